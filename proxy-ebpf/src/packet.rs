//! Read and rewrite headers. All access to packets is by the kernel's helpers: they know where the bytes are when a
//! packet is not linear, and what to do to a checksum that the hardware will finish.

use core::ptr::null_mut;

use aya_ebpf::bindings::{__sk_buff, BPF_F_MARK_MANGLED_0};
use aya_ebpf::helpers::generated::{bpf_redirect, bpf_redirect_neigh, bpf_skb_change_tail};
use aya_ebpf::programs::TcContext;
use aya_ebpf::programs::sk_buff::SkBuff;
use proxy_common::addr::{Addr, Port, Proto, SockAddr};
use proxy_common::counter::Reason;
use proxy_common::flow::{FlowKey, Hook, Seen};

use crate::Answer;
use crate::net::Net;

/// Length of an Ethernet header, where every device that we attach to has its IP header.
pub const ETH_LEN: u32 = 14;

// Our bits of `tc_index`. The lower ones have meanings for others (Cilium's programs among them).
const TRANSLATED: u32 = 1 << 15;
const FORWARD: u32 = 1 << 14;

/// What our hooks tell each other of a packet. Once rewritten it may look like a packet of another flow, for which a
/// later hook must not take it. Set only on what was rewritten: notes survive decapsulation, and what was inside a tunnel
/// has not been seen by anybody.
#[derive(Clone, Copy)]
pub struct Note(u32);

impl Note {
    #[inline(always)]
    pub fn is_translated(self) -> bool {
        self.0 & TRANSLATED != 0
    }

    #[inline(always)]
    pub fn is_forward(self) -> bool {
        self.0 & FORWARD != 0
    }
}

/// A packet in the kernel's hands.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Skb(*mut __sk_buff);

impl Skb {
    #[inline(always)]
    pub fn new(ctx: &TcContext) -> Self {
        Self(ctx.skb.skb)
    }

    /// The protocol, in network order.
    #[inline(always)]
    pub fn ethertype(self) -> u32 {
        // SAFETY: the kernel lends the context for the program's whole run.
        unsafe { (*self.0).protocol }
    }

    #[inline(always)]
    pub fn has_vlan_tag(self) -> bool {
        // SAFETY: as in `ethertype`.
        unsafe { (*self.0).vlan_present != 0 }
    }

    /// What hooks that it passed before on this host have noted on the packet.
    #[inline(always)]
    pub fn note(self) -> Note {
        // SAFETY: as in `ethertype`.
        Note(unsafe { (*self.0).tc_index } & (TRANSLATED | FORWARD))
    }

    /// Notes that the packet was rewritten and is on its way to a backend, or to a client.
    #[inline(always)]
    pub fn set_note(self, forward: bool) {
        let note = if forward { TRANSLATED | FORWARD } else { TRANSLATED };
        // SAFETY: as in `ethertype`; the kernel lets programs write this field.
        unsafe { (*self.0).tc_index |= note };
    }

    /// Takes the note away: the next host must not find it (it survives veth).
    #[inline(always)]
    pub fn clear_note(self) {
        // SAFETY: as in `set_note`.
        unsafe { (*self.0).tc_index &= !(TRANSLATED | FORWARD) };
    }

    #[inline(always)]
    pub fn ifindex(self) -> u32 {
        // SAFETY: as in `ethertype`.
        unsafe { (*self.0).ifindex }
    }

    #[inline(always)]
    pub fn len(self) -> u32 {
        // SAFETY: as in `ethertype`.
        unsafe { (*self.0).len }
    }

    #[inline(always)]
    pub fn load<T: Copy>(self, offset: u32) -> Result<T, Reason> {
        self.buff().load(offset as usize).map_err(|_| Reason::Malformed)
    }

    /// Overwrites bytes; `flags` as `bpf_skb_store_bytes` has them.
    #[inline(always)]
    pub fn store<T: Copy>(self, offset: u32, value: &T, flags: u32) -> Result<(), Reason> {
        self.buff().store(offset as usize, value, u64::from(flags)).map_err(|_| Reason::Rewrite)
    }

    #[inline(always)]
    pub fn replace_l3_checksum(self, offset: u32, from: u32, to: u32, size: u32) -> Result<(), Reason> {
        self.buff().l3_csum_replace(offset as usize, from.into(), to.into(), size.into()).map_err(|_| Reason::Rewrite)
    }

    #[inline(always)]
    pub fn replace_l4_checksum(self, offset: u32, from: u32, to: u32, flags: u32) -> Result<(), Reason> {
        self.buff().l4_csum_replace(offset as usize, from.into(), to.into(), flags.into()).map_err(|_| Reason::Rewrite)
    }

    #[inline(always)]
    pub fn set_destination_mac(self, mac: &[u8; 6]) -> Result<(), Reason> {
        self.store(0, mac, 0)
    }

    /// Cuts or grows the packet to `len` bytes.
    #[inline(always)]
    pub fn resize(self, len: u32) -> Result<(), Reason> {
        // SAFETY: the context is the kernel's own.
        match unsafe { bpf_skb_change_tail(self.0, len, 0) } {
            0 => Ok(()),
            _ => Err(Reason::Rewrite),
        }
    }

    /// Sends the packet out of a device or, with `BPF_F_INGRESS`, into it.
    #[inline(always)]
    pub fn redirect(self, ifindex: u32, flags: u64) -> Answer {
        // SAFETY: the helper takes numbers only; a device that does not exist costs the packet.
        unsafe { bpf_redirect(ifindex, flags) as Answer }
    }

