//! The programming latency: the time from a change in the cluster until it is programmed on this
//! node.

use std::collections::BTreeMap;

use jiff::Timestamp;

use super::ProxyMetrics;
use proxy_core::input::{ObjectName, Trigger};
use proxy_core::ip_family::IpFamily;

/// The maximum number of pending changes kept for a Service. It bounds the memory for a family that
/// is never programmed.
const PENDING: usize = 256;

/// The changes (triggers) that are not programmed yet.
#[derive(Debug)]
pub struct Latencies {
    started: Timestamp,
    pending: BTreeMap<(IpFamily, ObjectName), Vec<Timestamp>>,
}

impl Latencies {
    /// Creates an empty record. Changes before `started` are not measured, because they waited for
    /// the agent.
    pub fn since(started: Timestamp) -> Self {
        Self {
            started,
            pending: BTreeMap::new(),
        }
    }

    /// Adds a change, in order of arrival. `None` as time discards the Service's pending changes.
    pub fn add(&mut self, trigger: Trigger) {
        let key = (trigger.family, trigger.service);
        match trigger.at {
            Some(at) if at > self.started => {
                let pending = self.pending.entry(key).or_default();
                if pending.len() < PENDING {
                    pending.push(at);
                }
            }
            Some(_) => {}
            None => drop(self.pending.remove(&key)),
        }
    }

    /// Records the latencies of a family whose changes are now programmed.
    pub fn observe(&mut self, family: IpFamily, metrics: &ProxyMetrics) {
        let histogram = metrics
            .programming_latency
            .get_or_create_owned(&family.into());
        let now = Timestamp::now();
        self.pending.retain(|(of, _), triggers| {
            if *of == family {
                // The wall clock may have been set back.
                triggers.iter().for_each(|at| {
                    histogram.observe(now.duration_since(*at).as_secs_f64().max(0.0))
                });
            }
            *of != family
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Metrics;
    use proxy_core::builders::object_name;

    #[test]
    fn trigger_counts_once_when_its_family_is_in_force() {
        let metrics = Metrics::new();
        let started: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
        let mut latencies = Latencies::since(started);
        let at = |seconds: i64| Some(started + jiff::SignedDuration::from_secs(seconds));
        let trigger = |name: &str, family, at| Trigger {
            service: object_name(name),
            family,
            at,
        };
        for trigger in [
            trigger("old", IpFamily::V4, at(0)),
            trigger("web", IpFamily::V4, at(1)),
            trigger("web", IpFamily::V4, at(2)),
            trigger("web", IpFamily::V6, at(2)),
            trigger("gone", IpFamily::V4, at(3)),
            trigger("gone", IpFamily::V4, None),
        ] {
            latencies.add(trigger);
        }
        let counts = || {
            let text = metrics.text(None).unwrap();
            let count = |family: IpFamily| {
                let series = format!(
                    "kubeproxy_network_programming_duration_seconds_count{{ip_family=\"{}\"}} ",
                    family.name()
                );
                text.lines()
                    .find_map(|line| line.strip_prefix(&series))
                    .unwrap()
                    .parse::<u64>()
                    .unwrap()
            };
            IpFamily::ALL.map(count)
        };
        latencies.observe(IpFamily::V4, &metrics.proxy);
        assert_eq!(counts(), [2, 0]);
        latencies.observe(IpFamily::V4, &metrics.proxy);
        assert_eq!(counts(), [2, 0]);
        latencies.observe(IpFamily::V6, &metrics.proxy);
        assert_eq!(counts(), [2, 1]);
    }
}
