//! The conditions for packets of bypass flows, and for their routes: see "Redirecting past the
//! stack" in README.md.

use proxy_common::addr::Proto;
use proxy_common::device::Node;
use proxy_common::flow::{Flow, Kind, Seen};

use super::{FibResult, Forward, opener, term};
use crate::fast_path::{is_on_for_all, opens_flows};
use crate::maps;
use crate::net::Net;
use crate::packet::Packet;
use crate::skb::Skb;

/// Returns true if a packet does not show that its flow is established: it is a datagram, or part
/// of a handshake. Such a packet of a bypass flow skips the stack only if the flow could be opened
/// now.
#[inline(always)]
fn is_like_opener<A: Net>(packet: &Packet<A>) -> bool {
    let signals = packet.signals();
    packet.proto != Proto::TCP || signals.opens_connection() || signals.answers_opener()
}

/// Returns true if this is a bypass flow, and the packet may skip the stack by any route.
#[inline(always)]
pub fn is_bypass<A: Forward>(skb: Skb, packet: &Packet<A>, flow: &Flow<A>) -> bool {
    if !flow.rx.has(Seen::BYPASS) {
        return false;
    }
    // Device and networks were checked when the flow was opened, in this term.
    if is_first_answer(skb, flow) {
        return opens_flows();
    }
    // The agent has checked the rules only for packets of bare devices.
    opener::is_bare(skb.ifindex(), 0)
        && (!is_like_opener(packet)
            || opens_flows()
                && maps::node().is_some_and(|node| {
                    opener::is_between(node, &flow.client.addr, &flow.backend.addr)
                }))
}

/// Returns true for the backend's first packet in a bypass flow that was opened in this term, if it
/// comes in through the expected device: the reply entry is as it was created.
#[inline(never)]
fn is_first_answer<A: Forward>(skb: Skb, flow: &Flow<A>) -> bool {
    flow.kind == Kind::UNDNAT
        && !flow.rx.has(Seen::PACKET)
        && flow.cached_route().holds(skb.ifindex(), term())
}

/// Returns true if a packet of a bypass flow may take this route. `is_far` is set if the flow was
/// opened to another node. Once the pod of any other flow is gone, its route may lead to another
/// node as well, through devices for which the agent has not checked the rules.
#[inline(always)]
fn may_take<A: Net>(packet: &Packet<A>, route: &FibResult, is_far: bool) -> bool {
    if is_like_opener(packet) {
        return route.is_for_openers(
            is_far && maps::node().is_some_and(|node| node.has(Node::FAST_OPEN_FAR)),
        );
    }
    route.is_to_pod() || is_far
}

/// Returns true if a packet may take this route. `is_far` is as in [`may_take`], and also set if
/// the packet goes to a client outside. The kind of flow is read from `route`: on old kernels, a
/// value must not decide a branch before and after a call (see "Do not" in README.md).
#[inline(always)]
pub fn may_leave<A: Net>(packet: &Packet<A>, route: &FibResult, is_far: bool) -> bool {
    if route.is_of_bypass() {
        return may_take(packet, route, is_far);
    }
    is_on_for_all() || route.is_for_openers(is_far)
}

/// Returns true if the short path may handle further packets of a flow. The short path delivers the
/// FIN and RST of every flow with `Seen::BYPASS` past the stack, so TCP flows that take the stack
/// now must not use it.
#[inline(always)]
pub fn may_be_quick<A: Net>(packet: &Packet<A>, flow: &Flow<A>, route: &FibResult) -> bool {
    packet.proto != Proto::TCP || !flow.rx.has(Seen::BYPASS) || route.is_of_bypass()
}
