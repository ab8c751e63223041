//! The result of `kpx trace` in the form of `--output json`.
//!
//! The form is stable: fields may be added, and no field is renamed or removed. A field that does
//! not apply is `null`.

use serde::{Deserialize, Serialize};

/// A packet and its verdict.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Trace {
    /// The node that received the packet.
    pub node: String,
    pub tables: TablesOf,
    pub packet: Packet,
    pub hook: Hook,
    /// The outcome of the first packet.
    pub outcome: Outcome,
    /// The numbers of packets by verdict, the most frequent first.
    pub tally: Vec<Tally>,
    pub notes: Vec<String>,
    /// The notes that report a fault; `notes` has them too.
    #[serde(default)]
    pub warnings: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TablesOf {
    Agent,
    /// A folder of manifests.
    Manifests,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Packet {
    /// The address and port: `10.244.1.10:32768`.
    pub from: String,
    pub to: String,
    /// The protocol: `tcp` (a SYN), `udp` (a datagram), `sctp` (an INIT).
    pub protocol: String,
    pub count: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hook {
    /// The program: `kpx_ingress`, `kpx_anchor` or `kpx_lo`.
    pub program: String,
    pub device: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Outcome {
    pub verdict: Verdict,
    /// The reason why the packet was not forwarded, by its name in `kpx status`; `null` if it was
    /// forwarded.
    pub reason: Option<String>,
    /// The reason in words.
    pub explanation: String,
    /// The operator's next steps, a sentence each.
    #[serde(default)]
    pub remedy: Vec<String>,
    /// The frontend that the packet matched.
    pub frontend: Option<Frontend>,
    pub service: Option<Service>,
    pub origin: Option<Origin>,
    /// The set of endpoints for this client.
    pub set: Option<Set>,
    pub backend: Option<Backend>,
    /// The client's address and port after translation.
    pub source: Option<Source>,
    /// True if session affinity chose the backend.
    pub affinity_hit: bool,
    /// True if the packet goes unchanged to the backend's node, which translates it.
    #[serde(default)]
    pub handed_over: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The packet was translated and sent to a backend.
    Forward,
    /// The packet was rejected with a TCP RST or an ICMP port unreachable.
    Reject,
    /// The packet was dropped without an answer.
    Drop,
    /// The packet was left unchanged: it is not for a Service.
    Pass,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Frontend {
    /// The frontend's key: `10.96.0.10:80/tcp`; for a node port `IPv4 *:30080/tcp`; for a whole
    /// ClusterIP `10.96.0.10`.
    pub at: String,
    pub kind: FrontendKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FrontendKind {
    /// A ClusterIP without a frontend for the port.
    Address,
    ClusterIp,
    NodePort,
    ExternalIp,
    LoadBalancer,
    /// An address of a local redirect that belongs to no Service.
    Redirected,
    /// A value of a newer version.
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Service {
    /// The ClusterIP frontend, which is the service port's key in the tables.
    pub key: String,
    /// The namespace; `null` if the tables hold no names.
    pub namespace: Option<String>,
    pub name: Option<String>,
    /// The name of the port; empty for a port without a name.
    pub port_name: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// The node itself.
    Node,
    /// A pod of this node.
    Pod,
    /// A local pod according to `--detect-local-mode`.
    Detected,
    /// Another node, or a host outside the cluster.
    Outside,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Set {
    /// The name: `cluster` or `local`.
    pub name: String,
    pub algorithm: Algorithm,
    /// The timeout of `sessionAffinity: ClientIP` in seconds; `null` if there is no affinity.
    pub affinity_seconds: Option<u32>,
    pub backends: Vec<Backend>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    Random,
    Maglev,
    RoundRobin,
    LeastConnections,
    /// A value of a newer version.
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Backend {
    pub at: String,
    /// True if the backend is on this node.
    pub local: bool,
    /// The weight relative to the other backends' weights; `null` if all are equal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Source {
    /// The client's address and port as the backend sees them.
    pub at: String,
    /// True if the backend sees another address than the client's.
    pub masqueraded: bool,
    /// The reason in words.
    pub explanation: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Tally {
    pub packets: u32,
    pub verdict: Verdict,
    pub reason: Option<String>,
    /// The address and port of the backend.
    pub backend: Option<String>,
}
