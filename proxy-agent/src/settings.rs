//! The settings that flags, files and defaults resolve to. The rest of the agent reads only these.

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
    /// None: TCX if the kernel supports it, else clsact.
    pub attach: Option<Mechanism>,
    /// The folder of the socket for other processes of this machine.
    pub run_dir: PathBuf,
    /// The id of the group that may connect to that socket; None: root alone.
    pub socket_group: Option<u32>,
    /// The folder in which maps and links outlive the agent.
    pub bpf_dir: PathBuf,
    /// Set if the agent removes everything from this host at its end.
    pub cleanup_on_exit: bool,
    /// The address of `/healthz` and `/livez`; None disables them.
    pub healthz_address: Option<SocketAddr>,
    /// The address of `/metrics` and the other paths there; None disables them.
    pub metrics_address: Option<SocketAddr>,
    /// Set if a failure to listen ends the agent.
    pub bind_address_hard_fail: bool,
    /// Set if `/ui/` is served at the metrics address.
    pub ui: bool,
    /// The number of Service ports with series of their own in `/metrics`.
    pub service_metrics: usize,
    /// The number of decisions, and of refusals, that the monitor keeps.
    pub monitor_history: usize,
    /// Set if the kernel measures the programs' runs and run times.
    pub bpf_stats: bool,
    /// The period after which refused writes are retried. The node is unhealthy once a request
    /// waits for twice the period.
    pub sync_period: Duration,
    /// The shortest time between two syncs.
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
    /// Socket load balancing; None turns it off.
    pub sockets: Option<SocketOptions>,
    /// The server of the cluster's names; None turns it off.
    pub names: Option<NamesOptions>,
    /// The API server for TCP connections to unreachable pods; None turns the tunnel off.
    pub tunnel: Option<kubernetes::Options>,
    /// The cgroup below which sockets are translated; None: all.
    pub cgroup_root: Option<PathBuf>,
    /// The networks of IPVS virtual servers that are not kube-proxy's.
    pub ipvs_excluded: Vec<IpNet>,
    /// The files that the settings were read from.
    pub files: Files,
}
