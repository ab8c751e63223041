//! Rejects packets that no backend will serve, so that their senders fail at once: TCP with a RST,
//! other protocols with an ICMP "port unreachable". The program turns the packet itself into the
//! answer.

use aya_ebpf::bindings::BPF_F_RECOMPUTE_CSUM;
use proxy_common::addr::Proto;
use proxy_common::counter::Reason;
use proxy_common::device::Device;

use crate::checksum::{checksum_offset, fold, sum};
use crate::header::Header;
use crate::maps;
use crate::maps::SenderKind;
use crate::maps::about_now_secs;
use crate::net::Net;
use crate::outcome::Action;
use crate::skb::{FragmentPart, LinkHeader, Skb};
use crate::tcp::{ACK, RST_ACK};

/// The exit of an answer.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Exit {
    /// Back out of the device through which the packet came in.
    Device,
    /// The same, for a device without Ethernet headers.
    Headerless,
    /// Back into the anchor or lo, where a packet of the host's own socket was leaving.
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

/// The SCTP bytes in a quote. An INIT has no verification tag in its header, so its sender
/// identifies it by the initiate tag, which ends here (RFC 9260 §3.3.2, §10).
const INIT_QUOTED: u32 = 12 + 4 + 4;

/// RFC 792 p. 4, RFC 4443 §3.1.
#[derive(Clone, Copy)]
#[repr(C)]
struct IcmpHeader {
    kind: u8,
    code: u8,
    check: u16,
    unused: u16,
    /// Unused as well. If the packet has an unfinished UDP checksum, the kernel completes it here.
    checksum_of_udp: u16,
}

/// Returns true if this host may answer the packet: its frame is for this host (RFC 1122 §3.2.2),
/// and the limit per second is not reached.
#[inline(never)]
pub fn may_answer(skb: Skb, exit: Exit) -> bool {
    let (is_for_us, sender) = match exit {
        Exit::Host => (true, SenderKind::Host),
        Exit::Headerless => (skb.is_ours(), SenderKind::Other),
        Exit::Device => {
            let (flags, _) = maps::place_of(skb.ifindex());
            let sender = if flags & Device::POD != 0 {
                SenderKind::Pod
            } else {
                SenderKind::Other
            };
            (
                skb.peek(0).is_some_and(|mac| is_for_us(skb, flags, mac)),
                sender,
            )
        }
    };
    is_for_us && maps::may_answer(sender, about_now_secs())
}

#[inline(always)]
fn is_for_us(skb: Skb, flags: u32, mac: [u8; 6]) -> bool {
    /// The bit of group addresses (IEEE 802).
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
    // The caller has checked the addresses. The host's own packets may have loopback addresses.
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
        // An unfinished SCTP checksum comes from a socket of this host, and the answer returns to
        // that socket, without a wire in between.
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
            // Some tunnels find their remote end by the packet's route, which this helper looks up.
            // The helper requires an Ethernet header, and removes it for such a device.
            skb.add_ethernet(&[0; 6], A::ETHERTYPE)?;
            skb.redirect_neigh(skb.ifindex())
        }
    })
}

/// Removes IP options or extension headers from the packet, and so from its quote. The answer has
/// none, and its checksum must be at the offset where the kernel may complete the packet's.
#[inline(always)]
fn cut_options<A: Net>(skb: Skb, header: &mut Header<A>) -> Result<(), Reason> {
    let len = header.end - header.l4;
    // Shortened first: a quote needs few transport bytes, and the kernel cannot cut headers of a
    // packet that it will segment.
    skb.resize(header.l4 + TCP_LEN)?;
    skb.cut(header.l4 - header.at - A::IP_LEN)?;
    header.l4 = header.at + A::IP_LEN;
    header.end = header.l4 + len;
    let plain = A::ip_header(header.src, header.dst, header.proto, len as u16);
    skb.store(header.at, &plain, BPF_F_RECOMPUTE_CSUM)
}

/// Turns the packet into the answer of a closed port (RFC 9293 §3.10.7.1).
#[inline(always)]
fn reset<A: Net>(skb: Skb, header: &Header<A>, unfinished: bool) -> Result<(), Reason> {
    let tcp: TcpHeader = skb.load(header.l4)?;
    if tcp.flags & RST_ACK & !ACK != 0 {
        return Err(Reason::Rewrite);
    }
    let (seq, ack, flags) = if tcp.flags & ACK != 0 {
        (tcp.ack, 0, RST_ACK & !ACK)
    } else {
        // A SYN occupies one sequence number. Clients send no data to a port that was never open.
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
        // The packet is still CHECKSUM_PARTIAL: at this offset, the kernel will write the inverted
        // sum of all bytes from the ICMP header on. If this field holds the pseudo header's sum,
        // the kernel writes the same value again (over IPv4 the other form of zero).
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

/// Returns true if the checksum at `offset` is unfinished: the device completes it.
///
/// Programs cannot read this state. But the kernel leaves such a checksum unchanged in an update
/// for bytes outside the pseudo header, so the program makes such an update and compares. It then
/// restores the field, which may be quoted.
#[inline(always)]
fn has_unfinished_checksum(skb: Skb, offset: u32) -> Result<bool, Reason> {
    let before: u16 = skb.load(offset)?;
    skb.replace_l4_checksum(offset, 0, 1, size_of::<u16>() as u32)?;
    let after: u16 = skb.load(offset)?;
    skb.store(offset, &before, 0)?;
    Ok(before == after)
}
