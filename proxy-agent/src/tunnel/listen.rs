//! The tunnel's sockets, which accept only packets that kpx sends there.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result};
use futures::future::select_all;
use nix::libc;
use proxy_net::anchor;
use rtnetlink::Handle;
use socket2::{Domain, Protocol, SockFilter, SockRef, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;
use tracing::debug;

/// The maximum number of connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// The wait after a failed accept.
const RETRY: Duration = Duration::from_millis(10);
/// The interface index of lo in every network namespace.
const LO: u32 = 1;

/// Listens at the anchor's addresses, one for each family of the kernel. The kernel chooses the
/// ports.
pub(super) async fn listen(netlink: &Handle) -> Result<Vec<TcpListener>> {
    anchor::address_listeners(netlink).await?;
    let v4 = listener(IpAddr::from(anchor::LISTEN4))?;
    let v6 = listener(IpAddr::from(anchor::LISTEN6));
    if let Err(error) = &v6 {
        debug!(error = format!("{error:#}"), "no tunnel over IPv6");
    }
    Ok([v4].into_iter().chain(v6).collect())
}

fn listener(ip: IpAddr) -> Result<TcpListener> {
    let at = SocketAddr::new(ip, 0);
    let listen = || {
        let socket = Socket::new(Domain::for_address(at), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_nonblocking(true)?;
        // The filter precedes the socket's first packet.
        socket.attach_filter(&OF_LO)?;
        socket.bind(&at.into())?;
        socket.listen(BACKLOG)?;
        TcpListener::from_std(socket.into())
    };
    listen().with_context(|| format!("listen at {ip}"))
}

/// A socket filter that accepts only packets from lo, through which kpx sends the connections of
/// local processes. Other hosts get no answer from the port, whichever addresses the machine owns
/// or forwards. Connections inherit the filter of their listener.
const OF_LO: [SockFilter; 4] = [
    SockFilter::new(
        (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16,
        0,
        0,
        (libc::SKF_AD_OFF + libc::SKF_AD_IFINDEX).cast_unsigned(),
    ),
    SockFilter::new(
        (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
        0,
        1,
        LO,
    ),
    SockFilter::new((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, u32::MAX),
    SockFilter::new((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, 0),
];

pub(super) async fn accept(listeners: &[TcpListener]) -> (TcpStream, SocketAddr) {
    loop {
        let (accepted, ..) =
            select_all(listeners.iter().map(|listener| Box::pin(listener.accept()))).await;
        match accepted {
            Ok((stream, client)) => {
                // Nagle's algorithm would delay small answers.
                let _ = stream.set_nodelay(true);
                return (stream, client);
            }
            // The client has aborted the connection, or the process has no free file descriptor.
            Err(error) => {
                debug!(%error, "a connection for the tunnel could not be accepted");
                sleep(RETRY).await;
            }
        }
    }
}

/// Resets a connection, so that its client does not read an orderly end.
pub(super) fn reset(stream: TcpStream) {
    let lingers: io::Result<()> = SockRef::from(&stream).set_linger(Some(Duration::ZERO));
    if let Err(error) = lingers {
        debug!(%error, "a connection could not be reset");
    }
}
