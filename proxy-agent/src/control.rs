//! What others ask the running agent. The loop alone knows, so every question goes to it; from outside by HTTP on a
//! socket in the run directory, with JSON in return.

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
use crate::metrics::Readings;
use crate::status::Status;
use crate::view::{self, NameView, ServiceView};
use proxy_core::desired::Snapshot;
use proxy_datapath::FlowMaps;

pub use flows::FlowFilter;

/// A question to the loop, and where the answer goes.
#[derive(Debug)]
pub enum Ask {
    Status(oneshot::Sender<Result<Status>>),
    /// All Services that are served, and who knows what passed for them.
    Services(oneshot::Sender<(Snapshot, FlowMaps)>),
    /// The kernel's ids of the maps, by name.
    Maps(oneshot::Sender<BTreeMap<String, u32>>),
    /// What a scrape needs of the loop.
    Readings(oneshot::Sender<Result<Readings>>),
}

/// Questions that may wait for the loop.
const QUEUE: usize = 64;

/// Asks the loop of this process.
#[derive(Clone, Debug)]
pub struct Asker(mpsc::Sender<Ask>);

impl Asker {
    /// And where the loop takes questions from.
    pub fn new() -> (Self, mpsc::Receiver<Ask>) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        (Self(sender), receiver)
    }

    pub async fn status(&self) -> Result<Status> {
        self.ask(Ask::Status).await?
    }

    /// Made here, outside of the loop.
    pub async fn services(&self) -> Result<Vec<ServiceView>> {
        let (snapshot, flows) = self.ask(Ask::Services).await?;
        let views = tokio::task::spawn_blocking(move || {
            let counts = flows.recent_counts().context("count what passed")?;
            Ok(view::views(&snapshot, &counts))
        });
        views.await.context("look at the Services")?
    }

    /// What the frontends in force are called.
    pub async fn names(&self) -> Result<Vec<NameView>> {
        let (snapshot, _) = self.ask(Ask::Services).await?;
        tokio::task::spawn_blocking(move || view::frontend_names(&snapshot)).await.context("look at the Services")
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
        self.0.send(question(sender)).await.ok().context("the loop has ended")?;
        answer.await.context("the loop has ended")
    }
}

/// Answers on `listener` until it is dropped; `more` beside what it answers itself.
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

/// Where an agent answers, below its run directory.
fn socket(run_dir: &Path) -> PathBuf {
    run_dir.join("kpx.sock")
}

/// Makes sure that this is the only kpx in its network namespace, for as long as the result lives.
///
/// The lock is an abstract socket: it belongs to the namespace, and is gone with its process however that ends.
pub fn lock() -> Result<StdUnixListener> {
    let name = SocketAddr::from_abstract_name("kpx").context("name the lock")?;
    StdUnixListener::bind_addr(&name)
        .context("another kpx is running on this host, or another program holds the abstract socket @kpx")
}

/// Listens in the run directory.
pub fn listen(run_dir: &Path) -> Result<UnixListener> {
    std::fs::create_dir_all(run_dir).with_context(|| format!("create {}", run_dir.display()))?;
    let path = socket(run_dir);
    // Whoever left it is dead: see [`lock`].
    if path.exists() {
        std::fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
    }
    UnixListener::bind(&path).with_context(|| format!("listen on {}", path.display()))
}

/// Takes away what [`listen`] made.
pub fn unlisten(run_dir: &Path) -> Result<()> {
    let path = socket(run_dir);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}
