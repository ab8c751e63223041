//! Read and rewrite the headers of packets whose transport we translate.

use core::mem::size_of;

use aya_ebpf::bindings::BPF_F_MARK_MANGLED_0;
use proxy_common::addr::{Addr, Port, Proto, SockAddr};
use proxy_common::counter::Reason;
use proxy_common::flow::{FlowKey, Hook, Seen};

use crate::net::{Header, Net, Place};
use crate::sctp;
use crate::skb::Skb;

/// A TCP, UDP or SCTP packet over one family. It lives in map memory ([`Scratch`](crate::maps::Scratch)): the stack is too
/// small for it.
#[derive(Clone, Copy)]
pub struct Packet<A: Addr> {
    pub src: SockAddr<A>,
    pub dst: SockAddr<A>,
    pub proto: Proto,
    seen: Seen,
    marks: u8,
    /// What it counts for.
    pub segments: u32,
    pub len: u32,
    /// `DECISIONS` is about this packet.
    pub decided: bool,
}

/// What a packet's headers say, but for the addresses.
///
/// Kept in the packet's control block, which is the program's own while it runs: there every function can reach it that
/// has the packet. And what comes back from there is any number to the verifier, so that it follows the rest once, and
/// not once for every way through the headers.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Found {
    /// Offset of the transport header, in the frame.
    pub l4: u16,
    pub proto: Proto,
    /// Where it was found.
    pub hook: Hook,
    pub sport: Port,
    pub dport: Port,
    /// Of fragments: their key's identification.
    pub id: u32,
    pub seen: Seen,
    pub marks: u8,
    /// Offset of an Internet checksum in the transport header; 0 if there is none here.
    pub check: u8,
    /// Of fragments: their key's protocol.
    pub split: Proto,
    /// Bytes of transport header and payload.
    pub len: u32,
}

/// May open a flow.
const OPENS: u8 = 1 << 0;
/// Is a first fragment, a later one.
pub const FIRST: u8 = 1 << 1;
pub const LATER: u8 = 1 << 2;
/// A UDP checksum of 0 means "none" (RFC 768): it must stay, and must not come about by arithmetic.
const ZERO_IS_NONE: u8 = BPF_F_MARK_MANGLED_0 as u8;

const FIN: u8 = 0x01;
const SYN: u8 = 0x02;
const RST: u8 = 0x04;
pub const ACK: u8 = 0x10;
pub const RST_ACK: u8 = RST | ACK;

/// The first 16 of the 20 bytes of a TCP header.
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
const TCP_LEN: u32 = 20;

#[derive(Clone, Copy)]
#[repr(C)]
struct UdpHeader {
    sport: u16,
    dport: u16,
    len: u16,
    check: u16,
}

impl<A: Net> Packet<A> {
    /// Reads a packet as it is at `hook`.
    #[inline(never)]
    pub fn parse(&mut self, skb: Skb, hook: Hook) -> Result<(), Reason> {
        // What was known of another packet is not known of this one.
        self.proto = Proto::ANY;
        self.decided = false;
        if skb.is_in_vlan() {
            return Err(Reason::Vlan);
        }
        let header = A::header(skb)?;
        let mut found = Found {
            l4: header.l4 as u16,
            proto: header.proto,
            hook,
            sport: Port::ANY,
            dport: Port::ANY,
            id: header.id,
            seen: Seen::PACKET,
            marks: header.place.0,
            check: 0,
            split: header.split,
            len: header.end - header.l4,
        };
        if header.place == Place::LATER {
            skb.set_found(found);
            if !A::recall_fragment(skb) {
                return Err(Reason::Fragment);
            }
        } else {
            transport(skb, &header, &mut found)?;
            skb.set_found(found);
        }
        let found = skb.found();
        self.src = SockAddr::new(header.src, found.sport);
        self.dst = SockAddr::new(header.dst, found.dport);
        self.proto = found.proto;
        self.seen = found.seen;
        self.marks = found.marks;
        self.segments = skb.segments();
        self.len = skb.len();
        Ok(())
    }

    #[inline(always)]
    pub fn flow_key(&self, hook: Hook) -> FlowKey<A> {
        FlowKey::new(hook, self.proto, self.src, self.dst)
    }

    /// May this packet open a flow? A packet from the middle of a TCP connection or SCTP association belongs to somebody
    /// who remembers it, or to nobody.
    #[inline(always)]
    pub fn opens(&self) -> bool {
        self.marks & OPENS != 0
    }

