//! The short path past the stack, for flows both of whose directions skip the stack: packets that
//! change no flow state, and those state changes of bypass flows that `state_change.rs` applies. A
//! packet of a flow that takes the stack continues in `established.rs`, with the same entry.
//!
//! The slow path ([`super::run`]) would do the same with these packets. It takes all other packets,
//! such as the first packet of a flow in each second.

use proxy_common::addr::{Proto, SockAddr};
use proxy_common::counter::{Event, Reason};
use proxy_common::device::Node;
use proxy_common::flow::{CachedRoute, Flow, FlowKey, Hook, Kind, Seen, Term};
use proxy_macros::global_fn;

use super::fib::{find_on, send};
use super::{END, Forward, liberal};
use crate::established::{self, Others};
use crate::fast_path::{is_on_for_all, opens_flows};
use crate::header::Head;
use crate::maps::{self, Entry, Marked, Memory, Scratch};
use crate::outcome::Outcome;
use crate::skb::{PacketMark, Skb};
use crate::spoof::{At, is_spoofed};
use crate::{state_change, tcp};

/// Delivers, translates or passes a packet. Returns [`Outcome::NOT_ESTABLISHED`] if the slow path
/// has to take the packet, which is unchanged then.
#[global_fn(kpx_quick4, kpx_quick6)]
pub fn run<A: Forward>(skb: Skb, mut memory: Memory) -> Outcome {
    let mark = skb.packet_mark();
    let Some(head) = &established::head::<A>(skb, Hook::INGRESS, mark) else {
        return Outcome::NOT_ESTABLISHED;
    };
    let begins_or_ends =
        head.proto == Proto::TCP && head.flags & (tcp::SYN | tcp::FIN | tcp::RST) != 0;
    let ends_past_stack = begins_or_ends && may_end_past_stack();
    let is_end = head.flags & (tcp::SYN | tcp::FIN | tcp::RST) == tcp::FIN;
    if begins_or_ends && tcp::opens(head.flags) {
        return Outcome::NOT_ESTABLISHED;
    }
    let marked = Marked::of(head.src(), head.dst());
    if marked == Marked::NONE {
        return established::missed(skb, Hook::INGRESS, head, Others::NONE, memory);
    }
    if begins_or_ends && ends_past_stack && !is_end {
        return Outcome::NOT_ESTABLISHED;
    }
    let mut key = FlowKey::new(Hook::INGRESS, head.proto, head.src, head.dst);
    let (entry, is_original) = match find_entry(
        skb,
        head,
        &mut key,
        marked,
        begins_or_ends && !ends_past_stack,
    ) {
        Found::Original(entry) => (entry, true),
        Found::Reply(entry) => (entry, false),
        Found::Unknown => return Outcome::NOT_ESTABLISHED,
        _ if ends_past_stack => return Outcome::NOT_ESTABLISHED,
        found => {
            let others = if matches!(found, Found::ReplyByStack) {
                Others::ANY
            } else {
                Others::NO_ANSWER
            };
            return established::missed(skb, Hook::INGRESS, head, others, memory);
        }
    };
    let is_bypass = head.proto == Proto::TCP && entry.read(|flow| flow.rx.has(Seen::BYPASS));
    if begins_or_ends && !is_bypass && !(is_original && is_end && is_left_alone(&entry)) {
        return Outcome::NOT_ESTABLISHED;
    }
    if is_original
        && !is_bypass
        && (begins_or_ends || lacks_route(head, &entry) || is_of_stack(skb, head, &entry))
    {
        let is_spoofed = || established::is_spoofed(skb, Hook::INGRESS, head);
        return established::translate(
            skb,
            (Hook::INGRESS, mark),
            head,
            (&key, &entry),
            memory,
            is_spoofed,
        );
    }
    let is_fast = if is_original {
        goes_to_backend(&entry, is_bypass)
    } else {
        goes_to_client(&entry, is_bypass)
    };
    let is_change = if is_original {
        established::changes_opener(&entry, head)
    } else {
        established::changes_reply(&entry, head) || established::advances(&entry, head)
    };
    let may_go = is_fast && (!is_change || is_bypass && state_change::may_be_taken(head));
    let exit = if may_go {
        cached_exit(skb, &entry)
    } else {
        None
    };
    let (Some(exit), Some((scratch, _))) = (exit, memory.lend().scratch_here::<A>()) else {
        return Outcome::NOT_ESTABLISHED;
    };
    scratch.becomes.plan = is_change.into();
    if is_original {
        original(&entry, exit, scratch);
    } else {
        reply(head, &entry, exit, scratch);
    }
    if !entry.is_at(&key) {
        return Outcome::NOT_ESTABLISHED;
    }
    leave_for(skb, head, &entry, is_original, scratch)
}

