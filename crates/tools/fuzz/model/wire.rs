//! Parses a frame's headers by the RFCs, with plain indices into plain bytes.

use std::net::{IpAddr, Ipv6Addr};

use proxy_common::counter::Reason;
use testbed::reference::place::Family;

pub(crate) const ETH_LEN: usize = 14;
pub(crate) const TCP: u8 = 6;
pub(crate) const UDP: u8 = 17;
pub(crate) const SCTP: u8 = 132;

/// The headers before the transport header.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ip {
    pub(crate) family: Family,
    pub(crate) src: IpAddr,
    pub(crate) dst: IpAddr,
    pub(crate) proto: u8,
    /// Offsets in the frame: of this header, of the transport header, of the end by this header's
    /// length.
    pub(crate) at: usize,
    pub(crate) l4: usize,
    pub(crate) end: usize,
    pub(crate) part: Part,
}

/// The part of a packet in the frame. Fragments of a packet share identification, addresses and
/// `split`, the protocol after the fragment header (RFC 791 §3.2, RFC 8200 §4.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Whole,
    First { id: u32, split: u8 },
    Later { id: u32, split: u8 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Transport {
    pub(crate) sport: u16,
    pub(crate) dport: u16,
    /// SYN alone; any datagram; INIT.
    pub(crate) opens: bool,
    /// FIN, or a chunk of SCTP's shutdown.
    pub(crate) ends: bool,
    /// RST, ABORT.
    pub(crate) resets: bool,
    /// COOKIE ACK.
    pub(crate) accepts: bool,
    /// The sequence number of TCP.
    pub(crate) seq: Option<u32>,
    /// The sequence number of a SYN-ACK.
    pub(crate) answer: Option<u32>,
    /// TCP's acknowledgement number.
    pub(crate) ack: Option<u32>,
}

pub(crate) fn byte(frame: &[u8], at: usize) -> Option<u8> {
    frame.get(at).copied()
}

pub(crate) fn half(frame: &[u8], at: usize) -> Option<u16> {
    frame
        .get(at..at + 2)
        .map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
}

pub(crate) fn family(frame: &[u8]) -> Option<Family> {
    match half(frame, 12)? {
        0x0800 => Some(Family::V4),
        0x86dd => Some(Family::V6),
        _ => None,
    }
}

/// Returns the addresses of a frame, independent of the rest.
pub(crate) fn addrs(frame: &[u8], family: Family) -> Option<(IpAddr, IpAddr)> {
    let (start, len) = if family == Family::V4 {
        (12, 4)
    } else {
        (8, 16)
    };
    let addr = |at: usize| -> Option<IpAddr> {
        let bytes = frame.get(ETH_LEN + at..ETH_LEN + at + len)?;
        Some(match family {
            Family::V4 => IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?),
            Family::V6 => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?),
        })
    };
    Some((addr(start)?, addr(start + len)?))
}

/// Parses the IP header of a frame. Its lengths must be possible, its addresses unicast.
pub(crate) fn outer(frame: &[u8], family: Family) -> Result<Ip, Reason> {
    let ip = whole(frame, family)?;
    if !is_unicast(ip.src) || !is_unicast(ip.dst) {
        return Err(Reason::NotUnicast);
    }
    Ok(ip)
}

/// Parses the IP header of a frame inside the host, which may have loopback addresses.
pub(crate) fn outer_within_host(frame: &[u8], family: Family) -> Result<Ip, Reason> {
    let ip = whole(frame, family)?;
    if is_unicast(ip.src) && is_unicast(ip.dst)
        || ip.dst.is_loopback() && (ip.src.is_loopback() || is_unicast(ip.src))
    {
        return Ok(ip);
    }
    Err(Reason::NotUnicast)
}

fn whole(frame: &[u8], family: Family) -> Result<Ip, Reason> {
    let ip = ip(frame, ETH_LEN, family)?;
    if ip.l4 > ip.end || ip.end > frame.len() {
        Err(Reason::Malformed)
    } else {
        Ok(ip)
    }
}

/// Parses an IP header at any offset.
pub(crate) fn ip(frame: &[u8], at: usize, family: Family) -> Result<Ip, Reason> {
    match family {
        Family::V4 => v4(frame, at).ok_or(Reason::Malformed),
        Family::V6 => v6(frame, at),
    }
}

/// RFC 791 §3.1.
fn v4(frame: &[u8], at: usize) -> Option<Ip> {
    let header = frame.get(at..at + 20)?;
    let words = usize::from(header[0] & 15);
    if header[0] >> 4 != 4 || words < 5 {
        return None;
    }
    let id = half(header, 4)?.into();
    let split = header[9];
    let fragment = half(header, 6)?;
    let part = match (fragment & 0x1fff, fragment & 0x2000) {
        (0, 0) => Part::Whole,
        (0, _) => Part::First { id, split },
        _ => Part::Later { id, split },
    };
    let addr =
        |at: usize| IpAddr::from(<[u8; 4]>::try_from(&header[at..at + 4]).expect("four bytes"));
    let end = at + usize::from(half(header, 2)?);
    Some(Ip {
        family: Family::V4,
        src: addr(12),
        dst: addr(16),
        proto: split,
        at,
        l4: at + 4 * words,
        end,
        part,
    })
}

