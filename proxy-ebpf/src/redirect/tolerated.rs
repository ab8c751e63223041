//! Open flows past the stack where conntrack follows them. The agent tells conntrack first, for each flow, that it will miss packets
//! (`Node::FAST_OPENED`).
//!
//! A flow is judged with the first packet of a second in each direction, and asks the agent in the same second if it has no answer. All
//! other packets go by the judgement. Conntrack believes any end of such a flow, so an end under a false name must not get there.

use proxy_common::addr::{Proto, SockAddr};
use proxy_common::device::{Device, Node};
use proxy_common::flow::{Acked, Flow, FlowKey, Hook, Kind, Seen, is_for_asker, is_recent};

use super::opener::{is_bare, is_between, is_unchanged};
use super::{END, Forward, term};
use crate::net::{At, Net, is_forged};
use crate::packet::Packet;
use crate::skb::Skb;
use crate::{flow, maps};

/// After this many seconds of silence conntrack may have forgotten datagrams, and asks the policy about further ones.
const FORGOTTEN_SECS: u32 = 30;

/// Returns true if a node's open flows may skip the stack beside conntrack. The agent says so for a moment only.
#[inline(always)]
pub fn is_on(node: &Node) -> bool {
    node.has(Node::FAST_OPENED)
}

/// Returns true if flows like this may, at this moment: those to a pod of this node whose addresses no program of ours changes. `sender` is
/// [`Device::POD`] if the packet comes from a pod; else the client is outside.
#[inline(always)]
fn may_skip<A: Forward>(skb: Skb, proto: Proto, flow: &Flow<A>, sender: u32) -> bool {
    let is_plain_flow = !flow.is_snat() && !flow.has(Flow::<A>::HOST | Flow::<A>::GUEST);
    let is_known = proto == Proto::TCP || proto == Proto::UDP;
    let Some(node) = maps::node() else { return false };
    is_on(node)
        && is_known
        && is_plain_flow
        && flow::about_now_secs() <= maps::opens_until()
        && is_bare(skb.ifindex(), sender)
        && if flow.is_far() {
            may_skip_from_outside(node, proto, flow)
        } else {
            is_between(node, &flow.client.addr, &flow.backend.addr)
        }
}

/// Returns true if flows of clients outside may. Of TCP, a stranger's ends must have been told from the client's by their numbers.
#[inline(always)]
fn may_skip_from_outside<A: Forward>(node: &Node, proto: Proto, flow: &Flow<A>) -> bool {
    let tells_ends = proto != Proto::TCP || A::SHOWS_TCP && flow.has(Flow::<A>::NUMBERED);
    node.has(Node::FAST_OPENED_OUTSIDE) && tells_ends && is_unchanged(node, &flow.backend.addr)
}

/// Returns what a flow forgets by a long silence. Conntrack may be liberal with it still, and of a client outside no device tells a stranger.
#[inline(always)]
fn forgotten<A: Net>(flow: &Flow<A>) -> Seen {
    if flow.is_far() { Seen::TOLERATED } else { Seen::LIBERAL }
}

/// Returns true if a packet to the backend may skip the stack. `flow` is as before the packet.
#[inline(never)]
pub fn goes_there<A: Forward>(skb: Skb, proto: Proto, flow: &Flow<A>) -> bool {
    let now_secs = flow::about_now_secs();
    let sender = if flow.is_far() { 0 } else { Device::POD };
    let may_skip = || may_skip(skb, proto, flow, sender);
    if flow.last_secs >= now_secs {
        return flow.judged().holds(skb.ifindex(), term()) && may_skip();
    }
    if !may_skip() {
        return false;
    }
    let Some(undnat) = maps::undnat(flow, proto) else { return false };
    let key = A::any_key(&flow.opener_key(proto));
    let seen = undnat.read(|flow| flow.tx);
    if flow.idle_secs(now_secs) >= FORGOTTEN_SECS {
        undnat.set_tx(seen.without(forgotten(flow)));
        return false;
    }
    let asked = maps::tolerated_since(&key);
    let is_answered = seen.has(Seen::OFFERED) && asked.is_some_and(|secs| is_for_asker(secs, now_secs));
    if asked.is_some() && seen.has(Seen::TOLERATED) || is_answered {
        if !seen.has(Seen::TOLERATED) {
            undnat.set_tx(seen.with(Seen::TOLERATED));
        }
        return true;
    }
    if !seen.has(Seen::OFFERED) {
        undnat.set_tx(seen.with(Seen::OFFERED));
    }
    maps::offer(key, now_secs);
    false
}

