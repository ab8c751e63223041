//! The sockets at which the tunnel begins: for packets that kpx has sent there, and for no others.

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

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;
/// The wait after a connection that could not be accepted.
const RETRY: Duration = Duration::from_millis(10);
/// The interface index of lo, in every network namespace.
const LO: u32 = 1;

/// Listens at addresses of the anchor, one of each family that the kernel has. The kernel chooses
/// the ports.
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
        // Before the socket takes any packet.
        socket.attach_filter(&OF_LO)?;
        socket.bind(&at.into())?;
        socket.listen(BACKLOG)?;
        TcpListener::from_std(socket.into())
    };
    listen().with_context(|| format!("listen at {ip}"))
}

/// A filter that takes packets from lo alone, where kpx sends those of this machine's programs. To
/// others the port does not answer, whatever addresses the machine forwards or takes for its own.
/// Connections have the filter of their listener.
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

/// Returns the next connection at any of the listeners.
pub(super) async fn accept(listeners: &[TcpListener]) -> (TcpStream, SocketAddr) {
    loop {
        let (accepted, ..) =
            select_all(listeners.iter().map(|listener| Box::pin(listener.accept()))).await;
        match accepted {
            Ok((stream, client)) => {
                // Answers of a few bytes would wait for others.
                let _ = stream.set_nodelay(true);
                return (stream, client);
            }
            // The client gave up meanwhile, or files are short for a moment.
            Err(error) => {
                debug!(%error, "a connection for the tunnel could not be accepted");
                sleep(RETRY).await;
            }
        }
    }
}

/// Ends a connection so that its client does not take the end for an orderly one.
pub(super) fn reset(stream: TcpStream) {
    let lingers: io::Result<()> = SockRef::from(&stream).set_linger(Some(Duration::ZERO));
    if let Err(error) = lingers {
        debug!(%error, "a connection could not be reset");
    }
}
