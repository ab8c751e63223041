//! The decision about a packet that opens a flow: the frontend, whether the client may use it, and
//! the backend.

use proxy_common::addr::{Proto, SockAddr};
use proxy_common::counter::{Reason, Verdict};
use proxy_common::device::{Device, Node};
use proxy_common::flow::Flow;
use proxy_common::frontend::{Algorithm, FrontendKind, Service, Set};
use proxy_common::policy::{self, Decision, Origin};
use proxy_macros::global_fn;

use crate::maps::{DecisionMemory, Memory, Scratch};
use crate::net::Net;
use crate::packet::Packet;
use crate::route::{NextHop, route};
use crate::setting::HANDS_OVER;
use crate::skb::Skb;
use crate::{lookup, maps, select};

/// A request for a backend: by a packet, or by a socket before its first packet.
pub trait Dial<A: Net> {
    /// Set if another node may have handed the packet over.
    const MAY_BE_HANDED_OVER: bool;

    fn client(&self) -> A;
    fn dialled(&self) -> &SockAddr<A>;
    fn proto(&self) -> Proto;
}

impl<A: Net> Dial<A> for Packet<A> {
    const MAY_BE_HANDED_OVER: bool = true;

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

/// Decides about a packet of a client at `origin`. Stores only the client's affinity.
///
/// `objection` returns the reason why a packet to a service may not open a flow here. It runs
/// before anything is stored or answered.
#[inline(always)]
pub fn run<'run, A: Net>(
    mut memory: Memory<'run>,
    origin: Origin,
    node: &Node,
    objection: impl FnOnce(&Packet<A>) -> Option<Reason>,
) -> Result<(&'run mut Scratch<A>, &'run Decision<A>), Reason> {
    let (scratch, decision) = borrow::<A>(memory.lend())?;
    scratch.packet.decided = true;
    decision.origin = origin;
    let found = find_frontend::<A>(memory.lend());
    let (scratch, _) = borrow::<A>(memory.lend())?;
    if found != Err(Reason::NotOurs)
        && let Some(reason) = objection(&scratch.packet)
    {
        return Err(reason);
    }
    let (scratch, decision) = borrow::<A>(memory.lend())?;
    // Without a flow, a packet from the middle of a connection can only be handed over.
    if HANDS_OVER.get() != 0
        && !scratch.packet.opens_again()
        && (found.is_err() || decision.set != Set::DIRECT)
    {
        return Err(Reason::NoFlow);
    }
    found?;
    select_backend::<A>(memory.lend())?;
    let (scratch, decision) = borrow::<A>(memory)?;
    let service = &scratch.service;
    if policy::is_masqueraded(decision, service, node, A::is_detected_by(node)) {
        decision.flags |= Decision::<A>::MASQUERADE;
    }
    if service.algorithm == Algorithm::LEAST_CONNECTIONS {
        decision.flags |= Decision::<A>::COUNTED;
    }
    Ok((scratch, decision))
}

#[inline(always)]
fn borrow<'run, A: Net>(
    memory: Memory<'run>,
) -> Result<(&'run mut Scratch<A>, &'run mut Decision<A>), Reason> {
    let (scratch, decision) = memory.scratch::<A>().ok_or(Reason::FlowsFull)?;
    Ok((scratch, decision.get().ok_or(Reason::FlowsFull)?))
}

/// Calls [`find`] with the packet and the decision of the hook.
#[global_fn(kpx_find4, kpx_find6)]
pub fn find_frontend<A: Net>(memory: Memory) -> Result<(), Reason> {
    let node = maps::node().ok_or(Reason::NoNodeAddress)?;
    let (scratch, decision) = borrow::<A>(memory)?;
    find(&scratch.packet, node, &mut scratch.service, decision)
}

