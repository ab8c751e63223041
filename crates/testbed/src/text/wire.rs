//! The names of headers, and the checksums that no crate offers.

use std::net::IpAddr;

use anyhow::{Result, bail};
use etherparse::checksum::Sum16BitWords;

pub(super) const ETH_LEN: usize = 14;

pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;
pub(super) const SCTP: u8 = 132;
pub(super) const ICMP4: u8 = 1;
pub(super) const ICMP6: u8 = 58;

pub(super) const HOP_BY_HOP: u8 = 0;
pub(super) const ROUTING: u8 = 43;
pub(super) const FRAGMENT: u8 = 44;
pub(super) const ESP: u8 = 50;
pub(super) const AUTHENTICATION: u8 = 51;
pub(super) const NO_NEXT_HEADER: u8 = 59;
pub(super) const DESTINATION: u8 = 60;

pub(super) const ACK: u8 = 0x10;
pub(super) const SYN: u8 = 0x02;
/// The flags in tcpdump's notation and order.
pub(super) const TCP_FLAGS: [(char, u8); 5] = [
    ('S', SYN),
    ('F', 0x01),
    ('R', 0x04),
    ('P', 0x08),
    ('A', ACK),
];

/// TCP's options (RFC 9293 §3.1).
pub(super) const TCP_PADDING: u8 = 1;
pub(super) const TCP_MSS: u8 = 2;

/// SCTP chunks (RFC 9260 §3.2).
pub(super) const CHUNKS: [(&str, u8); 11] = [
    ("DATA", 0),
    ("INIT", 1),
    ("INIT-ACK", 2),
    ("SACK", 3),
    ("HEARTBEAT", 4),
    ("ABORT", 6),
    ("SHUTDOWN", 7),
    ("SHUTDOWN-ACK", 8),
    ("COOKIE-ECHO", 10),
    ("COOKIE-ACK", 11),
    ("SHUTDOWN-COMPLETE", 14),
];

/// ICMP messages, with type and code in ICMPv4 (RFC 792, RFC 1812) and in ICMPv6 (RFC 4443, RFC
/// 4861).
pub(super) const ICMP: [(&str, [u8; 2], [u8; 2]); 8] = [
    ("port-unreachable", [3, 3], [1, 4]),
    ("host-unreachable", [3, 1], [1, 3]),
    ("prohibited", [3, 13], [1, 1]),
    ("frag-needed", [3, 4], [2, 0]),
    ("time-exceeded", [11, 0], [3, 0]),
    ("bad-header", [12, 0], [4, 0]),
    ("redirect", [5, 1], [137, 0]),
    ("echo", [8, 0], [128, 0]),
];

pub(super) fn is_error(kind: &str) -> bool {
    kind != "echo"
}

/// Returns the pseudo header in the checksums of transports and ICMPv6.
pub(super) fn pseudo(src: IpAddr, dst: IpAddr, proto: u8, len: usize) -> Result<Sum16BitWords> {
    let mut sum = Sum16BitWords::new();
    sum = sum
        .add_4bytes(u32::try_from(len)?.to_be_bytes())
        .add_2bytes([0, proto]);
    match (src, dst) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            Ok(sum.add_4bytes(src.octets()).add_4bytes(dst.octets()))
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            Ok(sum.add_16bytes(src.octets()).add_16bytes(dst.octets()))
        }
        _ => bail!("{src} and {dst} are of different families"),
    }
}

/// Returns the start of an ICMP checksum: ICMPv4 has no pseudo header.
pub(super) fn icmp_seed(src: IpAddr, dst: IpAddr, len: usize) -> Result<Sum16BitWords> {
    if src.is_ipv4() {
        Ok(Sum16BitWords::new())
    } else {
        pseudo(src, dst, ICMP6, len)
    }
}

/// Returns the checksum for the field at `at` of a message; the field itself does not count.
pub(super) fn checksum(seed: Sum16BitWords, message: &[u8], at: usize) -> [u8; 2] {
    let sum = seed.add_slice(&message[..at]).add_slice(&message[at + 2..]);
    sum.ones_complement().to_ne_bytes()
}

/// Returns the checksum of an SCTP packet (RFC 9260 appendix A): a CRC32c with the field as zeros.
pub(super) fn crc32c(packet: &[u8]) -> [u8; 4] {
    let mut register = u32::MAX;
    for (at, byte) in packet.iter().enumerate() {
        register ^= if (8..12).contains(&at) {
            0
        } else {
            u32::from(*byte)
        };
        for _ in 0..8 {
            register = (register >> 1) ^ if register & 1 == 1 { 0x82f6_3b78 } else { 0 };
        }
    }
    (!register).to_le_bytes()
}
