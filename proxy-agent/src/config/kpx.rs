//! What kpx can be told beyond kube-proxy's configuration: `kpx.dev/v1alpha1`.

use serde::{Deserialize, Serialize};

use super::duration::GoDuration;
use crate::run::RUN_DIR;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct KpxConfiguration {
    pub api_version: String,
    pub kind: String,
    /// `node` or `host`.
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
    /// `default` or `compat`.
    pub masquerade: String,
    #[serde(rename = "clusterIPExternal")]
    pub cluster_ip_external: bool,
    pub lb_algorithm: String,
    /// `off`, `default` or `nodes`.
    pub pod_routes: String,
    /// `tcx` or `clsact`; empty: what the kernel takes.
    pub attach: String,
    /// Entries of each family's flow table; 0: as built.
    pub flow_table_size: u32,
    /// How long to wait for this node's object before giving up.
    pub node_timeout: GoDuration,
    pub run_dir: String,
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
            masquerade: "default".to_owned(),
            cluster_ip_external: false,
            lb_algorithm: "random".to_owned(),
            pod_routes: "off".to_owned(),
            attach: String::new(),
            flow_table_size: 0,
            node_timeout: GoDuration::secs(300),
            run_dir: RUN_DIR.to_owned(),
            ui: false,
            bpf_stats: false,
        }
    }
}
