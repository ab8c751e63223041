//! Whole connections past the stack, from their first packet on. The agent switches this on while
//! the stack does nothing to packets from one pod to another (`Node::FAST_OPEN`).

use proxy_common::addr::Proto;
use proxy_common::device::{Device, Node, pod_net};
use proxy_common::flow::{CachedRoute, Flow, Seen};

use super::fib::find;
use super::plan::Plan;
use super::{Forward, is_plain, term, towards_backend};
use crate::maps::{self, Memory, Scratch};
use crate::opening::Way;
use crate::skb::Skb;

/// Finds the way of the flow that is about to be opened as `scratch.opening` says, and notes it
/// there. Without a way the flow takes the stack.
#[inline(always)]
pub fn find_way<A: Forward>(skb: Skb, memory: Memory) {
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
    // A masqueraded flow is for the stack, and so is one of which it is known that it cannot keep
    // its port.
    let is_plain_flow = !source.port_taken && source.addr == packet.src.addr;
    let is_plain_packet =
        is_plain::<A>(skb) && !packet.is_fragment() && packet.proto != Proto::SCTP;
    // Its sender has been judged: see `ingress::choose`. Of a client outside the stack may know
    // more.
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
    // The route leads to the backend through this device, so its packets come from there.
    opening.way = Way {
        original,
        reply: CachedRoute::new(route.ifindex(), 0, term),
    };
}

/// Returns true if only our programs meet the packets of a device; `kind` is [`Device::POD`] if it
/// has to be a pod's.
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

/// Returns true if a pod of this node with this address may have flows past the stack.
#[inline(always)]
pub fn is_unchanged<A: Forward>(node: &Node, addr: &A) -> bool {
    !node.has(Node::FAST_OPEN_PODS) || maps::pod_net(*addr) & pod_net::UNCHANGED != 0
}

/// Plans for the first packet of the flow that has just been opened.
#[inline(always)]
pub fn first<A: Forward>(scratch: &mut Scratch<A>) -> Plan {
    let Scratch { flow, opening, .. } = &*scratch;
    // Another CPU may have opened it meanwhile, with another backend.
    if !flow.rx.has(Seen::BYPASS) || flow.backend != opening.backend {
        return Plan::Stack;
    }
    towards_backend(scratch)
}