/// The entry of a packet.
enum Found<A: Forward> {
    /// The packet goes to the backend.
    Original(Entry<A>),
    /// The packet comes from the backend, and may skip the stack.
    Reply(Entry<A>),
    /// The packet comes from the backend, and takes the stack. The hook where it leaves translates
    /// it.
    ReplyByStack,
    Nothing,
    /// The slow path has to find out.
    Unknown,
}

/// Finds the entry of a packet, and sets `key` to the entry's key. Returns [`Found::Unknown`] for a
/// packet that `begins_or_ends` a connection if the slow path has to check more.
#[inline(always)]
fn find_entry<A: Forward>(
    skb: Skb,
    head: &Head<A>,
    key: &mut FlowKey<A>,
    marked: Marked,
    begins_or_ends: bool,
) -> Found<A> {
    if !marked.is_answer_to_client(head.dst.port.get())
        && let Some(entry) = maps::live_flow_here(key)
    {
        return Found::Original(entry);
    }
    key.set_hook(Hook::EGRESS);
    let reply = maps::live_flow_here(key);
    // A liberal conntrack entry accepts any end of its connection, in either direction. The source
    // of such a client is marked.
    let may_end_another = || {
        let of_client = FlowKey::new(Hook::EGRESS, head.proto, head.dst(), head.src());
        begins_or_ends && marked == Marked::FIRST && maps::is_flow(&of_client)
    };
    match reply {
        Some(entry) if begins_or_ends && entry.read(|flow| !flow.rx.has(Seen::BYPASS)) => {
            let is_noted =
                || entry.read(|flow| flow.rx.has(Seen::DIRECT)) || notes(skb, head, &entry, key);
            let is_left = is_end_of_stack(&entry) && !may_end_another() && is_noted();
            if is_left {
                Found::ReplyByStack
            } else {
                Found::Unknown
            }
        }
        Some(entry) if !begins_or_ends && is_of_stack(skb, head, &entry) => Found::ReplyByStack,
        Some(entry) => Found::Reply(entry),
        None if may_end_another() => Found::Unknown,
        None => Found::Nothing,
    }
}

/// Returns true if packets that begin or end a connection may skip the stack.
#[inline(always)]
fn may_end_past_stack() -> bool {
    maps::node().is_none_or(|node| node.has(Node::FAST_OPEN | Node::FAST_PATH))
}

/// Returns true if only the stack handles the end of a flow: the slow path would leave the reply
/// entry unchanged.
#[inline(always)]
fn is_end_of_stack<A: Forward>(entry: &Entry<A>) -> bool {
    entry.read(|flow| {
        !flow.tx.has(Seen::LIBERAL)
            && flow.kind == Kind::UNDNAT
            && flow.cached_route() == CachedRoute::NONE
    })
}

/// Records where the backend's first answer came in, as the slow path would.
#[inline(always)]
fn notes<A: Forward>(skb: Skb, head: &Head<A>, entry: &Entry<A>, key: &FlowKey<A>) -> bool {
    let is_plain_flow = !entry.read(|flow| flow.has(Flow::<A>::HOST) || flow.is_snat());
    let src = head.src();
    let dst = head.dst();
    let may_note = A::SHORT_WAYS_JUDGE
        && is_plain_flow
        && skb.is_ours()
        && !skb.is_tagged()
        && !is_spoofed(skb, At::Here, &src.addr, &dst.addr)
        && entry.is_at(key);
    if may_note {
        entry.set_rx(entry.read(|flow| flow.rx).with(Seen::DIRECT));
    }
    may_note
}

