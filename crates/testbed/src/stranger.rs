//! Sends spoofed packets, without receiving the answers.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use etherparse::{IpNumber, Ipv4Header, Ipv6Header, PacketBuilder, PacketBuilderStep, TcpHeader};
use socket2::{Domain, SockAddr, Socket, Type};

use crate::lab::Host;

/// A host's raw IP sockets, one per family.
pub struct Stranger([Socket; 2]);

impl Stranger {
    pub fn on(host: &Host) -> Result<Self> {
        /// Sends packets including their IP headers.
        const RAW: i32 = 255;
        let socket = |domain| {
            host.ns
                .run(move || Socket::new(domain, Type::RAW, Some(RAW.into())))
        };
        let sockets = [socket(Domain::IPV4), socket(Domain::IPV6)]
            .into_iter()
            .collect::<Result<Vec<_>, _>>();
        let sockets = sockets.with_context(|| format!("make raw sockets on {}", host.name))?;
        Ok(Self(
            sockets
                .try_into()
                .map_err(|_| anyhow::anyhow!("not two sockets"))?,
        ))
    }

    /// Sends a packet to the address in its header.
    pub fn send(&self, packet: PacketBuilderStep<TcpHeader>, to: IpAddr) -> Result<()> {
        self.send_bytes(&written(packet)?, to)
    }

    /// Sends a packet with an outer header of the same family.
    pub fn send_tunnelled(
        &self,
        from: IpAddr,
        to: IpAddr,
        packet: PacketBuilderStep<TcpHeader>,
    ) -> Result<()> {
        const TTL: u8 = 64;
        let inner = written(packet)?;
        let len = u16::try_from(inner.len()).context("the packet is too long")?;
        let mut bytes = Vec::new();
        match (from, to) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                Ipv4Header::new(len, TTL, IpNumber::IPV4, from.octets(), to.octets())
                    .context("make an outer header")?
                    .write(&mut bytes)
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => Ipv6Header {
                payload_length: len,
                next_header: IpNumber::IPV6,
                hop_limit: TTL,
                source: from.octets(),
                destination: to.octets(),
                ..Ipv6Header::default()
            }
            .write(&mut bytes),
            _ => unreachable!("both are of one family"),
        }
        .context("write an outer header")?;
        bytes.extend(inner);
        self.send_bytes(&bytes, to)
    }

    /// Sends an ICMP host-unreachable error about a SYN with another sequence number than the
    /// client's. The sender is the router of the error.
    pub fn send_unreachable(
        &self,
        router: IpAddr,
        client: SocketAddr,
        backend: SocketAddr,
    ) -> Result<()> {
        self.send_bytes(&unreachable(router, client, backend)?, client.ip())
    }

    /// Sends a packet with hidden TCP flags: in IPv4 as fragments of which the first ends before
    /// the flags, in IPv6 behind an authentication header.
    pub fn send_hidden(&self, packet: PacketBuilderStep<TcpHeader>, to: IpAddr) -> Result<()> {
        let bytes = written(packet)?;
        if to.is_ipv6() {
            return self.send_bytes(&authenticated(bytes), to);
        }
        fragments(&bytes)
            .iter()
            .try_for_each(|fragment| self.send_bytes(fragment, to))
    }

    fn send_bytes(&self, bytes: &[u8], to: IpAddr) -> Result<()> {
        // Port 0: an IPv6 raw socket interprets the port as a protocol.
        let socket = &self.0[usize::from(to.is_ipv6())];
        socket
            .send_to(bytes, &SockAddr::from(SocketAddr::new(to, 0)))
            .context("send a packet in another's name")?;
        Ok(())
    }
}

fn written(packet: PacketBuilderStep<TcpHeader>) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    packet.write(&mut bytes, &[])?;
    Ok(bytes)
}

/// Returns a router's ICMP error to a client about its SYN to a backend: host unreachable (RFC
/// 792), or no route (RFC 4443).
fn unreachable(router: IpAddr, client: SocketAddr, backend: SocketAddr) -> Result<Vec<u8>> {
    let quote = written(tcp(client, backend).syn())?;
    let mut bytes = Vec::new();
    match (router, client.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => {
            PacketBuilder::ipv4(from.octets(), to.octets(), 64)
                .icmpv4_raw(3, 1, [0; 4])
                .write(&mut bytes, &quote)?;
        }
        (IpAddr::V6(from), IpAddr::V6(to)) => {
            PacketBuilder::ipv6(from.octets(), to.octets(), 64)
                .icmpv6_raw(1, 0, [0; 4])
                .write(&mut bytes, &quote)?;
        }
        _ => unreachable!("all are of one family"),
    }
    Ok(bytes)
}

/// Returns two fragments of an IPv4 packet, the first with 8 bytes. The kernel writes the header
/// checksum.
fn fragments(packet: &[u8]) -> [Vec<u8>; 2] {
    const HEADER_LEN: usize = 20;
    const FIRST_LEN: usize = 8;
    const MORE: u16 = 1 << 13;
    let (header, payload) = packet.split_at(HEADER_LEN);
    let id: u16 = rand::random_range(1..=u16::MAX);
    [(MORE, &payload[..FIRST_LEN]), (1, &payload[FIRST_LEN..])].map(|(place, part)| {
        let mut bytes = [header, part].concat();
        let len = bytes.len() as u16;
        for (at, number) in [(2, len), (4, id), (6, place)] {
            bytes[at..at + 2].copy_from_slice(&number.to_be_bytes());
        }
        bytes
    })
}

/// Inserts an authentication header (RFC 4302) of 8 bytes after the IPv6 header.
fn authenticated(mut packet: Vec<u8>) -> Vec<u8> {
    const HEADER_LEN: usize = 40;
    const AUTHENTICATION: u8 = 51;
    let len = (packet.len() - HEADER_LEN + 8) as u16;
    let next = std::mem::replace(&mut packet[6], AUTHENTICATION);
    packet[4..6].copy_from_slice(&len.to_be_bytes());
    packet.splice(HEADER_LEN..HEADER_LEN, [next, 0, 0, 0, 0, 0, 0, 0]);
    packet
}

/// Returns a TCP packet with a random sequence number and without flags.
pub fn tcp(from: SocketAddr, to: SocketAddr) -> PacketBuilderStep<TcpHeader> {
    tcp_with(from, to, rand::random())
}

/// Returns a TCP packet with this sequence number and without flags.
pub fn tcp_with(from: SocketAddr, to: SocketAddr, seq: u32) -> PacketBuilderStep<TcpHeader> {
    let ip = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => PacketBuilder::ipv4(from.octets(), to.octets(), 64),
        (IpAddr::V6(from), IpAddr::V6(to)) => PacketBuilder::ipv6(from.octets(), to.octets(), 64),
        _ => unreachable!("both are of one family"),
    };
    ip.tcp(from.port(), to.port(), seq, 64_000)
}

/// Returns a RST, FIN or SYN that would end a connection if its sequence number were right.
pub fn end(from: SocketAddr, to: SocketAddr) -> PacketBuilderStep<TcpHeader> {
    let packet = tcp(from, to);
    match rand::random_range(0..4) {
        0 => packet.rst(),
        1 => packet.rst().ack(rand::random()),
        2 => packet.fin().ack(rand::random()),
        _ => packet.syn(),
    }
}
