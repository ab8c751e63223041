//! The view of Services and their backends for users: `kpx services`, `kpx backends`, the web page
//! and readers of `--output json`. The form is stable: fields may be added, and no field is renamed
//! or removed.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::ConnectView;

/// A Service as last seen, with the parts of it that are in force.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceView {
    pub namespace: String,
    pub name: String,
    /// The type: `ClusterIP`, `NodePort` or `LoadBalancer`.
    pub r#type: String,
    pub created: Option<Timestamp>,
    /// The labels; of a Service with more than 4 KiB of them those that come first by key.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// True if the Service has more labels than these.
    #[serde(default)]
    pub labels_cut: bool,
    pub cluster_ips: Vec<IpAddr>,
    pub external_ips: Vec<IpAddr>,
    /// The addresses of `status.loadBalancer` that nodes serve.
    pub load_balancer_ips: Vec<IpAddr>,
    /// The addresses of both kinds that a host in mode host leaves to the network, with the
    /// reasons.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub not_taken: BTreeMap<IpAddr, String>,
    /// The policy: `Cluster` or `Local`.
    pub internal_traffic_policy: String,
    pub external_traffic_policy: String,
    /// The timeout of `sessionAffinity: ClientIP`.
    pub affinity_secs: Option<u32>,
    pub health_check_node_port: Option<u16>,
    /// The algorithm as `--lb-algorithm` spells it.
    pub algorithm: String,
    pub ports: Vec<PortView>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PortView {
    /// The name of the port; empty if the port has none.
    pub name: String,
    /// The protocol: `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    pub port: u16,
    pub node_port: Option<u16>,
    /// The frontends in force, of both families.
    pub frontends: Vec<FrontendView>,
    /// The listed endpoints, including those that take no traffic.
    pub backends: Vec<BackendView>,
    /// The counts since the agent started, of both families.
    pub counts: PortCounts,
    /// The TCP connections, of both families.
    #[serde(default)]
    pub connect: ConnectView,
    /// True while pods of this node answer for the Service in a local redirect.
    #[serde(default)]
    pub redirected: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FrontendView {
    /// The kind: `ClusterIP`, `NodePort`, `ExternalIP` or `LoadBalancer`.
    pub kind: String,
    /// The address; None for a node port, which is served at the node's addresses.
    pub address: Option<IpAddr>,
    pub port: u16,
    /// The reason why the frontend is not in force, for example that another Service holds it.
    pub conflict: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackendView {
    pub address: SocketAddr,
    /// The pod as `namespace/name`, if the slice names one.
    pub pod: Option<String>,
    pub node: Option<String>,
    pub zone: Option<String>,
    pub ready: bool,
    pub serving: bool,
    pub terminating: bool,
    /// True if the backend is on this node.
    pub local: bool,
    /// The share in new flows, relative to that of the other backends. With 0 the backend gets
    /// none.
    #[serde(default = "default_weight")]
    pub weight: u16,
    /// True if the backend takes new flows of clients of the whole cluster.
    pub in_cluster_set: bool,
    /// True if the backend takes new flows under a policy `Local`.
    pub in_local_set: bool,
    /// True if the backend takes new flows of this node's pods, because the Service has a local
    /// redirect.
    #[serde(default)]
    pub in_redirect_set: bool,
    /// The number of flows in the table: the rows of `kpx flows`.
    pub flows: u64,
    /// The flows that neither both sides have closed nor one has reset.
    #[serde(default)]
    pub open_flows: u64,
    /// The TCP connections since the backend was dialled first. After an hour without any, they
    /// count for the port alone.
    #[serde(default)]
    pub connect: ConnectView,
    /// True if the backend has given no answer on this node of late.
    #[serde(default)]
    pub silent: bool,
    /// True if it takes no new connections of this node because of that.
    #[serde(default)]
    pub ejected: bool,
    /// The way of a host in mode host to the backend: `direct`, `node port`, `tunnel` or
    /// `unreachable`. None on a node, and for a backend that takes no traffic.
    #[serde(default)]
    pub way: Option<String>,
}

/// Returns the weight at an agent of an earlier version, which has no others.
const fn default_weight() -> u16 {
    1
}

impl ServiceView {
    /// Returns the number of backends that take traffic, and of all that are listed. A backend of
    /// several ports counts once.
    pub fn backends_in_use(&self) -> (usize, usize) {
        let mut backends = BTreeMap::<_, bool>::new();
        for backend in self.ports.iter().flat_map(|port| &port.backends) {
            *backends.entry(backend.pod_or_ip()).or_default() |=
                backend.in_cluster_set || backend.in_local_set || backend.in_redirect_set;
        }
        let in_use = backends.values().filter(|is_in_use| **is_in_use).count();
        (in_use, backends.len())
    }
}

impl BackendView {
    /// Returns the pod, or the IP address of a backend that names no pod.
    pub fn pod_or_ip(&self) -> String {
        match &self.pod {
            Some(pod) => pod.clone(),
            None => self.address.ip().to_string(),
        }
    }
}

/// The traffic of a service port that passed this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PortCounts {
    /// The number of flows opened since the agent started.
    pub flows_opened: u64,
    /// The number of flows in the table: the rows of `kpx flows`.
    pub flows: u64,
    /// The flows that neither both sides have closed nor one has reset.
    #[serde(default)]
    pub open_flows: u64,
    /// The packets towards backends.
    pub packets: u64,
    pub bytes: u64,
    /// The packets back to clients.
    pub packets_returned: u64,
    pub bytes_returned: u64,
    /// The packets that would have opened a flow and were dropped.
    #[serde(default)]
    pub dropped: u64,
    /// The packets that would have opened a flow and were rejected, with an answer to the client.
    #[serde(default)]
    pub rejected: u64,
    /// The sum of `dropped` and `rejected`. It goes with the next release.
    pub refused: u64,
}

impl PortCounts {
    /// Returns what was counted since `before`. The flows are those of now.
    #[must_use]
    pub const fn since(&self, before: &Self) -> Self {
        Self {
            flows_opened: self.flows_opened.saturating_sub(before.flows_opened),
            flows: self.flows,
            open_flows: self.open_flows,
            packets: self.packets.saturating_sub(before.packets),
            bytes: self.bytes.saturating_sub(before.bytes),
            packets_returned: self
                .packets_returned
                .saturating_sub(before.packets_returned),
            bytes_returned: self.bytes_returned.saturating_sub(before.bytes_returned),
            dropped: self.dropped.saturating_sub(before.dropped),
            rejected: self.rejected.saturating_sub(before.rejected),
            refused: self.refused.saturating_sub(before.refused),
        }
    }

    /// Adds the counts of another port. Those of another node may be any numbers.
    pub const fn add(&mut self, other: &Self) {
        *self = Self {
            flows_opened: self.flows_opened.saturating_add(other.flows_opened),
            flows: self.flows.saturating_add(other.flows),
            open_flows: self.open_flows.saturating_add(other.open_flows),
            packets: self.packets.saturating_add(other.packets),
            bytes: self.bytes.saturating_add(other.bytes),
            packets_returned: self.packets_returned.saturating_add(other.packets_returned),
            bytes_returned: self.bytes_returned.saturating_add(other.bytes_returned),
            dropped: self.dropped.saturating_add(other.dropped),
            rejected: self.rejected.saturating_add(other.rejected),
            refused: self.refused.saturating_add(other.refused),
        };
    }

    /// Returns the packets that would have opened a flow, and were dropped or rejected.
    pub const fn unserved(&self) -> u64 {
        self.dropped.saturating_add(self.rejected)
    }
}

/// The name of a frontend in force.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NameView {
    /// The address; unspecified (`0.0.0.0`, `::`) for a node port, which is served at the node's
    /// addresses.
    pub address: IpAddr,
    pub port: u16,
    /// The protocol: `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    pub namespace: String,
    pub name: String,
    /// The name of the port; empty if the port has none.
    pub port_name: String,
}

/// The names by the addresses that clients dial.
#[derive(Clone, Debug, Default)]
pub struct Names(BTreeMap<(String, u16, IpAddr), NameView>);

impl Names {
    pub fn new(names: impl IntoIterator<Item = NameView>) -> Self {
        Self(
            names
                .into_iter()
                .map(|name| ((name.protocol.clone(), name.port, name.address), name))
                .collect(),
        )
    }

    /// Finds the name; `protocol` may be in upper or lower case. An address without a frontend of
    /// its own may be a node's.
    pub fn find(&self, at: SocketAddr, protocol: &str) -> Option<&NameView> {
        let any = if at.is_ipv4() {
            IpAddr::from([0; 4])
        } else {
            IpAddr::from([0; 16])
        };
        let name = |address| self.0.get(&(protocol.to_uppercase(), at.port(), address));
        name(at.ip()).or_else(|| name(any))
    }
}
