//! Serves HTTP on a listener. Whoever drops the future ends the listener and all its connections with it.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tracing::debug;

/// Connections of one listener at a time; more wait in the kernel.
const CONNECTIONS: usize = 256;
/// How long a connection may take over its next request's header.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long to wait when the kernel gives out no connection, as for want of file descriptors.
const ACCEPT_RETRY: Duration = Duration::from_secs(1);

/// Answers requests until it is dropped.
pub(crate) async fn serve<F>(listener: TcpListener, answer: F)
where
    F: Fn(Request<Incoming>) -> Response<Full<Bytes>> + Clone + Send + 'static,
{
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if connections.len() < CONNECTIONS => match accepted {
                Ok((stream, _)) => drop(connections.spawn(converse(stream, answer.clone()))),
                Err(error) => {
                    debug!(%error, "accept");
                    tokio::time::sleep(ACCEPT_RETRY).await;
                }
            },
            Some(_ended) = connections.join_next() => {}
        }
    }
}

async fn converse<F>(stream: TcpStream, answer: F)
where
    F: Fn(Request<Incoming>) -> Response<Full<Bytes>>,
{
    let service = service_fn(move |request| std::future::ready(Ok::<_, Infallible>(answer(request))));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .title_case_headers(true)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = connection.await {
        debug!(%error, "http connection");
    }
}
