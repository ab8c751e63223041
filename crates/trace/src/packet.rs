//! Builds the first packet of a flow, with correct checksums.

use std::net::SocketAddr;

use anyhow::{Result, bail};
use crc::{CRC_32_ISCSI, Crc};
use etherparse::{PacketBuilder, ip_number};
use proxy_common::addr::Proto;

/// Returns the packet that opens a flow: an Ethernet frame with a SYN, UDP datagram or SCTP INIT,
/// for a device with this link address.
pub(crate) fn opener(
    from: SocketAddr,
    to: SocketAddr,
    proto: Proto,
    device: [u8; 6],
) -> Result<Vec<u8>> {
    const CLIENT_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const HOPS: u8 = 64;
    const WINDOW: u16 = 64_240;
    let ethernet = PacketBuilder::ethernet2(CLIENT_MAC, device);
    let ip = match (from, to) {
        (SocketAddr::V4(from), SocketAddr::V4(to)) => {
            ethernet.ipv4(from.ip().octets(), to.ip().octets(), HOPS)
        }
        (SocketAddr::V6(from), SocketAddr::V6(to)) => {
            ethernet.ipv6(from.ip().octets(), to.ip().octets(), HOPS)
        }
        _ => bail!("{} and {} are of different families", from.ip(), to.ip()),
    };
    let mut frame = Vec::new();
    match proto {
        Proto::TCP => ip
            .tcp(from.port(), to.port(), 0, WINDOW)
            .syn()
            .write(&mut frame, &[])?,
        Proto::UDP => ip
            .udp(from.port(), to.port())
            .write(&mut frame, b"kpx trace")?,
        Proto::SCTP => ip.write(
            &mut frame,
            ip_number::SCTP,
            &sctp_init(from.port(), to.port()),
        )?,
        other => bail!("protocol {other} opens no flows"),
    }
    Ok(frame)
}

/// Returns an SCTP INIT packet: RFC 9260 sections 3.1 and 3.3.2.
fn sctp_init(sport: u16, dport: u16) -> Vec<u8> {
    const CHECKSUM: std::ops::Range<usize> = 8..12;
    const INIT: u8 = 1;
    const CHUNK_LEN: u16 = 20;
    const TAG: u32 = 1;
    const WINDOW: u32 = 65_536;
    const STREAMS: u16 = 10;
    const TSN: u32 = 1;
    let mut packet = Vec::new();
    packet.extend(sport.to_be_bytes());
    packet.extend(dport.to_be_bytes());
    // An INIT has verification tag 0, and the checksum is computed with its field set to 0.
    packet.extend([0; 8]);
    packet.extend([INIT, 0]);
    packet.extend(CHUNK_LEN.to_be_bytes());
    packet.extend(TAG.to_be_bytes());
    packet.extend(WINDOW.to_be_bytes());
    packet.extend(STREAMS.to_be_bytes());
    packet.extend(STREAMS.to_be_bytes());
    packet.extend(TSN.to_be_bytes());
    let checksum = Crc::<u32>::new(&CRC_32_ISCSI).checksum(&packet);
    // The bytes follow the transmission order of a CRC's bits: RFC 9260 appendix A.
    packet[CHECKSUM].copy_from_slice(&checksum.to_le_bytes());
    packet
}

#[cfg(test)]
mod tests {
    use etherparse::{NetSlice, SlicedPacket, TransportSlice};

    use super::*;

    const CLIENTS: [&str; 2] = ["10.244.1.10:4000", "[fd00:10:244:1::10]:4000"];
    const DEVICE: [u8; 6] = [2, 0, 0, 0, 0, 2];
    const TARGETS: [&str; 2] = ["10.96.0.10:80", "[fd00:10:96::10]:80"];

    fn frames(proto: Proto) -> [Vec<u8>; 2] {
        [0, 1].map(|n| {
            opener(
                CLIENTS[n].parse().unwrap(),
                TARGETS[n].parse().unwrap(),
                proto,
                DEVICE,
            )
            .unwrap()
        })
    }

    #[test]
    fn checksums_are_correct() {
        for proto in [Proto::TCP, Proto::UDP] {
            for frame in frames(proto) {
                let packet = SlicedPacket::from_ethernet(&frame).unwrap();
                let expected = match (
                    packet.net.as_ref().unwrap(),
                    packet.transport.as_ref().unwrap(),
                ) {
                    (NetSlice::Ipv4(ip), TransportSlice::Tcp(tcp)) => {
                        let src = ip.header().source();
                        let dst = ip.header().destination();
                        (tcp.checksum(), tcp.calc_checksum_ipv4(src, dst).unwrap())
                    }
                    (NetSlice::Ipv6(ip), TransportSlice::Tcp(tcp)) => {
                        let src = ip.header().source();
                        let dst = ip.header().destination();
                        (tcp.checksum(), tcp.calc_checksum_ipv6(src, dst).unwrap())
                    }
                    (NetSlice::Ipv4(ip), TransportSlice::Udp(udp)) => {
                        let src = ip.header().source();
                        let dst = ip.header().destination();
                        (
                            udp.checksum(),
                            udp.to_header()
                                .calc_checksum_ipv4_raw(src, dst, udp.payload())
                                .unwrap(),
                        )
                    }
                    (NetSlice::Ipv6(ip), TransportSlice::Udp(udp)) => {
                        let src = ip.header().source();
                        let dst = ip.header().destination();
                        (
                            udp.checksum(),
                            udp.to_header()
                                .calc_checksum_ipv6_raw(src, dst, udp.payload())
                                .unwrap(),
                        )
                    }
                    _ => panic!("neither TCP nor UDP"),
                };
                assert_eq!(expected.0, expected.1, "{proto}");
            }
        }
    }

    #[test]
    fn sctp_packet_ends_with_init_chunk_and_has_correct_checksum() {
        // CRC32C of 32 zero bytes: RFC 3720 appendix B.4.
        assert_eq!(
            Crc::<u32>::new(&CRC_32_ISCSI).checksum(&[0; 32]),
            0x8a91_36aa
        );
        for frame in frames(Proto::SCTP) {
            let mut sctp = frame[frame.len() - 32..].to_vec();
            assert_eq!(sctp[..4], [0x0f, 0xa0, 0, 80]);
            assert_eq!(sctp[12..16], [1, 0, 0, 20]);
            let checksum = u32::from_le_bytes(sctp[8..12].try_into().unwrap());
            sctp[8..12].fill(0);
            assert_eq!(Crc::<u32>::new(&CRC_32_ISCSI).checksum(&sctp), checksum);
        }
    }

    #[test]
    fn families_do_not_mix() {
        let error = opener(
            CLIENTS[0].parse().unwrap(),
            TARGETS[1].parse().unwrap(),
            Proto::TCP,
            DEVICE,
        )
        .unwrap_err();
        assert_eq!(
            error.to_string(),
            "10.244.1.10 and fd00:10:96::10 are of different families"
        );
    }
}
