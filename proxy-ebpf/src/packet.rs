//! Reads and rewrites the headers of TCP, UDP and SCTP packets.

use core::mem::size_of;

use aya_ebpf::bindings::BPF_F_MARK_MANGLED_0;
use proxy_common::addr::{Addr, Port, Proto, SockAddr};
use proxy_common::counter::Reason;
use proxy_common::flow::{Acked, FlowKey, Hook, Seen, Signals};
use proxy_macros::global_fn;

use crate::checksum::checksum_offset;
use crate::fragment;
use crate::header::{Head, Header};
use crate::maps::{self, Memory, Scratch};
use crate::net::{Net, are_fit};
use crate::sctp;
use crate::skb::{ETH_LEN, Found, FragmentPart, LinkHeader, Skb};
use crate::tcp::{Numbers, TCP_LEN, TcpStart};
use crate::udp::{UDP_LEN, UdpHeader};

/// A TCP, UDP or SCTP packet of one family. It lives in map memory
/// ([`Scratch`](crate::maps::Scratch)): the stack is too small for it.
#[derive(Clone, Copy)]
pub struct Packet<A: Addr> {
    pub src: SockAddr<A>,
    pub dst: SockAddr<A>,
    pub proto: Proto,
    signals: Signals,
    marks: u8,
    /// For the counters: the packets on the wire (GSO segments), and the bytes with link header.
    pub segments: u32,
    pub len: u32,
    numbers: Numbers,
    /// The word of [`Head::check`].
    check: u32,
    /// `DECISIONS` holds the decision about this packet.
    pub decided: bool,
    /// The packet's flow has left a silent backend, which the scratch's flow still names.
    pub moves: bool,
    /// The packet's flow has ended because another connection has its port: see [`Seen::CLASHES`].
    pub port_taken: bool,
}

/// A UDP checksum of 0 means "no checksum" (RFC 768): it must stay 0, and an update must not result
/// in 0.
const ZERO_IS_NONE: u8 = BPF_F_MARK_MANGLED_0 as u8;

/// The kind of a packet, for [`parse`], in a register.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Reading(pub u32);

impl Reading {
    pub const ETHERNET: Self = Self(0);
    /// The packet starts with its IP header.
    const HEADERLESS: Self = Self(1);
    /// The packet goes from the host to itself, perhaps to a loopback address.
    pub const WITHIN_HOST: Self = Self(2);

    #[inline(always)]
    pub fn behind(link: LinkHeader) -> Self {
        match link {
            LinkHeader::Ethernet => Self::ETHERNET,
            LinkHeader::None => Self::HEADERLESS,
        }
    }

    #[inline(always)]
    fn link(self) -> LinkHeader {
        if self == Self::HEADERLESS {
            LinkHeader::None
        } else {
            LinkHeader::Ethernet
        }
    }
}

/// Parses a packet as it is at `hook`, into the scratch.
#[global_fn(kpx_parse4, kpx_parse6)]
pub fn parse<A: Net>(skb: Skb, hook: Hook, reading: Reading, memory: Memory) -> Result<(), Reason> {
    let (scratch, _) = memory.scratch::<A>().ok_or(Reason::FlowsFull)?;
    scratch.packet.parse(skb, hook, reading)
}

/// Calls [`Packet::rewrite`] with the addresses and ports in `scratch.becomes`.
#[global_fn(kpx_rewrite4, kpx_rewrite6)]
pub fn rewrite<A: Net>(skb: Skb, memory: Memory) -> Result<(), Reason> {
    let (scratch, _) = memory.scratch::<A>().ok_or(Reason::FlowsFull)?;
    let Scratch {
        packet, becomes, ..
    } = scratch;
    packet.rewrite(skb, &becomes.src, &becomes.dst, becomes.is_far != 0)
}

