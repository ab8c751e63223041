//! The settings that flags, files and defaults resolve to; the rest of the agent reads only these.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;

pub use crate::choices::{Mode, PodRoutes, SocketLb, Tunnel};
pub use crate::conntrack::sysctl::Conntrack;
use crate::files::Files;
use crate::names::NamesOptions;
use crate::node::NodeOptions;
use proxy_core::model::ModelOptions;
use proxy_datapath::{Mechanism, Sizes, SocketOptions};
use proxy_source::{Source, kubernetes};

#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The node's name as the API spells it.
    pub node_name: String,
    pub mode: Mode,
    pub source: Source,
    pub node: NodeOptions,
    pub model: ModelOptions,
    /// The mechanism; None means TCX if the kernel supports it, else clsact.
    pub attach: Option<Mechanism>,
    /// The folder of the socket on which the agent answers other processes of this machine.
    pub run_dir: PathBuf,
    /// The number of the group whose members may connect to that socket; None for root alone.
    pub socket_group: Option<u32>,
    /// The folder in which maps and links outlive the agent.
    pub bpf_dir: PathBuf,
    /// True if the agent removes everything from this host when it ends.
    pub cleanup_on_exit: bool,
    /// The address of `/healthz` and `/livez`; None disables them.
    pub healthz_address: Option<SocketAddr>,
    /// The address of `/metrics` and its neighbours; None disables them.
    pub metrics_address: Option<SocketAddr>,
    /// True if a failure to listen ends the agent.
    pub bind_address_hard_fail: bool,
    /// True if the web page is served beside `/metrics`.
    pub ui: bool,
    /// The number of Services with series of their own in `/metrics`.
    pub service_metrics: usize,
    /// The number of decisions, and of refusals, that the monitor keeps.
    pub monitor_history: usize,
    /// True if the kernel measures how often and how long the programs run.
    pub bpf_stats: bool,
    /// The period after which refused writes are tried again. A request that is not in force after
    /// twice the period makes the node unhealthy.
    pub sync_period: Duration,
    /// The minimal time between two syncs.
    pub min_sync_period: Duration,
    pub conntrack: Conntrack,
    /// The longest wait for this node's object.
    pub node_timeout: Duration,
    /// The OOM score of this process; None leaves it unchanged.
    pub oom_score_adj: Option<i32>,
    /// The answer of `/configz`.
    pub configz: serde_json::Value,
    /// The sizes of the maps; an unset size depends on this machine.
    pub sizes: Sizes,
    /// The options of socket load balancing; None turns it off.
    pub sockets: Option<SocketOptions>,
    /// The place where the cluster's names are served; None if they are not.
    pub names: Option<NamesOptions>,
    /// The API server through which TCP connections reach pods out of reach; None if they do not.
    pub tunnel: Option<kubernetes::Options>,
    /// The cgroup below which sockets are translated; None means all.
    pub cgroup_root: Option<PathBuf>,
    /// The networks whose virtual servers of IPVS are not kube-proxy's.
    pub ipvs_excluded: Vec<IpNet>,
    /// The files that the settings were read from.
    pub files: Files,
}
