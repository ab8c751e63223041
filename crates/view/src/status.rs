//! The status that `kpx status` shows. The form is stable.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use proxy_datapath::{LoadedProgram, SocketsStatus};
use proxy_metrics::MapFill;

/// The state of an agent and of its programs.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    pub version: String,
    pub started: Timestamp,
    pub mode: String,
    pub node_name: String,
    pub node_addresses: Vec<IpAddr>,
    /// The agent's network namespace in the kernel's notation, `net:[4026531840]`. Interface
    /// indices in this status belong to it.
    #[serde(default)]
    pub network_namespace: Option<String>,
    pub options: OptionsStatus,
    /// True if the maps match the objects last seen, and every device carries its programs.
    pub healthy: bool,
    /// True if every watch has delivered its first list.
    pub complete: bool,
    /// The watches that bring no changes, because the API server is down or refuses them. `healthy`
    /// stays true: the node is not at fault.
    #[serde(default)]
    pub unheard: Option<UnheardStatus>,
    /// The URL of the API server, without credentials; `None` if the objects come from a folder.
    #[serde(default)]
    pub api_server: Option<String>,
    pub last_sync: Option<Timestamp>,
    /// The number of syncs that changed a map.
    pub syncs: u64,
    pub problems: Vec<ProblemStatus>,
    /// The objects, or parts of objects, that are not served.
    pub skipped: Vec<String>,
    /// The backends that are omitted because this host cannot reach them.
    #[serde(default)]
    pub unreachable: Vec<UnreachableStatus>,
    /// The Services whose backends are all unreachable from this host.
    #[serde(default)]
    pub cut_off: Vec<CutOffStatus>,
    /// The ports whose backends of an address family are all unreachable from this host, while
    /// other parts of the Service are reachable.
    #[serde(default)]
    pub cut_off_ports: Vec<CutOffPortStatus>,
    /// The backends that have recently been unresponsive to this node.
    #[serde(default)]
    pub silent_backends: Vec<SilentStatus>,
    /// Properties of this host that kpx does not obey. They leave the agent healthy.
    #[serde(default)]
    pub notices: Vec<String>,
    pub devices: Vec<DeviceStatus>,
    /// The name server for local processes; `None` if it is off.
    #[serde(default)]
    pub names: Option<NamesStatus>,
    /// The tunnel to pods through the API server; `None` if it is off.
    #[serde(default)]
    pub tunnel: Option<TunnelStatus>,
    /// The state of socket load balancing; `None` if it is off.
    #[serde(default)]
    pub sockets: Option<SocketsStatus>,
    /// The pods of this node by the path of their sockets; `None` if no pods are selected.
    #[serde(default)]
    pub pods: Option<PodsStatus>,
    /// What keeps programs and maps in the kernel while no agent runs: `pins`, `filters` or
    /// `nothing`. `unknown` means pins in a BPF file system that may disappear with the agent's
    /// container.
    #[serde(default)]
    pub kept_by: String,
    /// The tables by family.
    pub tables: BTreeMap<String, TableStatus>,
    pub flows: BTreeMap<String, FlowStatus>,
    /// The counts of translated packets and opened flows.
    pub events: BTreeMap<String, u64>,
    /// The counts of untranslated packets, by reason.
    pub reasons: BTreeMap<String, u64>,
    /// The kernel's ids of the maps, by name. Deprecated: the next release removes them.
    #[serde(default)]
    pub maps: BTreeMap<String, u32>,
    /// The fill of the maps, by name.
    pub map_fill: BTreeMap<String, MapFill>,
    /// The datapath's programs, by name.
    pub programs: BTreeMap<String, LoadedProgram>,
}

/// The objects whose changes the agent misses.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UnheardStatus {
    /// The beginning of the outage.
    pub since: Timestamp,
    /// The kinds of objects: `Service`, `EndpointSlice`.
    pub kinds: Vec<String>,
}

/// A backend that has recently been unresponsive to this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SilentStatus {
    /// The Service as `namespace/name`, and its port.
    pub service: String,
    pub port: u16,
    pub backend: SocketAddr,
    /// True if the backend takes no new connections of this node.
    #[serde(default)]
    pub is_ejected: bool,
    /// The name of `is_ejected` in the previous release.
    #[serde(default)]
    pub is_aside: bool,
}

