//! The status that `kpx status` shows. The form is stable: fields may be added, and no field is
//! renamed or removed.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use proxy_datapath::{LoadedProgram, SocketsStatus};
use proxy_metrics::MapFill;

/// The state of an agent and of the programs that it loaded.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    pub version: String,
    /// The time when the agent started.
    pub started: Timestamp,
    /// The mode: `node` or `host`.
    pub mode: String,
    pub node_name: String,
    pub node_addresses: Vec<IpAddr>,
    /// The agent's network namespace by the kernel's name for it: `net:[4026531840]`. Interface
    /// indices are valid there.
    #[serde(default)]
    pub network_namespace: Option<String>,
    pub options: OptionsStatus,
    /// True if the maps match the objects last seen, and every device carries its programs.
    pub healthy: bool,
    /// True if every watch has delivered its first list.
    pub complete: bool,
    /// What the agent does not hear of, while the API server is away or refuses a watch. Not a
    /// fault of the node: `healthy` stays true.
    #[serde(default)]
    pub unheard: Option<UnheardStatus>,
    /// The URL of the API server, without credentials; None if the objects come from a folder.
    #[serde(default)]
    pub api_server: Option<String>,
    pub last_sync: Option<Timestamp>,
    /// The number of syncs that changed a map.
    pub syncs: u64,
    pub problems: Vec<ProblemStatus>,
    /// The objects, or parts of them, that could not be used.
    pub skipped: Vec<String>,
    /// The backends that are left out because this host, which is not a node, cannot reach them.
    #[serde(default)]
    pub unreachable: Vec<UnreachableStatus>,
    /// The Services that have backends, and none that this host reaches.
    #[serde(default)]
    pub cut_off: Vec<CutOffStatus>,
    /// The ports that have backends of a family, and none that this host reaches, where it reaches
    /// another part of the Service.
    #[serde(default)]
    pub cut_off_ports: Vec<CutOffPortStatus>,
    /// The backends that have given no answer on this node of late.
    #[serde(default)]
    pub silent_backends: Vec<SilentStatus>,
    /// The properties of this host that kpx does not obey. The agent stays healthy.
    #[serde(default)]
    pub notices: Vec<String>,
    pub devices: Vec<DeviceStatus>,
    /// The cluster's names for programs of this machine; None if they are not served.
    #[serde(default)]
    pub names: Option<NamesStatus>,
    /// The way to pods through the API server; None if it is off.
    #[serde(default)]
    pub tunnel: Option<TunnelStatus>,
    /// The state of socket load balancing; None if it is off.
    #[serde(default)]
    pub sockets: Option<SocketsStatus>,
    /// The pods of this node, and the way of their sockets; None if no pods are chosen.
    #[serde(default)]
    pub pods: Option<PodsStatus>,
    /// The place that keeps programs and maps in the kernel while no agent runs: `pins`, `filters`
    /// or `nothing`. `unknown` is pins in a BPF file system that may go with the agent's container.
    #[serde(default)]
    pub kept_by: String,
    /// The tables by family.
    pub tables: BTreeMap<String, TableStatus>,
    pub flows: BTreeMap<String, FlowStatus>,
    /// The counts of translated packets and opened flows.
    pub events: BTreeMap<String, u64>,
    /// The counts of packets that were not translated, by reason.
    pub reasons: BTreeMap<String, u64>,
    /// The kernel's ids of the datapath's maps, by name. Goes with the next release: an id is of no
    /// use beyond the agent.
    #[serde(default)]
    pub maps: BTreeMap<String, u32>,
    /// The fill of the maps, by name.
    pub map_fill: BTreeMap<String, MapFill>,
    /// The datapath's programs, by name.
    pub programs: BTreeMap<String, LoadedProgram>,
}

/// The changes that do not reach the agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UnheardStatus {
    /// The time since which.
    pub since: Timestamp,
    /// The kinds of objects: `Service`, `EndpointSlice`.
    pub kinds: Vec<String>,
}

