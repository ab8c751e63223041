//! Serves HTTP on a listener. Whoever drops the future ends the listener and all its connections with it.

use std::fmt::Debug;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::task::JoinSet;
use tracing::debug;

/// Connections of one listener at a time; more wait in the kernel.
const CONNECTIONS: usize = 256;
/// How long a connection may take over its next request's header.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// Answers requests by `router` until it is dropped.
pub(crate) async fn serve<L>(mut listener: L, router: Router)
where
    L: Listener,
    L::Addr: Debug,
{
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            // It waits where the kernel gives out no connection, as for want of file descriptors.
            (stream, _) = listener.accept(), if connections.len() < CONNECTIONS => {
                drop(connections.spawn(converse(stream, router.clone())));
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
