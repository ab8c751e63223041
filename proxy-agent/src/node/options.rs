//! What an operator may say about a node; all of it has a default, or is found out otherwise.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use proxy_common::device::Node;

use super::detect::Detector;
use super::fast_path::FastPath;
use super::node_ports::NodePortAddresses;
use crate::choices::PodRoutes;

/// What an operator says about this node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeOptions {
    /// The node's own addresses, before those of its Node object.
    pub node_ips: Vec<IpAddr>,
    /// The ranges of ClusterIPs, instead of those of the ServiceCIDR objects.
    pub service_cidrs: Vec<IpNet>,
    pub node_ports: NodePortAddresses,
    /// Node ports are served at the host's own 127.0.0.1, which sockets can be and packets cannot.
    pub localhost_node_ports: bool,
    pub detector: Detector,
    pub masquerade: Masquerade,
    /// Every client of a ClusterIP is masqueraded.
    pub masquerade_all: bool,
    /// ClusterIPs serve clients outside the cluster, too, as kube-proxy's do.
    pub cluster_ip_external: bool,
    pub fast_path: FastPath,
    /// Of a host that is no node.
    pub outside: Option<PodRoutes>,
}

/// Which clients' addresses are replaced by the node's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Masquerade {
    /// Those to whom replies would not find back otherwise.
    #[default]
    Default,
    /// Those for whom kube-proxy does it.
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
            localhost_node_ports: false,
            detector: Detector::default(),
            masquerade: Masquerade::default(),
            masquerade_all: false,
            cluster_ip_external: true,
            fast_path: FastPath::default(),
            outside: None,
        }
    }
}

impl NodeOptions {
    /// The loopback address at which node ports are served, if they are at any. `primary` are the node's primary addresses.
    pub(crate) fn localhost(&self, primary: &[IpAddr]) -> Option<IpAddr> {
        let localhost = IpAddr::V4(Ipv4Addr::LOCALHOST);
        (self.localhost_node_ports && self.node_ports.names(localhost, primary)).then_some(localhost)
    }

    /// As flags of [`Node`].
    pub(crate) fn flags(&self) -> u32 {
        let flags = [
            (self.masquerade == Masquerade::Compat, Node::COMPAT),
            (self.masquerade_all, Node::MASQUERADE_ALL),
            (self.cluster_ip_external, Node::CLUSTER_IP_EXTERNAL),
            (self.outside.is_some(), Node::HOST),
        ];
        flags.into_iter().filter(|(is_set, _)| *is_set).fold(0, |all, (_, flag)| all | flag)
    }
}