/// Delivers a packet with the addresses in `scratch.becomes`.
#[inline(always)]
fn leave_for<A: Forward>(
    skb: Skb,
    head: &Head<A>,
    entry: &Entry<A>,
    is_original: bool,
    scratch: &mut Scratch<A>,
) -> Outcome {
    let Scratch {
        packet,
        route,
        becomes,
        ..
    } = scratch;
    // The route is looked up for the addresses between the hooks, where the client has its own
    // address.
    if !A::has_hop_left(skb, head)
        || !find_on(skb, head.proto, route, &head.src.addr, &becomes.dst.addr)
    {
        return Outcome::NOT_ESTABLISHED;
    }
    // As `bypass::may_take`: the slow path has validated the flow in this second. The client of a
    // bypass flow is a pod.
    let is_bypass = || entry.read(|flow| flow.rx.has(Seen::BYPASS));
    let is_to_outside = || !is_original && entry.read(Flow::is_far) && route.is_for_openers(true);
    let may_leave = || {
        if is_bypass() {
            is_original && entry.read(Flow::is_bypass_far)
        } else {
            is_to_outside() || is_on_for_all()
        }
    };
    if !route.is_to_pod() && !may_leave() {
        return Outcome::NOT_ESTABLISHED;
    }
    // A datagram leaves as the flow's opener: to a pod only by `bpf_redirect_peer`.
    if head.proto != Proto::TCP && route.is_to_pod() && !route.to_peer && is_bypass() {
        return Outcome::NOT_ESTABLISHED;
    }
    if is_original && !route.to_peer {
        becomes.src.addr = head.src.addr;
    }
    // In all other cases the hook of another device restores the frontend's address, and applies
    // the state change.
    let is_heard_here = is_original || route.to_peer;
    if maps::again(&becomes.plan) != 0
        && is_heard_here
        && !established::take_change(entry, head, is_original)
    {
        return Outcome::NOT_ESTABLISHED;
    }
    if is_original || route.to_peer {
        if let Err(reason) = translate(skb, head, &becomes.src, &becomes.dst, entry) {
            established::name(head, packet);
            return Outcome::new(Err(reason));
        }
        maps::count(if is_original {
            Event::Forwarded
        } else {
            Event::Returned
        });
    } else if let Err(reason) = A::spend_hop(skb) {
        return Outcome::new(Err(reason));
    }
    if is_original && !route.to_peer {
        skb.set_packet_mark(PacketMark::forward(
            entry.read(Flow::is_snat_on_devices),
            false,
        ));
    }
    Outcome::new(send(skb, route))
}

/// Returns true if the short path may take a packet to the backend. Bypass connections end past the
/// stack as well.
#[inline(always)]
fn goes_to_backend<A: Forward>(entry: &Entry<A>, is_bypass: bool) -> bool {
    let (tx, rx) = entry.read(|flow| (flow.tx, flow.rx));
    // As `State::Established`, in bits: each branch would multiply the verifier's work.
    let is_established = tx.with(rx).only(END.with(Seen::ASSURED)) == Seen::ASSURED;
    tx.only(rx).has(Seen::DIRECT)
        && (is_bypass || is_established)
        && entry.read(|flow| flow.kind) == Kind::DNAT
}

/// Returns true if the short path may take a packet from the backend.
#[inline(always)]
fn goes_to_client<A: Forward>(entry: &Entry<A>, is_bypass: bool) -> bool {
    let (tx, rx) = entry.read(|flow| (flow.tx, flow.rx));
    tx.only(rx).has(Seen::DIRECT)
        && (is_bypass || !rx.has(END))
        && rx.has(Seen::PACKET)
        && entry.read(|flow| flow.kind) == Kind::UNDNAT
        && !entry.read(|flow| flow.has(Flow::<A>::HOST) || flow.is_snat())
}

/// Returns true if only the stack handles the end of a flow by its client.
#[inline(always)]
fn is_left_alone<A: Forward>(entry: &Entry<A>) -> bool {
    A::SHORT_WAYS_JUDGE
        && entry.read(|flow| !flow.tx.has(Seen::DIRECT) && flow.cached_route() == CachedRoute::NONE)
}

