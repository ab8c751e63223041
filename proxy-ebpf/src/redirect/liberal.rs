//! Open flows that bypass the stack although conntrack tracks them. The agent first makes each
//! flow's conntrack entry liberal, because conntrack will miss packets (`Node::FAST_OPENED`).
//!
//! The first packet of a second in each direction decides for the flow, and sends the agent a
//! request if the conntrack entry is not liberal yet. All other packets of the second follow that
//! decision. A liberal conntrack entry accepts any FIN or RST, so spoofed FINs and RSTs must not
//! reach conntrack.

use proxy_common::addr::Proto;
use proxy_common::device::{Device, Node};
use proxy_common::flow::{AnyKey, Flow, FlowKey, Hook, Kind, Seen, is_for_asker};

use super::opener::{is_bare, is_between, is_unchanged};
use super::{END, Forward, term};
use crate::maps;
use crate::packet::Packet;
use crate::skb::Skb;
use crate::spoof::{At, is_spoofed};

/// The idle time in seconds after which conntrack may have forgotten a UDP exchange, so that the
/// next datagram has to pass the policy.
const FORGOTTEN_SECS: u32 = 30;

/// Returns true if a node's open flows may bypass the stack with liberal conntrack entries. Callers
/// also check the agent's lease.
#[inline(always)]
pub fn is_on(node: &Node) -> bool {
    node.has(Node::FAST_OPENED)
}

/// Returns true if such a flow may bypass the stack now: neither masqueraded, nor the host's, nor a
/// foreign NAT connection, and within the agent's lease. `sender` is [`Device::POD`] if the packet
/// must come from a pod, or 0 for a client outside.
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

/// Returns true if a flow of a client outside may bypass the stack: only UDP. A liberal conntrack
/// entry of TCP would accept a FIN or RST that spoofs the client.
#[inline(always)]
fn may_skip_from_outside<A: Forward>(node: &Node, proto: Proto, flow: &Flow<A>) -> bool {
    proto == Proto::UDP
        && node.has(Node::FAST_OPENED_OUTSIDE)
        && is_unchanged(node, &flow.backend.addr)
}

/// Returns true if a packet to the backend may skip the stack. `flow` is the state before the
/// packet.
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
    let key = AnyKey::of(&flow.opener_key(proto));
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

/// Returns true if a packet from the backend may skip the stack. `flow` is the reply entry before
/// the packet.
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
    maps::liberal_since(&AnyKey::of(&flow.opener_key(proto))).is_some()
}

/// Returns true if a packet without an entry at ingress is spoofed, and could end or restart a
/// connection with a liberal conntrack entry. Fragments count as well, because conntrack
/// reassembles them. `is_of_liberal` is set if the packet has the tuple of a reply in such a flow.
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

/// Returns true for the reply entry of a flow with a possibly liberal conntrack entry.
#[inline(always)]
pub fn is_liberal<A: Forward>(flow: &Flow<A>) -> bool {
    flow.kind == Kind::UNDNAT && flow.tx.has(Seen::LIBERAL)
}
