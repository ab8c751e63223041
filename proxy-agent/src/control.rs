//! Answers queries about the running agent. The loop owns the state, so each query goes to it.
//! Other processes use HTTP with JSON on a socket in the run directory.

mod flows;

use std::collections::BTreeMap;
use std::fs::{Permissions, metadata, set_permissions};
use std::net::SocketAddr as InternetAddr;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener as StdUnixListener;
use std::path::Path;

use anyhow::{Context, Result};
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use http::StatusCode;
use nix::sys::stat::{Mode, umask};
use tokio::net::UnixListener;
use tokio::sync::{mpsc, oneshot};

use crate::history::{self, History};
use crate::http_server::{self, LocalListener, Room};
use crate::tunnel::Tunnelled;
use proxy_core::desired::{Part, Snapshot};
use proxy_core::input::ObjectName;
use proxy_datapath::{FlowMaps, Pins};
use proxy_dns::{Known, Wanted};
use proxy_metrics::Readings;
use proxy_source::journal::{Journal, Reported};
use proxy_view::status::Status;
use proxy_view::{EventView, NameView, ServiceView, socket};

pub use flows::{EndedFlows, FlowFilter};

/// A query to the agent, with the channel for its answer.
#[derive(Debug)]
pub enum Query {
    Status(oneshot::Sender<Result<Status>>),
    /// Some of the served Services, after this name (`None`: the first), with the maps that count
    /// their traffic.
    Services(Option<ObjectName>, oneshot::Sender<(Part, FlowMaps)>),
    /// The objects behind a DNS name; `None` before the first lists.
    Known(Wanted, oneshot::Sender<Option<Known>>),
    /// The pods that serve a ClusterIP and port through the tunnel, if it serves them.
    Tunnelled(InternetAddr, oneshot::Sender<Option<Tunnelled>>),
    /// The kernel's ids of the maps, by name.
    Maps(oneshot::Sender<BTreeMap<String, u32>>),
    /// The loop's values for a scrape of `/metrics`.
    Readings(oneshot::Sender<Result<Readings>>),
}

impl Query {
    pub(crate) fn is_abandoned(&self) -> bool {
        match self {
            Self::Status(answer) => answer.is_closed(),
            Self::Services(_, answer) => answer.is_closed(),
            Self::Known(_, answer) => answer.is_closed(),
            Self::Tunnelled(_, answer) => answer.is_closed(),
            Self::Maps(answer) => answer.is_closed(),
            Self::Readings(answer) => answer.is_closed(),
        }
    }
}

/// The maximum number of queries that wait for the agent.
pub(crate) const QUEUE: usize = 64;

/// Sends queries to this process's agent. Also a handle on the agent's history.
#[derive(Clone, Debug)]
pub struct AgentHandle {
    queries: mpsc::Sender<Query>,
    pub(crate) history: History,
}

impl AgentHandle {
    /// Creates the handle, and the receiver of its queries.
    pub fn new() -> (Self, mpsc::Receiver<Query>) {
        Self::reporting(0)
    }

    /// Like [`Self::new`], with `/metrics` series for up to `service_metrics` Service ports.
    pub fn reporting(service_metrics: usize) -> (Self, mpsc::Receiver<Query>) {
        let (sender, receiver) = mpsc::channel(QUEUE);
        (
            Self {
                queries: sender,
                history: History::reporting(service_metrics),
            },
            receiver,
        )
    }

    pub async fn status(&self) -> Result<Status> {
        self.query(Query::Status).await?
    }

    /// Returns the views of the Services, built outside the agent's loop.
    pub async fn services(&self) -> Result<Vec<ServiceView>> {
        let (snapshot, flows) = self.flows().await?;
        let views = tokio::task::spawn_blocking(move || {
            let counts = flows.recent_counts().context("count the traffic")?;
            Ok(proxy_view::views(&snapshot, &counts))
        });
        views.await.context("build the views of Services")?
    }

    /// Returns the names of the frontends in the maps.
    pub async fn names(&self) -> Result<Vec<NameView>> {
        let (snapshot, _) = self.flows().await?;
        tokio::task::spawn_blocking(move || proxy_view::frontend_names(&snapshot))
            .await
            .context("build the views of Services")
    }

    /// Returns the data that name and count flows. The agent takes in changes between two parts.
    pub(crate) async fn flows(&self) -> Result<(Snapshot, FlowMaps)> {
        let mut snapshot = Snapshot::default();
        let mut after = None;
        loop {
            let (part, flows) = self.query(|answer| Query::Services(after, answer)).await?;
            after = snapshot.take(part);
            if after.is_none() {
                return Ok((snapshot, flows));
            }
        }
    }

    /// Returns the objects behind a DNS name; `None` before the first lists.
    pub(crate) async fn known(&self, wanted: Wanted) -> Result<Option<Known>> {
        self.query(|answer| Query::Known(wanted, answer)).await
    }

    /// Returns the pods that serve a ClusterIP and port through the tunnel.
    pub(crate) async fn tunnelled(&self, service: InternetAddr) -> Result<Option<Tunnelled>> {
        self.query(|answer| Query::Tunnelled(service, answer)).await
    }

    async fn maps(&self) -> Result<BTreeMap<String, u32>> {
        self.query(Query::Maps).await
    }

    pub async fn readings(&self) -> Result<Readings> {
        let readings = self.query(Query::Readings).await??;
        // The history's lock may be held for milliseconds.
        let history = self.history.clone();
        let services = tokio::task::spawn_blocking(move || history.service_readings());
        Ok(Readings {
            services: services.await.context("read the history")?,
            ..readings
        })
    }