/// RFC 8200 §3 and §4: skips at most six extension headers, none of which may hide the following
/// header or change the route.
fn v6(frame: &[u8], at: usize) -> Result<Ip, Reason> {
    const MAX: usize = 6;
    let header = frame.get(at..at + 40).ok_or(Reason::Malformed)?;
    if header[0] >> 4 != 6 {
        return Err(Reason::Malformed);
    }
    let addr = |at: usize| {
        IpAddr::from(<[u8; 16]>::try_from(&header[at..at + 16]).expect("sixteen bytes"))
    };
    let mut ip = Ip {
        family: Family::V6,
        src: addr(8),
        dst: addr(24),
        proto: header[6],
        at,
        l4: at + 40,
        end: at + 40 + usize::from(half(header, 4).ok_or(Reason::Malformed)?),
        part: Part::Whole,
    };
    let mut fragments = 0;
    // True for a truncated fragment header, which matters where the next header is read.
    let mut lacks_id = false;
    for followed in 0.. {
        match ip.proto {
            0 | 43 | 44 | 60 if followed == MAX => return Err(Reason::Protocol),
            0 | 43 | 44 | 60 => {}
            50 | 51 | 59 => return Err(Reason::Protocol),
            _ => break,
        }
        let extension = frame.get(ip.l4..ip.l4 + 4).ok_or(Reason::Malformed)?;
        if ip.proto == 44 {
            fragments += 1;
            if fragments > 1 {
                return Err(Reason::Protocol);
            }
            let offset = half(extension, 2).unwrap_or(0) >> 3;
            let more = extension[3] & 1;
            if offset != 0 || more != 0 {
                let id = frame
                    .get(ip.l4 + 4..ip.l4 + 8)
                    .map(|id| u32::from_be_bytes([id[0], id[1], id[2], id[3]]));
                lacks_id = id.is_none();
                let split = extension[0];
                let id = id.unwrap_or(0);
                ip.part = if offset == 0 {
                    Part::First { id, split }
                } else {
                    Part::Later { id, split }
                };
            }
            (ip.proto, ip.l4) = (extension[0], ip.l4 + 8);
            if offset != 0 {
                break;
            }
        } else {
            if ip.proto == 43 && extension[3] != 0 {
                return Err(Reason::Protocol);
            }
            (ip.proto, ip.l4) = (extension[0], ip.l4 + 8 * (usize::from(extension[1]) + 1));
        }
    }
    if lacks_id {
        Err(Reason::Malformed)
    } else {
        Ok(ip)
    }
}

/// Returns true for an address to which the kernel forwards as to a single host.
fn is_unicast(addr: IpAddr) -> bool {
    match addr {
        IpAddr::V4(addr) => {
            !addr.is_unspecified()
                && !addr.is_loopback()
                && !addr.is_multicast()
                && !addr.is_broadcast()
        }
        IpAddr::V6(addr) => {
            let is_here = addr == Ipv6Addr::UNSPECIFIED || addr == Ipv6Addr::LOCALHOST;
            !is_here && !addr.is_multicast() && addr.segments()[0] & 0xffc0 != 0xfe80
        }
    }
}

/// Parses the transport header of a packet that is not a later fragment. Its fixed part must be
/// inside the frame and inside the IP header's length.
pub(crate) fn transport(frame: &[u8], ip: &Ip) -> Result<Transport, Reason> {
    let fixed = match ip.proto {
        TCP => 20,
        UDP => 8,
        // The common header, and the header of the first chunk.
        SCTP => 16,
        _ => return Err(Reason::Protocol),
    };
    if ip.end < ip.l4 + fixed {
        return Err(Reason::Malformed);
    }
    let header = frame.get(ip.l4..ip.l4 + fixed).ok_or(Reason::Malformed)?;
    let (opens, ends, resets) = match ip.proto {
        TCP => (
            header[13] & 0b1_0111 == 0b10,
            header[13] & 0b1 != 0,
            header[13] & 0b100 != 0,
        ),
        UDP => (true, false, false),
        // INIT; SHUTDOWN, SHUTDOWN ACK, SHUTDOWN COMPLETE; ABORT (RFC 9260 §3.2).
        _ => (
            header[12] == 1,
            [7, 8, 14].contains(&header[12]),
            header[12] == 6,
        ),
    };
    let port = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
    let number = |at: usize| u32::from(port(at)) << 16 | u32::from(port(at + 2));
    let is_tcp = ip.proto == TCP;
    Ok(Transport {
        sport: port(0),
        dport: port(2),
        opens,
        ends,
        resets,
        // RFC 9260 §3.3.12.
        accepts: ip.proto == SCTP && header[12] == 11,
        seq: is_tcp.then(|| number(4)),
        answer: (is_tcp && header[13] & 0b1_0111 == 0b1_0010).then(|| number(4)),
        ack: (is_tcp && header[13] & 0b1_0000 != 0).then(|| number(8)),
    })
}

pub(crate) fn checksum_offset(proto: u8) -> usize {
    match proto {
        TCP => 16,
        UDP => 6,
        _ => 8,
    }
}

pub(crate) fn put_addr(frame: &mut [u8], at: usize, addr: IpAddr) {
    match addr {
        IpAddr::V4(addr) => frame[at..at + 4].copy_from_slice(&addr.octets()),
        IpAddr::V6(addr) => frame[at..at + 16].copy_from_slice(&addr.octets()),
    }
}

pub(crate) fn bytes(addr: IpAddr) -> Vec<u8> {
    match addr {
        IpAddr::V4(addr) => addr.octets().to_vec(),
        IpAddr::V6(addr) => addr.octets().to_vec(),
    }
}
