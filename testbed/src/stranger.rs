//! Sends packets in others' names, and sees none of the answers.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use etherparse::{PacketBuilder, PacketBuilderStep, TcpHeader};
use socket2::{Domain, SockAddr, Socket, Type};

use crate::lab::Host;

/// The sockets of a host that sends IP packets as they are, in each family.
pub struct Stranger([Socket; 2]);

impl Stranger {
    pub fn on(host: &Host) -> Result<Self> {
        /// Sends the packets with their IP headers.
        const RAW: i32 = 255;
        let socket = |domain| host.ns.run(move || Socket::new(domain, Type::RAW, Some(RAW.into())));
        let sockets = [socket(Domain::IPV4), socket(Domain::IPV6)].into_iter().collect::<Result<Vec<_>, _>>();
        let sockets = sockets.with_context(|| format!("make raw sockets on {}", host.name))?;
        Ok(Self(sockets.try_into().map_err(|_| anyhow::anyhow!("not two sockets"))?))
    }

    /// Sends a packet to the address that its header has as well.
    pub fn send(&self, packet: PacketBuilderStep<TcpHeader>, to: IpAddr) -> Result<()> {
        let mut bytes = Vec::new();
        packet.write(&mut bytes, &[])?;
        // To a port of 0: of IPv6 it would be the protocol's.
        let socket = &self.0[usize::from(to.is_ipv6())];
        socket.send_to(&bytes, &SockAddr::from(SocketAddr::new(to, 0))).context("send a packet in another's name")?;
        Ok(())
    }
}

/// Returns a TCP packet with a random number, and without flags.
pub fn tcp(from: SocketAddr, to: SocketAddr) -> PacketBuilderStep<TcpHeader> {
    let ip = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => PacketBuilder::ipv4(from.octets(), to.octets(), 64),
        (IpAddr::V6(from), IpAddr::V6(to)) => PacketBuilder::ipv6(from.octets(), to.octets(), 64),
        _ => unreachable!("both are of one family"),
    };
    ip.tcp(from.port(), to.port(), rand::random(), 64_000)
}

/// Returns a RST, FIN or SYN, which would end a connection if its number were right.
pub fn end(from: SocketAddr, to: SocketAddr) -> PacketBuilderStep<TcpHeader> {
    let packet = tcp(from, to);
    match rand::random_range(0..4) {
        0 => packet.rst(),
        1 => packet.rst().ack(rand::random()),
        2 => packet.fin().ack(rand::random()),
        _ => packet.syn(),
    }
}
