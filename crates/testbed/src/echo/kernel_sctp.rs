//! The kernel's SCTP, if available: one socket per association, with message boundaries.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};

use etherparse::IpNumber;
use nix::sys::socket::{setsockopt, sockopt};
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::{WHO, greeting};

/// The associations that may wait for accept.
const BACKLOG: i32 = 128;

/// Returns true if this kernel supports SCTP. Otherwise raw sockets replace it.
pub fn is_there() -> bool {
    static THERE: LazyLock<bool> = LazyLock::new(|| new(Domain::IPV4).is_ok());
    *THERE
}

fn new(domain: Domain) -> io::Result<Socket> {
    Socket::new(
        domain,
        Type::STREAM,
        Some(Protocol::from(i32::from(IpNumber::SCTP.0))),
    )
}

/// Returns a client socket that receives ICMP refusals at once.
pub(super) fn socket(from: SocketAddr) -> io::Result<Socket> {
    let socket = bound(from)?;
    match from {
        SocketAddr::V4(_) => setsockopt(&socket, sockopt::Ipv4RecvErr, &true)?,
        SocketAddr::V6(_) => setsockopt(&socket, sockopt::Ipv6RecvErr, &true)?,
    }
    Ok(socket)
}

/// Returns an SCTP listener in the type of a TCP listener, which accepts, reads and writes alike.
pub(super) fn listen(addr: SocketAddr) -> io::Result<std::net::TcpListener> {
    let socket = bound(addr)?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.into())
}

fn bound(addr: SocketAddr) -> io::Result<Socket> {
    let socket = new(Domain::for_address(addr))?;
    if addr.is_ipv6() {
        // Otherwise it would also offer the host's IPv4 addresses to its peer.
        socket.set_only_v6(true)?;
    }
    socket.bind(&SockAddr::from(addr))?;
    Ok(socket)
}

pub(super) async fn serve(listener: TcpListener, name: Arc<str>) {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                let name = name.clone();
                tokio::spawn(async move {
                    if let Err(error) = answer(stream, &name, peer).await {
                        tracing::debug!(%error, %name, %peer, "association failed");
                    }
                });
            }
            Err(error) => tracing::warn!(%error, %name, "cannot accept"),
        }
    }
}

async fn answer(mut stream: TcpStream, name: &str, peer: SocketAddr) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        match stream.read(&mut buffer).await? {
            0 => return Ok(()),
            length if &buffer[..length] == WHO => stream.write_all(&greeting(name, peer)).await?,
            length => stream.write_all(&buffer[..length]).await?,
        }
    }
}
