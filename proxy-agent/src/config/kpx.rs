//! kpx's settings beyond kube-proxy's configuration: `kpx.dev/v1alpha1`.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::choice::{self, BackendHealth, Forwarding, LbAlgorithm};
use super::invalid::Fields;
use crate::choices::{Mode, PodRoutes, SocketLb, Tunnel};
use crate::config::duration::GoDuration;
use crate::config::kube_version::KubeVersion;
use crate::node::{FastPath, Masquerade};
use proxy_datapath::{BPF_DIR, Mechanism, SocketOptions};
use proxy_source::kubernetes::without_credentials;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct KpxConfiguration {
    pub api_version: String,
    pub kind: String,
    #[serde(with = "choice")]
    pub mode: Mode,
    /// A directory to read objects from, instead of an API server.
    pub manifests: String,
    pub context: String,
    pub master: String,
    #[serde(rename = "nodeIPs")]
    pub node_ips: Vec<String>,
    #[serde(rename = "serviceCIDRs")]
    pub service_cidrs: Vec<String>,
    /// The networks that may contain ExternalIPs. Empty: any network. `none` alone: no network.
    #[serde(rename = "externalIPCIDRs")]
    pub external_ip_cidrs: Vec<String>,
    #[serde(with = "choice")]
    pub masquerade: Masquerade,
    #[serde(rename = "clusterIPExternal")]
    pub cluster_ip_external: bool,
    #[serde(with = "choice")]
    pub lb_algorithm: LbAlgorithm,
    #[serde(with = "choice")]
    pub backend_health: BackendHealth,
    /// The way of external clients to backends on other nodes.
    #[serde(with = "choice")]
    pub external_forwarding: Forwarding,
    #[serde(with = "choice")]
    pub pod_routes: PodRoutes,
    #[serde(with = "choice")]
    pub tunnel: Tunnel,
    /// An address and a port, or `none`. Empty: `127.0.0.153:53` in host mode, else `none`.
    pub dns_address: String,
    pub cluster_domain: String,
    /// Empty: the best mechanism of the kernel.
    #[serde(with = "choice::or_empty")]
    pub attach: Option<Mechanism>,
    #[serde(with = "choice")]
    pub fast_path: FastPath,
    /// The entries of each family's flow table; 0: derived from the machine's memory.
    pub flow_table_size: u32,
    /// The entries of each family's tables of frontends and service ports; 0: derived from the
    /// machine's memory.
    pub service_table_size: u32,
    /// The entries of each family's tables of endpoints; 0: derived from the machine's memory.
    pub endpoint_table_size: u32,
    #[serde(rename = "socketLB", with = "choice")]
    pub socket_lb: SocketLb,
    #[serde(rename = "socketLBUDP")]
    pub socket_lb_udp: bool,
    /// A directory of a cgroup2 file system; empty: its root.
    pub cgroup_root: String,
    /// Enables local redirects for Services that request them.
    pub local_redirect: bool,
    /// The networks of addresses that LocalRedirects may redirect, besides Services' addresses.
    pub local_redirect_addresses: Vec<String>,
    /// The cluster's Kubernetes version: some of kube-proxy's defaults depend on it.
    pub kubernetes_version: String,
    /// The maximum wait for the Node object.
    pub node_timeout: GoDuration,
    pub run_dir: String,
    /// The group that may connect to the agent's socket; empty: root alone.
    pub socket_group: String,
    /// A directory in a BPF file system.
    pub bpf_dir: String,
    /// True if the agent removes everything from this host when it ends.
    pub cleanup_on_exit: bool,
    pub ui: bool,
    /// The maximum number of Service ports with series in `/metrics`.
    pub service_metrics: u32,
    /// The numbers of decisions, and of drops and rejections, for `kpx monitor --since`.
    pub monitor_history: u32,
    /// Enables the kernel's statistics of the programs.
    pub bpf_stats: bool,
}

impl KpxConfiguration {
    pub const API_VERSION: &str = "kpx.dev/v1alpha1";
    pub const KIND: &str = "KpxConfiguration";

