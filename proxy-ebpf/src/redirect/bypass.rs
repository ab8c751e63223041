//! What is asked of packets of bypass flows, and of the ways that they take: see "Redirecting past
//! the stack" in README.md.

use proxy_common::addr::Proto;
use proxy_common::device::Node;
use proxy_common::flow::{Flow, Kind, Seen};

use super::{FibResult, Forward, is_on_for_all, opener, opens_flows, term};
use crate::maps;
use crate::net::Net;
use crate::packet::Packet;
use crate::skb::Skb;

/// Returns true if no state of a packet says that its flow goes on: it is a datagram, or of a
/// handshake. Of a bypass flow it skips the stack where that flow could be opened now.
#[inline(always)]
fn is_like_opener<A: Net>(packet: &Packet<A>) -> bool {
    let signals = packet.signals();
    packet.proto != Proto::TCP || signals.opens_connection() || signals.answers_opener()
}

/// Returns true if a packet of this flow belongs to one that was opened past the stack, and goes on
/// past it, whichever way it takes.
#[inline(always)]
pub fn is_bypass<A: Forward>(skb: Skb, packet: &Packet<A>, flow: &Flow<A>) -> bool {
    if !flow.rx.has(Seen::BYPASS) {
        return false;
    }
    // Device and networks were asked when the flow was opened, in this term.
    if is_first_answer(skb, flow) {
        return opens_flows();
    }
    // Rules are judged for packets that come by such devices alone.
    opener::is_bare(skb.ifindex(), 0)
        && (!is_like_opener(packet)
            || opens_flows()
                && maps::node().is_some_and(|node| {
                    opener::is_between(node, &flow.client.addr, &flow.backend.addr)
                }))
}

/// Returns true if a packet from the backend is the first one of a bypass flow that was opened in
/// this term, and comes in where it was expected then: the reply's entry is as it was made.
#[inline(never)]
fn is_first_answer<A: Forward>(skb: Skb, flow: &Flow<A>) -> bool {
    flow.kind == Kind::UNDNAT
        && !flow.rx.has(Seen::PACKET)
        && flow.cached_route().holds(skb.ifindex(), term())
}

/// Returns true if a packet of a bypass flow may take the way that was found; `is_far` if the flow
/// was opened to another node. The routes of other flows may lead there once their pods are gone,
/// by devices that no rule was judged for.
#[inline(always)]
fn may_take<A: Net>(packet: &Packet<A>, route: &FibResult, is_far: bool) -> bool {
    if is_like_opener(packet) {
        return route.is_for_openers(
            is_far && maps::node().is_some_and(|node| node.has(Node::FAST_OPEN_FAR)),
        );
    }
    route.is_to_pod() || is_far
}

/// Returns true if the way that was found is one for a packet of its flow: `is_far` as in
/// [`may_take`], or if the packet goes to a client outside. Old kernels remember wrongly what kind
/// of flow it was before the call that found the way.
#[inline(always)]
pub fn may_leave<A: Net>(packet: &Packet<A>, route: &FibResult, is_far: bool) -> bool {
    if route.is_of_bypass() {
        return may_take(packet, route, is_far);
    }
    is_on_for_all() || route.is_for_openers(is_far)
}

/// Returns true if the short way may take further packets of a flow. It takes the end of a
/// connection that was opened past the stack for one of a bypass flow.
#[inline(always)]
pub fn may_be_quick<A: Net>(packet: &Packet<A>, flow: &Flow<A>, route: &FibResult) -> bool {
    packet.proto != Proto::TCP || !flow.rx.has(Seen::BYPASS) || route.is_of_bypass()
}
