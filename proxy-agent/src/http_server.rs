//! Serves HTTP on a listener. Dropping the future closes the listener and all its connections.

mod opening;
mod patience;
mod room;

use std::convert::Infallible;
use std::fmt::Debug;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result};
use axum::response::{IntoResponse, Response};
use axum::serve::Listener;
use axum::{Extension, Router};
use http::header::{CONNECTION, X_CONTENT_TYPE_OPTIONS};
use http::{HeaderValue, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use nix::unistd::geteuid;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio::task::JoinSet;
use tracing::{debug, info};

use opening::Opening;
use patience::Patient;
use proxy_source::health::{Health, Problem};
use room::Permits;

pub(crate) use room::{Place, Room, files};

/// The length of the accept queue: the kernel's default limit (`net.core.somaxconn`), as in Go. If
/// the queue is full, a probe's SYN is lost and retried a second later.
const BACKLOG: i32 = 4_096;
/// The place of a connection's client, added to each request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Client {
    /// A process of this process's user, at the Unix socket.
    Own,
    /// A client in the host's own network namespace. Its loopback address proves it: no packet from
    /// outside has one.
    OnHost,
    #[default]
    Elsewhere,
}

pub(crate) trait RemoteAddr: Debug {
    fn client(&self) -> Client;

    /// Returns the client's address; `None` at a Unix socket.
    fn ip(&self) -> Option<IpAddr>;

    /// True if the client may speak HTTP/2 too: `kubectl kpx ui` has many answers in one stream.
    const SPEAKS_HTTP2: bool;

    /// The maximum time in which a client reads none of the written data. `None` for local tools at
    /// the Unix socket, which may pause.
    const PATIENCE: Option<Duration>;
}

impl RemoteAddr for SocketAddr {
    fn client(&self) -> Client {
        // A dual-stack listener shows IPv4 clients at mapped addresses.
        if self.ip().to_canonical().is_loopback() {
            Client::OnHost
        } else {
            Client::Elsewhere
        }
    }

    fn ip(&self) -> Option<IpAddr> {
        Some(self.ip())
    }

    const SPEAKS_HTTP2: bool = false;
    const PATIENCE: Option<Duration> = Some(WRITE_TIMEOUT);
}

/// The peer of a Unix socket: its user id, if the kernel reports it.
#[derive(Debug)]
pub(crate) struct Peer(Option<u32>);

pub(crate) struct LocalListener(pub(crate) UnixListener);

impl Listener for LocalListener {
    type Io = UnixStream;
    type Addr = Peer;

    async fn accept(&mut self) -> (UnixStream, Peer) {
        let (stream, _) = Listener::accept(&mut self.0).await;
        let user = stream.peer_cred().ok().map(|credentials| credentials.uid());
        (stream, Peer(user))
    }

    fn local_addr(&self) -> io::Result<Peer> {
        Ok(Peer(Some(geteuid().as_raw())))
    }
}

impl RemoteAddr for Peer {
    fn client(&self) -> Client {
        if self.0 == Some(geteuid().as_raw()) {
            Client::Own
        } else {
            Client::OnHost
        }
    }

    fn ip(&self) -> Option<IpAddr> {
        None
    }

    const SPEAKS_HTTP2: bool = true;
    const PATIENCE: Option<Duration> = None;
}

/// The time after which a failed address is retried, as in kube-proxy.
const RETRY: Duration = Duration::from_secs(5);

/// The maximum number of bytes of a request's header, and of a pending answer. Clients send some
/// hundred bytes.
const BUFFER: usize = 16 << 10;
/// The time limit for the header of a connection's next request.
const HEADER_TIMEOUT: Duration = Duration::from_secs(5);
/// The time in which a client on the network must read some of an answer. Clients that do not read
/// would use up the connections.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Serves `router` at an address until dropped. A failure to listen is reported as the problem
/// `what` and retried, or returned if `hard_fail`.
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
                serve(listener, router.clone(), Room::default().place()).await;
            }
            Err(error) if hard_fail => return Err(error).with_context(|| what.to_string()),
            Err(error) => health.begin(what, format!("{error:#}")),
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Listens on an address. The unspecified address of either family stands for all addresses of
/// both, as in Go's `net.Listen`.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    if address.ip().is_unspecified() {
        match bind((Ipv6Addr::UNSPECIFIED, address.port()).into(), false) {
            // The kernel has no IPv6.
            Err(error)
                if error.raw_os_error() == Some(nix::libc::EAFNOSUPPORT) && address.is_ipv4() => {}
            result => return result,
        }
    }
    bind(address, true)
}

/// Binds a listener. `only_v6` leaves the same port of IPv4 free.
pub(crate) fn bind(address: SocketAddr, only_v6: bool) -> io::Result<TcpListener> {
    let socket = Socket::new(
        Domain::for_address(address),
        Type::STREAM,
        Some(Protocol::TCP),
    )?;
    if address.is_ipv6() {
        socket.set_only_v6(only_v6)?;
    }
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

/// Answers an unknown path as Go's servers do.
pub(crate) async fn not_found() -> Response {
    let mut response = (StatusCode::NOT_FOUND, "404 page not found\n").into_response();
    nosniff(&mut response);
    response
}

pub(crate) fn nosniff(response: &mut Response) {
    response
        .headers_mut()
        .insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
}

/// Closes the connection after this response. Otherwise a probe could send its next request just as
/// the header timeout of the connection expires, and count a failure.
pub(crate) fn close_after(response: &mut Response) {
    response
        .headers_mut()
        .insert(CONNECTION, HeaderValue::from_static("close"));
}

pub(crate) async fn serve<L>(mut listener: L, router: Router, place: Place)
where
    L: Listener,
    L::Addr: RemoteAddr,
{
    let mut connections = JoinSet::new();
    // A layer costs as much as all routes, so each kind of client shares one.
    let of = |client: Client| router.clone().layer(Extension(client));
    let own = of(Client::Own);
    let on_host = of(Client::OnHost);
    let elsewhere = of(Client::Elsewhere);
    loop {
        tokio::select! {
            // Retries while the kernel refuses connections, for example without free file
            // descriptors.
            (stream, peer) = listener.accept() => {
                let router = match peer.client() {
                    Client::Own => &own,
                    Client::OnHost => &on_host,
                    Client::Elsewhere => &elsewhere,
                };
                let stream = Patient::new(stream, L::Addr::PATIENCE);
                let router = router.clone();
                let conversation = converse(stream, router, L::Addr::SPEAKS_HTTP2);
                let begin = |permits: Permits| {
                    connections.spawn(async move {
                        conversation.await;
                        drop(permits);
                    })
                };
                place.admit(peer.ip(), begin).await;
            }
            Some(_ended) = connections.join_next() => {}
        }
    }
}

/// Serves HTTP/1, or either version by the client's first bytes if it may speak HTTP/2.
async fn converse(
    stream: impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    router: Router,
    speaks_http2: bool,
) {
    let mut server = auto::Builder::new(TokioExecutor::new());
    if !speaks_http2 {
        server = server.http1_only();
    }
    server
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(BUFFER)
        .title_case_headers(true);
    server.http2().timer(TokioTimer::new());
    let stream = TokioIo::new(Opening::new(stream, HEADER_TIMEOUT));
    let served = server.serve_connection(stream, TowerToHyperService::new(router));
    if let Err(error) = served.await {
        debug!(error, "http connection");
    }
}

#[cfg(test)]
mod tests;
