//! Lists connected UDP sockets of this network namespace through netlink, aborts UDP and TCP
//! sockets, and finds out whether TCP sockets have owners (linux/sock_diag.h, linux/inet_diag.h).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use futures::StreamExt;
use netlink_packet_core::{NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use rtnetlink::proto::{Connection, ConnectionHandle, new_connection};
use rtnetlink::sys::protocols::NETLINK_SOCK_DIAG;
use tokio::time::timeout;

use super::netlink::{self, kernel};
use super::raw::{self, Message};

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;

const FAMILIES: [u8; 2] = [AF_INET, AF_INET6];
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const IPPROTO_TCP: u8 = 6;
const IPPROTO_UDP: u8 = 17;
/// The state of a connected UDP socket, as a bit.
const ESTABLISHED: u32 = 1 << 1;
/// The cookie that matches any socket with the requested endpoints (`INET_DIAG_NOCOOKIE`, twice).
const NO_COOKIE: [u8; 8] = [0xff; 8];

/// The maximum time to wait for an answer about a single socket.
const ANSWER: Duration = Duration::from_secs(1);

/// The length of `struct inet_diag_sockid`, and its offset in `struct inet_diag_msg`, after four
/// single bytes.
const ID_LEN: usize = 48;
const ID_AT: usize = 4;
/// The offset of the inode in `struct inet_diag_msg`, after the id and four fields of four bytes: a
/// timer, two queues and a uid.
const INODE_AT: usize = ID_AT + ID_LEN + 16;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UdpSocket {
    family: u8,
    /// The `struct inet_diag_sockid`, the kernel's key of the socket.
    id: [u8; ID_LEN],
}

impl UdpSocket {
    /// Returns the value of `SO_COOKIE`.
    pub fn cookie(&self) -> u64 {
        u64::from(self.word(40)) | u64::from(self.word(44)) << 32
    }

    /// Returns the peer's address and port. An IPv4-mapped address becomes an IPv4 address.
    pub fn peer(&self) -> SocketAddr {
        let port = u16::from_be_bytes([self.id[2], self.id[3]]);
        let bytes: [u8; 16] = std::array::from_fn(|nth| self.id[20 + nth]);
        let [a, b, c, d, ..] = bytes;
        let ip = match self.family {
            AF_INET => IpAddr::V4(Ipv4Addr::new(a, b, c, d)),
            _ => IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical(),
        };
        SocketAddr::new(ip, port)
    }

    /// Reads a word in native byte order.
    fn word(&self, at: usize) -> u32 {
        u32::from_ne_bytes([
            self.id[at],
            self.id[at + 1],
            self.id[at + 2],
            self.id[at + 3],
        ])
    }

    /// Reads a socket. Returns `None` if the message is too short.
    fn read(message: &[u8]) -> Option<Self> {
        let id = message.get(ID_AT..ID_AT + ID_LEN)?;
        Some(Self {
            family: *message.first()?,
            id: id.try_into().ok()?,
        })
    }
}

/// A handle for socket queries in this network namespace.
#[derive(Clone)]
pub struct Handle(ConnectionHandle<Message>);

/// Opens the socket. Requests are answered only while the connection's future is polled.
pub fn connect() -> io::Result<(Connection<Message>, Handle)> {
    let (mut connection, handle, _) = new_connection(NETLINK_SOCK_DIAG)?;
    // The message that ends a dump carries its error.
    connection.set_forward_done(true);
    Ok((connection, Handle(handle)))
}

impl Handle {
    /// Returns all connected UDP sockets. Sockets that change during the dump may be missing.
    pub async fn list(&self) -> io::Result<Vec<UdpSocket>> {
        let mut sockets = Vec::new();
        for family in FAMILIES {
            let request = request(
                SOCK_DIAG_BY_FAMILY,
                NLM_F_DUMP,
                (family, IPPROTO_UDP),
                &[0; ID_LEN],
            );
            let answers = self
                .0
                .request(request, kernel())
                .map_err(io::Error::other)?;
            netlink::dumped(answers, |message| {
                sockets.extend(UdpSocket::read(&message.bytes))
            })
            .await?;
        }
        Ok(sockets)
    }

    /// Aborts a socket. A process that waits on the socket, or uses it next, gets ECONNABORTED.
    /// Returns false if the socket was already gone.
    pub async fn abort(&self, socket: &UdpSocket) -> io::Result<bool> {
        self.destroy((socket.family, IPPROTO_UDP), &socket.id).await
    }

    /// Aborts the TCP socket with these endpoints, like [`Self::abort`].
    pub async fn abort_tcp(&self, local: SocketAddr, peer: SocketAddr) -> io::Result<bool> {
        let family = if local.is_ipv4() { AF_INET } else { AF_INET6 };
        self.destroy((family, IPPROTO_TCP), &id(local, peer)).await
    }

    async fn has_owner(&self, local: SocketAddr, peer: SocketAddr) -> io::Result<Option<bool>> {
        let family = if local.is_ipv4() { AF_INET } else { AF_INET6 };
        let wanted = id(local, peer);
        let request = request(SOCK_DIAG_BY_FAMILY, 0, (family, IPPROTO_TCP), &wanted);
        let mut answers = self
            .0
            .request(request, kernel())
            .map_err(io::Error::other)?;
        match answers.next().await.map(|answer| answer.payload) {
            Some(NetlinkPayload::InnerMessage(message)) => Ok(owner(&message.bytes, &wanted)),
            Some(NetlinkPayload::Error(error))
                if error.to_io().kind() == io::ErrorKind::NotFound =>
            {
                Ok(None)
            }
            Some(NetlinkPayload::Error(error)) => Err(error.to_io()),
            _ => Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the kernel does not answer about a socket",
            )),
        }
    }

    async fn destroy(&self, kind: (u8, u8), id: &[u8; ID_LEN]) -> io::Result<bool> {
        let request = request(SOCK_DESTROY, NLM_F_ACK, kind, id);
        netlink::deleted(
            self.0
                .request(request, kernel())
                .map_err(io::Error::other)?,
        )
        .await
    }
}

