//! The metrics of kpx's own work.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use super::kube_proxy::durations;
use super::{ByFamily, Histograms};
use proxy_core::ip_family::IpFamily;

#[derive(Clone, Debug)]
pub struct OwnMetrics {
    phases: Histograms<ByPhase>,
    sync_failures: Family<ByFamily, Counter>,
    sweep_duration: Histogram,
    flows_expired: Counter,
    repairs: Family<ByWhat, Counter>,
}

/// The repairs of node state that other processes removed or changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repairs {
    /// Programs detached from a device.
    pub programs: u64,
    /// Times that the anchor was deleted or down.
    pub anchors: u64,
    /// Deleted or changed routes to the anchor.
    pub routes: u64,
    /// Routing rules that point to the anchor's routes.
    pub rules: u64,
    pub sysctls: u64,
    pub pins: u64,
}

impl Repairs {
    /// Returns each count with the name of the repaired object.
    pub fn counts(self) -> [(&'static str, u64); 6] {
        let Self {
            programs,
            anchors,
            routes,
            rules,
            sysctls,
            pins,
        } = self;
        [
            ("program", programs),
            ("anchor", anchors),
            ("route", routes),
            ("rule", rules),
            ("sysctl", sysctls),
            ("pin", pins),
        ]
    }
}

/// The phases of a sync, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The computation of the model from objects.
    Model,
    /// The comparison of the desired tables with the programmed tables.
    Diff,
    Write,
    /// The changes of addresses, routes and rules.
    Node,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByWhat {
    what: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByPhase {
    phase: &'static str,
}

impl Phase {
    const ALL: [Self; 4] = [Self::Model, Self::Diff, Self::Write, Self::Node];

    const fn label(self) -> ByPhase {
        let phase = match self {
            Self::Model => "model",
            Self::Diff => "diff",
            Self::Write => "write",
            Self::Node => "node",
        };
        ByPhase { phase }
    }
}

impl OwnMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            phases: Family::new_with_constructor(phase_durations),
            sync_failures: Family::default(),
            sweep_duration: durations(),
            flows_expired: Counter::default(),
            repairs: Family::default(),
        };
        metrics.repairs(Repairs::default());
        for phase in Phase::ALL {
            drop(metrics.phases.get_or_create(&phase.label()));
        }
        for family in IpFamily::ALL {
            drop(metrics.sync_failures.get_or_create(&family.into()));
        }
        registry.register(
            "sync_phase_duration_seconds",
            "Time taken by a part of a sync",
            metrics.phases.clone(),
        );
        registry.register(
            "sync_failures",
            "Syncs that left a part of the desired state out of force",
            metrics.sync_failures.clone(),
        );
        registry.register(
            "flow_sweep_duration_seconds",
            "Time taken to search the flow tables for expired flows",
            metrics.sweep_duration.clone(),
        );
        registry.register(
            "flows_expired",
            "Flows that were removed because they had expired",
            metrics.flows_expired.clone(),
        );
        let repairs = "Repairs of what other programs had removed from this node: programs of devices, the anchor, routes, rules, sysctls, pins of maps";
        registry.register("repairs", repairs, metrics.repairs.clone());
        registry.register(
            "mended",
            "The name that kpx_repairs_total had: it goes with the next release",
            metrics.repairs.clone(),
        );
        metrics
    }

    pub fn repairs(&self, repairs: Repairs) {
        for (what, n) in repairs.counts() {
            self.repairs.get_or_create(&ByWhat { what }).inc_by(n);
        }
    }

    pub fn passed(&self, phase: Phase, duration: Duration) {
        self.phases
            .get_or_create(&phase.label())
            .observe(duration.as_secs_f64());
    }

    pub fn sync_failed(&self, family: IpFamily) {
        self.sync_failures.get_or_create(&family.into()).inc();
    }

    pub fn swept(&self, duration: Duration, expired: u64) {
        self.sweep_duration.observe(duration.as_secs_f64());
        self.flows_expired.inc_by(expired);
    }
}

/// Returns a histogram from 10 µs to 2.6 s: most syncs change a single Service.
fn phase_durations() -> Histogram {
    Histogram::new(exponential_buckets(0.00001, 4.0, 10))
}
