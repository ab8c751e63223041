//! The last 15 minutes of traffic, for the web page and for `/history` of the run directory's
//! socket.
//!
//! The agent takes the counters every ten seconds, mostly from the sweep of the flow table, which
//! counts in any case. The size is bounded: see [`proxy_view::history`].

use std::collections::BTreeMap;
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
use proxy_core::input::ObjectName;
use proxy_metrics::ServiceReading;
use proxy_view::history::{Chosen, Failures, Kept, STEP, Traffic};
use proxy_view::{HistoryView, PortSums, port_sums};

/// The time until the next attempt if no point can be added, as before Services are listed.
const RETRY: Duration = Duration::from_secs(1);
/// The maximum age of a sweep's counts in a point: half a step, so that two points never share
/// counts.
const COUNT_AGE: Duration = Duration::from_secs(5);

/// A handle on the history: the sampler writes, the servers read.
#[derive(Clone, Debug, Default)]
pub struct History(Arc<Mutex<(Kept, Chosen)>>);

/// The requested Service as `NAMESPACE/NAME`; `None` for all Services.
#[derive(Debug, Deserialize)]
pub(crate) struct Wanted {
    service: Option<String>,
}

impl History {
    /// Creates an empty history, with `/metrics` series for up to `service_metrics` Service ports.
    pub(crate) fn reporting(service_metrics: usize) -> Self {
        Self(Arc::new(Mutex::new((
            Kept::default(),
            Chosen::of(service_metrics),
        ))))
    }

    /// Returns the readings of Service ports as of the last point.
    pub(crate) fn service_readings(&self) -> Vec<ServiceReading> {
        self.lock().1.readings()
    }

    /// Returns the Services that failed in the last step.
    pub(crate) fn failing(&self) -> BTreeMap<ObjectName, Failures> {
        self.lock().0.failing().clone()
    }

    /// Returns the requested part of the history. Takes some milliseconds, and delays the sampler.
    pub(crate) fn view(&self, wanted: &Wanted) -> HistoryView {
        self.lock().0.view(wanted.service.as_deref())
    }

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

/// Adds a point in each step while polled.
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

pub(crate) async fn history(
    State(agent): State<AgentHandle>,
    Query(wanted): Query<Wanted>,
) -> Response {
    let view = tokio::task::spawn_blocking(move || agent.history.view(&wanted));
    answer(view.await.context("build the view of the history"))
}

/// Adds a point with the traffic of each Service port since the programs were loaded. Counts on
/// another thread, so that the loop does not wait.
async fn sample(agent: &AgentHandle) -> Result<()> {
    let (snapshot, flows) = agent.flows().await?;
    // A Service that is listed later would otherwise show all its past traffic in one step.
    ensure!(!snapshot.services.is_empty(), "no Service is listed yet");
    let history = agent.history.clone();
    let sample = tokio::task::spawn_blocking(move || {
        let (at, counts) = flows.counts_since(COUNT_AGE).context("count the traffic")?;
        history.take(at, port_sums(&snapshot, &counts));
        Ok(())
    });
    sample.await.context("take a point of the history")?
}

fn time_of(at: Instant) -> Timestamp {
    let ago = SignedDuration::try_from(at.elapsed()).unwrap_or_default();
    Timestamp::now()
        .saturating_sub(ago)
        .unwrap_or(Timestamp::UNIX_EPOCH)
}