/// Sets the addresses and the look-up of the route for a packet to the backend.
#[inline(always)]
fn original<A: Forward>(entry: &Entry<A>, exit: u32, scratch: &mut Scratch<A>) {
    let Scratch { route, becomes, .. } = scratch;
    (becomes.src, becomes.dst) = (
        entry.read(|flow| flow.source),
        entry.read(|flow| flow.backend),
    );
    route.ask(becomes.src.port, becomes.dst.port, exit, false);
}

/// Sets the addresses and the look-up of the route for a packet from the backend.
#[inline(always)]
fn reply<A: Forward>(head: &Head<A>, entry: &Entry<A>, exit: u32, scratch: &mut Scratch<A>) {
    let Scratch { route, becomes, .. } = scratch;
    (becomes.src, becomes.dst) = (
        entry.read(|flow| flow.frontend),
        entry.read(|flow| flow.client),
    );
    route.ask(head.src.port, head.dst.port, exit, false);
}

/// The number of an entry's first packets that check whether the flow may skip the stack, as the
/// first packet of each second does.
const FIRST_PACKETS: u64 = 4;

/// Returns true if a packet with an entry at ingress takes the stack, except for the first packet
/// of a second: [`established::translate`] leaves that to the slow path, which validates it. If all
/// flows may skip the stack, more has to be checked.
#[inline(always)]
fn lacks_route<A: Forward>(head: &Head<A>, entry: &Entry<A>) -> bool {
    let is_validated = entry.read(|flow| flow.cached_route() != CachedRoute::NONE);
    let is_bypass_exchange =
        head.proto != Proto::TCP && entry.read(|flow| flow.rx.has(Seen::BYPASS));
    !is_validated && !is_bypass_exchange && !is_on_for_all()
}

/// Returns true if a packet's flow takes the stack, so the packet need not pay for the short path.
#[inline(always)]
fn is_of_stack<A: Forward>(skb: Skb, head: &Head<A>, entry: &Entry<A>) -> bool {
    let rx = entry.read(|flow| flow.rx);
    // As `bypass::is_bypass`: SYNs do not come here.
    if rx.has(Seen::BYPASS) && (head.proto == Proto::TCP || opens_flows()) {
        return false;
    }
    let is_young = || entry.read(|flow| flow.passed.packets) < FIRST_PACKETS;
    let is_first_of_second = || entry.read(|flow| flow.last_secs) != maps::about_now_secs();
    if is_on_for_all() {
        return !rx.has(Seen::DIRECT) && !is_young() && !is_first_of_second();
    }
    if !maps::node().is_some_and(liberal::is_on) {
        return true;
    }
    // For flows that conntrack follows, the first packet of a second decides for all packets of the
    // second, and the first answer records where it came in. No other packet of a short connection
    // is checked.
    let notes = entry.read(|flow| flow.kind == Kind::UNDNAT) && !rx.has(Seen::DIRECT) && is_young();
    let cached_route = entry.read(Flow::cached_route);
    let is_validated = || {
        cached_route.holds(
            skb.ifindex(),
            Term::new(maps::about_now_secs(), maps::epoch()),
        )
    };
    !notes && !is_first_of_second() && (cached_route == CachedRoute::NONE || !is_validated())
}

/// Rewrites a packet's addresses and ports, decrements its hop limit, and updates its flow's
/// counters.
#[inline(always)]
fn translate<A: Forward>(
    skb: Skb,
    head: &Head<A>,
    src: &SockAddr<A>,
    dst: &SockAddr<A>,
    entry: &Entry<A>,
) -> Result<(), Reason> {
    A::forward(skb, head, src, dst)?;
    entry.count(skb.segments(), skb.len());
    established::note_acked(entry, head);
    Ok(())
}

/// Returns the device in front of the pod to which the packet goes, or 0 if the route has to be
/// looked up. Returns `None` if the slow path has not validated the sender at this device in this
/// second and term, or the frame is for another host or has a tag.
#[inline(always)]
fn cached_exit<A: Forward>(skb: Skb, entry: &Entry<A>) -> Option<u32> {
    let now_secs = maps::about_now_secs();
    let is_recent = entry.read(|flow| flow.last_secs) == now_secs;
    let cached_route = entry.read(Flow::cached_route);
    let holds = cached_route.holds(skb.ifindex(), Term::new(now_secs, maps::epoch()));
    (is_recent && holds && skb.is_ours() && !skb.is_tagged()).then(|| cached_route.exit())
}
