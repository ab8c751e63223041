//! Finds this host's listening sockets, and the sockets of open connections.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use procfs::net::{TcpNetEntry, TcpState, tcp, tcp6, udp, udp6};
use proxy_common::addr::Proto;

/// The host's sockets that accept packets from any peer.
#[derive(Debug, Default)]
pub struct Listeners(BTreeSet<(Proto, SocketAddr)>);

impl Listeners {
    /// Reads the TCP and UDP sockets of this process's network namespace. The kernel's files list
    /// no SCTP.
    pub fn read() -> Result<Self> {
        let tcp = tcp().context("list the host's TCP sockets")?;
        let udp = udp().context("list the host's UDP sockets")?;
        // A kernel without IPv6 has neither file.
        let tcp6 = tcp6().unwrap_or_default();
        let udp6 = udp6().unwrap_or_default();
        let tcp = tcp.into_iter().chain(tcp6);
        let udp = udp.into_iter().chain(udp6);
        let tcp = tcp.filter(|one| one.state == TcpState::Listen);
        // A connected socket accepts packets only from its peer.
        let udp = udp.filter(|one| one.remote_address.port() == 0);
        let tcp = tcp.map(|one| (Proto::TCP, one.local_address));
        Ok(Self(
            tcp.chain(udp.map(|one| (Proto::UDP, one.local_address)))
                .collect(),
        ))
    }

    /// Returns true if a socket accepts packets to this address of the host. A socket at `[::]`
    /// counts for IPv4 too, because the files do not show IPV6_V6ONLY.
    pub fn take(&self, addr: IpAddr, proto: Proto, port: u16) -> bool {
        let unspecified: [IpAddr; 2] = [[0_u8; 4].into(), [0_u8; 16].into()];
        let any = unspecified
            .into_iter()
            .filter(|any| any.is_ipv6() || addr.is_ipv4());
        any.chain([addr])
            .any(|at| self.0.contains(&(proto, SocketAddr::new(at, port))))
    }
}

/// Returns true if a process owns the TCP socket with these endpoints. The kernel keeps a closed
/// socket for a while without an owner. This function lists all sockets;
/// [`crate::sock_diag::has_owner`] queries a single socket.
pub fn has_owner(local: SocketAddr, remote: SocketAddr) -> Result<bool> {
    let v4 = if local.is_ipv4() {
        tcp().context("list the host's TCP sockets")?
    } else {
        Vec::new()
    };
    // An IPv6 socket may carry IPv4 connections.
    let all = v4.into_iter().chain(tcp6().unwrap_or_default());
    let canonical = |at: SocketAddr| SocketAddr::new(at.ip().to_canonical(), at.port());
    let is_it = |one: &TcpNetEntry| {
        canonical(one.local_address) == local && canonical(one.remote_address) == remote
    };
    // A socket with inode 0 has no owner.
    Ok(all.filter(is_it).any(|one| one.inode != 0))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::*;

    #[test]
    fn closed_socket_has_no_owner() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let _server = listener.accept().unwrap();
        let local = client.local_addr().unwrap();
        let remote = client.peer_addr().unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(has_owner(local, remote).unwrap(), "it reads yet");
        drop(client);
        assert!(!has_owner(local, remote).unwrap());
    }

    #[test]
    fn a_listening_socket_is_found_and_a_connection_is_not() {
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let any = TcpListener::bind("[::]:0").unwrap();
        let udp = UdpSocket::bind("0.0.0.0:0").unwrap();
        let connected = UdpSocket::bind("127.0.0.1:0").unwrap();
        connected
            .connect(
                udp.local_addr()
                    .map(|at| SocketAddr::new([127, 0, 0, 1].into(), at.port()))
                    .unwrap(),
            )
            .unwrap();
        let stream = TcpStream::connect(tcp.local_addr().unwrap()).unwrap();
        let listeners = Listeners::read().unwrap();
        let port = |at: std::io::Result<SocketAddr>| at.unwrap().port();
        let [lo, other]: [IpAddr; 2] = ["127.0.0.1", "192.0.2.1"].map(|ip| ip.parse().unwrap());
        assert!(listeners.take(lo, Proto::TCP, port(tcp.local_addr())));
        assert!(
            !listeners.take(lo, Proto::UDP, port(tcp.local_addr()))
                || port(tcp.local_addr()) == port(udp.local_addr())
        );
        assert!(!listeners.take(other, Proto::TCP, port(tcp.local_addr())));
        assert!(listeners.take(other, Proto::TCP, port(any.local_addr())));
        assert!(listeners.take(other, Proto::UDP, port(udp.local_addr())));
        assert!(!listeners.take(lo, Proto::UDP, port(connected.local_addr())));
        assert!(!listeners.take(lo, Proto::TCP, port(stream.local_addr())));
    }
}