    #[inline(always)]
    pub fn is_fragment(&self) -> bool {
        self.marks & (FIRST | LATER) != 0
    }

    #[inline(always)]
    pub fn resets(&self) -> bool {
        self.seen.has(Seen::RST)
    }

    #[inline(always)]
    pub fn seen(&self) -> Seen {
        self.seen
    }

    /// Gives the packet other addresses and ports, and fixes its checksums.
    #[inline(never)]
    pub fn rewrite(&self, skb: Skb, src: &SockAddr<A>, dst: &SockAddr<A>) -> Result<(), Reason> {
        let found = skb.found();
        // Of what is behind the IP header, later fragments have nothing that we know, and SCTP no addresses.
        if found.check != 0 {
            if src.port != self.src.port {
                replace_port(skb, &found, 0, self.src.port, src.port)?;
            }
            if dst.port != self.dst.port {
                replace_port(skb, &found, 2, self.dst.port, dst.port)?;
            }
        } else if found.marks & LATER == 0 {
            sctp::set_ports(skb, src.port, dst.port)?;
        }
        if found.marks & FIRST != 0 {
            A::remember_fragment(skb);
        }
        if src.addr != self.src.addr {
            replace_addr(skb, &found, A::SRC_OFFSET, self.src.addr, src.addr)?;
        }
        if dst.addr != self.dst.addr {
            replace_addr(skb, &found, A::DST_OFFSET, self.dst.addr, dst.addr)?;
        }
        Ok(())
    }
}

/// Reads the transport header, which must be there by the lengths that the IP header gives.
#[inline(always)]
fn transport<A: Net>(skb: Skb, header: &Header<A>, found: &mut Found) -> Result<(), Reason> {
    let min_len = match header.proto {
        Proto::TCP => {
            let tcp: TcpStart = skb.load(header.l4)?;
            (found.sport, found.dport) = (Port::from_wire(tcp.sport), Port::from_wire(tcp.dport));
            if tcp.flags & (SYN | ACK | RST | FIN) == SYN {
                found.marks |= OPENS;
            }
            if tcp.flags & FIN != 0 {
                found.seen = found.seen.with(Seen::FIN);
            }
            if tcp.flags & RST != 0 {
                found.seen = found.seen.with(Seen::RST);
            }
            TCP_LEN
        }
        Proto::UDP => {
            let udp: UdpHeader = skb.load(header.l4)?;
            (found.sport, found.dport) = (Port::from_wire(udp.sport), Port::from_wire(udp.dport));
            found.marks |= OPENS | ZERO_IS_NONE;
            size_of::<UdpHeader>() as u32
        }
        Proto::SCTP => {
            let sctp: sctp::Start = skb.load(header.l4)?;
            (found.sport, found.dport) = (Port::from_wire(sctp.sport), Port::from_wire(sctp.dport));
            found.seen = sctp.seen();
            if sctp.opens() {
                found.marks |= OPENS;
            }
            size_of::<sctp::Start>() as u32
        }
        _ => return Err(Reason::Protocol),
    };
    if header.proto != Proto::SCTP {
        found.check = checksum_offset(header.proto) as u8;
    }
    if found.len < min_len { Err(Reason::Malformed) } else { Ok(()) }
}

#[inline(always)]
fn replace_addr<A: Net>(skb: Skb, found: &Found, offset: u32, from: A, to: A) -> Result<(), Reason> {
    if found.check != 0 {
        A::replace_pseudo_checksum(skb, check_at(found), check_flags(found), from, to)?;
    }
    A::store_addr(skb, offset, from, to)
}

/// Without `BPF_F_PSEUDO_HDR`: a port is no part of the seed that the hardware starts a checksum from.
#[inline(always)]
fn replace_port(skb: Skb, found: &Found, offset: u32, from: Port, to: Port) -> Result<(), Reason> {
    let flags = check_flags(found) | size_of::<u16>() as u32;
    skb.replace_l4_checksum(check_at(found), from.wire().into(), to.wire().into(), flags)?;
    skb.store(u32::from(found.l4) + offset, &to.wire(), 0)
}

#[inline(always)]
fn check_at(found: &Found) -> u32 {
    u32::from(found.l4) + u32::from(found.check)
}

#[inline(always)]
fn check_flags(found: &Found) -> u32 {
    u32::from(found.marks & ZERO_IS_NONE)
}

/// Where the checksum is in a transport header.
#[inline(always)]
pub fn checksum_offset(proto: Proto) -> u32 {
    match proto {
        Proto::TCP => 16,
        Proto::SCTP => 8,
        _ => 6,
    }
}
