//! Reports the agent's state: problems, liveness, durations.

use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

use crate::conntrack::Reconciled;
use crate::liveness::Liveness;
use proxy_core::desired::Desired;
use proxy_core::input::{Input, Trigger, Update};
use proxy_core::ip_family::IpFamily;
use proxy_metrics::{Latencies, Metrics, Phase, ProxySync, Repairs};
use proxy_source::events::Events;
use proxy_source::health::Health;

#[derive(Debug)]
pub struct Reports {
    pub(super) health: Health,
    pub(super) liveness: Liveness,
    pub(super) events: Events,
    metrics: Metrics,
    latencies: Latencies,
}

pub(super) struct Pass {
    /// Set if there are changes to apply.
    asked: bool,
    /// Set if the pass reads the maps first.
    pub(super) full: bool,
    started: Instant,
    phases: Vec<(Phase, Duration)>,
}

impl Pass {
    pub(super) fn begin(asked: bool, full: bool) -> Self {
        Self {
            asked,
            full,
            started: Instant::now(),
            phases: Vec::new(),
        }
    }

    pub(super) fn passed(&mut self, phase: Phase, duration: Duration) {
        self.phases.push((phase, duration));
    }
}

impl Reports {
    pub fn new(health: Health, liveness: Liveness, metrics: Metrics, events: Events) -> Self {
        Self {
            health,
            liveness,
            events,
            metrics,
            latencies: Latencies::since(Timestamp::now()),
        }
    }

    pub(super) fn received(&self, input: &Input) {
        let proxy = &self.metrics.proxy;
        match input {
            Input::Service(update) => drop(proxy.service_changes.inc_by(objects(update))),
            Input::EndpointSlice(update) => drop(proxy.endpoint_changes.inc_by(objects(update))),
            Input::Node(_) | Input::ServiceCidr(_) | Input::ApiServer(_) => {}
            Input::Pod(_) | Input::LocalRedirect(_) => {}
        }
    }

    /// Records the received changes that are not yet applied.
    pub(super) fn know(&self, desired: &Desired) {
        let proxy = &self.metrics.proxy;
        let pending = desired.pending();
        let count = |pending: usize| i64::try_from(pending).unwrap_or(i64::MAX);
        proxy.service_changes_pending.set(count(pending.services));
        proxy.endpoint_changes_pending.set(count(pending.slices));
        self.liveness.set_node_eligible(desired.is_node_eligible());
        if desired.is_complete() && desired.is_dirty() {
            self.queued();
        }
    }

    /// Records pending work before it begins, because the work may hang.
    pub(super) fn queued(&self) {
        for family in IpFamily::ALL {
            self.liveness.queued(family);
            self.metrics.proxy.queued(family);
        }
    }

    pub(super) fn triggered(&mut self, triggers: Vec<Trigger>) {
        triggers
            .into_iter()
            .for_each(|trigger| self.latencies.add(trigger));
    }

    /// Records the end of a pass. `in_force` returns whether a family's desired state is in the
    /// maps.
    pub(super) fn end(&mut self, pass: Pass, in_force: impl Fn(IpFamily) -> bool) {
        let duration = pass.started.elapsed();
        for family in IpFamily::ALL {
            let successful = in_force(family);
            if successful {
                self.liveness.synced(family);
                self.latencies.observe(family, &self.metrics.proxy);
            } else {
                self.liveness.queued(family);
            }
            if pass.asked {
                self.metrics.proxy.synced(
                    family,
                    ProxySync {
                        duration,
                        full: pass.full,
                        successful,
                    },
                );
            }
            if pass.asked && !successful {
                self.metrics.own.sync_failed(family);
            }
        }
        if pass.asked {
            pass.phases
                .into_iter()
                .for_each(|(phase, duration)| self.metrics.own.passed(phase, duration));
        }
    }

    pub(super) fn reconciled(&self, reconciled: &[Reconciled]) {
        for Reconciled {
            ip_family,
            duration,
            deleted,
        } in reconciled
        {
            self.metrics
                .proxy
                .conntrack
                .reconciled(*ip_family, *duration, *deleted);
        }
    }

    pub(super) fn repairs(&self, repairs: Repairs) {
        self.metrics.own.repairs(repairs);
    }

    pub(super) fn swept(&self, duration: Duration, expired: u64) {
        self.metrics.own.swept(duration, expired);
    }
}

fn objects<K>(update: &Update<K>) -> u64 {
    match update {
        Update::All(objects) | Update::AllBut(objects, _) => objects.len() as u64,
        Update::Put(_) | Update::Del(_) => 1,
        Update::Refused => 0,
    }
}