/// Chooses a backend for the packet from the decision's set, which must not be empty.
#[global_fn(kpx_select4, kpx_select6)]
fn select_backend<A: Net>(memory: Memory) -> Result<(), Reason> {
    let (scratch, decision) = borrow::<A>(memory)?;
    let Scratch {
        packet,
        service,
        flow,
        ..
    } = scratch;
    if HANDS_OVER.get() != 0 && decision.set == Set::DIRECT {
        // Nodes that choose again would disagree.
        select::direct(&packet.src, service, decision)
    } else if maps::again(&packet.moves) {
        select::another(&packet.src.addr, service, decision, &flow.backend)
    } else {
        select::backend(&packet.src, service, decision)
    }
}

/// Stores the backend of an external client, if the service has session affinity. The client's
/// address may be spoofed until its flow is beyond half-open.
#[inline(never)]
pub fn remember<A: Net>(scratch: &Scratch<A>, decision: DecisionMemory) {
    // The decision of a direct flow has no backend.
    if let Some(decision) = decision.get::<A>()
        && decision.origin.is_remote()
        && decision.has(Decision::<A>::BACKEND)
        && decision.set != Set::DIRECT
        && scratch.service.affinity_secs > 0
    {
        select::remember_new(&scratch.packet.src.addr, decision);
    }
}

/// Finds the frontend, checks whether it serves this client, and chooses the set of backends.
#[inline(always)]
pub fn find<A: Net>(
    dial: &impl Dial<A>,
    node: &Node,
    service: &mut Service,
    decision: &mut Decision<A>,
) -> Result<(), Reason> {
    decision.flags = 0;
    if let Err(reason) = lookup::find(dial.dialled(), dial.proto(), decision)
        && !is_senders_node_port(dial, reason, decision)
    {
        // Different answers would reveal which ClusterIPs exist to a client that ClusterIPs do not
        // serve.
        let is_hidden = reason == Reason::UnknownPort
            && !policy::is_open_to(FrontendKind::CLUSTER_IP, decision.origin, node);
        return Err(if is_hidden { Reason::Outside } else { reason });
    }
    *service = maps::service(&decision.service).ok_or(Reason::NotOurs)?;
    if service.has(Service::ELSE_PASSES) && !is_redirected(dial.dialled(), decision.origin) {
        return Err(Reason::NotOurs);
    }
    decision.flags = Decision::<A>::FRONTEND;
    if !policy::is_open_to(decision.kind, decision.origin, node) {
        return Err(Reason::Outside);
    }
    if decision.kind == FrontendKind::LOAD_BALANCER
        && service.has(Service::SOURCE_RANGES)
        && !maps::is_in_source_range(&decision.service, dial.client())
    {
        return Err(Reason::SourceRange);
    }
    let is_localhost = dial.dialled().addr.is_loopback();
    let keeps_local = is_localhost && node.has(Node::LOCALHOST_LOCAL);
    decision.set = policy::set(
        decision.kind,
        service,
        if keeps_local {
            Origin::EXTERNAL
        } else {
            decision.origin
        },
    );
    if service.has(Service::REDIRECTED) && is_spared(service, dial.client(), decision) {
        decision.set = Set::CLUSTER;
    }
    decision.flags |= Decision::<A>::SET;
    if service.has(Service::ELSE_PASSES) && service.count(decision.set) == 0 {
        decision.flags = 0;
        return Err(Reason::NotOurs);
    }
    if service.count(decision.set) == 0 {
        // Load balancers expect silence without local endpoints, but send nothing to loopback
        // addresses.
        let elsewhere = service.has(Service::HAS_ENDPOINTS) && !is_localhost;
        return Err(if elsewhere {
            Reason::NoLocalEndpoints
        } else {
            Reason::NoEndpoints
        });
    }
    Ok(())
}

