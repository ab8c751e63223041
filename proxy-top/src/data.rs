//! The form of `kpx top --output json`. The form is stable: fields may be added, and no field is renamed or removed.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::rows::{Rates, Rows};

/// The traffic between two samples.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Traffic<'a> {
    node_name: &'a str,
    health: &'a str,
    problems: &'a [String],
    /// The seconds between the samples.
    interval_secs: f64,
    services: Vec<OfService<'a>>,
    /// The sum over the listed Services.
    total: PerSecond,
    /// The dropped and rejected packets of the node per second, by reason.
    unserved_reasons: BTreeMap<&'a str, f64>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct OfService<'a> {
    namespace: &'a str,
    name: &'a str,
    #[serde(flatten)]
    rates: PerSecond,
    backends_in_use: usize,
    backends_listed: usize,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PerSecond {
    opened_per_sec: f64,
    packets_per_sec: f64,
    bytes_per_sec: f64,
    unserved_per_sec: f64,
    flows: u64,
}

impl<'a> Traffic<'a> {
    pub(crate) fn of(rows: &'a Rows) -> Self {
        let services = rows.services.iter().map(|row| {
            let (namespace, name) = row.name.split_once('/').unwrap_or_default();
            let (backends_in_use, backends_listed) = (row.in_use, row.listed);
            OfService { namespace, name, rates: PerSecond::of(&row.rates), backends_in_use, backends_listed }
        });
        Self {
            node_name: &rows.header.node_name,
            health: rows.header.health,
            problems: &rows.header.problems,
            interval_secs: rows.header.interval,
            services: services.collect(),
            total: PerSecond::of(&rows.total),
            unserved_reasons: rows.reasons.iter().map(|(name, rate)| (name.as_str(), *rate)).collect(),
        }
    }
}

impl PerSecond {
    fn of(rates: &Rates) -> Self {
        Self {
            opened_per_sec: rates.opened,
            packets_per_sec: rates.packets,
            bytes_per_sec: rates.bytes,
            unserved_per_sec: rates.unserved,
            flows: rates.flows,
        }
    }
}
