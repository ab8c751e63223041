//! The rules of a node for `kpx trace`, from the node's flags.

use std::net::IpAddr;

use anyhow::Result;
use ipnet::IpNet;
use proxy_core::model::ModelOptions;
use proxy_trace::{NodeFlags, NodeRules};

use super::Configuration;
use super::file_config::FileConfig;
use super::flags::{FlagValues, NodeArgs};
use crate::node::NodeOptions;
use crate::node::detect::{Detection, Detector};

/// The options of a node, and the cluster's data for its detector.
#[derive(Debug)]
pub struct TracedNode {
    options: NodeOptions,
    detection: Detection,
}

impl NodeArgs {
    /// Returns the options for a node and for Services. Errors name the field and the flag.
    pub fn options(&self) -> Result<(NodeOptions, ModelOptions)> {
        let configuration = Configuration::resolve(&self.0, FileConfig::default(), false)?;
        Ok((configuration.checked.node, configuration.checked.model))
    }
}

impl NodeFlags for NodeArgs {
    type Rules = TracedNode;

    fn is_empty(&self) -> bool {
        self.0 == FlagValues::default()
    }

    fn rules(&self) -> Result<(TracedNode, ModelOptions)> {
        let (options, model) = self.options()?;
        let detection = Detection::new(options.detector.clone());
        Ok((TracedNode { options, detection }, model))
    }
}

impl NodeRules for TracedNode {
    fn service_cidrs(&self) -> &[IpNet] {
        &self.options.service_cidrs
    }

    fn learn(&mut self, pod_cidrs: &[IpNet]) -> Result<()> {
        self.detection.learn(pod_cidrs)
    }

    fn detected(&self) -> Vec<IpNet> {
        self.detection.nets()
    }

    fn detects_by_device(&self) -> bool {
        matches!(
            self.options.detector,
            Detector::Bridge(_) | Detector::Prefix(_)
        )
    }

    fn flags(&self) -> u32 {
        self.options.flags() | self.detection.flags()
    }

    fn serves_node_ports(&self, addr: IpAddr, primary: &[IpAddr]) -> bool {
        self.options.node_ports.accepts(addr, primary) || self.options.localhosts().contains(&addr)
    }
}
