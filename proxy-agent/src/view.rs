//! What others are shown of Services and their backends: the form of `kpx services`, `kpx backends`, of the web page and of
//! all who read `--output json`. The form is kept: fields may be added, none is renamed or taken away.

mod build;
mod flow;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

pub use build::{frontend_names, views};
pub use flow::{FlowService, FlowView};

/// A Service, as it was last seen, and what of it is in force.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceView {
    pub namespace: String,
    pub name: String,
    /// `ClusterIP`, `NodePort` or `LoadBalancer`.
    pub r#type: String,
    pub created: Option<Timestamp>,
    pub cluster_ips: Vec<IpAddr>,
    pub external_ips: Vec<IpAddr>,
    /// Of `status.loadBalancer`, those that nodes serve.
    pub load_balancer_ips: Vec<IpAddr>,
    /// `Cluster` or `Local`.
    pub internal_traffic_policy: String,
    pub external_traffic_policy: String,
    /// Of `sessionAffinity: ClientIP`.
    pub affinity_secs: Option<u32>,
    pub health_check_node_port: Option<u16>,
    /// As `--lb-algorithm` spells it.
    pub algorithm: String,
    pub ports: Vec<PortView>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PortView {
    /// Empty if it has none.
    pub name: String,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    pub port: u16,
    pub node_port: Option<u16>,
    /// In force, of both families.
    pub frontends: Vec<FrontendView>,
    /// All endpoints that are listed, whether they take traffic or not.
    pub backends: Vec<BackendView>,
    /// Since the agent started; of both families.
    pub counts: PortCounts,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FrontendView {
    /// `ClusterIP`, `NodePort`, `ExternalIP` or `LoadBalancer`.
    pub kind: String,
    /// None for a node port: it is served at the node's addresses.
    pub address: Option<IpAddr>,
    pub port: u16,
    /// Another Service holds it, or it is not in force for another reason.
    pub conflict: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackendView {
    pub address: SocketAddr,
    /// `namespace/name` of the pod, if the slice names one.
    pub pod: Option<String>,
    pub node: Option<String>,
    pub zone: Option<String>,
    pub ready: bool,
    pub serving: bool,
    pub terminating: bool,
    /// On this node.
    pub local: bool,
    /// Takes new flows of clients of the whole cluster, of those under a policy `Local`.
    pub in_cluster_set: bool,
    pub in_local_set: bool,
    /// Flows in the table, as of the last sweep.
    pub flows: u64,
}

impl ServiceView {
    /// Returns the backends that take traffic, and all that are listed.
    pub fn backends_in_use(&self) -> (usize, usize) {
        let all = || self.ports.iter().flat_map(|port| &port.backends);
        (all().filter(|backend| backend.in_cluster_set || backend.in_local_set).count(), all().count())
    }
}

/// What passed this node for a service port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PortCounts {
    /// Flows opened since the agent started.
    pub flows_opened: u64,
    /// Flows in the table, as of the last sweep.
    pub flows: u64,
    /// Towards backends.
    pub packets: u64,
    pub bytes: u64,
    /// Back to clients.
    pub packets_returned: u64,
    pub bytes_returned: u64,
    /// Packets that would have opened a flow and were dropped.
    #[serde(default)]
    pub dropped: u64,
    /// Packets that would have opened a flow and were rejected, with an answer to the client.
    #[serde(default)]
    pub rejected: u64,
    /// The sum of `dropped` and `rejected`: it goes with the next release.
    pub refused: u64,
}

impl PortCounts {
    /// Returns the packets that would have opened a flow, and were dropped or rejected.
    pub const fn unserved(&self) -> u64 {
        self.dropped + self.rejected
    }
}

/// What a frontend in force is called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NameView {
    /// Unspecified (`0.0.0.0`, `::`) for a node port: it is served at the node's addresses.
    pub address: IpAddr,
    pub port: u16,
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    pub namespace: String,
    pub name: String,
    /// Empty if it has none.
    pub port_name: String,
}

/// Names by what clients dial.
#[derive(Clone, Debug, Default)]
pub struct Names(BTreeMap<(String, u16, IpAddr), NameView>);

impl Names {
    pub fn new(names: impl IntoIterator<Item = NameView>) -> Self {
        Self(names.into_iter().map(|name| ((name.protocol.clone(), name.port, name.address), name)).collect())
    }

    /// `protocol` in upper or lower case. An address without a frontend of its own may be a node's.
    pub fn find(&self, at: SocketAddr, protocol: &str) -> Option<&NameView> {
        let any = if at.is_ipv4() { IpAddr::from([0; 4]) } else { IpAddr::from([0; 16]) };
        let name = |address| self.0.get(&(protocol.to_uppercase(), at.port(), address));
        name(at.ip()).or_else(|| name(any))
    }
}
