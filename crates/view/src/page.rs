//! The rows of the page's table of Services, and their changes for the page of a cluster. Unlike
//! the forms of `--output json`, these change with the page.

mod changes;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use data_encoding::BASE64URL_NOPAD;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::{BackendView, PortView, ServiceView};

pub use changes::Sent;

/// The number of counters of a row.
pub const COUNTERS: usize = 5;

/// A Service with the table's fields.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    #[serde(flatten)]
    pub shape: Shape,
    pub flows: u64,
    pub open_flows: u64,
    /// The counters: flows opened, packets and bytes of both directions, packets dropped, packets
    /// rejected.
    pub counts: [u64; COUNTERS],
    /// The unserved packets and the failed connects per second in the last step of the history;
    /// missing without failures.
    #[serde(flatten)]
    pub failures: Option<RowFailures>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RowFailures {
    pub unserved: f64,
    pub failed: f64,
}

/// The fields of a row that nodes with the same objects have in common.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Shape {
    pub namespace: String,
    pub name: String,
    pub r#type: String,
    pub addresses: Vec<IpAddr>,
    pub ports: Vec<RowPort>,
    /// The numbers of ready pods and of all pods, or of addresses if pods have no names.
    pub ready: usize,
    pub total: usize,
    /// The number of frontends that are not programmed.
    pub conflicts: usize,
    /// The beginning of the SHA-256 of all endpoints: equal on nodes that have the same addresses,
    /// states and weights, and so the same table for packets that they hand over.
    #[serde(default)]
    pub endpoints: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RowPort {
    pub port: u16,
    pub node_port: Option<u16>,
    pub protocol: String,
    pub name: String,
}

/// The beginning of the SHA-256 of a shape, long enough that no node finds another shape with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest([u8; 12]);

/// A shape with the digest that its node computed.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Shaped {
    pub digest: Digest,
    pub shape: Shape,
}

/// What changed on a node since the round before. The first round has everything.
///
/// A Service has a number within a stream.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// The number of Services on the node.
    pub services: usize,
    pub shapes: Vec<(u32, Digest)>,
    pub counts: Vec<(u32, RowCounts)>,
    pub gone: Vec<u32>,
    /// True if changes wait for the next round.
    pub more: bool,
}

/// The numbers of a row: flows, open flows, counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RowCounts(pub u64, pub u64, pub [u64; COUNTERS], pub RowFailures);

/// The time on a node's clock.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Clock {
    pub now: Timestamp,
}

impl Row {
    pub fn new(service: ServiceView) -> Self {
        let (ready, total) = readiness(&service.ports);
        let endpoints = endpoints(&service.ports);
        let counts = service.ports.iter().map(|port| &port.counts).fold(
            [0; COUNTERS],
            |sum: [u64; COUNTERS], counts| {
                let [opened, packets, bytes, dropped, rejected] = sum;
                [
                    opened + counts.flows_opened,
                    packets + counts.packets + counts.packets_returned,
                    bytes + counts.bytes + counts.bytes_returned,
                    dropped + counts.dropped,
                    rejected + counts.rejected,
                ]
            },
        );
        let frontends = service.ports.iter().flat_map(|port| &port.frontends);
        let conflicts = frontends
            .filter(|frontend| frontend.conflict.is_some())
            .count();
        Self {
            flows: service.ports.iter().map(|port| port.counts.flows).sum(),
            open_flows: service
                .ports
                .iter()
                .map(|port| port.counts.open_flows)
                .sum(),
            shape: Shape {
                conflicts,
                ports: service.ports.into_iter().map(RowPort::new).collect(),
                addresses: [
                    service.cluster_ips,
                    service.load_balancer_ips,
                    service.external_ips,
                ]
                .concat(),
                namespace: service.namespace,
                name: service.name,
                r#type: service.r#type,
                ready,
                total,
                endpoints,
            },
            counts,
            failures: None,
        }
    }

    fn numbers(&self) -> RowCounts {
        let failures = self.failures.unwrap_or_default();
        RowCounts(self.flows, self.open_flows, self.counts, failures)
    }
}

impl RowPort {
    fn new(
        PortView {
            port,
            node_port,
            protocol,
            name,
            ..
        }: PortView,
    ) -> Self {
        Self {
            port,
            node_port,
            protocol,
            name,
        }
    }
}

impl Digest {
    pub fn of(shape: &Shape) -> Self {
        let text = serde_json::to_vec(shape).unwrap_or_default();
        let mut digest = [0; 12];
        digest.copy_from_slice(&Sha256::digest(text)[..12]);
        Self(digest)
    }
}

impl TryFrom<String> for Digest {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let bytes = BASE64URL_NOPAD.decode(text.as_bytes()).ok();
        let bytes = bytes.and_then(|bytes| bytes.try_into().ok());
        bytes
            .map(Self)
            .ok_or_else(|| format!("{text:?} is no digest"))
    }
}

impl From<Digest> for String {
    fn from(Digest(bytes): Digest) -> Self {
        BASE64URL_NOPAD.encode(&bytes)
    }
}

/// Returns [`Shape::endpoints`].
fn endpoints(ports: &[PortView]) -> String {
    let of_port = |port: &PortView| {
        // Each node redirects to a pod of its own, which no EndpointSlice has to name.
        let is_named = |backend: &&BackendView| backend.in_cluster_set || !backend.in_redirect_set;
        let named = port.backends.iter().filter(is_named);
        let mut all: Vec<_> = named.map(endpoint).collect();
        all.sort_unstable();
        (port.port, all)
    };
    let mut all: Vec<_> = ports.iter().map(of_port).collect();
    all.sort_unstable();
    let digest = Sha256::digest(serde_json::to_vec(&all).unwrap_or_default());
    BASE64URL_NOPAD.encode(&digest[..6])
}

/// Returns the fields of a backend that all nodes read in the same EndpointSlices.
fn endpoint(backend: &BackendView) -> (SocketAddr, [bool; 3], u16) {
    let states = [backend.ready, backend.serving, backend.terminating];
    (backend.address, states, backend.weight)
}

/// Returns the numbers of ready pods and of all pods. A pod is ready if it is ready for every port.
fn readiness(ports: &[PortView]) -> (usize, usize) {
    let mut pods: BTreeMap<String, bool> = BTreeMap::new();
    for backend in ports.iter().flat_map(|port| &port.backends) {
        *pods.entry(backend.pod_or_ip()).or_insert(true) &= backend.ready;
    }
    (pods.values().filter(|ready| **ready).count(), pods.len())
}
