//! The settings of `kpx run` that `kpx check` uses, from flags and files.

use anyhow::Result;
use proxy_check::{RunFlags, Setting};

use super::Configuration;
use super::flags::CheckFlags;
use crate::node::detect::Detector;
use crate::settings::Tunnel;

impl RunFlags for CheckFlags {
    fn setting(&self) -> Result<Setting> {
        let configuration = Configuration::load_values(&self.0)?;
        let Configuration { kpx, checked, .. } = &configuration;
        Ok(Setting {
            mode: kpx.mode,
            source: configuration.source(false),
            names: checked.names.as_ref().map(|names| names.address),
            cluster_domain: kpx.cluster_domain.clone(),
            has_tunnel: kpx.tunnel == Tunnel::Tcp,
            service_cidrs: checked.node.service_cidrs.clone(),
            pod_networks: match &checked.node.detector {
                Detector::ClusterCidr(nets) => nets.clone(),
                _ => Vec::new(),
            },
        })
    }
}
