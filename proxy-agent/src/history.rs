//! The last 15 minutes of traffic, kept for the web page and for `/history` of the run directory's
//! socket.
//!
//! The agent takes the counters every ten seconds, mostly from the sweep of the flow table, which
//! counts anyway. The room is bounded: see [`proxy_view::history`].

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use axum::extract::{Query, State};
use axum::response::Response;
use jiff::{SignedDuration, Timestamp};
use serde::Deserialize;
use tokio::time::{MissedTickBehavior, interval};
use tracing::debug;

use crate::control::{AgentHandle, answer};
use proxy_metrics::ServiceReading;
use proxy_view::history::{Chosen, Kept, STEP, Traffic};
use proxy_view::{HistoryView, PortSums, port_sums};

/// The time to the next look where no point could be taken, such as before Services are listed.
const RETRY: Duration = Duration::from_secs(1);
/// The age of a count that a point may use. It is half a step, so that no count serves two points.
const COUNT_AGE: Duration = Duration::from_secs(5);

/// A handle on the history, which the sampler writes and the servers read.
#[derive(Clone, Debug, Default)]
pub struct History(Arc<Mutex<(Kept, Chosen)>>);

/// The Service to answer for, as `NAMESPACE/NAME`; all without it.
#[derive(Debug, Deserialize)]
pub(crate) struct Wanted {
    service: Option<String>,
}

impl History {
    /// Returns an empty history, which tells the series of so many Service ports.
    pub(crate) fn telling(service_metrics: usize) -> Self {
        Self(Arc::new(Mutex::new((
            Kept::default(),
            Chosen::of(service_metrics),
        ))))
    }

    /// Returns the readings of Services as of the last sample.
    pub(crate) fn service_readings(&self) -> Vec<ServiceReading> {
        self.lock().1.readings()
    }

    /// Returns what is kept for a question. It takes some milliseconds, and holds up the sampler.
    pub(crate) fn view(&self, wanted: &Wanted) -> HistoryView {
        self.lock().0.view(wanted.service.as_deref())
    }

    /// Takes a point, if one is due.
    fn take(&self, at: Instant, ports: Vec<PortSums>) {
        let traffic = Traffic::of(&ports);
        let (kept, chosen) = &mut *self.lock();
        if kept.is_due(at) {
            chosen.take(ports, kept.last(), &traffic);
            kept.take(at, time_of(at), traffic);
        }
    }

    fn lock(&self) -> MutexGuard<'_, (Kept, Chosen)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes a point in each step, for as long as it is polled.
pub(crate) async fn keep(agent: &AgentHandle) -> Infallible {
    let mut ticks = interval(STEP);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        ticks.tick().await;
        if let Err(error) = sample(agent).await {
            // A step without a point stays a gap.
            debug!(error = format!("{error:#}"), "no point of the history");
            ticks.reset_after(RETRY);
        }
    }
}

/// Answers with the history.
pub(crate) async fn history(
    State(agent): State<AgentHandle>,
    Query(wanted): Query<Wanted>,
) -> Response {
    let view = tokio::task::spawn_blocking(move || agent.history.view(&wanted));
    answer(view.await.context("build the view of the history"))
}

/// Takes a point from the traffic of each Service port since the programs were loaded. A thread of
/// its own does it, lest changes wait.
async fn sample(agent: &AgentHandle) -> Result<()> {
    let (snapshot, flows) = agent.flows().await?;
    // Services that are listed later would seem to have had all their traffic since.
    ensure!(!snapshot.services.is_empty(), "no Service is listed yet");
    let history = agent.history.clone();
    let sample = tokio::task::spawn_blocking(move || {
        let (at, counts) = flows.counts_since(COUNT_AGE).context("count the traffic")?;
        history.take(at, port_sums(&snapshot, &counts));
        Ok(())
    });
    sample.await.context("take a point of the history")?
}

/// Returns the time of a moment that has passed.
fn time_of(at: Instant) -> Timestamp {
    let ago = SignedDuration::try_from(at.elapsed()).unwrap_or_default();
    Timestamp::now()
        .saturating_sub(ago)
        .unwrap_or(Timestamp::UNIX_EPOCH)
}
