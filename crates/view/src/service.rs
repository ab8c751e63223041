//! Services and their backends for users: `kpx services`, `kpx backends`, the web page, `--output
//! json`. The form is stable.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{ConnectView, UdpOutcomes};

/// A Service as last seen, with its programmed parts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceView {
    pub namespace: String,
    pub name: String,
    /// The type: `ClusterIP`, `NodePort` or `LoadBalancer`.
    pub r#type: String,
    pub created: Option<Timestamp>,
    /// The labels; beyond 4 KiB, only the first in the order of their keys.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// True if labels were dropped.
    #[serde(default)]
    pub labels_cut: bool,
    pub cluster_ips: Vec<IpAddr>,
    pub external_ips: Vec<IpAddr>,
    /// The addresses of `status.loadBalancer` that nodes serve.
    pub load_balancer_ips: Vec<IpAddr>,
    /// External and load balancer addresses that kpx does not translate in host mode, with the
    /// reason for each. Their packets are routed as without kpx.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub not_taken: BTreeMap<IpAddr, String>,
    /// The policy: `Cluster` or `Local`.
    pub internal_traffic_policy: String,
    pub external_traffic_policy: String,
    /// The timeout of `sessionAffinity: ClientIP` in seconds.
    pub affinity_secs: Option<u32>,
    pub health_check_node_port: Option<u16>,
    /// The algorithm in the spelling of `--lb-algorithm`.
    pub algorithm: String,
    pub ports: Vec<PortView>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PortView {
    /// The name of the port; empty for a port without a name.
    pub name: String,
    /// The protocol: `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    pub port: u16,
    pub node_port: Option<u16>,
    /// The programmed frontends of both families.
    pub frontends: Vec<FrontendView>,
    /// The listed endpoints, including endpoints without traffic.
    pub backends: Vec<BackendView>,
    /// The counts since the agent started, summed over both families.
    pub counts: PortCounts,
    /// Outcomes and durations of TCP connects, summed over both families.
    #[serde(default)]
    pub connect: ConnectView,
    /// The outcomes of UDP flows, summed over both families; missing for other protocols.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub udp: Option<UdpOutcomes>,
    /// True if an unanswered flow is a failure. False for UDP that no backend has answered, such as
    /// syslog, except DNS.
    #[serde(default = "expected")]
    pub expects_answers: bool,
    /// True while pods of this node serve the Service by a local redirect.
    #[serde(default)]
    pub redirected: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FrontendView {
    /// The kind: `ClusterIP`, `NodePort`, `ExternalIP` or `LoadBalancer`.
    pub kind: String,
    /// The address; `None` for a node port, which every node address serves.
    pub address: Option<IpAddr>,
    pub port: u16,
    /// The reason why the frontend is not programmed, for example a conflict with another Service.
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
    /// The weight relative to the other backends' weights. A weight of 0 takes no new flows.
    #[serde(default = "default_weight")]
    pub weight: u16,
    /// True if the backend is in the cluster set: it takes new flows of clients of the whole
    /// cluster.
    pub in_cluster_set: bool,
    /// True if the backend is in the local set: it takes new flows under a traffic policy `Local`.
    pub in_local_set: bool,
    /// True if the backend takes new flows of this node's pods by a local redirect.
    #[serde(default)]
    pub in_redirect_set: bool,
    /// The number of flows in the table: the rows of `kpx flows`.
    pub flows: u64,
    /// The number of flows that are neither closed by both sides nor reset.
    #[serde(default)]
    pub open_flows: u64,
    /// The TCP connections since the first connection to the backend. After an idle hour only the
    /// port counts them.
    #[serde(default)]
    pub connect: ConnectView,
    /// The outcomes of UDP flows; missing for other protocols. After an idle hour only the port
    /// counts them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub udp: Option<UdpOutcomes>,
    /// True if the backend has recently been unresponsive to this node.
    #[serde(default)]
    pub silent: bool,
    /// True if the backend is ejected: it takes no new connections of this node.
    #[serde(default)]
    pub ejected: bool,
    /// The name of `ejected` in the previous release.
    #[serde(default)]
    pub set_aside: bool,
    /// The path to the backend in host mode: `direct`, `node port`, `tunnel` or `unreachable`.
    /// `None` on a node, and for a backend without traffic.
    #[serde(default)]
    pub way: Option<String>,
}

/// The default for answers of older agents, which have no weights.
const fn default_weight() -> u16 {
    1
}

/// The default for answers of older agents.
const fn expected() -> bool {
    true
}

impl ServiceView {
    /// Returns the number of backends that take traffic, and the number of all listed backends. A
    /// backend with several ports counts once.
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
    /// Returns true if the backend is ejected. An agent of the previous release sets `set_aside`.
    pub const fn is_ejected(&self) -> bool {
        self.ejected || self.set_aside
    }

    /// Returns the pod, or the IP address of a backend without a pod.
    pub fn pod_or_ip(&self) -> String {
        match &self.pod {
            Some(pod) => pod.clone(),
            None => self.address.ip().to_string(),
        }
    }
}

/// The traffic of a service port through this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PortCounts {
    /// The number of flows opened since the agent started.
    pub flows_opened: u64,
    /// The number of flows in the table: the rows of `kpx flows`.
    pub flows: u64,
    /// The number of flows that are neither closed by both sides nor reset.
    #[serde(default)]
    pub open_flows: u64,
    /// The packets towards backends.
    pub packets: u64,
    pub bytes: u64,
    /// The packets to clients.
    pub packets_returned: u64,
    pub bytes_returned: u64,
    /// The packets that would have opened a flow and were dropped.
    #[serde(default)]
    pub dropped: u64,
    /// The packets that would have opened a flow and were rejected: the client got an answer.
    #[serde(default)]
    pub rejected: u64,
    /// The sum of `dropped` and `rejected`. Deprecated: the next release removes it.
    pub refused: u64,
}

impl PortCounts {
    /// Returns the counts since `before`. The numbers of flows are current.
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

    /// Adds the counts of another port. The sums saturate, because another node may report any
    /// number.
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

/// The name of a programmed frontend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NameView {
    /// The address; unspecified (`0.0.0.0`, `::`) for a node port, which every node address serves.
    pub address: IpAddr,
    pub port: u16,
    /// The protocol: `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    pub namespace: String,
    pub name: String,
    /// The name of the port; empty for a port without a name.
    pub port_name: String,
}

/// The names by frontend address.
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

    /// Returns the name; `protocol` is case-insensitive. An address without a frontend is tried as
    /// a node's address.
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
