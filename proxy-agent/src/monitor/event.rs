//! An event in the form that watchers get. The form is stable: fields may be added, and are never
//! renamed or removed.

use std::net::{IpAddr, SocketAddr};

use jiff::Timestamp;
use proxy_common::addr::{Addr, Proto};
use proxy_common::counter::Reason;
use proxy_common::frontend::{Dialled, FrontendKind};
use proxy_common::monitor::{Fate, Record, What};
use proxy_common::policy::{Client, Decision, Origin};
use serde::{Deserialize, Serialize};

use proxy_core::tables::set_name;
use proxy_datapath::AnyRecord;
use proxy_view::Names;
use proxy_view::object_name::ObjectName;

/// A packet that opened a flow or was dropped or rejected, or a number of lost events.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    pub time: Timestamp,
    /// The kind of event: `decision`, `drop`, `reject`, or `lost`.
    pub what: String,
    /// The reason of a drop or rejection, named as in `kpx status`.
    pub reason: Option<String>,
    /// The hook: `ingress`, `egress`, `anchor` or `lo`.
    pub hook: String,
    pub ifindex: u32,
    pub device: Option<String>,
    /// The protocol: `TCP`, `UDP` or `SCTP`. `None`, like the addresses, for headers that the
    /// programs did not parse.
    pub protocol: Option<String>,
    pub client: Option<SocketAddr>,
    pub dialled: Option<SocketAddr>,
    pub decision: Option<DecisionEvent>,
    /// The number of lost events, in a `lost` event.
    pub lost: u64,
}

/// The decision about a packet to a frontend.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DecisionEvent {
    /// The kind of frontend: `ClusterIP`, `NodePort`, `ExternalIP` or `LoadBalancer`.
    pub kind: String,
    /// The ClusterIP and port of the service port.
    pub service: SocketAddr,
    /// The namespace of the Service; `None` if unknown, for example because the Service is gone.
    pub namespace: Option<String>,
    pub name: Option<String>,
    pub port_name: Option<String>,
    /// The place of the client: `outside`, `detected`, `pod` or `node`.
    pub origin: String,
    /// The set of endpoints, `cluster` or `local`; `None` if the decision fell before a set was
    /// chosen.
    pub set: Option<String>,
    pub backend: Option<SocketAddr>,
    /// True if session affinity chose the backend.
    pub affinity: bool,
    /// The client's address as the backend sees it; `None` if no flow was opened.
    pub source: Option<SocketAddr>,
    /// True if the backend sees the node instead of the client.
    pub masquerade: bool,
}

impl Event {
    pub(crate) fn lost(lost: u64) -> Self {
        Self {
            time: Timestamp::now(),
            what: "lost".to_owned(),
            reason: None,
            hook: String::new(),
            ifindex: 0,
            device: None,
            protocol: None,
            client: None,
            dialled: None,
            decision: None,
            lost,
        }
    }

    pub(super) fn of(record: &AnyRecord) -> Self {
        match record {
            AnyRecord::V4(record) => Self::of_family(record),
            AnyRecord::V6(record) => Self::of_family(record),
        }
    }

    fn of_family<A: Addr>(record: &Record<A>) -> Self {
        let is_known = record.proto != Proto::ANY;
        let opened = record.what == What::DECIDED;
        let reason = Reason::from_index(record.reason.into()).filter(|_| !opened);
        let what = match record.what.known() {
            Some(Fate::Decided) => "decision",
            Some(Fate::Rejected) => "reject",
            Some(Fate::Dropped) | None => "drop",
        };
        Self {
            what: what.to_owned(),
            reason: reason.map(|reason| reason.name().to_owned()),
            hook: record.hook_id.name().to_owned(),
            ifindex: record.ifindex,
            device: nix::net::if_::if_indextoname(record.ifindex)
                .ok()
                .and_then(|name| name.into_string().ok()),
            protocol: is_known.then(|| record.proto.to_string().to_uppercase()),
            client: is_known.then(|| record.src.socket_addr()),
            dialled: is_known.then(|| record.dst.socket_addr()),
            decision: DecisionEvent::of(record, opened),
            ..Self::lost(0)
        }
    }

    pub(crate) fn name(&mut self, names: &Names) {
        let (Some(protocol), Some(decision)) = (&self.protocol, &mut self.decision) else {
            return;
        };
        if let Some(found) = names.find(decision.service, protocol) {
            decision.namespace = Some(found.namespace.clone());
            decision.name = Some(found.name.clone());
            decision.port_name = Some(found.port_name.clone()).filter(|name| !name.is_empty());
        }
    }

    /// Returns true if the event is about a frontend whose Service has no name yet.
    pub(crate) fn lacks_name(&self) -> bool {
        self.decision
            .as_ref()
            .is_some_and(|decision| decision.name.is_none())
    }

    /// Returns true if the packet is to a frontend of the Service `[namespace/]name`.
    pub(super) fn is_to(&self, service: &ObjectName) -> bool {
        let name = self
            .decision
            .as_ref()
            .and_then(|decision| decision.name.as_ref());
        name == Some(&service.name)
            && service
                .namespace
                .as_ref()
                .is_none_or(|namespace| self.is_in(namespace))
    }

    pub(super) fn is_in(&self, namespace: &str) -> bool {
        self.decision
            .as_ref()
            .is_some_and(|decision| decision.namespace.as_deref() == Some(namespace))
    }

    pub(super) fn client_ip(&self) -> Option<IpAddr> {
        self.client.map(|client| client.ip())
    }
}

/// Returns true for the host's own IPv6 packets on the anchor, as on any device with IPv6:
/// neighbour discovery and multicast reports. No other IPv6 packet is refused for this reason.
pub(super) fn is_housekeeping(record: &AnyRecord) -> bool {
    let is_not_unicast = |reason: u8| Reason::from_index(reason.into()) == Some(Reason::NotUnicast);
    matches!(record, AnyRecord::V6(record) if record.what != What::DECIDED && is_not_unicast(record.reason))
}

impl DecisionEvent {
    /// Returns the decision; `None` if the packet's destination is no frontend.
    fn of<A: Addr>(record: &Record<A>, opened: bool) -> Option<Self> {
        let decision = &record.decision;
        if !decision.has(Decision::<A>::FRONTEND) {
            return None;
        }
        let has = |flag| decision.has(flag);
        Some(Self {
            kind: kind_name(decision.kind).to_owned(),
            service: decision.service.socket_addr(),
            namespace: None,
            name: None,
            port_name: None,
            origin: origin_name(decision.origin).to_owned(),
            set: has(Decision::<A>::SET).then(|| set_name(decision.set).to_owned()),
            backend: has(Decision::<A>::BACKEND).then(|| decision.backend_at().socket_addr()),
            affinity: has(Decision::<A>::AFFINITY),
            source: opened.then(|| record.source.socket_addr()),
            masquerade: has(Decision::<A>::MASQUERADE),
        })
    }
}

fn kind_name(kind: FrontendKind) -> &'static str {
    match kind.known() {
        Some(Dialled::ClusterIp) => "ClusterIP",
        Some(Dialled::NodePort) => "NodePort",
        Some(Dialled::ExternalIp) => "ExternalIP",
        Some(Dialled::LoadBalancer) => "LoadBalancer",
        Some(Dialled::Address) | None => "address",
    }
}

fn origin_name(origin: Origin) -> &'static str {
    match origin.known() {
        Some(Client::Node) => "node",
        Some(Client::Pod) => "pod",
        Some(Client::Detected) => "detected",
        Some(Client::External | Client::Elsewhere | Client::HandedOver) | None => "outside",
    }
}
