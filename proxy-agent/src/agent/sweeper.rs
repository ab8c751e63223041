//! Sweeps the flow tables periodically.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::task::JoinHandle;
use tokio::time::Instant as Due;

use proxy_datapath::{FlowMaps, Pressure, Remaining, Swept};

const SWEEP_PERIOD: Duration = Duration::from_secs(10);

/// The time before the second sweep: packets without a flow are classified only after two sweeps.
const SECOND_SWEEP: Duration = Duration::from_secs(1);

/// The time between sweeps while a table is nearly full.
const EMERGENCY_PERIOD: Duration = Duration::from_secs(1);

/// Sweeps the flow tables on its own thread, because a large table takes long.
pub(super) struct Sweeper {
    due: Due,
    flows: FlowMaps,
    sweep: Option<JoinHandle<(Result<SweptFamilies>, Duration)>>,
    last: SweptFamilies,
}

pub(super) type SweptFamilies = BTreeMap<&'static str, Swept>;

impl Sweeper {
    pub(super) fn new(flows: FlowMaps) -> Self {
        Self {
            due: Due::now(),
            flows,
            sweep: None,
            last: BTreeMap::new(),
        }
    }

    pub(super) fn flows(&self) -> FlowMaps {
        self.flows.clone()
    }

    pub(super) fn last(&self) -> &SweptFamilies {
        &self.last
    }

    pub(super) fn expired(&self) -> u64 {
        self.last.values().map(|swept| swept.expired as u64).sum()
    }

    /// Returns the numbers of bypass and liberal flows, as of the last sweep.
    pub(super) fn fast(&self) -> Remaining {
        self.last
            .values()
            .fold(Remaining::default(), |all, swept| Remaining {
                bypass: all.bypass + swept.fast.bypass,
                liberal: all.liberal + swept.fast.liberal,
            })
    }

    /// Waits for the end of the next sweep, and returns its duration. Cancel-safe: the sweep
    /// continues, and the next call waits for it.
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
        self.due = Due::now()
            + if self.last.is_empty() {
                SECOND_SWEEP
            } else {
                SWEEP_PERIOD
            };
        let (swept, duration) = ended.context("sweep flows")?;
        self.last = swept?;
        if self
            .last
            .values()
            .any(|swept| swept.pressure == Pressure::Emergency)
        {
            self.due = Due::now() + EMERGENCY_PERIOD;
        }
        Ok(duration)
    }
}
