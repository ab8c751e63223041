//! kube-proxy's metrics (its `pkg/proxy/metrics/metrics.go`), except for those of iptables, ipvs
//! and nftables.

use std::time::Duration;

use jiff::Timestamp;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use super::{ByCode, ByFamily, Histograms, Seconds};
use proxy_core::ip_family::IpFamily;

#[derive(Clone, Debug)]
pub struct ProxyMetrics {
    sync_duration: Histograms<ByFamily>,
    full_sync_duration: Histograms<ByFamily>,
    partial_sync_duration: Histograms<ByFamily>,
    last_sync: Family<ByFamily, Seconds>,
    last_queued: Family<ByFamily, Seconds>,
    pub(super) programming_latency: Histograms<ByFamily>,
    pub endpoint_changes_pending: Gauge,
    pub endpoint_changes: Counter,
    pub service_changes_pending: Gauge,
    pub service_changes: Counter,
    pub healthz: Family<ByCode, Counter>,
    pub livez: Family<ByCode, Counter>,
    pub conntrack: ConntrackMetrics,
}

/// The metrics of conntrack cleanup after endpoint changes.
#[derive(Clone, Debug)]
pub struct ConntrackMetrics {
    duration: Histograms<ByFamily>,
    deleted: Family<ByFamily, Counter>,
}

/// A sync of one address family.
#[derive(Clone, Copy, Debug)]
pub struct ProxySync {
    pub duration: Duration,
    /// Set if the sync began by reading the maps.
    pub full: bool,
    pub successful: bool,
}

impl ProxyMetrics {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            sync_duration: Family::new_with_constructor(durations),
            full_sync_duration: Family::new_with_constructor(durations),
            partial_sync_duration: Family::new_with_constructor(durations),
            last_sync: Family::default(),
            last_queued: Family::default(),
            programming_latency: Family::new_with_constructor(latencies),
            endpoint_changes_pending: Gauge::default(),
            endpoint_changes: Counter::default(),
            service_changes_pending: Gauge::default(),
            service_changes: Counter::default(),
            healthz: Family::default(),
            livez: Family::default(),
            conntrack: ConntrackMetrics {
                duration: Family::new_with_constructor(durations),
                deleted: Family::default(),
            },
        };
        metrics.register_syncs(registry);
        metrics.register_changes(registry);
        let conntrack = &metrics.conntrack;
        registry.register(
            "proxy_healthz",
            "Answers at /healthz, by HTTP status code",
            metrics.healthz.clone(),
        );
        registry.register(
            "proxy_livez",
            "Answers at /livez, by HTTP status code",
            metrics.livez.clone(),
        );
        registry.register(
            "conntrack_reconciler_sync_duration_seconds",
            "Time taken to remove stale entries from the kernel's connection tracking",
            conntrack.duration.clone(),
        );
        registry.register(
            "conntrack_reconciler_deleted_entries",
            "Stale entries removed from the kernel's connection tracking",
            conntrack.deleted.clone(),
        );
        for family in IpFamily::ALL.map(ByFamily::from) {
            drop(conntrack.deleted.get_or_create(&family));
            drop(conntrack.duration.get_or_create(&family));
            drop(metrics.programming_latency.get_or_create(&family));
        }
        metrics
    }

    fn register_syncs(&self, registry: &mut Registry) {
        registry.register(
            "sync_proxy_rules_duration_seconds",
            "Time taken by a sync of the maps with Services and EndpointSlices",
            self.sync_duration.clone(),
        );
        registry.register(
            "sync_full_proxy_rules_duration_seconds",
            "Time taken by a sync that began with reading the maps",
            self.full_sync_duration.clone(),
        );
        registry.register(
            "sync_partial_proxy_rules_duration_seconds",
            "Time taken by a sync of the changes since the last one",
            self.partial_sync_duration.clone(),
        );
        registry.register(
            "sync_proxy_rules_last_timestamp_seconds",
            "Time at which all desired state was last programmed, in seconds since 1970",
            self.last_sync.clone(),
        );
        registry.register(
            "sync_proxy_rules_last_queued_timestamp_seconds",
            "Time at which a sync was last requested, in seconds since 1970",
            self.last_queued.clone(),
        );
        registry.register(
            "network_programming_duration_seconds",
            "Time from a change of pods or of a Service, from the EndpointSlice's trigger time, until it is programmed",
            self.programming_latency.clone(),
        );
    }

    fn register_changes(&self, registry: &mut Registry) {
        registry.register(
            "sync_proxy_rules_endpoint_changes_pending",
            "EndpointSlices with changes that are not yet programmed",
            self.endpoint_changes_pending.clone(),
        );
        registry.register(
            "sync_proxy_rules_endpoint_changes",
            "EndpointSlices received, changed or not",
            self.endpoint_changes.clone(),
        );
        registry.register(
            "sync_proxy_rules_service_changes_pending",
            "Services with changes that are not yet programmed",
            self.service_changes_pending.clone(),
        );
        registry.register(
            "sync_proxy_rules_service_changes",
            "Services received, changed or not",
            self.service_changes.clone(),
        );
    }

    pub fn queued(&self, family: IpFamily) {
        self.last_queued
            .get_or_create(&family.into())
            .set(now_seconds());
    }

    pub fn synced(&self, family: IpFamily, sync: ProxySync) {
        let family = ByFamily::from(family);
        let seconds = sync.duration.as_secs_f64();
        self.sync_duration.get_or_create(&family).observe(seconds);
        let by_extent = if sync.full {
            &self.full_sync_duration
        } else {
            &self.partial_sync_duration
        };
        by_extent.get_or_create(&family).observe(seconds);
        if sync.successful {
            self.last_sync.get_or_create(&family).set(now_seconds());
        }
    }
}

impl ConntrackMetrics {
    /// Records one cleanup of conntrack entries.
    pub fn reconciled(&self, family: IpFamily, duration: Duration, deleted: u64) {
        self.duration
            .get_or_create(&family.into())
            .observe(duration.as_secs_f64());
        self.deleted.get_or_create(&family.into()).inc_by(deleted);
    }
}

fn now_seconds() -> f64 {
    Timestamp::now().as_duration().as_secs_f64()
}

/// Returns a histogram from 1 ms to 16 s.
pub(super) fn durations() -> Histogram {
    Histogram::new(exponential_buckets(0.001, 2.0, 15))
}

/// Returns a histogram up to five minutes, with bounds every quarter second, then every second up
/// to a minute, then wider. The first bound is 0, as in kube-proxy.
fn latencies() -> Histogram {
    let steps = |from: u16, to: u16, step: usize| (from..=to).step_by(step).map(f64::from);
    Histogram::new(
        [0.0, 0.25, 0.5]
            .into_iter()
            .chain(steps(1, 59, 1))
            .chain(steps(60, 115, 5))
            .chain(steps(120, 300, 30)),
    )
}
