//! The form of `kpx top --output json`. The form is stable: fields may be added, and no field is
//! renamed or removed.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::Serialize;

use super::backends::{Backends, Row};
use super::rows::Rows;
use proxy_view::rates::{ConnectRates, Rates};

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Traffic<'a> {
    node_name: &'a str,
    health: &'a str,
    problems: &'a [String],
    interval_secs: f64,
    services: Vec<OfService<'a>>,
    /// The backends of the selected Service.
    #[serde(skip_serializing_if = "Option::is_none")]
    backends: Option<Vec<OfBackend<'a>>>,
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
struct OfBackend<'a> {
    address: SocketAddr,
    pod: Option<&'a str>,
    node: Option<&'a str>,
    port: &'a str,
    in_use: bool,
    ready: bool,
    terminating: bool,
    flows: u64,
    #[serde(flatten)]
    connect: Connects,
}

/// The TCP connections of the interval, with connect times in seconds.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Connects {
    connects_per_sec: f64,
    connect_p50: Option<f64>,
    connect_p99: Option<f64>,
    refused_per_sec: f64,
    unanswered_per_sec: f64,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PerSecond {
    opened_per_sec: f64,
    packets_per_sec: f64,
    bytes_per_sec: f64,
    unserved_per_sec: f64,
    flows: u64,
    #[serde(flatten)]
    connect: Connects,
}

impl<'a> Traffic<'a> {
    pub(super) fn of(rows: &'a Rows, backends: Option<&'a Backends>) -> Self {
        let services = rows.services.iter().map(|row| {
            let (namespace, name) = row.name.split_once('/').unwrap_or_default();
            let backends_in_use = row.in_use;
            let backends_listed = row.listed;
            OfService {
                namespace,
                name,
                rates: PerSecond::of(&row.rates),
                backends_in_use,
                backends_listed,
            }
        });
        Self {
            node_name: &rows.header.node_name,
            health: rows.header.health,
            problems: &rows.header.problems,
            interval_secs: rows.header.interval,
            services: services.collect(),
            backends: backends
                .map(|backends| backends.rows.iter().flatten().map(OfBackend::of).collect()),
            total: PerSecond::of(&rows.total),
            unserved_reasons: rows
                .reasons
                .iter()
                .map(|(name, rate)| (name.as_str(), *rate))
                .collect(),
        }
    }
}

impl PerSecond {
    fn of(rates: &Rates) -> Self {
        Self {
            opened_per_sec: rates.opened,
            packets_per_sec: rates.packets,
            bytes_per_sec: rates.bytes,
            unserved_per_sec: rates.unserved(),
            flows: rates.flows,
            connect: Connects::of(&rates.connect),
        }
    }
}

impl<'a> OfBackend<'a> {
    fn of(
        Row {
            port,
            backend,
            connect,
        }: &'a Row,
    ) -> Self {
        Self {
            address: backend.address,
            pod: backend.pod.as_deref(),
            node: backend.node.as_deref(),
            port,
            in_use: backend.in_cluster_set || backend.in_local_set,
            ready: backend.ready,
            terminating: backend.terminating,
            flows: backend.flows,
            connect: Connects::of(connect),
        }
    }
}

impl Connects {
    fn of(connect: &ConnectRates) -> Self {
        Self {
            connects_per_sec: connect.per_sec,
            connect_p50: connect.p50,
            connect_p99: connect.p99,
            refused_per_sec: connect.refused,
            unanswered_per_sec: connect.unanswered,
        }
    }
}
