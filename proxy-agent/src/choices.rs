//! The choices among few that an operator has, as flags and files spell them, and the default that they share.

use std::fmt;

/// Where the agent answers `kpx status`.
pub(crate) const RUN_DIR: &str = "/run/kpx";

/// What this host is to the cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// One of its nodes: takes the place of kube-proxy.
    #[default]
    Node,
    /// None of its nodes: ClusterIPs become reachable from it.
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

/// How a host that is no node finds pods, beside the routes that it has for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum PodRoutes {
    /// Not at all: the default route does not count.
    #[default]
    Off,
    /// By the default route: its gateway knows where pods are.
    Default,
    /// By routes of ours through the pods' nodes, as far as these are the host's neighbours.
    Nodes,
}

/// Which sockets that dial services are led to backends before they send anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum SocketLb {
    /// None: their packets are.
    #[default]
    Off,
    /// Those of the host's own network namespace.
    Host,
    /// Those of pods as well.
    All,
}
