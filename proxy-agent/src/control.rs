//! Answers queries about the running agent. Only the agent's loop has the state, so each query goes to it. Other
//! processes ask by HTTP on a socket in the run directory, and get JSON.

pub mod client;
mod flows;

use std::collections::BTreeMap;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener as StdUnixListener};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use http::StatusCode;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot};

use crate::http_server;
use crate::status::Status;
use crate::view::{self, NameView, ServiceView};
use proxy_core::desired::Snapshot;
use proxy_datapath::FlowMaps;
use proxy_metrics::Readings;

pub use flows::FlowFilter;

/// A query to the agent, with the channel for its answer.
#[derive(Debug)]
pub enum Ask {
    Status(oneshot::Sender<Result<Status>>),
    /// A query for all Services that are served, with the maps that count their traffic.
    Services(oneshot::Sender<(Snapshot, FlowMaps)>),
    /// A query for the kernel's ids of the maps, by name.
    Maps(oneshot::Sender<BTreeMap<String, u32>>),
    /// A query for the readings that a scrape needs.
    Readings(oneshot::Sender<Result<Readings>>),
}

/// The number of queries that may wait for the agent.
const QUEUE: usize = 64;

/// A handle that sends queries to the agent of this process.
#[derive(Clone, Debug)]
pub struct Asker(mpsc::Sender<Ask>);

impl Asker {
    /// Makes the handle, and the receiver of its queries.
    pub fn new() -> (Self, mpsc::Receiver<Ask>) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        (Self(sender), receiver)
    }

    pub async fn status(&self) -> Result<Status> {
        self.ask(Ask::Status).await?
    }

    /// Returns the views of the Services, which are built outside of the agent's loop.
    pub async fn services(&self) -> Result<Vec<ServiceView>> {
        let (snapshot, flows) = self.ask(Ask::Services).await?;
        let views = tokio::task::spawn_blocking(move || {
            let counts = flows.recent_counts().context("count the traffic")?;
            Ok(view::views(&snapshot, &counts))
        });
        views.await.context("build the views of Services")?
    }

    /// Returns the names of the frontends in force.
    pub async fn names(&self) -> Result<Vec<NameView>> {
        let (snapshot, _) = self.ask(Ask::Services).await?;
        tokio::task::spawn_blocking(move || view::frontend_names(&snapshot))
            .await
            .context("build the views of Services")
    }

    /// Returns what tells the flows and their names.
    async fn flows(&self) -> Result<(Snapshot, FlowMaps)> {
        self.ask(Ask::Services).await
    }

    async fn maps(&self) -> Result<BTreeMap<String, u32>> {
        self.ask(Ask::Maps).await
    }

    pub async fn readings(&self) -> Result<Readings> {
        self.ask(Ask::Readings).await?
    }

    async fn ask<T>(&self, question: impl FnOnce(oneshot::Sender<T>) -> Ask) -> Result<T> {
        let (sender, answer) = oneshot::channel();
        self.0.send(question(sender)).await.ok().context("the agent has ended")?;
        answer.await.context("the agent has ended")
    }
}

/// Answers on `listener` until dropped, with the paths of `more` beside its own.
pub async fn serve(listener: UnixListener, asker: Asker, more: Router) {
    http_server::serve(listener, router().with_state(asker).merge(more)).await;
}

fn router() -> Router<Asker> {
    Router::new()
        .route("/status", get(status))
        .route("/services", get(services))
        .route("/names", get(names))
        .route("/maps", get(maps))
        .route("/flows", get(flows::flows))
}

async fn status(State(asker): State<Asker>) -> Response {
    answer(asker.status().await)
}

async fn services(State(asker): State<Asker>) -> Response {
    answer(asker.services().await)
}

async fn names(State(asker): State<Asker>) -> Response {
    answer(asker.names().await)
}

async fn maps(State(asker): State<Asker>) -> Response {
    answer(asker.maps().await)
}

pub(crate) fn answer<T: serde::Serialize>(result: Result<T>) -> Response {
    match result {
        Ok(value) => Json(value).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error:#}")).into_response(),
    }
}

/// Returns the path of an agent's socket below its run directory.
fn socket(run_dir: &Path) -> PathBuf {
    run_dir.join("kpx.sock")
}

/// Takes the lock of this network namespace, which holds as long as the result lives.
///
/// The lock is an abstract socket. An abstract socket belongs to the network namespace, and the kernel
/// releases it when its process ends for any reason.
pub fn lock() -> Result<StdUnixListener> {
    let name = SocketAddr::from_abstract_name("kpx").context("name the lock")?;
    StdUnixListener::bind_addr(&name)
        .context("another kpx is running on this host, or another program holds the abstract socket @kpx")
}

/// Listens in the run directory.
pub fn listen(run_dir: &Path) -> Result<UnixListener> {
    std::fs::create_dir_all(run_dir).with_context(|| format!("create {}", run_dir.display()))?;
    let path = socket(run_dir);
    // The process that left the socket is dead: see [`lock`].
    if path.exists() {
        std::fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
    }
    UnixListener::bind(&path).with_context(|| format!("listen on {}", path.display()))
}

/// Removes the socket that [`listen`] made.
pub fn unlisten(run_dir: &Path) -> Result<()> {
    let path = socket(run_dir);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}
