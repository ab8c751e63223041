//! The knowledge of its node that a trace without an agent needs. The agent has the flags and the
//! rules, and hands them in.

use std::net::IpAddr;

use anyhow::Result;
use ipnet::IpNet;
use proxy_core::model::ModelOptions;

/// The flags of the command line that set a node's treatment of packets.
pub trait NodeFlags: clap::Args {
    type Rules: NodeRules;

    /// Returns true if no flag is given.
    fn is_empty(&self) -> bool;

    /// Returns the rules of the node, and the options for Services. Errors name the flag.
    fn rules(&self) -> Result<(Self::Rules, ModelOptions)>;
}

/// The rules by which the agent of the node would fill the maps.
pub trait NodeRules {
    /// Returns the operator's ranges of ClusterIPs; empty if the cluster's count.
    fn service_cidrs(&self) -> &[IpNet];

    /// Takes in the Node object's `spec.podCIDRs`.
    fn learn(&mut self, pod_cidrs: &[IpNet]) -> Result<()>;

    /// Returns the networks of clients that count as local pods.
    fn detected(&self) -> Vec<IpNet>;

    /// Returns true if the device of a client tells whether the client is a local pod.
    fn detects_by_device(&self) -> bool;

    /// Returns the flags of [`proxy_common::device::Node`].
    fn flags(&self) -> u32;

    /// Returns true if node ports are served at this address of the node.
    fn serves_node_ports(&self, addr: IpAddr, primary: &[IpAddr]) -> bool;
}
