//! The configuration file of kube-proxy: `kubeproxy.config.k8s.io/v1alpha1`.

mod defaults;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::config::duration::{GoDuration, nanos_or_text};
use crate::config::kube_version::KubeVersion;
use crate::config::node_ports::NodePortAddresses;

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
    /// Set if the configuration names a mode.
    #[serde(skip)]
    pub(super) mode_is_given: bool,
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
    /// The options of each format's buffers; kpx's log has no such buffers.
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

/// The fields that kube-proxy's modes have in common, from the active mode's section.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Common {
    /// The section that holds the periods.
    pub section: &'static str,
    pub masquerade_bit: i32,
    pub masquerade_all: bool,
    pub sync_period: GoDuration,
    pub min_sync_period: GoDuration,
}

/// The fields that count as unset if a file sets them to zero or to an empty text.
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

/// The default mode of newer versions.
pub(super) const NFTABLES: &str = "nftables";

const HEALTHZ_PORT: u16 = 10_256;
const METRICS_PORT: u16 = 10_249;

impl KubeProxyConfiguration {
    pub const API_VERSION: &str = "kubeproxy.config.k8s.io/v1alpha1";
    pub const KIND: &str = "KubeProxyConfiguration";

    /// Sets the defaults that depend on other fields and on the version.
    pub(super) fn complete(&mut self, version: KubeVersion) {
        self.mode_is_given = !self.mode.is_empty();
        // An empty mode has always meant iptables.
        if !self.mode_is_given && version.default_mode() == NFTABLES {
            self.mode = NFTABLES.to_owned();
        }
        let ipv6 = self
            .bind_address
            .parse::<IpAddr>()
            .is_ok_and(|addr| addr.is_ipv6());
        let (any, loopback) = if ipv6 {
            ("::", "::1")
        } else {
            ("0.0.0.0", "127.0.0.1")
        };
        self.healthz_bind_address = with_port(&self.healthz_bind_address, any, HEALTHZ_PORT);
        self.metrics_bind_address = with_port(&self.metrics_bind_address, loopback, METRICS_PORT);
        if self.mode == NFTABLES && self.node_port_addresses.is_empty() {
            self.node_port_addresses = vec![NodePortAddresses::PRIMARY.to_owned()];
        }
    }

    pub fn common(&self) -> Common {
        let Iptables {
            masquerade_bit,
            masquerade_all,
            sync_period,
            min_sync_period,
            ..
        } = self.iptables;
        let iptables = Common {
            section: "iptables",
            masquerade_bit,
            masquerade_all,
            sync_period,
            min_sync_period,
        };
        match self.mode.as_str() {
            "ipvs" => {
                let Ipvs {
                    sync_period,
                    min_sync_period,
                    ..
                } = self.ipvs;
                Common {
                    section: "ipvs",
                    sync_period,
                    min_sync_period,
                    ..iptables
                }
            }
            NFTABLES => {
                let Nftables {
                    masquerade_bit,
                    masquerade_all,
                    sync_period,
                    min_sync_period,
                } = self.nftables;
                Common {
                    section: "nftables",
                    masquerade_bit,
                    masquerade_all,
                    sync_period,
                    min_sync_period,
                }
            }
            _ => iptables,
        }
    }
}

/// Completes an address to `IP:port`. Leaves a text that is not an address for validation.
pub(super) fn with_port(address: &str, default_host: &str, default_port: u16) -> String {
    let (host, port) = match address.strip_prefix(':').map(str::parse) {
        Some(Ok(port)) => (default_host, port),
        _ if address.is_empty() => (default_host, default_port),
        _ => (address, default_port),
    };
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host);
    match bare.parse::<IpAddr>() {
        Ok(host) => SocketAddr::new(host, port).to_string(),
        Err(_) => address.to_owned(),
    }
}
