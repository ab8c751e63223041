//! Serves HTTP on a listener. Dropping the future closes the listener and all its connections.

mod patience;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::fmt::Debug;
use std::io;
use std::net::{Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result};
use axum::response::{IntoResponse, Response};
use axum::serve::Listener;
use axum::{Extension, Router};
use http::header::X_CONTENT_TYPE_OPTIONS;
use http::{HeaderValue, StatusCode};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::TcpListener;
use tokio::task::{AbortHandle, JoinSet};
use tracing::{debug, info};

use patience::Patient;
use proxy_source::health::{Health, Problem};

/// The maximal number of connections that wait for an accept.
const BACKLOG: i32 = 128;
/// The place of a connection's client, which is added to each request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Client {
    /// A client in the host's own network namespace. A loopback address proves it, because no packet from outside has
    /// one.
    OnHost,
    #[default]
    Elsewhere,
}

/// The far end of a connection.
pub(crate) trait RemoteAddr: Debug {
    fn client(&self) -> Client;

    /// The longest time in which a client takes none of what was written. The operator's programs on this host may pause for as long as they like.
    const PATIENCE: Option<Duration>;
}

impl RemoteAddr for SocketAddr {
    fn client(&self) -> Client {
        // A listener of both families shows IPv4's clients at mapped addresses.
        if self.ip().to_canonical().is_loopback() { Client::OnHost } else { Client::Elsewhere }
    }

    const PATIENCE: Option<Duration> = Some(WRITE_TIMEOUT);
}

impl RemoteAddr for tokio::net::unix::SocketAddr {
    fn client(&self) -> Client {
        Client::OnHost
    }

    const PATIENCE: Option<Duration> = None;
}

/// The time after which a failed address is tried again; kube-proxy's.
const RETRY: Duration = Duration::from_secs(5);

/// The maximal number of connections of one listener; a further connection ends the oldest. Without this, a client with
/// so many idle connections could keep the kubelet and load balancers out.
const CONNECTIONS: usize = 256;
/// The time limit for the header of a connection's next request.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// The time limit for a client on the network to take some of an answer. Without it, clients that do not read would keep the room of others.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Serves `router` at an address until dropped. A failure to listen is a problem named `what`, and listening is tried
/// again. If `hard_fail`, the failure is returned instead.
pub(crate) async fn keep_serving(
    what: &Problem,
    address: SocketAddr,
    router: Router,
    hard_fail: bool,
    health: &Health,
) -> Result<Infallible> {
    loop {
        match listen(address).with_context(|| format!("listen on {address}")) {
            Ok(listener) => {
                health.end(what);
                info!(what = what.to_string(), %address, "listening");
                serve(listener, router.clone()).await;
            }
            Err(error) if hard_fail => return Err(error).with_context(|| what.to_string()),
            Err(error) => health.begin(what, format!("{error:#}")),
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Listens on an address. The unspecified address of either family stands for all addresses of both, as for Go's
/// `net.Listen`.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    if address.ip().is_unspecified() {
        match bind((Ipv6Addr::UNSPECIFIED, address.port()).into(), false) {
            // The kernel has no IPv6.
            Err(error) if error.raw_os_error() == Some(nix::libc::EAFNOSUPPORT) && address.is_ipv4() => {}
            result => return result,
        }
    }
    bind(address, true)
}

/// Binds a listener. `only_v6` leaves the same port of IPv4 free.
pub(crate) fn bind(address: SocketAddr, only_v6: bool) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    if address.is_ipv6() {
        socket.set_only_v6(only_v6)?;
    }
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

/// Answers a path that is not served, as Go's servers do.
pub(crate) async fn not_found() -> Response {
    let mut response = (StatusCode::NOT_FOUND, "404 page not found\n").into_response();
    nosniff(&mut response);
    response
}

pub(crate) fn nosniff(response: &mut Response) {
    response.headers_mut().insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
}

/// Answers requests by `router` until dropped.
pub(crate) async fn serve<L>(mut listener: L, router: Router)
where
    L: Listener,
    L::Addr: RemoteAddr,
{
    let mut connections = JoinSet::new();
    // The oldest connection comes first.
    let mut open: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        tokio::select! {
            // This waits while the kernel refuses connections, for example for lack of file descriptors.
            (stream, peer) = listener.accept() => {
                open.retain(|connection| !connection.is_finished());
                if open.len() >= CONNECTIONS && let Some(oldest) = open.pop_front() {
                    oldest.abort();
                }
                let router = router.clone().layer(Extension(peer.client()));
                let stream = Patient::new(stream, L::Addr::PATIENCE);
                open.push_back(connections.spawn(converse(stream, router)));
            }
            Some(_ended) = connections.join_next() => {}
        }
    }
}

async fn converse(stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static, router: Router) {
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .title_case_headers(true)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    if let Err(error) = connection.await {
        debug!(%error, "http connection");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_with_loopback_address_is_on_the_host() {
        for addr in ["127.0.0.1:5", "127.9.9.9:5", "[::1]:5", "[::ffff:127.0.0.1]:5"] {
            assert_eq!(addr.parse::<SocketAddr>().unwrap().client(), Client::OnHost, "{addr}");
        }
        for addr in ["192.0.2.1:5", "[fd00::1]:5", "[::ffff:192.0.2.1]:5", "0.0.0.0:5"] {
            assert_eq!(addr.parse::<SocketAddr>().unwrap().client(), Client::Elsewhere, "{addr}");
        }
    }
}
