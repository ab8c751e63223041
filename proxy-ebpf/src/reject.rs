//! Answers to packets that no backend will serve, so that their sender learns it at once. TCP gets
//! a RST, the rest an ICMP "port unreachable". The packet itself is turned into its answer.

use aya_ebpf::bindings::BPF_F_RECOMPUTE_CSUM;
use proxy_common::addr::Proto;
use proxy_common::counter::Reason;
use proxy_common::device::Device;

use crate::maps::Asker;
use crate::maps::about_now_secs;
use crate::net::{FragmentPart, Header, Net, fold, sum};
use crate::packet::checksum_offset;
use crate::skb::{LinkHeader, Skb};
use crate::tcp::{ACK, RST_ACK};
use crate::{Action, maps};

/// The way out of an answer.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Exit {
    /// Back out of the device through which the packet came in.
    Device,
    /// The same, of a device without Ethernet headers.
    Headerless,
    /// Back into the anchor or lo, through which the packet of a socket of the host was leaving.
    Host,
}

impl Exit {
    /// The header in front of the IP header, in packet and answer alike.
    #[inline(always)]
    pub fn link(self) -> LinkHeader {
        if self == Self::Headerless {
            LinkHeader::None
        } else {
            LinkHeader::Ethernet
        }
    }
}

/// RFC 9293 §3.1.
#[derive(Clone, Copy)]
#[repr(C)]
struct TcpHeader {
    sport: u16,
    dport: u16,
    seq: u32,
    ack: u32,
    data_offset: u8,
    flags: u8,
    window: u16,
    check: u16,
    urgent: u16,
}
const TCP_LEN: u32 = size_of::<TcpHeader>() as u32;

/// The bytes of SCTP that are quoted. An INIT has no tag in its header. Its sender knows it by the
/// tag inside, which ends here (RFC 9260 §3.3.2, §10).
const INIT_QUOTED: u32 = 12 + 4 + 4;

/// RFC 792 p. 4, RFC 4443 §3.1.
#[derive(Clone, Copy)]
#[repr(C)]
struct IcmpHeader {
    kind: u8,
    code: u8,
    check: u16,
    unused: u16,
    /// Unused as well; where a half-done UDP checksum would be finished, if the packet brought one.
    checksum_of_udp: u16,
}

/// Returns true if this host may answer the packet. Only a frame for this host is answered (RFC
/// 1122 §3.2.2), and only so many in a second.
#[inline(never)]
pub fn may_answer(skb: Skb, exit: Exit) -> bool {
    let (is_for_us, asker) = match exit {
        Exit::Host => (true, Asker::Host),
        Exit::Headerless => (skb.is_ours(), Asker::Other),
        Exit::Device => {
            let (flags, _) = maps::place_of(skb.ifindex());
            let asker = if flags & Device::POD != 0 {
                Asker::Pod
            } else {
                Asker::Other
            };
            (
                skb.peek(0).is_some_and(|mac| is_for_us(skb, flags, mac)),
                asker,
            )
        }
    };
    is_for_us && maps::may_answer(asker, about_now_secs())
}

#[inline(always)]
fn is_for_us(skb: Skb, flags: u32, mac: [u8; 6]) -> bool {
    /// IEEE 802: of a group of hosts.
    const GROUP: u8 = 1;
    if flags & Device::LOOSE != 0 {
        mac[0] & GROUP == 0
    } else {
        maps::mac_of(skb.ifindex()) == Some(mac)
    }
}

#[inline(always)]
pub fn run<A: Net>(skb: Skb, exit: Exit) -> Result<Action, Reason> {
    let link = exit.link();
    // The addresses were judged before: those of the host's own packets may be loopback ones.
    let mut header = A::whole_header(skb, link)?;
    if header.part == FragmentPart::LATER {
        return Err(Reason::Rewrite);
    }
    let unfinished = has_unfinished_checksum(skb, header.l4 + checksum_offset(header.proto))?;
    if header.l4 != header.at + A::IP_LEN {
        cut_options(skb, &mut header)?;
    }
    match header.proto {
        Proto::TCP => reset(skb, &header, unfinished)?,
        // An unfinished checksum is that of a socket here, and no wire lies between it and us.
        Proto::SCTP if header.end - header.l4 >= INIT_QUOTED => {
            unreachable::<A, A::SctpQuote>(skb, &header, false)?
        }
        proto => unreachable::<A, A::Quote>(skb, &header, unfinished && proto != Proto::SCTP)?,
    }
    if link == LinkHeader::Ethernet {
        let macs: [[u8; 6]; 2] = skb.load(0)?;
        skb.store(0, &[macs[1], macs[0]], 0)?;
    }
    Ok(match exit {
        Exit::Host => skb.inject(skb.ifindex()),
        Exit::Device => skb.redirect(skb.ifindex(), 0),
        Exit::Headerless => {
            // Some tunnels find their other end by the packet's route, which this helper looks up.
            // It takes a packet only with an Ethernet header, and takes that off for such a device.
            skb.add_ethernet(&[0; 6], A::ETHERTYPE)?;
            skb.redirect_neigh(skb.ifindex())
        }
    })
}

