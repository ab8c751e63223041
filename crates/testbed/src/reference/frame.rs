//! Builds first packets of flows, and parses the programs' output.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, bail, ensure};
use etherparse::{
    IpHeaders, IpNumber, NetSlice, PacketBuilder, PacketBuilderStep, SlicedPacket, ip_number,
};

use super::cluster::{Packet, Proto};

/// Returns a SYN, a datagram, or an INIT.
pub fn of(packet: &Packet) -> Result<Vec<u8>> {
    let src = packet.src.port();
    let dst = packet.dst.port();
    let mut frame = Vec::new();
    match packet.proto {
        Proto::Tcp => ip(packet)?
            .tcp(src, dst, 1_000, 65_000)
            .syn()
            .write(&mut frame, &[])?,
        Proto::Udp => ip(packet)?.udp(src, dst).write(&mut frame, b"question")?,
        Proto::Sctp => ip(packet)?.write(&mut frame, ip_number::SCTP, &init(src, dst))?,
    }
    Ok(frame)
}

fn ip(packet: &Packet) -> Result<PacketBuilderStep<IpHeaders>> {
    let ethernet = PacketBuilder::ethernet2([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
    match (packet.src.ip(), packet.dst.ip()) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => Ok(ethernet.ipv4(src.octets(), dst.octets(), 64)),
        (IpAddr::V6(src), IpAddr::V6(dst)) => Ok(ethernet.ipv6(src.octets(), dst.octets(), 64)),
        (src, dst) => bail!("{src} and {dst} are of different families"),
    }
}

/// Returns an INIT chunk (RFC 9260 §3.1, §3.3.2). The device completes the checksum, as for a
/// packet from this machine.
fn init(src: u16, dst: u16) -> Vec<u8> {
    let mut init = [src.to_be_bytes(), dst.to_be_bytes()].concat();
    init.extend([0; 8]); // No tag yet, no checksum.
    init.extend([1, 0, 0, 20]); // INIT, 20 bytes long.
    init.extend([0, 0, 0, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 1]);
    init
}

/// Returns the source and destination of a translated packet.
pub fn peers(frame: &[u8]) -> Result<(SocketAddr, SocketAddr)> {
    let (src, dst, proto, payload) = parts(frame)?;
    ensure!(
        [ip_number::TCP, ip_number::UDP, ip_number::SCTP].contains(&proto),
        "protocol {proto:?}"
    );
    let port = |at: usize| {
        payload
            .get(at..at + 2)
            .map(|port| u16::from_be_bytes([port[0], port[1]]))
    };
    let sport = port(0).context("no source port")?;
    let dport = port(2).context("no destination port")?;
    Ok((SocketAddr::new(src, sport), SocketAddr::new(dst, dport)))
}

/// Returns true if a frame rejects `packet`.
pub fn is_refusal_of(packet: &Packet, frame: &[u8]) -> Result<bool> {
    const RST: u8 = 1 << 2;
    let (src, dst, proto, payload) = parts(frame)?;
    let is_back = src == packet.dst.ip() && dst == packet.src.ip();
    let refuses = match (packet.proto, proto) {
        (Proto::Tcp, ip_number::TCP) => payload.get(13).is_some_and(|flags| flags & RST != 0),
        (_, ip_number::ICMP) => payload.starts_with(&[3, 3]),
        (_, ip_number::IPV6_ICMP) => payload.starts_with(&[1, 4]),
        _ => false,
    };
    Ok(is_back && refuses)
}

fn parts(frame: &[u8]) -> Result<(IpAddr, IpAddr, IpNumber, Vec<u8>)> {
    match SlicedPacket::from_ethernet(frame)?
        .net
        .context("no IP header")?
    {
        NetSlice::Ipv4(ip) => {
            let header = ip.header();
            let payload = ip.payload();
            let src = header.source_addr();
            let dst = header.destination_addr();
            Ok((
                src.into(),
                dst.into(),
                payload.ip_number,
                payload.payload.to_vec(),
            ))
        }
        NetSlice::Ipv6(ip) => {
            let header = ip.header();
            let payload = ip.payload();
            let src = header.source_addr();
            let dst = header.destination_addr();
            Ok((
                src.into(),
                dst.into(),
                payload.ip_number,
                payload.payload.to_vec(),
            ))
        }
        NetSlice::Arp(_) => bail!("an ARP packet"),
    }
}