/// Returns true if a process owns the TCP socket with these endpoints, and false if the process has
/// closed the socket. The kernel finds the socket by hash.
///
/// Returns `None` if the kernel has no such socket, or no `tcp_diag` (`ENOENT` in both cases).
pub async fn has_owner(local: SocketAddr, peer: SocketAddr) -> io::Result<Option<bool>> {
    let (connection, handle) = connect()?;
    let closed = || {
        io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "the netlink socket has failed",
        )
    };
    tokio::select! {
        found = timeout(ANSWER, handle.has_owner(local, peer)) => found.map_err(io::Error::from)?,
        () = connection => Err(closed()),
    }
}

/// Reads from a `struct inet_diag_msg` whether the socket has an owner. Returns `None` if the ports
/// differ: if there is no such connection, the kernel returns the listener at the local port.
fn owner(message: &[u8], wanted: &[u8; ID_LEN]) -> Option<bool> {
    let ports = message.get(ID_AT..ID_AT + 4)?;
    let inode = message.get(INODE_AT..INODE_AT + 4)?;
    // A socket with inode 0 has no owner.
    (*ports == wanted[..4]).then(|| inode != [0; 4])
}

/// Builds a `struct inet_diag_sockid`: two ports, two addresses of 16 bytes, device, cookie.
fn id(local: SocketAddr, peer: SocketAddr) -> [u8; ID_LEN] {
    let mut id = [0; ID_LEN];
    for (nth, end) in [local, peer].into_iter().enumerate() {
        id[2 * nth..][..2].copy_from_slice(&end.port().to_be_bytes());
        let addr = &mut id[4 + 16 * nth..][..16];
        match end.ip() {
            IpAddr::V4(ip) => addr[..4].copy_from_slice(&ip.octets()),
            IpAddr::V6(ip) => addr.copy_from_slice(&ip.octets()),
        }
    }
    id[ID_LEN - NO_COOKIE.len()..].copy_from_slice(&NO_COOKIE);
    id
}

/// Builds a request with a `struct inet_diag_req_v2` for a family and a protocol.
fn request(
    kind: u16,
    flags: u16,
    (family, protocol): (u8, u8),
    id: &[u8; ID_LEN],
) -> NetlinkMessage<Message> {
    let head = [family, protocol, 0, 0];
    raw::request(
        kind,
        NLM_F_REQUEST | flags,
        [&head[..], &ESTABLISHED.to_ne_bytes(), id].concat(),
    )
}

#[cfg(test)]
mod tests {
    use std::net::{Shutdown, TcpListener, TcpStream};

    use super::*;

    #[tokio::test]
    async fn kernel_tells_whether_a_process_has_a_connection() {
        for at in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(at).unwrap();
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let _server = listener.accept().unwrap();
            let local = client.local_addr().unwrap();
            let peer = client.peer_addr().unwrap();
            client.shutdown(Shutdown::Write).unwrap();
            assert_eq!(
                has_owner(local, peer).await.unwrap(),
                Some(true),
                "{at}: it reads yet"
            );
            drop(client);
            assert_eq!(
                has_owner(local, peer).await.unwrap(),
                Some(false),
                "{at}: it was closed"
            );
            // The listener has the same local port but another peer.
            let never = SocketAddr::new(peer.ip(), 1);
            assert_eq!(
                has_owner(peer, never).await.unwrap(),
                None,
                "{at}: it never was"
            );
        }
    }

    #[tokio::test]
    async fn socket_of_ipv6_that_speaks_ipv4_has_an_owner() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let client = TcpStream::connect(format!("[::ffff:127.0.0.1]:{port}")).unwrap();
        let canonical = |at: SocketAddr| SocketAddr::new(at.ip().to_canonical(), at.port());
        let local = canonical(client.local_addr().unwrap());
        let peer = canonical(client.peer_addr().unwrap());
        assert!(local.is_ipv4() && peer.is_ipv4());
        assert_eq!(has_owner(local, peer).await.unwrap(), Some(true));
    }
}
