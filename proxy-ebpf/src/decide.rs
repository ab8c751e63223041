//! What becomes of a packet that opens a flow: which frontend it dials, whether it may, and who shall serve it.

use proxy_common::addr::{Proto, SockAddr};
use proxy_common::counter::{Reason, Verdict};
use proxy_common::device::Node;
use proxy_common::flow::Flow;
use proxy_common::frontend::{Algorithm, FrontendKind, Service};
use proxy_common::policy::{self, Decision, Origin};

use crate::maps::Scratch;
use crate::net::{Net, NextHop, route};
use crate::packet::Packet;
use crate::skb::Skb;
use crate::{lookup, maps, select};

/// What asks to be led to a backend: a packet, or a socket before it sends any.
pub trait Dial<A: Net> {
    fn client(&self) -> A;
    fn dialled(&self) -> &SockAddr<A>;
    fn proto(&self) -> Proto;
}

impl<A: Net> Dial<A> for Packet<A> {
    #[inline(always)]
    fn client(&self) -> A {
        self.src.addr
    }

    #[inline(always)]
    fn dialled(&self) -> &SockAddr<A> {
        &self.dst
    }

    #[inline(always)]
    fn proto(&self) -> Proto {
        self.proto
    }
}

/// Decides about a packet of a client at `origin`. Nothing is remembered but the client's affinity.
#[inline(always)]
pub fn run<A: Net>(scratch: &mut Scratch<A>, origin: Origin, node: &Node) -> Result<&'static Decision<A>, Reason> {
    let decision = maps::decision().ok_or(Reason::FlowsFull)?;
    let Scratch { packet, service, .. } = scratch;
    packet.decided = true;
    decision.origin = origin;
    find(packet, node, service, decision)?;
    select::backend(&packet.src, service, decision)?;
    if policy::is_masqueraded(decision, service, node, A::is_detected_by(node)) {
        decision.flags |= Decision::<A>::MASQUERADE;
    }
    if service.algorithm == Algorithm::LEAST_CONNECTIONS {
        decision.flags |= Decision::<A>::COUNTED;
    }
    Ok(decision)
}

/// A client from outside has opened a flow, and so has not come in another's name: it shall have its backend again, if the
/// service wants that.
#[inline(never)]
pub fn stick<A: Net>(scratch: &Scratch<A>) {
    // A direct flow was led to no backend.
    if let Some(decision) = maps::decision::<A>()
        && decision.origin.is_outside()
        && decision.has(Decision::<A>::BACKEND)
        && scratch.service.affinity_secs > 0
    {
        select::remember(&scratch.packet.src.addr, decision);
    }
}

/// Finds out what is dialled, whether it serves this client, and from which set.
#[inline(never)]
pub fn find<A: Net>(
    dial: &impl Dial<A>,
    node: &Node,
    service: &mut Service,
    decision: &mut Decision<A>,
) -> Result<(), Reason> {
    decision.flags = 0;
    lookup::frontend(dial.dialled(), dial.proto(), decision)?;
    decision.flags = Decision::<A>::FRONTEND;
    if !policy::is_open_to(decision.kind, decision.origin, node) {
        return Err(Reason::Outside);
    }
    *service = maps::service(&decision.service).ok_or(Reason::NotOurs)?;
    if decision.kind == FrontendKind::LOAD_BALANCER
        && service.has(Service::SOURCE_RANGES)
        && !maps::is_in_source_range(&decision.service, dial.client())
    {
        return Err(Reason::SourceRange);
    }
    decision.set = policy::set(decision.kind, service, decision.origin);
    decision.flags |= Decision::<A>::SET;
    if service.count(decision.set) == 0 {
        let elsewhere = service.has(Service::HAS_ENDPOINTS);
        return Err(if elsewhere { Reason::NoLocalEndpoints } else { Reason::NoEndpoints });
    }
    Ok(())
}

/// A packet that has been decided about opens no flow: counts it for the service that it dialled, if it dialled one.
#[inline(never)]
pub fn refused<A: Net>(verdict: Verdict) {
    if let Some(decision) = maps::decision::<A>()
        && decision.has(Decision::<A>::FRONTEND)
    {
        maps::service_refused(&decision.service, verdict);
    }
}

/// Where the client of a packet is that was on its way out into the anchor or lo.
///
/// The anchor's routes take in what is forwarded as well. If it came in through a device without our hooks, it is neither
/// known to be outside nor to hear back what does not pass here.
#[inline(always)]
pub fn origin_inside<A: Net>(skb: Skb, packet: &Packet<A>, node: &Node) -> Origin {
    let client = &packet.src.addr;
    if maps::own_addr(client).is_some() {
        // kube-proxy takes the host for a pod where the operator says that pods have such addresses.
        let is_pod = node.has(Node::COMPAT) && A::is_detected_by(node) && maps::is_pod(*client);
        return if is_pod { Origin::DETECTED } else { Origin::NODE };
    }
    match route(skb, node.anchor_ifindex, &packet.dst.addr, client) {
        Ok(NextHop::Device(ifindex)) if maps::device(ifindex).is_some() => origin(ifindex, packet, node),
        _ => Origin::DETECTED,
    }
}

/// Where the client of a packet is that came in through a device.
#[inline(always)]
pub fn origin<A: Net>(ifindex: u32, packet: &Packet<A>, node: &Node) -> Origin {
    let device = maps::device(ifindex);
    if device.is_some_and(|device| device.is_pod()) && !node.has(Node::COMPAT) {
        return Origin::POD;
    }
    let detected =
        device.is_some_and(|device| device.is_detected()) || A::is_detected_by(node) && maps::is_pod(packet.src.addr);
    if detected { Origin::DETECTED } else { Origin::OUTSIDE }
}

/// Does the backend of a UDP flow still serve those who dial its frontend? None where nobody does: there flows stay where
/// they are, until somebody does.
#[inline(never)]
pub fn still_serves<A: Net>(flow: &Flow<A>) -> Option<bool> {
    // A direct one has no service to ask.
    if flow.frontend == flow.backend {
        return Some(true);
    }
    let decision = maps::decision()?;
    lookup::frontend(&flow.frontend, Proto::UDP, decision).ok()?;
    let service = maps::service(&decision.service)?;
    service.has(Service::HAS_ENDPOINTS).then(|| maps::endpoint(decision.service, flow.backend).is_some())
}
