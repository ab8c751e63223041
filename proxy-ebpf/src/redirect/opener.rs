//! The opening of bypass flows, which skip the stack from their first packet. The agent enables it
//! while the stack does not change packets between pods (`Node::FAST_OPEN`).

use proxy_common::addr::Proto;
use proxy_common::device::{Device, Node, pod_net};
use proxy_common::flow::{CachedRoute, Flow, Seen};
use proxy_macros::global_fn;

use super::fib::find;
use super::plan::Plan;
use super::{Forward, is_plain, term, towards_backend};
use crate::maps::{self, Memory, Scratch};
use crate::opening::Way;
use crate::skb::Skb;

/// Finds the route of the flow that `scratch.opening` is about to open, and stores it there.
/// Without a route the flow takes the stack.
#[global_fn(kpx_find_route4, kpx_find_route6)]
pub fn find_route<A: Forward>(skb: Skb, memory: Memory) {
    let Some((
        Scratch {
            packet,
            opening,
            route,
            ..
        },
        _,
    )) = memory.scratch::<A>()
    else {
        return;
    };
    let Some(node) = maps::node() else { return };
    let source = &opening.source;
    // A masqueraded flow takes the stack, and so does a flow that cannot keep its client's port.
    let is_plain_flow = !source.port_taken && source.addr == packet.src.addr;
    let is_plain_packet =
        is_plain::<A>(skb) && !packet.is_fragment() && packet.proto != Proto::SCTP;
    // `ingress::choose` has validated the source. Clients outside take the stack, which may have
    // more rules for them.
    if !is_plain_flow || !is_plain_packet || !is_bare_by(opening.device, Device::POD) {
        return;
    }
    if !is_between(node, &packet.src.addr, &opening.backend.addr) {
        return;
    }
    let term = term();
    route.ask(packet.src.port, opening.backend.port, 0, false);
    let is_found = find(
        skb,
        packet.proto,
        route,
        &packet.src.addr,
        &opening.backend.addr,
    );
    if !is_found || !route.is_for_openers(node.has(Node::FAST_OPEN_FAR)) {
        return;
    }
    let original = CachedRoute::new(skb.ifindex(), route.keep(&opening.backend.addr), term);
    if !route.is_to_pod() {
        opening.flags |= Flow::<A>::FAR;
    }
    // The route to the backend leads through this device, so the backend's packets come in through
    // it.
    opening.way = Way {
        original,
        reply: CachedRoute::new(route.ifindex(), 0, term),
    };
}

/// Returns true if only kpx's programs handle the packets of a device. `kind` is [`Device::POD`] if
/// it has to be a pod's device, else 0.
#[inline(always)]
pub fn is_bare(ifindex: u32, kind: u32) -> bool {
    is_bare_by(maps::place_of(ifindex).0, kind)
}

/// Returns the same by the flags of the device.
#[inline(always)]
fn is_bare_by(flags: u32, kind: u32) -> bool {
    let is = Device::BARE | kind;
    flags & is == is
}

/// Returns true if bypass flows between these addresses may be opened.
#[inline(never)]
pub fn is_between<A: Forward>(node: &Node, src: &A, dst: &A) -> bool {
    is_unchanged(node, src) && is_unchanged(node, dst)
}

/// Returns true if bypass flows with this address are allowed: in all networks, or with
/// `FAST_OPEN_PODS` in networks that are `UNCHANGED`.
#[inline(always)]
pub fn is_unchanged<A: Forward>(node: &Node, addr: &A) -> bool {
    !node.has(Node::FAST_OPEN_PODS) || maps::pod_net(*addr) & pod_net::UNCHANGED != 0
}

/// Plans the first packet of the flow that has just been opened.
#[inline(always)]
pub fn first<A: Forward>(scratch: &mut Scratch<A>) -> Plan {
    let Scratch { flow, opening, .. } = &*scratch;
    // Another CPU may have opened the flow first, with another backend.
    if !flow.rx.has(Seen::BYPASS) || flow.backend != opening.backend {
        return Plan::Stack;
    }
    towards_backend(scratch)
}