/// Makes the packet one without options or extension headers, and so it is quoted, too. Answers
/// have none, and their checksum must be where the kernel may have begun it for the packet.
#[inline(always)]
fn cut_options<A: Net>(skb: Skb, header: &mut Header<A>) -> Result<(), Reason> {
    let len = header.end - header.l4;
    // A few bytes of a transport are quoted, and the kernel does not cut from what is to be
    // segmented.
    skb.resize(header.l4 + TCP_LEN)?;
    skb.cut(header.l4 - header.at - A::IP_LEN)?;
    header.l4 = header.at + A::IP_LEN;
    header.end = header.l4 + len;
    let plain = A::ip_header(header.src, header.dst, header.proto, len as u16);
    skb.store(header.at, &plain, BPF_F_RECOMPUTE_CSUM)
}

/// RFC 9293 §3.10.7.1: what a closed port answers.
#[inline(always)]
fn reset<A: Net>(skb: Skb, header: &Header<A>, unfinished: bool) -> Result<(), Reason> {
    let tcp: TcpHeader = skb.load(header.l4)?;
    if tcp.flags & RST_ACK & !ACK != 0 {
        return Err(Reason::Rewrite);
    }
    let (seq, ack, flags) = if tcp.flags & ACK != 0 {
        (tcp.ack, 0, RST_ACK & !ACK)
    } else {
        // A SYN counts for one; no client sends data to a port that was never open.
        (0, u32::from_be(tcp.seq).wrapping_add(1).to_be(), RST_ACK)
    };
    let mut answer = TcpHeader {
        sport: tcp.dport,
        dport: tcp.sport,
        seq,
        ack,
        data_offset: 5 << 4,
        flags,
        window: 0,
        check: 0,
        urgent: 0,
    };
    let pseudo = A::pseudo_sum(header.dst, header.src, Proto::TCP, TCP_LEN as u16);
    answer.check = if unfinished {
        fold(pseudo)
    } else {
        !fold(sum(&answer, pseudo))
    };
    skb.resize(header.l4 + TCP_LEN)?;
    write_header(skb, header, Proto::TCP, TCP_LEN as u16)?;
    skb.store(header.l4, &answer, BPF_F_RECOMPUTE_CSUM)
}

#[inline(always)]
fn unreachable<A: Net, Q: Copy>(
    skb: Skb,
    header: &Header<A>,
    unfinished: bool,
) -> Result<(), Reason> {
    const ICMP_LEN: u32 = size_of::<IcmpHeader>() as u32;
    let quote: Q = skb.load(header.at)?;
    let len = ICMP_LEN + size_of::<Q>() as u32;
    let pseudo = A::icmp_pseudo_sum(header.dst, header.src, len as u16);
    let mut icmp = IcmpHeader {
        kind: A::ICMP_TYPE,
        code: A::ICMP_CODE,
        check: 0,
        unused: 0,
        checksum_of_udp: 0,
    };
    if unfinished {
        // The packet is still marked as one whose UDP checksum is to be finished here. The kernel
        // would write
        // the inverted sum of all from the ICMP header on. With the pseudo header's sum in this
        // place, that value stands here already (over IPv4 it is zero, in its other form).
        icmp.checksum_of_udp = fold(pseudo);
    }
    icmp.check = !fold(sum(&quote, sum(&icmp, pseudo)));
    skb.resize(header.l4 + len)?;
    write_header(skb, header, A::ICMP, len as u16)?;
    skb.store(header.l4, &icmp, BPF_F_RECOMPUTE_CSUM)?;
    skb.store(header.l4 + ICMP_LEN, &quote, BPF_F_RECOMPUTE_CSUM)
}

#[inline(always)]
fn write_header<A: Net>(
    skb: Skb,
    header: &Header<A>,
    proto: Proto,
    len: u16,
) -> Result<(), Reason> {
    skb.store(
        header.at,
        &A::ip_header(header.dst, header.src, proto, len),
        BPF_F_RECOMPUTE_CSUM,
    )
}

/// Returns true if the device is to finish the checksum at `offset`.
///
/// Nothing tells us directly. But the kernel leaves such a checksum alone when told of a change
/// outside the pseudo header, so we tell it of one and look. (Then the field is as before: it may
/// be quoted.)
#[inline(always)]
fn has_unfinished_checksum(skb: Skb, offset: u32) -> Result<bool, Reason> {
    let before: u16 = skb.load(offset)?;
    skb.replace_l4_checksum(offset, 0, 1, size_of::<u16>() as u32)?;
    let after: u16 = skb.load(offset)?;
    skb.store(offset, &before, 0)?;
    Ok(before == after)
}