    /// Sends the packet out through a device, to the neighbour that the route there names; the kernel resolves its
    /// link address.
    ///
    /// Not to a next hop of ours: then the packet would keep its route to the anchor, and if it has to wait for the
    /// neighbour the kernel takes the link address from that route in the end.
    #[inline(always)]
    pub fn redirect_neigh(self, ifindex: u32) -> Answer {
        // SAFETY: no structure, and so no size.
        unsafe { bpf_redirect_neigh(ifindex, null_mut(), 0, 0) as Answer }
    }

    #[inline(always)]
    pub fn as_ptr(self) -> *mut __sk_buff {
        self.0
    }

    #[inline(always)]
    fn buff(self) -> SkBuff {
        SkBuff { skb: self.0 }
    }
}

/// What the IP header says, and where the transport header starts.
#[derive(Clone, Copy)]
pub struct Header<A> {
    pub src: A,
    pub dst: A,
    pub proto: Proto,
    pub l4: u32,
}

/// A TCP or UDP packet over one family.
#[derive(Clone, Copy)]
pub struct Packet<A: Addr> {
    pub skb: Skb,
    pub src: SockAddr<A>,
    pub dst: SockAddr<A>,
    pub proto: Proto,
    /// The TCP header's flags (RFC 9293 §3.1), 0 for UDP.
    tcp_flags: u8,
    l4: u32,
}

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
pub const ACK: u8 = 0x10;
pub const RST_ACK: u8 = RST | ACK;

/// The first 16 bytes of a TCP header.
#[derive(Clone, Copy)]
#[repr(C)]
struct TcpStart {
    sport: u16,
    dport: u16,
    seq: u32,
    ack: u32,
    data_offset: u8,
    flags: u8,
    window: u16,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct UdpHeader {
    sport: u16,
    dport: u16,
    len: u16,
    check: u16,
}

impl<A: Net> Packet<A> {
    #[inline(always)]
    pub fn parse(skb: Skb) -> Result<Self, Reason> {
        if skb.has_vlan_tag() {
            return Err(Reason::Vlan);
        }
        let Header { src, dst, proto, l4 } = A::header(skb)?;
        let (sport, dport, tcp_flags) = match proto {
            Proto::TCP => {
                let tcp: TcpStart = skb.load(l4)?;
                (tcp.sport, tcp.dport, tcp.flags)
            }
            Proto::UDP => {
                let udp: UdpHeader = skb.load(l4)?;
                (udp.sport, udp.dport, 0)
            }
            _ => return Err(Reason::Protocol),
        };
        let src = SockAddr::new(src, Port::from_wire(sport));
        let dst = SockAddr::new(dst, Port::from_wire(dport));
        Ok(Self { skb, src, dst, proto, tcp_flags, l4 })
    }

    #[inline(always)]
    pub fn flow_key(&self, hook: Hook) -> FlowKey<A> {
        FlowKey::new(hook, self.proto, self.src, self.dst)
    }

    /// May this packet open a flow? Of TCP only a SYN may: a packet from the middle of a connection belongs to
    /// somebody who remembers it, or to nobody.
    #[inline(always)]
    pub fn opens(&self) -> bool {
        self.proto != Proto::TCP || self.tcp_flags & (SYN | ACK | RST | FIN) == SYN
    }

    #[inline(always)]
    pub fn resets(&self) -> bool {
        self.tcp_flags & RST != 0
    }

    #[inline(always)]
    pub fn seen(&self) -> Seen {
        let mut seen = Seen::PACKET;
        if self.tcp_flags & FIN != 0 {
            seen = seen.with(Seen::FIN);
        }
        if self.resets() {
            seen = seen.with(Seen::RST);
        }
        seen
    }

    /// Gives the packet other addresses and ports, and fixes its checksums.
    #[inline(always)]
    pub fn rewrite(&self, src: SockAddr<A>, dst: SockAddr<A>) -> Result<(), Reason> {
        if src.addr != self.src.addr {
            self.replace_addr(A::SRC_OFFSET, self.src.addr, src.addr)?;
        }
        if dst.addr != self.dst.addr {
            self.replace_addr(A::DST_OFFSET, self.dst.addr, dst.addr)?;
        }
        if src.port != self.src.port {
            self.replace_port(0, self.src.port, src.port)?;
        }
        if dst.port != self.dst.port {
            self.replace_port(2, self.dst.port, dst.port)?;
        }
        Ok(())
    }

    #[inline(always)]
    fn replace_addr(&self, offset: u32, from: A, to: A) -> Result<(), Reason> {
        A::replace_pseudo_checksum(
            self.skb,
            self.l4 + checksum_offset(self.proto),
            checksum_flags(self.proto),
            from,
            to,
        )?;
        A::store_addr(self.skb, offset, from, to)
    }

    /// Without `BPF_F_PSEUDO_HDR`: a port is no part of the seed that the hardware starts a checksum from.
    #[inline(always)]
    fn replace_port(&self, offset: u32, from: Port, to: Port) -> Result<(), Reason> {
        self.skb.replace_l4_checksum(
            self.l4 + checksum_offset(self.proto),
            from.wire().into(),
            to.wire().into(),
            checksum_flags(self.proto) | size_of::<u16>() as u32,
        )?;
        self.skb.store(self.l4 + offset, &to.wire(), 0)
    }
}

/// Where the checksum is in a transport header.
#[inline(always)]
pub fn checksum_offset(proto: Proto) -> u32 {
    if proto == Proto::TCP { 16 } else { 6 }
}

/// A UDP checksum of 0 means "none" (RFC 768): it must stay, and must not come about by arithmetic.
#[inline(always)]
fn checksum_flags(proto: Proto) -> u32 {
    if proto == Proto::TCP { 0 } else { BPF_F_MARK_MANGLED_0 }
}
