//! The mode of a host, a flag of the agent and of `kpx check`.

use std::fmt;

/// The role of this host in the cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// A node of the cluster: kpx takes the place of kube-proxy.
    #[default]
    Node,
    /// A host outside the cluster: kpx makes ClusterIPs reachable from it.
    Host,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Node => "node",
            Self::Host => "host",
        })
    }
}