impl<A: Net> Packet<A> {
    #[inline(always)]
    pub fn parse(&mut self, skb: Skb, hook: Hook, reading: Reading) -> Result<(), Reason> {
        let link = reading.link();
        let within_host = reading == Reading::WITHIN_HOST;
        // The memory still holds the previous packet.
        self.proto = Proto::ANY;
        self.decided = false;
        self.moves = false;
        self.port_taken = false;
        if skb.is_in_vlan() {
            return Err(Reason::Vlan);
        }
        let peeked = if link == LinkHeader::Ethernet {
            A::peek(skb)
        } else {
            None
        };
        let (src, dst) = match peeked {
            Some(head) if !are_fit(&head.src.addr, &head.dst.addr, within_host) => {
                return Err(Reason::NotUnicast);
            }
            Some(head) => {
                skb.set_found(usual(&head, hook));
                self.check = head.check;
                self.numbers = head.numbers;
                (head.src.addr, head.dst.addr)
            }
            None => {
                let (src, dst, numbers) = read::<A>(skb, link, hook, within_host)?;
                self.numbers = numbers;
                (src, dst)
            }
        };
        let found = skb.found();
        self.src = SockAddr::new(src, found.sport);
        self.dst = SockAddr::new(dst, found.dport);
        self.proto = found.proto;
        self.signals = found.signals;
        self.marks = found.marks;
        self.segments = skb.segments();
        self.len = skb.len();
        Ok(())
    }

    #[inline(always)]
    fn head(&self) -> Head<A> {
        let numbers = Numbers::NONE;
        Head {
            src: self.src,
            dst: self.dst,
            proto: self.proto,
            flags: 0,
            numbers,
            check: self.check,
            len: 0,
        }
    }

    #[inline(always)]
    pub fn flow_key(&self, hook: Hook) -> FlowKey<A> {
        FlowKey::new(hook, self.proto, self.src, self.dst)
    }

    /// Returns true if the packet may open a flow. Without a flow, a packet from the middle of a
    /// TCP connection or SCTP association belongs to a connection that kpx does not translate.
    #[inline(always)]
    pub fn opens(&self) -> bool {
        self.marks & Found::OPENS != 0
    }

    #[inline(always)]
    pub fn is_fragment(&self) -> bool {
        self.marks & (Found::FIRST | Found::LATER) != 0
    }

    #[inline(always)]
    pub fn resets(&self) -> bool {
        self.signals.resets()
    }

    #[inline(always)]
    pub fn seen(&self) -> Seen {
        self.signals.seen()
    }

    /// Returns the same, read again: see [`maps::again`].
    #[inline(always)]
    pub fn opens_again(&self) -> bool {
        maps::again(&self.marks) & Found::OPENS != 0
    }

    /// Returns the packet's signals, read again: see [`maps::again`].
    #[inline(always)]
    pub fn signals_again(&self) -> Signals {
        maps::again(&self.signals)
    }

    #[inline(always)]
    pub fn signals(&self) -> Signals {
        self.signals
    }

    /// Returns TCP's sequence number in host byte order. `None` for later fragments and other
    /// protocols.
    #[inline(always)]
    pub fn seq(&self) -> Option<u32> {
        (self.proto == Proto::TCP && self.marks & Found::LATER == 0)
            .then_some(u32::from_be(self.numbers.seq))
    }

    /// Returns TCP's acknowledgement number. `None` without the ACK flag.
    #[inline(always)]
    pub fn acked(&self) -> Option<Acked> {
        (self.marks & Found::ACKS != 0).then_some(Acked(u32::from_be(self.numbers.acked)))
    }

