//! The settings of `kpx run` that a check depends on. proxy-agent implements the trait for its
//! flags.

use std::net::SocketAddr;

use anyhow::Result;
use ipnet::IpNet;
use proxy_source::{Source, kubernetes};
use proxy_view::Mode;

/// The flags of `kpx run` that a check accepts too.
pub trait RunFlags: clap::Args {
    /// Returns the settings of a run with these flags. Errors name the flag.
    fn setting(&self) -> Result<Setting>;
}

/// The settings of a run that a check needs.
#[derive(Clone, Debug)]
pub struct Setting {
    pub mode: Mode,
    pub source: Source,
    /// The address of the name server; `None` if it is off.
    pub names: Option<SocketAddr>,
    pub cluster_domain: String,
    /// True if the tunnel through the API server is on.
    pub has_tunnel: bool,
    /// The operator's ClusterIP ranges; empty to use the cluster's ranges.
    pub service_cidrs: Vec<IpNet>,
    /// The networks of the cluster's pods; empty if not configured.
    pub pod_networks: Vec<IpNet>,
}

impl Setting {
    /// Returns the access to the API server; `None` for a folder of manifests.
    pub(crate) fn api_server(&self) -> Option<&kubernetes::Options> {
        match &self.source {
            Source::Kubernetes(options) => Some(options),
            Source::Manifests(_) => None,
        }
    }

    /// Returns the access to the API server, if the operator configured it.
    pub(crate) fn named_api_server(&self) -> Option<&kubernetes::Options> {
        let is_named = |options: &&kubernetes::Options| {
            options.kubeconfig.is_some() || options.context.is_some() || options.master.is_some()
        };
        self.api_server().filter(is_named)
    }
}
