//! The operator's settings of a node. Each has a default or is detected.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use proxy_common::device::Node;

use super::detect::Detector;
use super::fast_path::FastPath;
use crate::choices::PodRoutes;
use crate::config::node_ports::{Localhost, NodePortAddresses};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeOptions {
    /// The node's own addresses, before those of its Node object.
    pub node_ips: Vec<IpAddr>,
    /// The ranges of ClusterIPs, instead of those of the ServiceCIDR objects.
    pub service_cidrs: Vec<IpNet>,
    pub node_ports: NodePortAddresses,
    /// The loopback addresses at which local processes reach node ports.
    pub localhost: Localhost,
    pub detector: Detector,
    pub masquerade: Masquerade,
    /// Set to masquerade every client of a ClusterIP.
    pub masquerade_all: bool,
    /// Set to serve ClusterIPs to clients outside the cluster too, as kube-proxy does.
    pub cluster_ip_external: bool,
    pub fast_path: FastPath,
    /// Set to hand external clients over to the nodes of their backends.
    pub hands_over: bool,
    pub pod_routing: Option<PodRoutes>,
    /// The settings that kpx implements differently from kube-proxy, for `kpx status`.
    pub notices: Vec<String>,
}

/// The choice of clients to masquerade.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Masquerade {
    /// The clients whose replies would otherwise bypass the node.
    #[default]
    Default,
    /// The clients that kube-proxy masquerades.
    Compat,
}

impl fmt::Display for Masquerade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Default => "default",
            Self::Compat => "compat",
        })
    }
}

impl Default for NodeOptions {
    fn default() -> Self {
        Self {
            node_ips: Vec::new(),
            service_cidrs: Vec::new(),
            node_ports: NodePortAddresses::default(),
            localhost: Localhost::default(),
            detector: Detector::default(),
            masquerade: Masquerade::default(),
            masquerade_all: false,
            cluster_ip_external: true,
            fast_path: FastPath::default(),
            hands_over: false,
            pod_routing: None,
            notices: Vec::new(),
        }
    }
}

impl NodeOptions {
    pub(crate) fn localhosts(&self) -> Vec<IpAddr> {
        self.node_ports.localhosts(self.localhost)
    }

    /// Returns the settings as flags of [`Node`].
    pub(crate) fn flags(&self) -> u32 {
        let flags = [
            (self.masquerade == Masquerade::Compat, Node::COMPAT),
            (self.masquerade_all, Node::MASQUERADE_ALL),
            (self.cluster_ip_external, Node::CLUSTER_IP_EXTERNAL),
            (self.pod_routing.is_some(), Node::HOST),
            (self.localhost == Localhost::Named, Node::LOCALHOST_LOCAL),
        ];
        flags
            .into_iter()
            .filter(|(is_set, _)| *is_set)
            .fold(0, |all, (_, flag)| all | flag)
    }
}
