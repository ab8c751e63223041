//! kube-proxy's configuration as its files have it: `kubeproxy.config.k8s.io/v1alpha1`.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::duration::{GoDuration, nanos_or_text};

/// Defaults are kube-proxy's, but for `minSyncPeriod`: kpx has no reason to wait.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct KubeProxyConfiguration {
    pub api_version: String,
    pub kind: String,
    pub feature_gates: BTreeMap<String, bool>,
    pub client_connection: ClientConnection,
    pub logging: Logging,
    pub hostname_override: String,
    pub bind_address: String,
    pub healthz_bind_address: String,
    pub metrics_bind_address: String,
    pub bind_address_hard_fail: bool,
    pub enable_profiling: bool,
    pub show_hidden_metrics_for_version: String,
    pub mode: String,
    pub iptables: Iptables,
    pub ipvs: Ipvs,
    pub nftables: Nftables,
    pub winkernel: Winkernel,
    pub windows_run_as_service: bool,
    pub detect_local_mode: String,
    pub detect_local: DetectLocal,
    #[serde(rename = "clusterCIDR")]
    pub cluster_cidr: String,
    pub node_port_addresses: Vec<String>,
    pub oom_score_adj: i32,
    pub conntrack: Conntrack,
    pub config_sync_period: GoDuration,
    pub port_range: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ClientConnection {
    pub kubeconfig: String,
    pub accept_content_types: String,
    pub content_type: String,
    pub qps: f32,
    pub burst: i32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Logging {
    pub format: String,
    #[serde(deserialize_with = "nanos_or_text")]
    pub flush_frequency: GoDuration,
    pub verbosity: u32,
    pub vmodule: Vec<VmoduleItem>,
    /// Of how each format buffers, which ours do not.
    pub options: BTreeMap<String, Value>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct VmoduleItem {
    pub file_pattern: String,
    pub verbosity: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Iptables {
    pub masquerade_bit: i32,
    pub masquerade_all: bool,
    pub localhost_node_ports: bool,
    pub sync_period: GoDuration,
    pub min_sync_period: GoDuration,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Ipvs {
    pub sync_period: GoDuration,
    pub min_sync_period: GoDuration,
    pub scheduler: String,
    #[serde(rename = "excludeCIDRs")]
    pub exclude_cidrs: Vec<String>,
    #[serde(rename = "strictARP")]
    pub strict_arp: bool,
    pub tcp_timeout: GoDuration,
    pub tcp_fin_timeout: GoDuration,
    pub udp_timeout: GoDuration,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Nftables {
    pub masquerade_bit: i32,
    pub masquerade_all: bool,
    pub sync_period: GoDuration,
    pub min_sync_period: GoDuration,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Winkernel {
    pub network_name: String,
    pub source_vip: String,
    #[serde(rename = "enableDSR")]
    pub enable_dsr: bool,
    pub root_hns_endpoint_name: String,
    pub forward_health_check_vip: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct DetectLocal {
    pub bridge_interface: String,
    pub interface_name_prefix: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Conntrack {
    pub max_per_core: i32,
    pub min: i32,
    pub tcp_established_timeout: GoDuration,
    pub tcp_close_wait_timeout: GoDuration,
    pub tcp_be_liberal: bool,
    pub udp_timeout: GoDuration,
    pub udp_stream_timeout: GoDuration,
}

/// What those of kube-proxy's modes have in common that do what the active one says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Common {
    /// The section of the periods.
    pub section: &'static str,
    pub masquerade_bit: i32,
    pub masquerade_all: bool,
    pub sync_period: GoDuration,
    pub min_sync_period: GoDuration,
}

/// Fields of which a file that says zero, or nothing in quotes, says nothing.
pub(super) const UNSET_WHEN_ZERO: [&str; 15] = [
    "bindAddress",
    "healthzBindAddress",
    "metricsBindAddress",
    "detectLocalMode",
    "iptables.syncPeriod",
    "iptables.minSyncPeriod",
    "ipvs.syncPeriod",
    "nftables.syncPeriod",
    "nftables.minSyncPeriod",
    "configSyncPeriod",
    "clientConnection.contentType",
    "clientConnection.qps",
    "clientConnection.burst",
    "logging.format",
    "logging.flushFrequency",
];

const HEALTHZ_PORT: u16 = 10_256;
const METRICS_PORT: u16 = 10_249;

impl KubeProxyConfiguration {
    pub const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";
    pub const KIND: &str = "KubeProxyConfiguration";

    /// Sets the defaults that hang on other fields.
    pub(super) fn complete(&mut self) {
        let ipv6 = self.bind_address.parse::<IpAddr>().is_ok_and(|addr| addr.is_ipv6());
        let (any, loopback) = if ipv6 { ("::", "::1") } else { ("0.0.0.0", "127.0.0.1") };
        self.healthz_bind_address = with_port(&self.healthz_bind_address, any, HEALTHZ_PORT);
        self.metrics_bind_address = with_port(&self.metrics_bind_address, loopback, METRICS_PORT);
        if self.mode == "nftables" && self.node_port_addresses.is_empty() {
            self.node_port_addresses = vec!["primary".to_owned()];
        }
    }

    pub fn common(&self) -> Common {
        let Iptables { masquerade_bit, masquerade_all, sync_period, min_sync_period, .. } = self.iptables;
        let iptables = Common { section: "iptables", masquerade_bit, masquerade_all, sync_period, min_sync_period };
        match self.mode.as_str() {
            "ipvs" => {
                let Ipvs { sync_period, min_sync_period, .. } = self.ipvs;
                Common { section: "ipvs", sync_period, min_sync_period, ..iptables }
            }
            "nftables" => {
                let Nftables { masquerade_bit, masquerade_all, sync_period, min_sync_period } = self.nftables;
                Common { section: "nftables", masquerade_bit, masquerade_all, sync_period, min_sync_period }
            }
            _ => iptables,
        }
    }
}

/// Fills in what is missing of `IP:port`. Text that is no address is left for whoever validates it.
pub(super) fn with_port(address: &str, default_host: &str, default_port: u16) -> String {
    let (host, port) = match address.strip_prefix(':').map(str::parse) {
        Some(Ok(port)) => (default_host, port),
        _ if address.is_empty() => (default_host, default_port),
        _ => (address, default_port),
    };
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    match bare.parse::<IpAddr>() {
        Ok(host) => SocketAddr::new(host, port).to_string(),
        Err(_) => address.to_owned(),
    }
}

impl Default for KubeProxyConfiguration {
    fn default() -> Self {
        Self {
            api_version: Self::API_VERSION.to_owned(),
            kind: Self::KIND.to_owned(),
            feature_gates: BTreeMap::new(),
            client_connection: ClientConnection::default(),
            logging: Logging::default(),
            hostname_override: String::new(),
            bind_address: "0.0.0.0".to_owned(),
            healthz_bind_address: String::new(),
            metrics_bind_address: String::new(),
            bind_address_hard_fail: false,
            enable_profiling: false,
            show_hidden_metrics_for_version: String::new(),
            mode: String::new(),
            iptables: Iptables::default(),
            ipvs: Ipvs::default(),
            nftables: Nftables::default(),
            winkernel: Winkernel::default(),
            windows_run_as_service: false,
            detect_local_mode: "ClusterCIDR".to_owned(),
            detect_local: DetectLocal::default(),
            cluster_cidr: String::new(),
            node_port_addresses: Vec::new(),
            oom_score_adj: -999,
            conntrack: Conntrack::default(),
            config_sync_period: GoDuration::secs(15 * 60),
            port_range: String::new(),
        }
    }
}

impl Default for ClientConnection {
    fn default() -> Self {
        Self {
            kubeconfig: String::new(),
            accept_content_types: String::new(),
            content_type: "application/vnd.kubernetes.protobuf".to_owned(),
            qps: 5.0,
            burst: 10,
        }
    }
}

impl Default for Logging {
    fn default() -> Self {
        Self {
            format: "text".to_owned(),
            flush_frequency: GoDuration::secs(5),
            verbosity: 0,
            vmodule: Vec::new(),
            options: BTreeMap::new(),
        }
    }
}

const MASQUERADE_BIT: i32 = 14;
const SYNC_PERIOD: GoDuration = GoDuration::secs(30);

impl Default for Iptables {
    fn default() -> Self {
        Self {
            masquerade_bit: MASQUERADE_BIT,
            masquerade_all: false,
            localhost_node_ports: true,
            sync_period: SYNC_PERIOD,
            min_sync_period: GoDuration::ZERO,
        }
    }
}

impl Default for Ipvs {
    fn default() -> Self {
        Self {
            sync_period: SYNC_PERIOD,
            min_sync_period: GoDuration::ZERO,
            scheduler: String::new(),
            exclude_cidrs: Vec::new(),
            strict_arp: false,
            tcp_timeout: GoDuration::ZERO,
            tcp_fin_timeout: GoDuration::ZERO,
            udp_timeout: GoDuration::ZERO,
        }
    }
}

impl Default for Nftables {
    fn default() -> Self {
        Self {
            masquerade_bit: MASQUERADE_BIT,
            masquerade_all: false,
            sync_period: SYNC_PERIOD,
            min_sync_period: GoDuration::ZERO,
        }
    }
}

impl Default for Conntrack {
    fn default() -> Self {
        Self {
            max_per_core: 32 * 1024,
            min: 128 * 1024,
            tcp_established_timeout: GoDuration::secs(24 * 3600),
            tcp_close_wait_timeout: GoDuration::secs(3600),
            tcp_be_liberal: false,
            udp_timeout: GoDuration::ZERO,
            udp_stream_timeout: GoDuration::ZERO,
        }
    }
}
