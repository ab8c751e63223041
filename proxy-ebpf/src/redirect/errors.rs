//! ICMP errors about packets of bypass flows. They bypass the stack as well: conntrack has no entry
//! of such a flow, so it would classify them as invalid, which rules may drop.

use proxy_common::addr::Port;
use proxy_common::counter::{Event, Reason};
use proxy_common::device::{Device, Node};
use proxy_common::flow::{Hook, Kind, Seen};
use proxy_macros::global_fn;

use super::fib::{find, leave};
use super::opener::{is_bare, is_between};
use super::{Delivery, Forward, Plan};
use crate::icmp::note_unreachable;
use crate::maps::{self, Memory, Scratch};
use crate::outcome::Action;
use crate::skb::{PacketMark, Skb};
use crate::spoof::{At, is_spoofed};

/// Delivers the error in `scratch.error`, if its flow could be opened as a bypass flow now.
#[global_fn(kpx_deliver_error4, kpx_deliver_error6)]
pub fn deliver<A: Forward>(skb: Skb, memory: Memory) -> Delivery {
    let Some((scratch, _)) = memory.scratch::<A>() else {
        return Delivery::LEFT;
    };
    if finds_flow(skb, scratch) && finds_way(skb, scratch) {
        return Delivery::of(carry_out(skb, scratch));
    }
    Delivery::LEFT
}

/// Finds the flow, into `scratch.other`, and sets the error's translation and plan. Returns false
/// if the error takes the stack.
#[inline(never)]
fn finds_flow<A: Forward>(skb: Skb, scratch: &mut Scratch<A>) -> bool {
    let Scratch {
        error,
        other: flow,
        becomes,
        ..
    } = scratch;
    if !error.has_usual_headers() || !skb.is_ours() || skb.is_tagged() || !is_bare(skb.ifindex(), 0)
    {
        return false;
    }
    if maps::flow(&error.key(Hook::INGRESS), flow).is_some() {
        // The error stays as parsed, because the slow path translates it if this path does not.
        if flow.kind != Kind::DNAT || !flow.rx.has(Seen::BYPASS) {
            return false;
        }
        error.goes_there(flow);
        becomes.plan = Plan::ToDevice as u32;
        return true;
    }
    let is_found = maps::flow(&error.key(Hook::EGRESS), flow).is_some();
    if !is_found || flow.kind != Kind::UNDNAT || !flow.rx.has(Seen::BYPASS) {
        return false;
    }
    error.goes_back(flow);
    becomes.plan = Plan::BackToPod as u32;
    true
}

/// Finds the error's route, into `scratch.route`. Returns false if the error takes the stack.
#[inline(never)]
fn finds_way<A: Forward>(skb: Skb, scratch: &mut Scratch<A>) -> bool {
    let Scratch {
        error,
        other: flow,
        route,
        becomes,
        ..
    } = scratch;
    let Some(node) = maps::node() else {
        return false;
    };
    if !is_between(node, &flow.client.addr, &flow.backend.addr)
        || is_spoofed(skb, At::Here, error.src(), error.dst())
    {
        return false;
    }
    // The agent has checked rules for errors of senders other than pods only if bypass flows may be
    // opened to other nodes.
    let is_of_pod =
        || is_bare(skb.ifindex(), Device::POD) && is_between(node, error.src(), error.goes_to());
    if !(flow.is_bypass_far() && node.has(Node::FAST_OPEN_FAR) || is_of_pod()) {
        return false;
    }
    // The stack routes errors without ports.
    route.ask(Port::ANY, Port::ANY, 0, false);
    if !find(skb, A::ICMP, route, error.src(), error.goes_to()) {
        return false;
    }
    let is_there = maps::again(&becomes.plan) == Plan::ToDevice as u32;
    route.is_for_openers(is_there && flow.is_bypass_far() && node.has(Node::FAST_OPEN_FAR))
}

/// Rewrites and sends the error. The plan is read again for each branch: see [`super::carry_out`].
#[inline(always)]
fn carry_out<A: Forward>(skb: Skb, scratch: &mut Scratch<A>) -> Result<Action, Reason> {
    let Scratch {
        error,
        other: flow,
        route,
        becomes,
        ..
    } = scratch;
    error.rewrite(skb)?;
    if maps::again(&becomes.plan) == Plan::BackToPod as u32 {
        maps::count(Event::Returned);
        note_unreachable(skb, error, flow, At::Here);
    } else {
        maps::count(Event::Forwarded);
        if !route.to_peer {
            skb.set_packet_mark(PacketMark::forward(false, false));
        }
    }
    leave::<A>(skb, route)
}