/// Returns true if another node has handed over the packet, which goes to a node port there. The
/// tunnel's hook has checked the address, and lets no other packet pass.
#[inline(always)]
fn is_senders_node_port<A: Net, D: Dial<A>>(
    dial: &D,
    reason: Reason,
    decision: &mut Decision<A>,
) -> bool {
    D::MAY_BE_HANDED_OVER
        && HANDS_OVER.get() != 0
        && reason == Reason::NotOurs
        && decision.origin.is_handed_over()
        && lookup::node_port(dial.dialled().port, dial.proto(), decision)
}

/// Returns true if packets of this client to an address without a Service may be redirected. That
/// applies only to pods of this node: the node's own packets have a route to the address. The
/// addresses of the node's devices are never redirected.
#[inline(always)]
fn is_redirected<A: Net>(dialled: &SockAddr<A>, origin: Origin) -> bool {
    !origin.is_remote() && !origin.is_node() && maps::own_addr(&dialled.addr).is_none()
}

/// Returns true if the client serves the service's local redirect, and so must reach the endpoints
/// that it caches. Hooks validate the address where the pod's packets come in, as for all pods.
#[inline(never)]
fn is_spared<A: Net>(service: &Service, client: A, decision: &Decision<A>) -> bool {
    if service.has(Service::SPARES_NODE) && maps::own_addr(&client).is_some() {
        return true;
    }
    service.has(Service::SPARES_PODS) && maps::is_spared(decision.service, client)
}

/// Counts a packet that opens no flow despite a decision, for the service that it dialled, if any.
#[inline(never)]
pub fn refused<A: Net>(verdict: Verdict, decision: DecisionMemory) {
    if let Some(decision) = decision.get::<A>()
        && decision.has(Decision::<A>::FRONTEND)
    {
        maps::service_refused(&decision.service, verdict);
    }
}

/// Returns the origin of a packet that leaves through the anchor or lo.
///
/// A socket of the host may send from an address that is not the host's own (`IP_TRANSPARENT`).
/// Such a client counts as a client behind the device of its route. If that device has no kpx
/// hooks, the client counts as detected.
#[inline(always)]
pub fn origin_inside<A: Net>(skb: Skb, packet: &Packet<A>, node: &Node) -> Origin {
    let client = &packet.src.addr;
    if client.is_loopback() || maps::own_addr(client).is_some() {
        // kube-proxy treats the host as a pod if its address is in the configured pod networks.
        let is_pod = node.has(Node::COMPAT) && A::is_detected_by(node) && maps::is_pod(*client);
        return if is_pod {
            Origin::DETECTED
        } else {
            Origin::NODE
        };
    }
    match route(skb, node.anchor_ifindex, &packet.dst.addr, client) {
        Ok(NextHop::Device(ifindex)) if maps::device(ifindex).is_some() => {
            origin(maps::place_of(ifindex).0, packet, node)
        }
        _ => Origin::DETECTED,
    }
}

/// Returns the origin of a packet that came in through a device with these flags.
#[inline(always)]
pub fn origin<A: Net>(flags: u32, packet: &Packet<A>, node: &Node) -> Origin {
    let is_pods = flags & Device::POD != 0;
    if is_pods && !node.has(Node::COMPAT) {
        return Origin::POD;
    }
    if flags & Device::DETECTED != 0 {
        return Origin::DETECTED;
    }
    match maps::is_pod(packet.src.addr) {
        true if A::is_detected_by(node) && is_pods => Origin::DETECTED,
        true if A::is_detected_by(node) => Origin::ELSEWHERE,
        _ => Origin::EXTERNAL,
    }
}

/// Returns true if the backend of a UDP flow is still an endpoint of its frontend. Another pod may
/// have the backend's address by now.
#[inline(never)]
pub fn still_serves<A: Net>(flow: &Flow<A>, decision: DecisionMemory) -> bool {
    // A direct flow has no service.
    if flow.frontend == flow.backend {
        return true;
    }
    let Some(decision) = decision.get() else {
        return true;
    };
    lookup::find(&flow.frontend, Proto::UDP, decision).is_ok()
        && maps::endpoint(decision.service, flow.backend).is_some()
}
