//! What `kpx trace` found, in the form of `--output json`.
//!
//! The form is kept: fields may be added, none is renamed or taken away. What does not apply is `null`.

use serde::{Deserialize, Serialize};

/// A packet and its fate.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Trace {
    /// The node that met the packet.
    pub node: String,
    /// Whose tables decided.
    pub tables: TablesOf,
    pub packet: Packet,
    /// Where it met the programs.
    pub hook: Hook,
    /// What became of it: of the first one, if there were several.
    pub outcome: Outcome,
    /// All packets, those with one fate together, the most frequent first.
    pub tally: Vec<Tally>,
    /// What to bear in mind when reading this.
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
    /// Address and port: `10.244.1.10:32768`.
    pub from: String,
    pub to: String,
    /// `tcp` (a SYN), `udp` (a datagram), `sctp` (an INIT).
    pub protocol: String,
    pub count: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hook {
    /// `kpx_ingress`, `kpx_anchor` or `kpx_lo`.
    pub program: String,
    pub device: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Outcome {
    pub verdict: Verdict,
    /// Why it was not forwarded, by the name that `kpx status` counts it under; `null` if it was.
    pub reason: Option<String>,
    /// The same in words.
    pub explanation: String,
    /// What the packet was addressed to.
    pub frontend: Option<Frontend>,
    pub service: Option<Service>,
    pub origin: Option<Origin>,
    /// The endpoints that serve such a client.
    pub set: Option<Set>,
    pub backend: Option<Backend>,
    /// With what the client's address or port was replaced.
    pub source: Option<Source>,
    /// The client was led back to the backend that it had before.
    pub affinity_hit: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Translated, on its way to a backend.
    Forward,
    /// Answered with a TCP RST or an ICMP port unreachable.
    Reject,
    /// Dropped in silence.
    Drop,
    /// Left as it is: not for us.
    Pass,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Frontend {
    /// `10.96.0.10:80/tcp`; a node port is `IPv4 *:30080/tcp`, a ClusterIP without port `10.96.0.10`.
    pub at: String,
    pub kind: FrontendKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FrontendKind {
    /// A ClusterIP, of which no port matched.
    Address,
    ClusterIp,
    NodePort,
    ExternalIp,
    LoadBalancer,
    /// One that this kpx does not know.
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Service {
    /// The ClusterIP frontend, which names the service port in the tables.
    pub key: String,
    /// `null` if the tables are an agent's: they hold no names.
    pub namespace: Option<String>,
    pub name: Option<String>,
    /// Empty if the port has no name.
    pub port_name: Option<String>,
}

/// Where the client is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// This node itself.
    Node,
    /// A pod of this node.
    Pod,
    /// A local pod, says `--detect-local-mode`.
    Detected,
    /// Another node, or outside the cluster.
    Outside,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Set {
    /// `cluster` or `local`.
    pub name: String,
    pub algorithm: Algorithm,
    /// `sessionAffinity: ClientIP`: seconds for which a client keeps its backend; `null` without.
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
    /// One that this kpx does not know.
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Backend {
    pub at: String,
    /// On this node.
    pub local: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Source {
    /// What the backend sees as its client: address and port.
    pub at: String,
    /// The address is another one than the client's.
    pub masqueraded: bool,
    /// Why, in words.
    pub explanation: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Tally {
    pub packets: u32,
    pub verdict: Verdict,
    pub reason: Option<String>,
    /// Address and port.
    pub backend: Option<String>,
}