    async fn query<T>(&self, question: impl FnOnce(oneshot::Sender<T>) -> Query) -> Result<T> {
        let (sender, answer) = oneshot::channel();
        self.queries
            .send(question(sender))
            .await
            .ok()
            .context("the agent has ended")?;
        answer.await.context("the agent has ended")
    }
}

/// Answers on `listener` until dropped, with the extra paths `more`.
pub async fn serve(listener: UnixListener, agent: AgentHandle, more: Router) {
    let router = router().with_state(agent).merge(more);
    http_server::serve(LocalListener(listener), router, Room::default().place()).await;
}

fn router() -> Router<AgentHandle> {
    Router::new()
        .route("/status", get(status))
        .route("/services", get(services))
        .route("/names", get(names))
        .route("/maps", get(maps))
        .route("/flows", get(flows::flows).delete(flows::end))
        .route("/history", get(history::history))
}

/// Returns the path `/pins`: the directory of the pinned maps, for processes that cannot open maps
/// by id.
pub(crate) fn pins_router(root: &Path) -> Router {
    let folder = Pins::maps_in(root);
    Router::new().route("/pins", get(move || async move { Json(folder) }))
}

/// Returns the path `/events`: recent Events and problems.
pub(crate) fn events_router(journal: Journal) -> Router {
    let view = |Reported {
                    entry,
                    count,
                    first,
                    last,
                }: Reported| EventView {
        first_seen: first,
        last_seen: last,
        count,
        r#type: if entry.is_warning {
            "Warning"
        } else {
            "Normal"
        }
        .to_owned(),
        reason: entry.reason.to_owned(),
        kind: entry.kind.to_owned(),
        namespace: entry.namespace.to_string(),
        name: entry.name.to_string(),
        note: entry.note.to_string(),
        services: entry
            .concerned()
            .map(|service| service.to_string())
            .collect(),
    };
    Router::new().route(
        "/events",
        get(async move || Json(journal.all().into_iter().map(view).collect::<Vec<_>>())),
    )
}

async fn status(State(agent): State<AgentHandle>) -> Response {
    answer(agent.status().await)
}

async fn services(State(agent): State<AgentHandle>) -> Response {
    answer(agent.services().await)
}

async fn names(State(agent): State<AgentHandle>) -> Response {
    answer(agent.names().await)
}

async fn maps(State(agent): State<AgentHandle>) -> Response {
    answer(agent.maps().await)
}

pub(crate) fn answer<T: serde::Serialize>(result: Result<T>) -> Response {
    match result {
        Ok(value) => Json(value).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error:#}")).into_response(),
    }
}

/// Listens in the run directory. Root and the members of `group` may connect. The group only reads:
/// each request with a change checks the client's user.
///
/// The process must have only one thread, because the umask is global, and must still have root's
/// rights, which setting a group requires.
pub fn listen(run_dir: &Path, group: Option<u32>) -> Result<StdUnixListener> {
    std::fs::create_dir_all(run_dir).with_context(|| format!("create {}", run_dir.display()))?;
    let path = socket(run_dir);
    // The process that left the socket is dead: see [`proxy_net::lock`].
    if path.exists() {
        std::fs::remove_file(&path).with_context(|| format!("remove {}", path.display()))?;
    }
    // Until the mode is set, the umask lets only root connect.
    let mask = umask(Mode::S_IRWXG | Mode::S_IRWXO);
    let listener = StdUnixListener::bind(&path);
    umask(mask);
    let listener = listener.with_context(|| format!("listen on {}", path.display()))?;
    listener
        .set_nonblocking(true)
        .context("have the socket not wait")?;
    if let Some(group) = group {
        admit(run_dir, &path, group)
            .with_context(|| format!("grant group {group} access to {}", path.display()))?;
    }
    Ok(listener)
}

/// Lets a group connect to the socket and traverse its directory. A directory that everyone may
/// traverse stays unchanged.
///
/// The group gets no write access: a writer of the directory could replace the list of changes that
/// root reverts.
fn admit(run_dir: &Path, socket: &Path, group: u32) -> Result<()> {
    const PASS_BY_GROUP: u32 = 0o010;
    const PASS_BY_ALL: u32 = 0o001;
    const WITHOUT_GROUP: u32 = 0o7707;
    chown(socket, None, Some(group))?;
    set_permissions(socket, Permissions::from_mode(0o660))?;
    let mode = metadata(run_dir)?.mode();
    if mode & PASS_BY_ALL == 0 {
        chown(run_dir, None, Some(group))?;
        set_permissions(
            run_dir,
            Permissions::from_mode(mode & WITHOUT_GROUP | PASS_BY_GROUP),
        )?;
    }
    Ok(())
}

/// Removes the socket of [`listen`].
pub fn unlisten(run_dir: &Path) -> Result<()> {
    let path = socket(run_dir);
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn group_passes_folder_and_may_not_write_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = socket(dir.path());
        std::fs::write(&path, "").unwrap();
        let group = metadata(&path).unwrap().gid();
        let mode = |path: &Path| metadata(path).unwrap().mode() & 0o7777;
        for (before, after) in [
            (0o700, 0o710),
            (0o770, 0o710),
            (0o2770, 0o2710),
            (0o750, 0o710),
            (0o755, 0o755),
        ] {
            set_permissions(dir.path(), Permissions::from_mode(before)).unwrap();
            admit(dir.path(), &path, group).unwrap();
            assert_eq!(
                (mode(dir.path()), mode(&path)),
                (after, 0o660),
                "{before:o}"
            );
        }
    }
}
