//! Looks through the flow tables now and then.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::task::JoinHandle;
use tokio::time::Instant as Due;

use proxy_datapath::{FlowMaps, Pressure, Swept};

/// How often flows are looked through for those that are over.
const SWEEP_PERIOD: Duration = Duration::from_secs(10);

/// ... where there is hardly room for more.
const EMERGENCY_PERIOD: Duration = Duration::from_secs(1);

/// Sweeps the flow tables on a thread of its own: a large table takes a while.
pub(super) struct Sweeper {
    due: Due,
    flows: FlowMaps,
    sweep: Option<JoinHandle<(Result<SweptFamilies>, Duration)>>,
    last: SweptFamilies,
}

pub(super) type SweptFamilies = BTreeMap<&'static str, Swept>;

impl Sweeper {
    pub(super) fn new(flows: FlowMaps) -> Self {
        Self { due: Due::now(), flows, sweep: None, last: BTreeMap::new() }
    }

    /// A handle on what it sweeps.
    pub(super) fn flows(&self) -> FlowMaps {
        self.flows.clone()
    }

    /// What the last sweep found.
    pub(super) fn last(&self) -> &SweptFamilies {
        &self.last
    }

    /// How many flows the last sweep removed.
    pub(super) fn expired(&self) -> u64 {
        self.last.values().map(|swept| swept.expired as u64).sum()
    }

    /// Waits for the end of the next sweep, and says how long it took. May be cancelled: the sweep goes on and is waited
    /// for the next time.
    pub(super) async fn next(&mut self) -> Result<Duration> {
        if self.sweep.is_none() {
            tokio::time::sleep_until(self.due).await;
            let flows = self.flows.clone();
            self.sweep = Some(tokio::task::spawn_blocking(move || {
                let started = Instant::now();
                (flows.sweep(), started.elapsed())
            }));
        }
        let sweep = self.sweep.as_mut().context("no sweep is under way")?;
        let ended = sweep.await;
        self.sweep = None;
        self.due = Due::now() + SWEEP_PERIOD;
        let (swept, duration) = ended.context("sweep flows")?;
        self.last = swept?;
        if self.last.values().any(|swept| swept.pressure == Pressure::Emergency) {
            self.due = Due::now() + EMERGENCY_PERIOD;
        }
        Ok(duration)
    }
}
