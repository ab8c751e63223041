//! One state of a cluster, as one of its nodes sees it, and one packet on that node.

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

/// The facts of the node under test, and the choices of its operator.
#[derive(Clone, Debug)]
pub struct NodeFacts {
    pub name: &'static str,
    pub zone: Option<&'static str>,
    /// The node's own addresses at which node ports are served.
    pub node_port_addrs: BTreeSet<IpAddr>,
    pub detector: Detector,
    /// `--masquerade compat`
    pub compat: bool,
    pub masquerade_all: bool,
    pub cluster_ip_external: bool,
}

/// How local pods are told from others.
#[derive(Clone, Debug)]
pub enum Detector {
    /// By source address. A family without a network is not detected.
    Cidrs(Vec<IpNet>),
    /// By the device through which they send.
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

    /// Returns the name as the API spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Sctp => "SCTP",
        }
    }
}

/// Where a packet meets the programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Hook {
    /// It arrives at a device.
    Ingress(Device),
    /// The node's own, on its way to an address elsewhere.
    Anchor,
    /// The node's own, to an address of its own.
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

/// The objects as YAML, and the node.
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
