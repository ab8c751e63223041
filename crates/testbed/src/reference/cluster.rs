//! The state of a cluster as seen by a node, and a packet on that node.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use serde_json::json;

use crate::reference::place::{self, Device, Family};

#[derive(Clone, Debug)]
pub struct Cluster {
    pub services: Vec<Service>,
    pub slices: Vec<EndpointSlice>,
    pub service_cidrs: Vec<IpNet>,
    pub node: NodeFacts,
}

/// The node under test, and its operator's options.
#[derive(Clone, Debug)]
pub struct NodeFacts {
    pub name: &'static str,
    pub zone: Option<&'static str>,
    /// The node's own addresses that serve node ports.
    pub node_port_addrs: BTreeSet<IpAddr>,
    pub detector: Detector,
    /// `--masquerade compat`
    pub compat: bool,
    pub masquerade_all: bool,
    pub cluster_ip_external: bool,
}

/// The detection of local pods.
#[derive(Clone, Debug)]
pub enum Detector {
    /// By source address. Families without a network are not detected.
    Cidrs(Vec<IpNet>),
    /// By the incoming device.
    Device(Device),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Proto {
    Tcp,
    Udp,
    Sctp,
}

impl Proto {
    pub const ALL: [Self; 3] = [Self::Tcp, Self::Udp, Self::Sctp];

    /// Returns the API's name of the protocol.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }
}

/// The hook that handles a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hook {
    /// A packet that arrives at a device.
    Ingress(Device),
    /// The node's own packet to a remote address.
    Anchor,
    /// The node's own packet to an address of the node.
    Lo,
}

/// The first packet of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packet {
    pub hook: Hook,
    pub proto: Proto,
    pub src: SocketAddr,
    pub dst: SocketAddr,
}

impl Packet {
    pub fn family(&self) -> Family {
        Family::of(self.dst.ip())
    }
}

impl Cluster {
    pub fn node_object(&self) -> Node {
        let addresses: Vec<_> = Family::ALL
            .iter()
            .map(|family| json!({ "type": "InternalIP", "address": place::primary(*family) }))
            .collect();
        let mut node: Node = object(json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": { "name": self.node.name },
            "status": { "addresses": addresses },
        }));
        node.metadata.labels = self
            .node
            .zone
            .map(|zone| [("topology.kubernetes.io/zone".into(), zone.into())].into());
        node
    }

    pub fn service_cidr_objects(&self) -> Vec<ServiceCIDR> {
        if self.service_cidrs.is_empty() {
            return Vec::new();
        }
        vec![object(json!({
            "apiVersion": "networking.k8s.io/v1",
            "kind": "ServiceCIDR",
            "metadata": { "name": "kubernetes" },
            "spec": { "cidrs": self.service_cidrs.iter().map(IpNet::to_string).collect::<Vec<_>>() },
        }))]
    }
}

pub fn object<T: serde::de::DeserializeOwned>(value: serde_json::Value) -> T {
    serde_json::from_value(value).expect("an object of this kind")
}

/// Displays the objects as YAML, and the node.
impl fmt::Display for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.services
            .iter()
            .try_for_each(|object| write_yaml(f, object))?;
        self.slices
            .iter()
            .try_for_each(|object| write_yaml(f, object))?;
        self.service_cidr_objects()
            .iter()
            .try_for_each(|object| write_yaml(f, object))?;
        write!(f, "{:#?}", self.node)
    }
}

fn write_yaml(f: &mut fmt::Formatter<'_>, object: &impl serde::Serialize) -> fmt::Result {
    let text = serde_saphyr::to_string(object).map_err(|_| fmt::Error)?;
    writeln!(f, "---\n{}", text.trim_end())
}
