//! The form of `kpx flows --output json`, and of the lines of the agent's `/flows`.

use std::net::SocketAddr;

use proxy_common::flow::State;
use serde::{Deserialize, Serialize};

use crate::{NameView, Names};
use proxy_datapath::ListedFlow;

/// A flow. The form is stable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FlowView {
    /// `TCP`, `UDP` or `SCTP`.
    pub protocol: String,
    pub client: SocketAddr,
    /// The address that the client dialled.
    pub frontend: SocketAddr,
    pub backend: SocketAddr,
    /// The client's address as the backend sees it.
    pub source: SocketAddr,
    /// True if the node's address replaced the client's address.
    pub masqueraded: bool,
    /// True if a socket of this node opened the flow.
    pub from_node: bool,
    /// `new`, `answered` (by the backend; the client has been silent since), `established`,
    /// `halfClosed`, `closed` or `reset`.
    pub state: String,
    /// The seconds since the client's last packet.
    pub idle_secs: u32,
    /// The seconds of silence after which a flow in this state expires.
    pub timeout_secs: u32,
    /// The Service of the frontend; null if no Service has the frontend any more.
    pub service: Option<FlowService>,
}

/// The Service that has a flow's frontend.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FlowService {
    pub namespace: String,
    pub name: String,
    /// Empty for a port without a name.
    pub port_name: String,
}

impl FlowView {
    pub fn new(flow: &ListedFlow, names: &Names) -> Self {
        let protocol = flow.proto.to_string();
        Self {
            client: flow.client,
            frontend: flow.frontend,
            backend: flow.backend,
            source: flow.source,
            masqueraded: flow.masqueraded,
            from_node: flow.from_node,
            state: state_name(flow.state).to_owned(),
            idle_secs: flow.idle_secs,
            timeout_secs: flow.timeout_secs,
            service: names.find(flow.frontend, &protocol).map(FlowService::new),
            protocol: protocol.to_uppercase(),
        }
    }
}

impl FlowView {
    /// Returns the Service and its port as `namespace/name:port`; empty if no Service has the
    /// frontend any more.
    pub fn service_name(&self) -> String {
        match &self.service {
            Some(FlowService {
                namespace,
                name,
                port_name,
            }) if port_name.is_empty() => format!("{namespace}/{name}"),
            Some(FlowService {
                namespace,
                name,
                port_name,
            }) => format!("{namespace}/{name}:{port_name}"),
            None => String::new(),
        }
    }
}

impl FlowService {
    fn new(name: &NameView) -> Self {
        Self {
            namespace: name.namespace.clone(),
            name: name.name.clone(),
            port_name: name.port_name.clone(),
        }
    }
}

/// The names of all states, as in [`FlowView::state`].
pub const STATES: [&str; 6] = [
    state_name(State::New),
    state_name(State::Answered),
    state_name(State::Established),
    state_name(State::HalfClosed),
    state_name(State::Closed),
    state_name(State::Reset),
];

const fn state_name(state: State) -> &'static str {
    match state {
        State::New => "new",
        State::Answered => "answered",
        State::Established => "established",
        State::HalfClosed => "halfClosed",
        State::Closed => "closed",
        State::Reset => "reset",
    }
}
