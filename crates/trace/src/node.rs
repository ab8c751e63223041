//! The node's properties for a trace without an agent. proxy-agent implements the traits, because
//! it has the flags and the rules.

use std::net::IpAddr;

use anyhow::Result;
use ipnet::IpNet;
use proxy_core::model::ModelOptions;

/// The command line flags that determine a node's treatment of packets.
pub trait NodeFlags: clap::Args {
    type Rules: NodeRules;

    /// Returns true if no flag is set.
    fn is_empty(&self) -> bool;

    /// Returns the rules of the node, and the options for Services. Errors name the flag.
    fn rules(&self) -> Result<(Self::Rules, ModelOptions)>;
}

/// The rules by which the agent of the node would fill the maps.
pub trait NodeRules {
    /// Returns the operator's ClusterIP ranges; empty to use the cluster's ranges.
    fn service_cidrs(&self) -> &[IpNet];

    /// Adds the Node object's `spec.podCIDRs`.
    fn learn(&mut self, pod_cidrs: &[IpNet]) -> Result<()>;

    /// Returns the client networks that count as local pods.
    fn detected(&self) -> Vec<IpNet>;

    /// Returns true if local pods are detected by device.
    fn detects_by_device(&self) -> bool;

    /// Returns the flags of [`proxy_common::device::Node`].
    fn flags(&self) -> u32;

    /// Returns true if node ports are served at this address of the node.
    fn serves_node_ports(&self, addr: IpAddr, primary: &[IpAddr]) -> bool;
}