/// Returns true if a packet from the backend may skip the stack. `flow` is the reply's entry as before the packet.
#[inline(never)]
pub fn goes_back<A: Forward>(skb: Skb, proto: Proto, flow: &Flow<A>) -> bool {
    if !flow.tx.has(Seen::TOLERATED) || !may_skip(skb, proto, flow, Device::POD) {
        return false;
    }
    if flow.last_secs >= flow::about_now_secs() {
        return flow.judged().holds(skb.ifindex(), term());
    }
    if flow.idle_secs(flow::about_now_secs()) >= FORGOTTEN_SECS {
        if let Some(undnat) = maps::undnat(flow, proto) {
            undnat.set_tx(flow.tx.without(forgotten(flow)));
        }
        return false;
    }
    maps::tolerated_since(&A::any_key(&flow.opener_key(proto))).is_some()
}

/// Returns true if a packet that no flow begins with could end a connection in conntrack's eyes, and comes from where its sender is not.
/// Conntrack joins fragments, so those count as well. A client outside dials the frontend: what has its name and goes to the backend itself is
/// a stranger's.
#[inline(never)]
pub fn is_blind<A: Forward>(skb: Skb, packet: &Packet<A>) -> bool {
    let told = packet.told();
    let is_end = told.seen().has(END) || told.opens_connection() || told.answers_opener() || packet.is_fragment();
    if packet.proto != Proto::TCP || !is_end {
        return false;
    }
    let of_backend = liberal_flow(&packet.flow_key(Hook::EGRESS));
    let of_client = liberal_flow(&FlowKey::new(Hook::EGRESS, packet.proto, packet.dst, packet.src));
    of_client == Liberal::Far
        || (of_backend != Liberal::None || of_client != Liberal::None)
            && is_forged(skb, At::Here, &packet.src.addr, &packet.dst.addr)
}

/// Returns true if a first fragment, which is too short for its TCP header, goes from a client outside to the backend itself: see [`is_blind`].
#[inline(always)]
pub fn is_blind_stub<A: Net>(src: SockAddr<A>, dst: SockAddr<A>) -> bool {
    A::SHOWS_TCP && liberal_flow(&FlowKey::new(Hook::EGRESS, Proto::TCP, dst, src)) == Liberal::Far
}

/// Returns true if a packet of a client outside would end its flow in conntrack's eyes, and the backend has not acknowledged nearly as much as
/// its number. What the backend would ignore must not count for conntrack. After any other end the flow asks again.
#[inline(never)]
pub fn is_wild_end<A: Forward>(packet: &Packet<A>, flow: &Flow<A>) -> bool {
    let told = packet.told();
    if packet.proto != Proto::TCP || !told.seen().has(END) {
        return false;
    }
    let Some(undnat) = maps::undnat(flow, packet.proto) else { return false };
    let seen = undnat.read(|flow| flow.tx);
    if !seen.has(Seen::LIBERAL) {
        return false;
    }
    let now_secs = flow::about_now_secs();
    let advances = undnat.read(|flow| flow.rx.has(Seen::ADVANCED) && is_recent(flow.idle_secs(now_secs)));
    let acked = Acked(undnat.read(|flow| flow.generation));
    if packet.seq().is_none_or(|seq| !acked.admits_end(seq, told.resets(), advances)) {
        return true;
    }
    undnat.set_tx(seen.without(Seen::TOLERATED));
    false
}

/// The flow of a reply's entry that conntrack may be liberal with, in a register.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum Liberal {
    None,
    /// Both ends are pods of this node.
    Near,
    /// The client is outside.
    Far,
}

#[inline(always)]
fn liberal_flow<A: Net>(key: &FlowKey<A>) -> Liberal {
    let Some(entry) = maps::live_flow(key) else { return Liberal::None };
    entry.read(|flow| {
        if flow.kind != Kind::UNDNAT || !flow.tx.has(Seen::LIBERAL) {
            Liberal::None
        } else if flow.is_far() {
            Liberal::Far
        } else {
            Liberal::Near
        }
    })
}