/// A backend that has given no answer on this node of late.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SilentStatus {
    /// The Service as `namespace/name`, and its port.
    pub service: String,
    pub port: u16,
    pub backend: SocketAddr,
    /// True if the backend takes no new connections of this node.
    pub is_ejected: bool,
}

/// The operator's options, in the words of the flags.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OptionsStatus {
    /// The choice of masquerading: `default` or `compat`.
    pub masquerade: String,
    pub masquerade_all: bool,
    /// The detection of local pods: `none`, or a mode and its argument.
    pub local_pods: String,
    /// The addresses of node ports: `all`, `primary`, or networks.
    pub node_port_addresses: String,
    /// The loopback addresses at which programs of this host reach node ports.
    #[serde(default)]
    pub localhost_node_ports: Vec<IpAddr>,
    pub cluster_ip_external: bool,
    /// The algorithm of Services that ask for none.
    #[serde(default)]
    pub algorithm: String,
    /// The state of the fast path, by which packets of open connections skip the stack, and its
    /// reason: `off`, `on`, `auto: …`.
    #[serde(default)]
    pub fast_path: String,
    /// The sockets that get a backend before they send a packet, and why if that is not what was
    /// asked for: `off`, `host`, `all`, `auto: …`.
    #[serde(default)]
    pub socket_lb: String,
    /// The routes that count for pods, beside this host's own: `off`, `default` or `nodes`. None on
    /// a node.
    #[serde(default)]
    pub pod_routes: Option<String>,
}

/// The cluster's names, as programs of this machine ask for them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NamesStatus {
    pub domain: String,
    /// The address at which kpx answers; None if it cannot.
    pub address: Option<SocketAddr>,
    /// True if systemd-resolved asks there for names of the domain.
    pub asked_by_resolved: bool,
    /// What keeps kpx from answering, or systemd-resolved from asking.
    pub why_not: Option<String>,
}

/// The way of TCP connections to pods through the API server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TunnelStatus {
    /// The sockets at which it begins, for this machine's programs alone.
    pub addresses: Vec<SocketAddr>,
    /// The number of streams that are open.
    pub streams: usize,
    /// The numbers of streams that were opened, and of connections that failed.
    pub opened: u64,
    pub failed: u64,
    /// The last failure, until a connection to the same Service ends well. One of no Service lasts
    /// until any does, or until the sockets' addresses stand.
    pub failure: Option<TunnelFailure>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TunnelFailure {
    /// The Service as `namespace/name`, if the connection was for one.
    pub service: Option<String>,
    pub why: String,
    pub at: Timestamp,
}

/// The pods of this node by the way of their TCP sockets.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodsStatus {
    /// The number of pods whose sockets get a backend at `connect`.
    pub led: usize,
    /// What keeps kpx from choosing pods, or from finding them.
    pub why_none: Option<String>,
    pub pods: Vec<PodStatus>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodStatus {
    pub namespace: String,
    pub name: String,
    /// The way: `led`, `packets`, or `host` for a pod on the host's network.
    pub way: String,
    /// The reason in a word or two, which other pods share; empty if there is none.
    pub group: String,
    /// The reason for another way than `led`.
    pub why: Option<String>,
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
    /// The reason why a veth into another network namespace does not count as a pod's; null for
    /// other devices.
    #[serde(default)]
    pub no_pod: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TableStatus {
    pub services: usize,
    pub service_ports: usize,
    pub frontends: usize,
    /// The places of backends in the sets of service ports: a backend has one in each set that it
    /// is in.
    #[serde(default)]
    pub slots: usize,
    /// The name that `slots` had: it goes with the next release.
    pub backends: usize,
}

/// The numbers of flows and entries, as of the last sweep.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FlowStatus {
    pub flows: usize,
    /// The flows that neither both sides have closed nor one has reset.
    #[serde(default)]
    pub open: usize,
    pub entries: usize,
}