/// The operator's options, with the values of the flags.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OptionsStatus {
    /// The choice of masquerading: `default` or `compat`.
    pub masquerade: String,
    pub masquerade_all: bool,
    /// The detection of local pods: `none`, or a mode with its argument.
    pub local_pods: String,
    /// The addresses of node ports: `all`, `primary`, or networks.
    pub node_port_addresses: String,
    /// The loopback addresses at which local processes can reach node ports.
    #[serde(default)]
    pub localhost_node_ports: Vec<IpAddr>,
    pub cluster_ip_external: bool,
    /// The default algorithm of Services.
    #[serde(default)]
    pub algorithm: String,
    /// The state of the fast path and its reason: `off`, `on`, `auto: …`.
    #[serde(default)]
    pub fast_path: String,
    /// The sockets with socket load balancing, and the reason if the setting has no effect: `off`,
    /// `host`, `all`, `auto: …`.
    #[serde(default)]
    pub socket_lb: String,
    /// The routes to pods that are used in addition to this host's own: `off`, `default` or
    /// `nodes`. `None` on a node.
    #[serde(default)]
    pub pod_routes: Option<String>,
}

/// The name server for local processes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NamesStatus {
    pub domain: String,
    /// The address of kpx's name server; `None` if it cannot serve.
    pub address: Option<SocketAddr>,
    /// True if systemd-resolved forwards the cluster domain to that address.
    pub asked_by_resolved: bool,
    /// The reason why the name server or systemd-resolved does not serve.
    pub why_not: Option<String>,
}

/// TCP connections to pods through the API server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TunnelStatus {
    /// The listening sockets, for local processes alone.
    pub addresses: Vec<SocketAddr>,
    /// The number of streams that are open.
    pub streams: usize,
    /// The number of opened streams. The number of failed connections follows.
    pub opened: u64,
    pub failed: u64,
    /// The last failure. A later success for the same Service clears it. Any success clears a
    /// failure without a Service, and so does listening on all addresses.
    pub failure: Option<TunnelFailure>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TunnelFailure {
    /// The Service as `namespace/name`, if the connection belonged to a Service.
    pub service: Option<String>,
    pub why: String,
    pub at: Timestamp,
}

/// The pods of this node by the path of their TCP sockets.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodsStatus {
    /// The number of pods with socket load balancing.
    #[serde(default)]
    pub by_sockets: usize,
    /// The old name of `by_sockets`, for one release.
    pub led: usize,
    /// The reason why pods cannot be selected or found.
    pub why_none: Option<String>,
    pub pods: Vec<PodStatus>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodStatus {
    pub namespace: String,
    pub name: String,
    /// The path: `sockets` (socket load balancing), `packets`, or `host` for a pod in the host's
    /// network.
    #[serde(default)]
    pub path: String,
    /// The old form of `path`, for one release: `led` in place of `sockets`.
    pub way: String,
    /// The reason in a word or two, to group pods; empty if there is none.
    pub group: String,
    /// The reason for a path other than `sockets`.
    pub why: Option<String>,
}

impl PodStatus {
    /// Returns the path, also of an older agent that reports only `way`.
    pub fn socket_path(&self) -> &str {
        match (self.path.as_str(), self.way.as_str()) {
            ("", "led") => "sockets",
            ("", way) => way,
            (path, _) => path,
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProblemStatus {
    pub what: String,
    pub why: String,
    pub since: Timestamp,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UnreachableStatus {
    /// The Service as `namespace/name`.
    pub service: String,
    /// The number and protocol of the port: `80/tcp`.
    pub port: String,
    pub backend: SocketAddr,
    pub why: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CutOffStatus {
    /// The Service as `namespace/name`.
    pub service: String,
    pub why: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CutOffPortStatus {
    /// The Service as `namespace/name`.
    pub service: String,
    /// The number and protocol of the port: `80/tcp`.
    pub port: String,
    /// The family of the backends: `IPv4` or `IPv6`.
    pub family: String,
    pub why: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceStatus {
    pub name: String,
    pub ifindex: u32,
    /// The mechanism: `tcx` or `clsact`.
    pub attached_by: String,
    /// The role: `pod`, `device`, `loopback` or `anchor`.
    pub role: String,
    /// The reason why a veth into another network namespace is not a pod's; null for other devices.
    #[serde(default)]
    pub no_pod: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TableStatus {
    pub services: usize,
    pub service_ports: usize,
    pub frontends: usize,
    /// The slots in the sets of service ports: a backend has one slot in each of its sets.
    #[serde(default)]
    pub slots: usize,
    /// The old name of `slots`. Deprecated: the next release removes it.
    pub backends: usize,
}

/// The numbers of flows and entries at the last sweep.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FlowStatus {
    pub flows: usize,
    /// The flows that are neither closed by both sides nor reset.
    #[serde(default)]
    pub open: usize,
    pub entries: usize,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn pods_of_an_older_agent_have_their_path() {
        let pod = |way: &str| json!({ "namespace": "shop", "name": way, "way": way, "group": "", "why": null });
        let pods =
            json!({ "led": 1, "whyNone": null, "pods": [pod("led"), pod("packets"), pod("host")] });
        let pods: PodsStatus = serde_json::from_value(pods).unwrap();
        let paths: Vec<_> = pods.pods.iter().map(PodStatus::socket_path).collect();
        assert_eq!(paths, ["sockets", "packets", "host"]);
    }
}
