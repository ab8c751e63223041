//! All that an operator decides, resolved: flags, files and defaults become this, and nothing else reads them.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

pub use crate::choices::{Mode, PodRoutes, SocketLb};
pub use crate::conntrack::sysctl::Conntrack;
use crate::files::Files;
use crate::node::NodeOptions;
use proxy_core::model::ModelOptions;
use proxy_datapath::{Mechanism, Sizes, SocketOptions};
use proxy_source::Source;

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
