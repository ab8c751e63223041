//! Maintains the rows of pods with socket load balancing. The agent's loop selects the pods, and
//! this task finds their cgroups.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use proxy_datapath::{Datapath, PodRow, PodSockets};
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};
use tracing::warn;

/// The time for which changes of pods are collected.
const PAUSE: Duration = Duration::from_millis(50);
/// The first wait for a missing cgroup. The longest is the sync period.
const RETRY_MIN: Duration = Duration::from_millis(500);

type Uids = BTreeSet<Box<str>>;

/// The agent's side of the channel.
#[derive(Debug)]
pub struct SelectedPods {
    wanted: watch::Sender<Option<Uids>>,
    found: watch::Receiver<Arc<Found>>,
}

/// The results of the last search.
#[derive(Debug, Default)]
pub struct Found {
    /// The rows of the selected pods, by the pod's uid.
    pub rows: BTreeMap<Box<str>, PodRow>,
    /// The reason why the search failed.
    pub error: Option<String>,
}

/// The task's side of the channel.
pub struct PodSocketsTask {
    sockets: PodSockets,
    wanted: watch::Receiver<Option<Uids>>,
    found: watch::Sender<Arc<Found>>,
    sync_period: Duration,
}

/// Connects an agent with its task, if pods are selected.
pub fn start(
    datapath: &mut Datapath,
    sync_period: Duration,
) -> Result<(Option<SelectedPods>, Option<PodSocketsTask>)> {
    let rows = datapath.pod_rows.take();
    let Some(sockets) = datapath.attachments.pod_sockets(rows)? else {
        return Ok((None, None));
    };
    let (wanted, of_agent) = watch::channel(None);
    let (of_task, found) = watch::channel(Arc::default());
    let task = PodSocketsTask {
        sockets,
        wanted: of_agent,
        found: of_task,
        sync_period,
    };
    Ok((Some(SelectedPods { wanted, found }), Some(task)))
}

impl SelectedPods {
    /// Sets the selected pods. A predecessor's rows stay until the first call.
    pub fn set(&self, uids: Uids) {
        self.wanted.send_if_modified(|wanted| {
            let is_new = wanted.as_ref() != Some(&uids);
            *wanted = Some(uids);
            is_new
        });
    }

    pub fn found(&self) -> Arc<Found> {
        self.found.borrow().clone()
    }
}

/// Runs the task, which ends only if its search panics. Never returns if there is no task.
pub async fn run(task: Option<PodSocketsTask>) -> Result<()> {
    match task {
        Some(task) => task.run().await,
        None => std::future::pending().await,
    }
}

impl PodSocketsTask {
    async fn run(mut self) -> Result<()> {
        let mut wait = RETRY_MIN;
        loop {
            let wanted = self.wanted.borrow_and_update().clone();
            let Self { mut sockets, .. } = self;
            let found;
            (sockets, found) = spawn_blocking(move || {
                let found = wanted.map(|uids| sockets.select(&uids));
                (sockets, found)
            })
            .await
            .context("look for the cgroups of pods")?;
            self.sockets = sockets;
            let is_whole = self.report(found);
            wait = if is_whole {
                self.sync_period
            } else {
                (wait * 2).min(self.sync_period)
            };
            match timeout(wait, self.wanted.changed()).await {
                Ok(Ok(())) => {
                    wait = RETRY_MIN;
                    sleep(PAUSE).await;
                }
                // The agent ends, and reports why.
                Ok(Err(_)) => return std::future::pending().await,
                Err(_) => {}
            }
        }
    }

    /// Publishes the results. Returns true if another search would find nothing more.
    fn report(&self, found: Option<Result<BTreeMap<Box<str>, PodRow>>>) -> bool {
        let last = self.found.borrow().clone();
        let found = match found {
            None => return true,
            Some(Ok(rows)) => Found { rows, error: None },
            Some(Err(error)) => Found {
                rows: last.rows.clone(),
                error: Some(format!("{error:#}")),
            },
        };
        if let Some(error) = found
            .error
            .as_ref()
            .filter(|error| last.error.as_ref() != Some(error))
        {
            warn!(error, "pods' sockets are translated as before");
        }
        let is_whole =
            found.error.is_none() && found.rows.values().all(|row| *row != PodRow::NoCgroup);
        self.found.send_replace(Arc::new(found));
        is_whole
    }
}
