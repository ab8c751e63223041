//! All that an operator decides, resolved: flags, files and defaults become this, and nothing else reads them.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::config::Files;
use crate::datapath::{Mechanism, Sizes, SocketOptions};
use crate::model::ModelOptions;
use crate::node::NodeOptions;
use crate::source::Source;

#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// As the API spells it.
    pub node_name: String,
    pub mode: Mode,
    pub source: Source,
    pub node: NodeOptions,
    pub model: ModelOptions,
    /// None: TCX where the kernel takes it, else clsact.
    pub attach: Option<Mechanism>,
    /// Where the agent answers those who ask it from the same machine.
    pub run_dir: PathBuf,
    /// Where maps and links outlive the agent.
    pub bpf_dir: PathBuf,
    /// At its end the agent takes everything off this host.
    pub cleanup_on_exit: bool,
    /// `/healthz` and `/livez`; None disables them.
    pub healthz_address: Option<SocketAddr>,
    /// `/metrics` and its neighbours; None disables them.
    pub metrics_address: Option<SocketAddr>,
    /// A listener that cannot be had ends the agent.
    pub bind_address_hard_fail: bool,
    /// Serve the web page beside `/metrics`.
    pub ui: bool,
    /// Let the kernel measure how often and how long the programs run.
    pub bpf_stats: bool,
    /// What is not in force after twice this long makes the node unhealthy; what the kernel refused is tried again.
    pub sync_period: Duration,
    /// At most one sync in this time.
    pub min_sync_period: Duration,
    pub conntrack: Conntrack,
    /// How long to wait for this node's object before giving up.
    pub node_timeout: Duration,
    /// Of this process; None leaves it.
    pub oom_score_adj: Option<i32>,
    /// What `/configz` answers.
    pub configz: serde_json::Value,
    /// Room in the maps; what is not said is up to this machine.
    pub sizes: Sizes,
    /// Whether sockets that dial services are led to backends.
    pub sockets: Option<SocketOptions>,
    /// Below which sockets are served; None: all.
    pub cgroup_root: Option<PathBuf>,
    /// What all this was read from.
    pub files: Files,
}

/// What this host is to the cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Mode {
    /// One of its nodes: takes the place of kube-proxy.
    #[default]
    Node,
    /// None of its nodes: ClusterIPs become reachable from it.
    Host,
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

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Node => "node",
            Self::Host => "host",
        })
    }
}

/// The kernel's connection tracking, which still sees every flow, translated. Unset means leave it as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Conntrack {
    pub max_per_core: Option<u32>,
    pub min: Option<u32>,
    pub tcp_established_timeout: Option<Duration>,
    pub tcp_close_wait_timeout: Option<Duration>,
    pub tcp_be_liberal: bool,
    pub udp_timeout: Option<Duration>,
    pub udp_stream_timeout: Option<Duration>,
}
