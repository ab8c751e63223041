//! The metrics of `/metrics/slis`: the results of this process's health checks, in the form of all
//! Kubernetes components (k8s.io/component-base/metrics/prometheus/slis).

use std::fmt;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::exposition;

#[derive(Clone, Debug, Default)]
pub struct Slis {
    healthcheck: Family<Check, Gauge>,
    healthchecks: Family<CheckResult, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Check {
    name: &'static str,
    r#type: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CheckResult {
    name: &'static str,
    status: &'static str,
    r#type: &'static str,
}

impl Slis {
    /// Counts a successful ping. A process that responds always succeeds.
    pub fn pinged(&self) {
        self.healthcheck
            .get_or_create(&Check {
                name: "ping",
                r#type: "healthz",
            })
            .set(1);
        self.healthchecks
            .get_or_create(&CheckResult {
                name: "ping",
                status: "success",
                r#type: "healthz",
            })
            .inc();
    }

    pub fn text(&self) -> Result<String, fmt::Error> {
        let mut registry = Registry::default();
        let help = "The last result of a health check: 1 if it passed";
        registry.register("kubernetes_healthcheck", help, self.healthcheck.clone());
        let help = "Health checks that were requested, by result";
        registry.register("kubernetes_healthchecks", help, self.healthchecks.clone());
        exposition::text(&[&registry])
    }
}