    /// Returns the version in use: the default if the configured version is invalid.
    pub(super) fn version(&self) -> KubeVersion {
        self.kubernetes_version
            .parse()
            .unwrap_or(KubeVersion::DEFAULT)
    }

    /// Returns the fields without secrets: a URL may contain a password.
    pub(super) fn without_secrets(&self) -> Value {
        let mut fields = json!(self);
        if !self.master.is_empty() {
            let url = self
                .master
                .parse()
                .ok()
                .filter(|url: &http::Uri| url.scheme().is_some());
            let shown = url.map(|url| without_credentials(&url).trim_end_matches('/').to_owned());
            fields["master"] = shown.unwrap_or("not shown: no URL".to_owned()).into();
        }
        fields
    }

    /// Returns the options of socket load balancing; `None` if disabled. `masquerades` is set if
    /// masquerading depends on clients' addresses, which only packets have.
    pub(super) fn sockets(&self, masquerades: bool, own: &mut Fields) -> Option<SocketOptions> {
        // An invalid scope is already reported, and decides nothing about the other fields.
        if own.has_refused("socketLB") {
            return None;
        }
        let is_on = match self.socket_lb {
            SocketLb::Off => false,
            // A host outside the cluster is somebody's machine: its owner must enable translation
            // of all sockets.
            SocketLb::Auto => self.mode == Mode::Node,
            SocketLb::Host | SocketLb::All => true,
        };
        let why = if self.socket_lb == SocketLb::Off {
            "is not for socketLB off"
        } else {
            "needs socketLB host or all in host mode"
        };
        own.check(
            is_on || !self.socket_lb_udp,
            "socketLBUDP",
            self.socket_lb_udp,
            why,
        );
        own.check(
            is_on || self.cgroup_root.is_empty(),
            "cgroupRoot",
            &self.cgroup_root,
            why,
        );
        let is_path = self.cgroup_root.is_empty() || self.cgroup_root.starts_with('/');
        own.check(
            is_path,
            "cgroupRoot",
            &self.cgroup_root,
            "must be the full path of a folder",
        );
        is_on.then_some(SocketOptions {
            everywhere: self.socket_lb == SocketLb::All,
            // A directory of manifests has no Pods.
            pods: self.socket_lb == SocketLb::Auto && self.manifests.is_empty() && !masquerades,
            udp: self.socket_lb_udp,
            is_optional: self.socket_lb == SocketLb::Auto,
        })
    }
}

impl Default for KpxConfiguration {
    fn default() -> Self {
        Self {
            api_version: Self::API_VERSION.to_owned(),
            kind: Self::KIND.to_owned(),
            mode: Mode::default(),
            manifests: String::new(),
            context: String::new(),
            master: String::new(),
            node_ips: Vec::new(),
            service_cidrs: Vec::new(),
            external_ip_cidrs: Vec::new(),
            masquerade: Masquerade::default(),
            cluster_ip_external: true,
            lb_algorithm: LbAlgorithm::default(),
            backend_health: BackendHealth::default(),
            external_forwarding: Forwarding::default(),
            pod_routes: PodRoutes::default(),
            tunnel: Tunnel::default(),
            dns_address: String::new(),
            cluster_domain: "cluster.local".to_owned(),
            attach: None,
            fast_path: FastPath::default(),
            flow_table_size: 0,
            service_table_size: 0,
            endpoint_table_size: 0,
            socket_lb: SocketLb::default(),
            socket_lb_udp: false,
            cgroup_root: String::new(),
            local_redirect: false,
            local_redirect_addresses: Vec::new(),
            kubernetes_version: KubeVersion::DEFAULT.to_string(),
            node_timeout: GoDuration::secs(300),
            run_dir: proxy_view::RUN_DIR.to_owned(),
            socket_group: String::new(),
            bpf_dir: BPF_DIR.to_owned(),
            cleanup_on_exit: false,
            ui: false,
            service_metrics: 0,
            monitor_history: 0,
            bpf_stats: false,
        }
    }
}
