//! Nodes for tests: agents in memory, with the answers of the test.

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use clap::Parser;
use futures::stream::{BoxStream, StreamExt};
use http::{Request, Response};
use http_body_util::StreamBody;
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use kube::{Client, Config};
use tokio::io::duplex;

use super::link::{Link, shake};
use super::{Shared, lock};
use crate::connect::ConnectArgs;

/// The pieces of an answer, by what is asked.
pub(super) type Answers = fn(&str) -> BoxStream<'static, Bytes>;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    connect: ConnectArgs,
}

/// Returns the state of a page without nodes, and without an API server.
pub(super) fn shared() -> Arc<Shared> {
    let Line { connect } = Line::parse_from(["kpx", "--timeout=30"]);
    let config = Config::new("http://127.0.0.1:1".parse().unwrap());
    Arc::new(Shared::new(connect, 0, Client::try_from(config).unwrap()))
}

/// Adds a node that answers.
pub(super) async fn answer(shared: &Shared, node: &str, answers: Answers) {
    let link = link(answers).await;
    lock(&shared.links).insert(node.to_owned(), link);
}

/// Returns a link with an agent that answers so.
pub(super) async fn link(answers: Answers) -> Link {
    let (here, there) = duplex(1 << 16);
    let answered = service_fn(move |request: Request<Incoming>| async move {
        let what = request.uri().path_and_query().map(|what| what.as_str());
        let pieces = answers(what.unwrap_or_default());
        let frames = pieces.map(|piece| Ok::<_, Infallible>(Frame::data(piece)));
        Ok::<_, Infallible>(Response::new(StreamBody::new(frames)))
    });
    let server = http2::Builder::new(TokioExecutor::new());
    tokio::spawn(server.serve_connection(TokioIo::new(there), answered));
    let (link, connection) = shake(here, Arc::default()).await.unwrap();
    tokio::spawn(connection);
    link
}
