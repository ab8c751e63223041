//! The settings of `kpx run` that a check goes by. The agent has the flags and their meaning, and
//! hands them in.

use std::net::SocketAddr;

use anyhow::Result;
use ipnet::IpNet;
use proxy_source::{Source, kubernetes};
use proxy_view::Mode;

/// The flags of `kpx run` that a check takes as well.
pub trait RunFlags: clap::Args {
    /// Returns what a run with these flags would do. Errors name the flag.
    fn setting(&self) -> Result<Setting>;
}

/// The settings of a run, as far as a check needs them.
#[derive(Clone, Debug)]
pub struct Setting {
    pub mode: Mode,
    pub source: Source,
    /// The address at which names are served; None if they are not.
    pub names: Option<SocketAddr>,
    pub cluster_domain: String,
    /// True if connections go through the API server to pods out of reach.
    pub has_tunnel: bool,
    /// The operator's ranges of ClusterIPs; empty if the cluster's count.
    pub service_cidrs: Vec<IpNet>,
    /// The networks of the cluster's pods; empty if the operator has not told them.
    pub pod_networks: Vec<IpNet>,
}

impl Setting {
    /// Returns the way to the API server; None for a folder of manifests.
    pub(crate) fn api_server(&self) -> Option<&kubernetes::Options> {
        match &self.source {
            Source::Kubernetes(options) => Some(options),
            Source::Manifests(_) => None,
        }
    }

    /// Returns the way to the API server, if the operator has named one.
    pub(crate) fn named_api_server(&self) -> Option<&kubernetes::Options> {
        let is_named = |options: &&kubernetes::Options| {
            options.kubeconfig.is_some() || options.context.is_some() || options.master.is_some()
        };
        self.api_server().filter(is_named)
    }
}
