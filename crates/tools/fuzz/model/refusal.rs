//! The answer to the sender of a rejected packet.

use std::net::IpAddr;

use testbed::reference::place::Family;

use super::rewrite::{fold, pseudo_sum, sum};
use super::wire::{self, ETH_LEN, Ip, Part, SCTP, TCP, half};

/// The most bytes that the kernel removes from a packet.
const OPTIONS_MAX: usize = 4_095;

/// Returns the answer to a packet; `None` for a RST and for later fragments.
pub(crate) fn answer(frame: &[u8]) -> Option<Vec<u8>> {
    let ip = wire::outer(frame, wire::family(frame)?).ok()?;
    if matches!(ip.part, Part::Later { .. }) {
        return None;
    }
    let frame = without_options(frame, &ip)?;
    let ip = wire::outer(&frame, ip.family).expect("it was made here");
    let mut answer = [&frame[6..12], &frame[..6], &frame[12..ETH_LEN]].concat();
    match ip.proto {
        TCP => {
            let segment = reset(&frame[ip.l4..ip.end.min(frame.len())], &ip)?;
            answer.extend(ip_header(ip.dst, ip.src, TCP, segment.len()));
            answer.extend(segment);
        }
        _ => {
            let message = unreachable(&frame, &ip);
            let proto = if ip.family == Family::V4 { 1 } else { 58 };
            answer.extend(ip_header(ip.dst, ip.src, proto, message.len()));
            answer.extend(message);
        }
    }
    Some(answer)
}

/// Removes IP options: neither the answer nor the quoted packet has them. The quote may end inside
/// the transport header then.
fn without_options(frame: &[u8], ip: &Ip) -> Option<Vec<u8>> {
    let plain = ETH_LEN + if ip.family == Family::V4 { 20 } else { 40 };
    if ip.l4 == plain {
        return Some(frame.to_vec());
    }
    if ip.l4 - plain > OPTIONS_MAX {
        return None;
    }
    let mut without = frame[..ETH_LEN].to_vec();
    without.extend(ip_header(ip.src, ip.dst, ip.proto, ip.end - ip.l4));
    without.extend(&frame[ip.l4..]);
    Some(without)
}

/// Returns the RST to a segment at a closed port (RFC 9293 §3.10.7.1).
fn reset(segment: &[u8], ip: &Ip) -> Option<Vec<u8>> {
    let flags = segment[13];
    if flags & 0b100 != 0 {
        return None;
    }
    let word = |at: usize| u32::from_be_bytes(segment[at..at + 4].try_into().expect("four bytes"));
    // The RST acknowledges the SYN.
    let (seq, ack, flags) = if flags & 0b1_0000 != 0 {
        (word(8), 0, 0b100)
    } else {
        (0, word(4).wrapping_add(1), 0b1_0100)
    };
    let mut reset = [&segment[2..4], &segment[..2]].concat();
    reset.extend(u32::to_be_bytes(seq));
    reset.extend(u32::to_be_bytes(ack));
    reset.extend([5 << 4, flags, 0, 0, 0, 0, 0, 0]);
    let checksum = !fold(pseudo_sum(ip.dst, ip.src, TCP, reset.len()) + sum(&reset));
    reset[16..18].copy_from_slice(&checksum.to_be_bytes());
    Some(reset)
}

/// Returns "port unreachable" with the quoted IP header and 8 bytes (RFC 792 p. 4, RFC 4443 §3.1);
/// 20 bytes for SCTP, so that the sender of an INIT recognises it.
fn unreachable(frame: &[u8], ip: &Ip) -> Vec<u8> {
    let quoted = if ip.proto == SCTP && ip.end - ip.l4 >= 20 {
        20
    } else {
        8
    };
    let (kind, code, pseudo): (u8, u8, _) = match ip.family {
        Family::V4 => (3, 3, 0),
        Family::V6 => (1, 4, pseudo_sum(ip.dst, ip.src, 58, 8 + 40 + quoted)),
    };
    let mut message = vec![kind, code, 0, 0, 0, 0, 0, 0];
    message.extend(&frame[ETH_LEN..ip.l4 + quoted]);
    let checksum = !fold(pseudo + sum(&message));
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    message
}

/// Returns an IP header of the host's own packets.
pub(crate) fn ip_header(src: IpAddr, dst: IpAddr, proto: u8, len: usize) -> Vec<u8> {
    let mut header = match src {
        IpAddr::V4(_) => {
            let total = u16::try_from(20 + len).expect("packets are short");
            let [high, low] = total.to_be_bytes();
            // Do not fragment; 64 hops.
            vec![0x45, 0, high, low, 0, 0, 0x40, 0, 64, proto, 0, 0]
        }
        IpAddr::V6(_) => {
            let [high, low] = u16::try_from(len).expect("packets are short").to_be_bytes();
            vec![0x60, 0, 0, 0, high, low, proto, 64]
        }
    };
    header.extend(wire::bytes(src));
    header.extend(wire::bytes(dst));
    if src.is_ipv4() {
        let checksum = !fold(sum(&header));
        header[10..12].copy_from_slice(&checksum.to_be_bytes());
        debug_assert_eq!(half(&header, 10), Some(checksum));
    }
    header
}
