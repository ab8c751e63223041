//! Rewrites addresses and ports of a frame, byte by byte.

use std::net::{IpAddr, SocketAddr};

use proxy_common::counter::Reason;
use testbed::reference::place::Family;

use super::wire::{self, Ip, Part, SCTP, UDP, byte, half};

/// The 16-bit words under a checksum, before and after.
pub(crate) type Changes = Vec<(u16, u16)>;

/// Sets the packet's peers.
pub(crate) fn peers(
    frame: &mut [u8],
    ip: &Ip,
    ports: (u16, u16),
    src: SocketAddr,
    dst: SocketAddr,
) -> Result<(), Reason> {
    let ports_change = ports != (src.port(), dst.port());
    let addrs = [
        addr_changes(ip.src, src.ip()),
        addr_changes(ip.dst, dst.ip()),
    ]
    .concat();
    match (ip.part, ip.proto) {
        // The bytes after the IP header are not a transport header.
        (Part::Later { .. }, _) => {}
        // The checksum covers bytes of other fragments.
        (Part::First { .. }, SCTP) if ports_change => return Err(Reason::Rewrite),
        (_, SCTP) => sctp_ports(frame, ip, src.port(), dst.port()),
        (_, proto) => {
            let words = [(ports.0, src.port()), (ports.1, dst.port())];
            let changes = [
                addrs,
                words.into_iter().filter(|(from, to)| from != to).collect(),
            ]
            .concat();
            frame[ip.l4..ip.l4 + 2].copy_from_slice(&src.port().to_be_bytes());
            frame[ip.l4 + 2..ip.l4 + 4].copy_from_slice(&dst.port().to_be_bytes());
            update(
                frame,
                ip.l4 + wire::checksum_offset(proto),
                &changes,
                proto == UDP,
            );
        }
    }
    set_addrs(frame, ip, src.ip(), dst.ip());
    Ok(())
}

/// Sets the packet's addresses, and leaves its payload unchanged.
pub(crate) fn set_addrs(frame: &mut [u8], ip: &Ip, src: IpAddr, dst: IpAddr) {
    let (src_at, dst_at) = match ip.family {
        Family::V4 => {
            update(
                frame,
                ip.at + 10,
                &[addr_changes(ip.src, src), addr_changes(ip.dst, dst)].concat(),
                false,
            );
            (ip.at + 12, ip.at + 16)
        }
        Family::V6 => (ip.at + 8, ip.at + 24),
    };
    wire::put_addr(frame, src_at, src);
    wire::put_addr(frame, dst_at, dst);
}

/// Returns the differing words of two addresses; all words if any differs.
pub(crate) fn addr_changes(from: IpAddr, to: IpAddr) -> Changes {
    if from == to {
        return Changes::new();
    }
    let words = |addr| {
        wire::bytes(addr)
            .chunks(2)
            .map(|word| u16::from_be_bytes([word[0], word[1]]))
            .collect::<Vec<_>>()
    };
    words(from).into_iter().zip(words(to)).collect()
}

/// Updates a checksum by RFC 1624 §3, equation 3. The sum of any words is never the positive zero.
/// `optional`: 0 means no checksum, and a computed 0 is written as the other zero (RFC 768).
pub(crate) fn update(frame: &mut [u8], at: usize, changes: &[(u16, u16)], optional: bool) {
    let Some(before) = half(frame, at).filter(|_| !changes.is_empty()) else {
        return;
    };
    if optional && before == 0 {
        return;
    }
    let sum = changes.iter().fold(u64::from(!before), |sum, (from, to)| {
        sum + u64::from(!from) + u64::from(*to)
    });
    let after = match !fold(sum) {
        0xffff => 0,
        sum => sum,
    };
    let after = if optional && after == 0 {
        0xffff
    } else {
        after
    };
    frame[at..at + 2].copy_from_slice(&after.to_be_bytes());
}

/// Returns the one's complement sum of 16-bit words (RFC 1071).
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    bytes
        .chunks(2)
        .map(|word| u64::from(word[0]) << 8 | u64::from(byte(word, 1).unwrap_or(0)))
        .sum()
}

pub(crate) fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).expect("it was folded")
}

/// Returns the checksum with a pseudo header (RFC 9293 §3.1, RFC 8200 §8.1).
pub(crate) fn pseudo_sum(src: IpAddr, dst: IpAddr, proto: u8, len: usize) -> u64 {
    sum(&wire::bytes(src)) + sum(&wire::bytes(dst)) + u64::from(proto) + len as u64
}

/// Sets the ports, and updates the CRC over the packet with checksum 0 (RFC 9260 §6.8). A wrong CRC
/// stays wrong by the same difference. A CRC of 0 is still to be computed by the kernel.
fn sctp_ports(frame: &mut [u8], ip: &Ip, sport: u16, dport: u16) {
    let packet = &mut frame[ip.l4..ip.end];
    let ports = [sport.to_be_bytes(), dport.to_be_bytes()].concat();
    if packet[..4] == ports {
        return;
    }
    let said = u32::from_le_bytes([packet[8], packet[9], packet[10], packet[11]]);
    packet[8..12].fill(0);
    let wrong = said ^ crc32c(packet);
    packet[..4].copy_from_slice(&ports);
    if said == 0 {
        return;
    }
    let checksum = crc32c(packet) ^ wrong;
    packet[8..12].copy_from_slice(&checksum.to_le_bytes());
}

pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    const CASTAGNOLI: crc::Crc<u32> = crc::Crc::<u32>::new(&crc::CRC_32_ISCSI);
    CASTAGNOLI.checksum(bytes)
}
