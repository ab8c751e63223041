//! The result of `kpx trace` in the form of `--output json`.
//!
//! The form is stable: fields may be added, and no field is renamed or removed. A field that does
//! not apply is `null`.

use serde::{Deserialize, Serialize};

/// A packet and its fate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Trace {
    /// The node that met the packet.
    pub node: String,
    /// The origin of the tables that decided.
    pub tables: TablesOf,
    pub packet: Packet,
    /// The hook that met the packet.
    pub hook: Hook,
    /// The outcome of the packet, or of the first one of several.
    pub outcome: Outcome,
    /// The packets counted by their fate, the most frequent first.
    pub tally: Vec<Tally>,
    /// The notes that help to interpret the result.
    pub notes: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TablesOf {
    /// The agent that runs on this node.
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
    /// The next steps of an operator, a sentence each.
    #[serde(default)]
    pub remedy: Vec<String>,
    /// The frontend that the packet was addressed to.
    pub frontend: Option<Frontend>,
    pub service: Option<Service>,
    pub origin: Option<Origin>,
    /// The endpoints that serve such a client.
    pub set: Option<Set>,
    pub backend: Option<Backend>,
    /// The client's new address and port.
    pub source: Option<Source>,
    /// True if session affinity led the client to its former backend.
    pub affinity_hit: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// The packet was translated and sent to a backend.
    Forward,
    /// The packet was answered with a TCP RST or an ICMP port unreachable.
    Reject,
    /// The packet was dropped without an answer.
    Drop,
    /// The packet was left as it is, because it is not for a Service.
    Pass,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Frontend {
    /// The frontend's key: `10.96.0.10:80/tcp`; a node port is `IPv4 *:30080/tcp`, a ClusterIP
    /// without port `10.96.0.10`.
    pub at: String,
    pub kind: FrontendKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FrontendKind {
    /// A ClusterIP whose ports did not match.
    Address,
    ClusterIp,
    NodePort,
    ExternalIp,
    LoadBalancer,
    /// An address that is no Service's, from a local redirect.
    Redirected,
    /// A value that this kpx does not know.
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Service {
    /// The ClusterIP frontend, which names the service port in the tables.
    pub key: String,
    /// The namespace; `null` if the tables are an agent's, because they hold no names.
    pub namespace: Option<String>,
    pub name: Option<String>,
    /// The name of the port; empty if the port has none.
    pub port_name: Option<String>,
}

/// The place of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// The node itself.
    Node,
    /// A pod of this node.
    Pod,
    /// A local pod according to `--detect-local-mode`.
    Detected,
    /// Another node, or a place outside the cluster.
    Outside,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Set {
    /// The name: `cluster` or `local`.
    pub name: String,
    pub algorithm: Algorithm,
    /// The seconds for which `sessionAffinity: ClientIP` keeps a client's backend; `null` without
    /// affinity.
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
    /// A value that this kpx does not know.
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Backend {
    pub at: String,
    /// True if the backend is on this node.
    pub local: bool,
    /// The share in new flows, relative to that of the other backends; none where all are alike.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Source {
    /// The client's address and port as the backend sees them.
    pub at: String,
    /// True if the address differs from the client's.
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
