//! Open flows past the stack where conntrack follows them. The agent tells conntrack first, for
//! each flow, that it will miss packets (`Node::FAST_OPENED`).
//!
//! A flow is judged with the first packet of a second in each direction, and asks the agent in the
//! same second if it has no answer. All other packets go by the judgement. Conntrack believes any
//! end of such a flow, so an end under a false name must not get there.

use proxy_common::addr::Proto;
use proxy_common::device::{Device, Node};
use proxy_common::flow::{Flow, FlowKey, Hook, Kind, Seen, is_for_asker};

use super::opener::{is_bare, is_between, is_unchanged};
use super::{END, Forward, term};
use crate::maps;
use crate::net::{At, is_spoofed};
use crate::packet::Packet;
use crate::skb::Skb;

/// After this many seconds of silence conntrack may have forgotten datagrams, and asks the policy
/// about further ones.
const FORGOTTEN_SECS: u32 = 30;

/// Returns true if a node's open flows may skip the stack beside conntrack. The agent says so for a
/// moment only.
#[inline(always)]
pub fn is_on(node: &Node) -> bool {
    node.has(Node::FAST_OPENED)
}

/// Returns true if flows like this may, at this moment: those to a pod of this node whose addresses
/// no program of ours changes. `sender` is [`Device::POD`] if the packet comes from a pod; else the
/// client is outside.
#[inline(always)]
fn may_skip<A: Forward>(skb: Skb, proto: Proto, flow: &Flow<A>, sender: u32) -> bool {
    let is_plain_flow = !flow.is_snat() && !flow.has(Flow::<A>::HOST | Flow::<A>::FOREIGN_NAT);
    let is_known = proto == Proto::TCP || proto == Proto::UDP;
    let Some(node) = maps::node() else {
        return false;
    };
    is_on(node)
        && is_known
        && is_plain_flow
        && maps::about_now_secs() <= maps::opens_until()
        && is_bare(skb.ifindex(), sender)
        && if flow.is_far() {
            may_skip_from_outside(node, proto, flow)
        } else {
            is_between(node, &flow.client.addr, &flow.backend.addr)
        }
}

/// Returns true if flows of clients outside may: UDP alone. A stranger may end TCP in a client's
/// name, and conntrack would believe it.
#[inline(always)]
fn may_skip_from_outside<A: Forward>(node: &Node, proto: Proto, flow: &Flow<A>) -> bool {
    proto == Proto::UDP
        && node.has(Node::FAST_OPENED_OUTSIDE)
        && is_unchanged(node, &flow.backend.addr)
}

/// Returns true if a packet to the backend may skip the stack. `flow` is as before the packet.
#[inline(never)]
pub fn goes_to_backend<A: Forward>(skb: Skb, proto: Proto, flow: &Flow<A>) -> bool {
    let now_secs = maps::about_now_secs();
    let sender = if flow.is_far() { 0 } else { Device::POD };
    let may_skip = || may_skip(skb, proto, flow, sender);
    if flow.last_secs >= now_secs {
        return flow.cached_route().holds(skb.ifindex(), term()) && may_skip();
    }
    if !may_skip() {
        return false;
    }
    let Some(undnat) = maps::undnat(flow, proto) else {
        return false;
    };
    let key = A::any_key(&flow.opener_key(proto));
    let seen = undnat.read(|flow| flow.tx);
    if flow.idle_secs(now_secs) >= FORGOTTEN_SECS {
        undnat.set_tx(seen.without(Seen::MADE_LIBERAL));
        return false;
    }
    let asked = maps::liberal_since(&key);
    let is_answered =
        seen.has(Seen::OFFERED) && asked.is_some_and(|secs| is_for_asker(secs, now_secs));
    if asked.is_some() && seen.has(Seen::MADE_LIBERAL) || is_answered {
        if !seen.has(Seen::MADE_LIBERAL) {
            undnat.set_tx(seen.with(Seen::MADE_LIBERAL));
        }
        return true;
    }
    if !seen.has(Seen::OFFERED) {
        undnat.set_tx(seen.with(Seen::OFFERED));
    }
    maps::offer(key, now_secs);
    false
}

/// Returns true if a packet from the backend may skip the stack. `flow` is the reply's entry as
/// before the packet.
#[inline(never)]
pub fn goes_to_client<A: Forward>(skb: Skb, proto: Proto, flow: &Flow<A>) -> bool {
    if !flow.tx.has(Seen::MADE_LIBERAL) || !may_skip(skb, proto, flow, Device::POD) {
        return false;
    }
    if flow.last_secs >= maps::about_now_secs() {
        return flow.cached_route().holds(skb.ifindex(), term());
    }
    if flow.idle_secs(maps::about_now_secs()) >= FORGOTTEN_SECS {
        if let Some(undnat) = maps::undnat(flow, proto) {
            undnat.set_tx(flow.tx.without(Seen::MADE_LIBERAL));
        }
        return false;
    }
    maps::liberal_since(&A::any_key(&flow.opener_key(proto))).is_some()
}

/// Returns true if a packet that no flow begins with could end a connection in conntrack's eyes,
/// and comes from where its sender is not. Conntrack joins fragments, so those count as well.
/// `is_of_liberal`: it looks like one of a backend, in a flow with which conntrack may be liberal.
#[inline(never)]
pub fn is_blind<A: Forward>(skb: Skb, packet: &Packet<A>, is_of_liberal: bool) -> bool {
    let signals = packet.signals();
    let is_end = signals.seen().has(END)
        || signals.opens_connection()
        || signals.answers_opener()
        || packet.is_fragment();
    if packet.proto != Proto::TCP || !is_end {
        return false;
    }
    let of_client = FlowKey::new(Hook::EGRESS, packet.proto, packet.dst, packet.src);
    let is_of_client = || maps::live_flow(&of_client).is_some_and(|entry| entry.read(is_liberal));
    (is_of_liberal || is_of_client())
        && is_spoofed(skb, At::Here, &packet.src.addr, &packet.dst.addr)
}

/// Returns true for the reply's entry of a flow with which conntrack may be liberal.
#[inline(always)]
pub fn is_liberal<A: Forward>(flow: &Flow<A>) -> bool {
    flow.kind == Kind::UNDNAT && flow.tx.has(Seen::LIBERAL)
}