    /// Replaces the packet's addresses and ports, and updates its checksums. `is_far` is set if the
    /// flow's client is behind an uplink.
    #[inline(never)]
    pub fn rewrite(
        &self,
        skb: Skb,
        src: &SockAddr<A>,
        dst: &SockAddr<A>,
        is_far: bool,
    ) -> Result<(), Reason> {
        let found = skb.found();
        if found.marks & Found::USUAL != 0 {
            return A::rewrite(skb, &self.head(), src, dst);
        }
        // Later fragments have no transport header, and SCTP's checksum covers no addresses.
        if found.check != 0 {
            if src.port != self.src.port {
                replace_port(skb, &found, 0, self.src.port, src.port)?;
            }
            if dst.port != self.dst.port {
                replace_port(skb, &found, 2, self.dst.port, dst.port)?;
            }
        } else if found.marks & Found::LATER == 0 {
            sctp::set_ports(skb, src.port, dst.port)?;
        }
        if found.marks & Found::FIRST != 0 {
            fragment::remember::<A>(skb, is_far);
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

/// Describes a packet with the usual headers: see [`Head`].
#[inline(always)]
fn usual<A: Net>(head: &Head<A>, hook: Hook) -> Found {
    let mut found = Found {
        l4: (ETH_LEN + A::IP_LEN) as u16,
        proto: head.proto,
        hook,
        sport: head.src.port,
        dport: head.dst.port,
        id: 0,
        signals: Signals::PACKET,
        marks: Found::USUAL,
        check: checksum_offset(head.proto) as u8,
        split: Proto::ANY,
        len: head.len,
    };
    if head.proto == Proto::TCP {
        found.take_flags(head.flags)
    } else {
        found.marks |= Found::OPENS | ZERO_IS_NONE
    }
    found
}

/// Reads the headers of any packet. Returns the addresses and TCP's numbers, and stores the other
/// fields in the control block.
#[inline(always)]
fn read<A: Net>(
    skb: Skb,
    link: LinkHeader,
    hook: Hook,
    within_host: bool,
) -> Result<(A, A, Numbers), Reason> {
    let header = A::whole_header(skb, link)?;
    if !are_fit(&header.src, &header.dst, within_host) {
        return Err(Reason::NotUnicast);
    }
    let mut found = Found {
        l4: header.l4 as u16,
        proto: header.proto,
        hook,
        sport: Port::ANY,
        dport: Port::ANY,
        id: header.id,
        signals: Signals::PACKET,
        marks: header.part.0
            | if link == LinkHeader::None {
                Found::HEADERLESS
            } else {
                0
            },
        check: 0,
        split: header.split,
        len: header.end - header.l4,
    };
    let mut numbers = Numbers::NONE;
    if header.part == FragmentPart::LATER {
        skb.set_found(found);
        if !fragment::recall::<A>(skb) {
            return Err(Reason::Fragment);
        }
    } else {
        if header.part == FragmentPart::FIRST {
            skb.set_found(found);
            fragment::forget::<A>(skb);
        }
        numbers = match transport(skb, &header, &mut found) {
            // The stack may reassemble the packet behind this hook, and no hook would translate it.
            Err(Reason::Malformed)
                if header.part == FragmentPart::FIRST
                    && hook == Hook::INGRESS
                    && fragment::is_stub_for_service::<A>(skb) =>
            {
                return Err(Reason::CutHeader);
            }
            read => read?,
        };
        skb.set_found(found);
    }
    Ok((header.src, header.dst, numbers))
}

/// Reads the transport header, which must fit the length in the IP header. Returns TCP's numbers.
#[inline(always)]
fn transport<A: Net>(skb: Skb, header: &Header<A>, found: &mut Found) -> Result<Numbers, Reason> {
    let mut numbers = Numbers::NONE;
    let min_len = match header.proto {
        Proto::TCP => {
            let tcp: TcpStart = skb.load(header.l4)?;
            (found.sport, found.dport) = (Port::from_wire(tcp.sport), Port::from_wire(tcp.dport));
            found.take_flags(tcp.flags);
            numbers = tcp.numbers;
            TCP_LEN
        }
        Proto::UDP => {
            let udp: UdpHeader = skb.load(header.l4)?;
            (found.sport, found.dport) = (Port::from_wire(udp.sport), Port::from_wire(udp.dport));
            found.marks |= Found::OPENS | ZERO_IS_NONE;
            UDP_LEN
        }
        Proto::SCTP => {
            let sctp: sctp::Start = skb.load(header.l4)?;
            (found.sport, found.dport) = (Port::from_wire(sctp.sport), Port::from_wire(sctp.dport));
            found.signals = sctp.signals();
            if sctp.opens() {
                found.marks |= Found::OPENS;
            }
            size_of::<sctp::Start>() as u32
        }
        _ => return Err(Reason::Protocol),
    };
    if header.proto != Proto::SCTP {
        found.check = checksum_offset(header.proto) as u8;
    }
    if found.len < min_len {
        Err(Reason::Malformed)
    } else {
        Ok(numbers)
    }
}

#[inline(always)]
fn replace_addr<A: Net>(
    skb: Skb,
    found: &Found,
    offset: u32,
    from: A,
    to: A,
) -> Result<(), Reason> {
    if found.check != 0 {
        A::replace_pseudo_checksum(skb, check_at(found), check_flags(found), from, to)?;
    }
    A::store_addr(skb, found.link().len(), offset, from, to)
}

/// Without `BPF_F_PSEUDO_HDR`: ports are not part of the pseudo header, from which hardware starts
/// a checksum.
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
