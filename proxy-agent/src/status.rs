//! What `kpx status` shows. The form is kept: fields may be added, none is renamed or taken away.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use proxy_datapath::{LoadedProgram, SocketsStatus};

/// The state of an agent and of the programs that it loaded.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    pub version: String,
    /// When the agent started.
    pub started: Timestamp,
    /// `node` or `host`.
    pub mode: String,
    pub node_name: String,
    pub node_addresses: Vec<IpAddr>,
    /// Of the agent, as the kernel calls it: `net:[4026531840]`. Devices have their indexes there.
    #[serde(default)]
    pub network_namespace: Option<String>,
    pub options: OptionsStatus,
    /// The maps hold what the objects last seen ask for, and every device carries its programs.
    pub healthy: bool,
    /// Every watch has delivered its first list.
    pub complete: bool,
    pub last_sync: Option<Timestamp>,
    /// Syncs that changed a map.
    pub syncs: u64,
    pub problems: Vec<ProblemStatus>,
    /// Objects, or parts of them, that could not be used.
    pub skipped: Vec<String>,
    /// Backends that are left out because this host, which is no node, does not reach them.
    #[serde(default)]
    pub unreachable: Vec<UnreachableStatus>,
    pub devices: Vec<DeviceStatus>,
    /// Sockets that are led to backends; None: none are.
    #[serde(default)]
    pub sockets: Option<SocketsStatus>,
    /// What keeps programs and maps in the kernel while no agent runs: `pins`, `filters` or `nothing`.
    #[serde(default)]
    pub kept_by: String,
    /// By family.
    pub tables: BTreeMap<String, TableStatus>,
    pub flows: BTreeMap<String, FlowStatus>,
    /// Packets translated, flows opened.
    pub events: BTreeMap<String, u64>,
    /// Packets not translated, by reason.
    pub reasons: BTreeMap<String, u64>,
    /// The kernel's ids of the datapath's maps, by name. Goes with the next release: an id is of no use beyond the agent.
    #[serde(default)]
    pub maps: BTreeMap<String, u32>,
    /// How full they are, by name.
    pub map_fill: BTreeMap<String, MapFill>,
    /// The datapath's programs, by name.
    pub programs: BTreeMap<String, LoadedProgram>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MapFill {
    /// None where nobody keeps count: to count, one would have to walk through the map.
    pub entries: Option<u64>,
    pub max_entries: u64,
}

/// What the operator said, in the words of the flags.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct OptionsStatus {
    /// `default` or `compat`.
    pub masquerade: String,
    pub masquerade_all: bool,
    /// How local pods are told from others: `none`, or a mode and what it goes by.
    pub local_pods: String,
    /// `all`, `primary`, or networks.
    pub node_port_addresses: String,
    pub cluster_ip_external: bool,
    /// Whether packets of open connections skip the stack, and why: `off`, `on`, `auto: …`.
    #[serde(default)]
    pub fast_path: String,
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
    /// `namespace/name`.
    pub service: String,
    /// Number and protocol: `80/TCP`.
    pub port: String,
    pub backend: SocketAddr,
    pub why: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceStatus {
    pub name: String,
    pub ifindex: u32,
    /// `tcx` or `clsact`.
    pub attached_by: String,
    /// `pod`, `device`, `loopback` or `anchor`.
    pub role: String,
    /// Why a veth into another network namespace counts as no pod's; null for all else.
    #[serde(default)]
    pub no_pod: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TableStatus {
    pub services: usize,
    pub service_ports: usize,
    pub frontends: usize,
    /// The places of backends in the sets of service ports: a backend has one in each set that it is in.
    #[serde(default)]
    pub slots: usize,
    /// The name that `slots` had: it goes with the next release.
    pub backends: usize,
}

/// As of the last sweep.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FlowStatus {
    pub flows: usize,
    pub entries: usize,
}

/// Returns the name that an event had in the release before. Both are told until the next one.
pub(crate) fn old_event_name(name: &str) -> Option<&'static str> {
    match name {
        "socket_translated" => Some("socket_led"),
        _ => None,
    }
}
