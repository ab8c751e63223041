//! Metrics for Prometheus. kube-proxy's metrics keep their names, types, labels and buckets, so
//! that dashboards and alerts continue to work. kpx's own metrics begin with `kpx_`.
//!
//! The agent and its servers set most metrics: [`ProxyMetrics`], [`OwnMetrics`], [`Requests`]. The
//! kernel's counts are read for each scrape: [`Readings`].
#![forbid(unsafe_code)]

#[cfg(test)]
mod alerts_page;
mod build;
mod exposition;
mod kube_proxy;
mod latency;
mod own;
mod process;
mod readings;
mod services;
mod slis;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use http::StatusCode;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

pub use exposition::TEXT_FORMAT;
pub use kube_proxy::{ConntrackMetrics, ProxyMetrics, ProxySync};
pub use latency::Latencies;
pub use own::{OwnMetrics, Phase, Repairs};
pub use readings::{MapFill, ProgramReading, Readings, old_event_name, old_map_name};
pub use services::ServiceReading;
pub use slis::Slis;

use proxy_core::ip_family::IpFamily;
use proxy_source::requests::Requests;
use proxy_source::watches::Watches;

/// The agent's metrics. Clones share their values.
#[derive(Clone, Debug)]
pub struct Metrics {
    pub proxy: ProxyMetrics,
    pub own: OwnMetrics,
    pub slis: Slis,
    registry: Arc<Registry>,
}

impl Metrics {
    #[expect(
        clippy::new_without_default,
        reason = "it takes the time for the start of the agent"
    )]
    pub fn new() -> Self {
        let mut registry = Registry::default();
        let proxy = ProxyMetrics::register(registry.sub_registry_with_prefix("kubeproxy"));
        let own = OwnMetrics::register(registry.sub_registry_with_prefix("kpx"));
        Watches::of_process().register(registry.sub_registry_with_prefix("kpx"));
        Requests::of_process().register(&mut registry);
        build::register(&mut registry);
        registry.register_collector(Box::new(process::Process::started_now()));
        Self {
            proxy,
            own,
            slis: Slis::default(),
            registry: Arc::new(registry),
        }
    }

    /// Returns the body of `/metrics`; `readings` is `None` if the agent was too busy to read them.
    pub fn text(&self, readings: Option<Readings>) -> Result<String, fmt::Error> {
        let mut scraped = Registry::default();
        if let Some(readings) = readings {
            scraped.register_collector(Box::new(readings));
        }
        exposition::text(&[&self.registry, &scraped])
    }
}

/// The label of kube-proxy's metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByFamily {
    ip_family: &'static str,
}

impl From<IpFamily> for ByFamily {
    fn from(family: IpFamily) -> Self {
        Self {
            ip_family: family.name(),
        }
    }
}

/// The label of kube-proxy's health response counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ByCode {
    code: u16,
}

impl From<StatusCode> for ByCode {
    fn from(code: StatusCode) -> Self {
        Self {
            code: code.as_u16(),
        }
    }
}

type Histograms<L> = Family<L, Histogram, fn() -> Histogram>;
type Seconds = Gauge<f64, AtomicU64>;
