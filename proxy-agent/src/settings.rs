//! The settings, resolved from flags, files and defaults. The rest of the agent reads only these.

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
    /// `None`: TCX if the kernel supports it, otherwise clsact.
    pub attach: Option<Mechanism>,
    /// The directory of the agent's socket.
    pub run_dir: PathBuf,
    /// The id of the group that may connect to the socket; `None`: root alone.
    pub socket_group: Option<u32>,
    /// The directory in which maps and links outlive the agent.
    pub bpf_dir: PathBuf,
    /// True if the agent removes everything from this host when it ends.
    pub cleanup_on_exit: bool,
    /// The address of `/healthz` and `/livez`; `None` disables them.
    pub healthz_address: Option<SocketAddr>,
    /// The address of `/metrics` and related paths; `None` disables them.
    pub metrics_address: Option<SocketAddr>,
    /// True if a failure to listen ends the agent.
    pub bind_address_hard_fail: bool,
    /// True if the metrics address serves `/ui/`.
    pub ui: bool,
    /// The maximum number of Service ports with series in `/metrics`.
    pub service_metrics: usize,
    /// The numbers of decisions, and of drops and rejections, that the monitor keeps.
    pub monitor_history: usize,
    /// True if the kernel measures the programs' runs and run times.
    pub bpf_stats: bool,
    /// The period after which refused writes are retried. The node is unhealthy once a request has
    /// waited for twice the period.
    pub sync_period: Duration,
    pub min_sync_period: Duration,
    pub conntrack: Conntrack,
    /// The maximum wait for the Node object.
    pub node_timeout: Duration,
    /// The OOM score of this process; `None` leaves it unchanged.
    pub oom_score_adj: Option<i32>,
    /// The response of `/configz`.
    pub configz: serde_json::Value,
    /// The sizes of the maps; an unset size depends on this machine's memory.
    pub sizes: Sizes,
    /// Socket load balancing; `None` disables it.
    pub sockets: Option<SocketOptions>,
    /// The DNS server; `None` disables it.
    pub names: Option<NamesOptions>,
    /// The API server for TCP connections to unreachable pods; `None` disables the tunnel.
    pub tunnel: Option<kubernetes::Options>,
    /// The cgroup below which sockets are translated; `None`: all.
    pub cgroup_root: Option<PathBuf>,
    /// The networks of IPVS virtual servers that are not kube-proxy's.
    pub ipvs_excluded: Vec<IpNet>,
    /// The files from which the settings were read.
    pub files: Files,
}
