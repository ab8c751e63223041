//! What kpx can be told beyond kube-proxy's configuration: `kpx.dev/v1alpha1`.

use serde::{Deserialize, Serialize};

use super::duration::GoDuration;
use crate::choices::RUN_DIR;
use proxy_datapath::BPF_DIR;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct KpxConfiguration {
    pub api_version: String,
    pub kind: String,
    /// The mode: `node` or `host`.
    pub mode: String,
    /// A folder to read objects from, instead of an API server.
    pub manifests: String,
    /// A context of the kubeconfig.
    pub context: String,
    pub master: String,
    #[serde(rename = "nodeIPs")]
    pub node_ips: Vec<String>,
    #[serde(rename = "serviceCIDRs")]
    pub service_cidrs: Vec<String>,
    /// From where ExternalIPs may be; empty: from anywhere; `none` alone: from nowhere.
    #[serde(rename = "externalIPCIDRs")]
    pub external_ip_cidrs: Vec<String>,
    /// The choice of masquerading: `default` or `compat`.
    pub masquerade: String,
    #[serde(rename = "clusterIPExternal")]
    pub cluster_ip_external: bool,
    pub lb_algorithm: String,
    /// `off`, `default` or `nodes`.
    pub pod_routes: String,
    /// `tcx` or `clsact`; empty: what the kernel takes.
    pub attach: String,
    /// `off`, `auto` or `on`.
    pub fast_path: String,
    /// Entries of each family's flow table; 0: by the machine's memory.
    pub flow_table_size: u32,
    /// Entries of each family's tables of frontends and service ports; 0: by the machine's memory.
    pub service_table_size: u32,
    /// Entries of each family's tables of endpoints; 0: by the machine's memory.
    pub endpoint_table_size: u32,
    /// `off`, `host` or `all`.
    #[serde(rename = "socketLB")]
    pub socket_lb: String,
    #[serde(rename = "socketLBUDP")]
    pub socket_lb_udp: bool,
    /// A folder of a cgroup2 file system; empty: its root.
    pub cgroup_root: String,
    /// The longest wait for this node's object.
    pub node_timeout: GoDuration,
    pub run_dir: String,
    /// In a BPF file system.
    pub bpf_dir: String,
    /// The end of the agent is the end of its data path.
    pub cleanup_on_exit: bool,
    pub ui: bool,
    /// The kernel measures the programs.
    pub bpf_stats: bool,
}

impl KpxConfiguration {
    pub const API_VERSION: &str = "kpx.dev/v1alpha1";
    pub const KIND: &str = "KpxConfiguration";
}

impl Default for KpxConfiguration {
    fn default() -> Self {
        Self {
            api_version: Self::API_VERSION.to_owned(),
            kind: Self::KIND.to_owned(),
            mode: "node".to_owned(),
            manifests: String::new(),
            context: String::new(),
            master: String::new(),
            node_ips: Vec::new(),
            service_cidrs: Vec::new(),
            external_ip_cidrs: Vec::new(),
            masquerade: "default".to_owned(),
            cluster_ip_external: true,
            lb_algorithm: "random".to_owned(),
            pod_routes: "off".to_owned(),
            attach: String::new(),
            fast_path: "off".to_owned(),
            flow_table_size: 0,
            service_table_size: 0,
            endpoint_table_size: 0,
            socket_lb: "off".to_owned(),
            socket_lb_udp: false,
            cgroup_root: String::new(),
            node_timeout: GoDuration::secs(300),
            run_dir: RUN_DIR.to_owned(),
            bpf_dir: BPF_DIR.to_owned(),
            cleanup_on_exit: false,
            ui: false,
            bpf_stats: false,
        }
    }
}
