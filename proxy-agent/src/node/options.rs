//! What an operator may say about a node; all of it has a default, or is found out otherwise.

use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use proxy_common::device::Node;

use super::detect::Detector;
use super::node_ports::NodePortAddresses;
use crate::settings::PodRoutes;

/// What an operator says about this node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeOptions {
    /// The node's own addresses, before those of its Node object.
    pub node_ips: Vec<IpAddr>,
    /// The ranges of ClusterIPs, instead of those of the ServiceCIDR objects.
    pub service_cidrs: Vec<IpNet>,
    pub node_ports: NodePortAddresses,
    pub detector: Detector,
    pub masquerade: Masquerade,
    /// Every client of a ClusterIP is masqueraded.
    pub masquerade_all: bool,
    /// ClusterIPs serve clients outside the cluster, too.
    pub cluster_ip_external: bool,
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

impl NodeOptions {
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
