//! Packets of open connections that skip the node's stack: see README.md.
//!
//! A packet of an established flow goes straight to the pod's end of its veth, or to the neighbour
//! through another device. In doubt a packet takes the stack instead of being dropped.

mod bypass;
pub mod errors;
mod fib;
mod liberal;
pub mod opener;
mod plan;
mod quick;

use proxy_common::addr::{Addr, Proto};
use proxy_common::counter::{Event, Reason};
use proxy_common::flow::{CachedRoute, EntryKind, Flow, Hook, Kind, Seen, State, Term};
use proxy_macros::global_fn;

use self::bypass::{is_bypass, may_be_quick, may_leave};
use self::fib::leave;
use self::plan::Plan;
use crate::fast_path::is_on_for_all;
use crate::maps::{self, Entry, Memory, Scratch};
use crate::net::Net;
use crate::outcome::Action;
use crate::packet::Packet;
use crate::skb::{ETH_LEN, LinkHeader, PacketMark, Skb};
use crate::spoof::{At, is_spoofed};
use crate::{flow, packet};

pub use self::fib::{FibResult, Forward, find, longest};
pub use self::opener::find_route;
pub use self::plan::Becomes;
pub use self::quick::run as quick;

/// The result of the fast path for a packet, in one register: a tc action, or a constant below.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Delivery(pub i32);

impl Delivery {
    /// The packet is unchanged, and takes the stack.
    const LEFT: Self = Self(i32::MIN);
    /// The kernel has failed to rewrite the packet, which may be partly rewritten.
    const FAILED: Self = Self(i32::MIN + 1);
    /// A spoofed packet that a liberal conntrack entry could accept as the end of its connection.
    const SPOOFED: Self = Self(i32::MIN + 2);

    #[inline(always)]
    fn of(result: Result<Action, Reason>) -> Self {
        result.map_or(Self::FAILED, |Action(action)| Self(action))
    }

    #[inline(always)]
    fn result(self) -> Option<Result<Action, Reason>> {
        match self {
            Self::LEFT => None,
            Self::FAILED => Some(Err(Reason::Rewrite)),
            Self::SPOOFED => Some(Err(Reason::Spoofed)),
            Self(action) => Some(Ok(Action(action))),
        }
    }
}

/// Whether the ingress hook has found or opened a packet's flow, which is then in `scratch.flow`.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Known(pub u32);

impl Known {
    const NOTHING: Self = Self(0);
    const FOUND: Self = Self(1);
    /// The packet has just opened the flow.
    const OPENED: Self = Self(2);
}

/// The idle time in seconds after which no packets of a flow are in flight that a redirected packet
/// could overtake.
const SILENCE_SECS: u32 = 2;
/// The period in seconds (a power of two) in which a busy flow sends a packet through the stack.
/// Conntrack forgets a UDP exchange after 30 s.
const TURN_SECS: u32 = 16;

/// The bits of a flow that has ended or begins to end.
const END: Seen = Seen::FIN.with(Seen::RST);

/// Delivers an incoming packet past the stack, if its flow allows that. `is_known` is set if this
/// hook has found the flow, in `scratch.flow`. `None` leaves the packet to the stack, unchanged.
#[inline(always)]
pub fn run<A: Forward>(skb: Skb, is_known: bool, memory: Memory) -> Option<Result<Action, Reason>> {
    let known = if is_known {
        Known::FOUND
    } else {
        Known::NOTHING
    };
    deliver::<A>(skb, known, memory).result()
}

/// Delivers the first packet of the flow that has just been opened. `None` leaves the packet to the
/// stack, unchanged.
#[inline(always)]
pub fn first<A: Forward>(skb: Skb, memory: Memory) -> Option<Result<Action, Reason>> {
    deliver::<A>(skb, Known::OPENED, memory).result()
}

/// Delivers the ICMP error in `scratch.error`, if it is about a bypass flow. `None` leaves the
/// error to the stack, unchanged.
#[inline(always)]
pub fn error<A: Forward>(skb: Skb, memory: Memory) -> Option<Result<Action, Reason>> {
    errors::deliver::<A>(skb, memory).result()
}

#[global_fn(kpx_deliver4, kpx_deliver6)]
fn deliver<A: Forward>(skb: Skb, known: Known, mut memory: Memory) -> Delivery {
    let Some((scratch, _)) = memory.lend().scratch::<A>() else {
        return Delivery::LEFT;
    };
    let Scratch { packet, flow, .. } = &*scratch;
    // With a FIN or RST, this direction takes the stack from now on, and so must the other
    // direction, where the entry has only its own FIN and RST. (The FIN may be older than the fast
    // path.)
    if known == Known::FOUND
        && flow.kind == Kind::DNAT
        && flow.tx.has(Seen::DIRECT)
        && !flow.rx.has(Seen::BYPASS)
        && flow.tx.with(packet.seen()).has(END)
    {
        note_direct(flow, packet.proto, false);
    }
    if known != Known::NOTHING && !is_plain::<A>(skb) {
        return Delivery::LEFT;
    }
    let plan = match scratch.flow.kind.known() {
        Some(EntryKind::Dnat) if known == Known::OPENED => opener::first(scratch),
        Some(EntryKind::Dnat) if known == Known::FOUND => original(skb, scratch),
        Some(EntryKind::Snat | EntryKind::Undnat) | None if known != Known::NOTHING => Plan::Stack,
        _ => from_backend(skb, scratch, known != Known::NOTHING),
    };
    if plan == Plan::Stack {
        return Delivery::LEFT;
    }
    if plan == Plan::Spoofed {
        return Delivery::SPOOFED;
    }
    scratch.becomes.plan = plan as u32;
    Delivery::of(carry_out::<A>(skb, memory))
}

/// Returns true if this host routes the frame, and it has an Ethernet header and the usual IP
/// header.
#[inline(always)]
fn is_plain<A: Net>(skb: Skb) -> bool {
    // At a bridge's port, frames for this host have the bridge's address, and the bridge handles
    // them. Packets from a device without Ethernet headers have no room for one.
    let found = skb.found();
    let has_usual_headers =
        u32::from(found.l4) == ETH_LEN + A::IP_LEN && found.link() == LinkHeader::Ethernet;
    skb.is_ours() && !skb.is_tagged() && has_usual_headers
}

/// Carries out the plan for a packet that bypasses the stack.
///
/// The plan is read from memory again after each call: the verifier of old kernels would take a
/// second branch on the same register for one that always goes the same way.
#[inline(always)]
fn carry_out<A: Forward>(skb: Skb, mut memory: Memory) -> Result<Action, Reason> {
    let (scratch, _) = memory.lend().scratch::<A>().ok_or(Reason::Rewrite)?;
    if maps::again(&scratch.becomes.plan) != Plan::BackToDevice as u32 {
        packet::rewrite::<A>(skb, memory.lend())?;
    }
    let (scratch, _) = memory.scratch::<A>().ok_or(Reason::Rewrite)?;
    let Scratch { becomes, route, .. } = scratch;
    let plan = maps::again(&becomes.plan);
    let is = |other: Plan| plan == other as u32;
    if is(Plan::ToPod) || is(Plan::ToDevice) || is(Plan::ToDeviceAsNode) {
        maps::count(Event::Forwarded);
    } else if is(Plan::BackToPod) {
        maps::count(Event::Returned);
    }
    if is(Plan::ToDevice) || is(Plan::ToDeviceAsNode) {
        skb.set_packet_mark(PacketMark::forward(is(Plan::ToDeviceAsNode), false));
    } else if is(Plan::BackFromNode) {
        skb.set_packet_mark(PacketMark::BACK);
    }
    leave::<A>(skb, route)
}

/// Plans a packet to the backend. The ingress hook has already updated its flow.
#[inline(never)]
fn original<A: Forward>(skb: Skb, scratch: &mut Scratch<A>) -> Plan {
    let Scratch {
        packet,
        flow,
        route,
        becomes,
        ..
    } = scratch;
    // Conntrack forgets a connection within a minute if it sees only SYN and SYN-ACK. So the packet
    // that completes the handshake takes the stack.
    let is_bypass = is_bypass(skb, packet, flow);
    let is_open = flow.rx.has(Seen::DIRECT) && flow.state() == State::Established;
    let is_free = is_bypass || is_open && is_on_for_all();
    let is_made_liberal = !is_free && is_open && liberal::goes_to_backend(skb, packet.proto, flow);
    if !is_free && !is_made_liberal || is_for_stack(packet, flow, is_bypass) {
        // A cached route that is not renewed would become valid again when its term wraps.
        keep_route(flow, packet.proto, CachedRoute::NONE);
        return Plan::Stack;
    }
    // The kernel does not validate the source of packets that bypass it.
    let term = term();
    route.ask(flow.source.port, flow.backend.port, 0, is_bypass);
    let is_validated = flow.cached_route().holds(skb.ifindex(), term);
    // The kernel validates clients outside (`rp_filter`) behind this hook, by the route from the
    // backend. One variable for both cases spares the verifier a branch.
    becomes.dst.addr = if flow.is_far() {
        flow.backend.addr
    } else {
        packet.dst.addr
    };
    let is_sent_here =
        is_validated || !is_spoofed(skb, At::Here, &packet.src.addr, &becomes.dst.addr);
    let is_found = is_sent_here
        && find(
            skb,
            packet.proto,
            route,
            &flow.client.addr,
            &flow.backend.addr,
        );
    if !(is_found && may_leave(packet, route, flow.is_bypass_far())) {
        keep_route(flow, packet.proto, CachedRoute::NONE);
        return Plan::Stack;
    }
    let cached_route = CachedRoute::new(skb.ifindex(), route.keep(&flow.backend.addr), term);
    keep_route(
        flow,
        packet.proto,
        if may_be_quick(packet, flow, route) {
            cached_route
        } else {
            CachedRoute::NONE
        },
    );
    if !flow.tx.has(Seen::DIRECT) {
        note_direct(flow, packet.proto, true);
    }
    towards_backend(scratch)
}

/// Plans a packet to the backend by the route in `scratch.route`.
#[inline(always)]
fn towards_backend<A: Forward>(scratch: &mut Scratch<A>) -> Plan {
    let Scratch {
        flow,
        route,
        becomes,
        ..
    } = scratch;
    let src = if route.to_peer {
        flow.source
    } else {
        flow.client_between()
    };
    *becomes = Becomes {
        src,
        dst: flow.backend,
        is_far: flow.is_far().into(),
        plan: 0,
    };
    match (route.to_peer, flow.is_snat_on_devices()) {
        (true, _) => Plan::ToPod,
        (false, true) => Plan::ToDeviceAsNode,
        (false, false) => Plan::ToDevice,
    }
}

/// Stores a cached route in the original entry, if it differs.
#[inline(never)]
fn keep_route<A: Net>(flow: &Flow<A>, proto: Proto, cached_route: CachedRoute) {
    if flow.cached_route() != cached_route
        && let Some(entry) = maps::opener(flow, proto)
    {
        entry.set_cached_route(cached_route);
    }
}

/// Removes the cached route of the reply entry, if there is one.
#[inline(always)]
fn forget_route<A: Net>(entry: &Entry<A>, flow: &Flow<A>) {
    if flow.cached_route() != CachedRoute::NONE {
        entry.set_cached_route(CachedRoute::NONE);
    }
}

/// Records in both entries whether the original direction bypasses the stack. Rarely called more
/// than once per flow.
#[inline(never)]
fn note_direct<A: Net>(flow: &Flow<A>, proto: Proto, is_direct: bool) {
    for entry in [maps::undnat(flow, proto), maps::opener(flow, proto)]
        .into_iter()
        .flatten()
    {
        let tx = entry.read(|flow| flow.tx).without(Seen::DIRECT);
        entry.set_tx(if is_direct { tx.with(Seen::DIRECT) } else { tx });
    }
}

/// Plans a packet that may come from a backend: a packet to the node's address with an `Unsnat`
/// entry (`is_unsnat`), or a packet without an entry at ingress.
#[inline(always)]
fn from_backend<A: Forward>(skb: Skb, scratch: &mut Scratch<A>, is_unsnat: bool) -> Plan {
    let Scratch {
        packet,
        flow,
        other,
        becomes,
        ..
    } = scratch;
    becomes.plan = is_unsnat.into();
    let key = if is_unsnat {
        flow.undnat_key(packet.proto)
    } else {
        packet.flow_key(Hook::EGRESS)
    };
    let entry = maps::flow(&key, other);
    // Read from memory, so that the code below is verified once, and for old kernels: see "Do not"
    // in README.md.
    let is_unsnat = maps::again(&becomes.plan) != 0;
    if !is_unsnat {
        let is_of_liberal = entry.is_some() && liberal::is_liberal(other);
        if liberal::is_blind(skb, packet, is_of_liberal) {
            return Plan::Spoofed;
        }
        if !is_plain::<A>(skb) {
            return Plan::Stack;
        }
    }
    match entry {
        Some(entry) => reply(skb, scratch, &entry, is_unsnat),
        None => Plan::Stack,
    }
}

/// Plans a backend's packet, with its reply entry in `scratch.other`. `is_unsnat` is set if the
/// packet goes to the node's address.
#[inline(never)]
fn reply<A: Forward>(
    skb: Skb,
    scratch: &mut Scratch<A>,
    entry: &Entry<A>,
    is_unsnat: bool,
) -> Plan {
    let Scratch {
        packet,
        other,
        route,
        becomes,
        ..
    } = scratch;
    if other.kind != Kind::UNDNAT || other.has(Flow::<A>::HOST) || other.is_snat() != is_unsnat {
        return Plan::Stack;
    }
    // The egress hook closes such a flow.
    if flow::is_of_another_connection(packet, other) {
        return Plan::Stack;
    }
    if !other.rx.has(Seen::DIRECT) {
        if is_spoofed(skb, At::Here, &packet.src.addr, &packet.dst.addr) {
            return Plan::Stack;
        }
        entry.set_rx(entry.read(|flow| flow.rx).with(Seen::DIRECT));
    }
    // The first answer takes the stack, and so all of its rules.
    let is_bypass = is_bypass(skb, packet, other);
    let is_open = other.tx.has(Seen::DIRECT) && other.rx.has(Seen::PACKET) && !other.rx.has(END);
    let is_free = is_bypass || is_open && is_on_for_all();
    let is_made_liberal = !is_free && is_open && liberal::goes_to_client(skb, packet.proto, other);
    if !is_free && !is_made_liberal || is_for_stack(packet, other, is_bypass) {
        forget_route(entry, other);
        return Plan::Stack;
    }
    let term = term();
    route.ask(packet.src.port, packet.dst.port, 0, is_bypass);
    let is_validated = other.cached_route().holds(skb.ifindex(), term);
    let is_sent_here =
        is_validated || !is_spoofed(skb, At::Here, &packet.src.addr, &packet.dst.addr);
    let is_found = is_sent_here
        && find(
            skb,
            packet.proto,
            route,
            &packet.src.addr,
            &other.client.addr,
        );
    if !(is_found && may_leave(packet, route, other.is_far())) {
        forget_route(entry, other);
        return Plan::Stack;
    }
    let cached_route = CachedRoute::new(skb.ifindex(), route.keep(&other.client.addr), term);
    let cached_route = if may_be_quick(packet, other, route) {
        cached_route
    } else {
        CachedRoute::NONE
    };
    if other.cached_route() != cached_route && entry.is_at(&other.undnat_key(packet.proto)) {
        entry.set_cached_route(cached_route);
    }
    becomes.is_far = other.is_far().into();
    if route.to_peer {
        flow::reply(entry, other, packet);
        (becomes.src, becomes.dst) = (other.frontend, other.client);
        Plan::BackToPod
    } else if is_unsnat {
        (becomes.src, becomes.dst) = (packet.src, other.client_between());
        Plan::BackFromNode
    } else {
        Plan::BackToDevice
    }
}

/// Returns the current term. Callers read it before the routes.
#[inline(always)]
fn term() -> Term {
    Term::new(maps::about_now_secs(), maps::epoch())
}

/// Returns true if the stack has to see this packet.
#[inline(always)]
fn is_for_stack<A: Net>(packet: &Packet<A>, flow: &Flow<A>, is_bypass: bool) -> bool {
    let opens = packet.proto != Proto::UDP && (packet.opens() || packet.signals().answers_opener());
    // The stack has no state of a bypass flow.
    let is_due = !is_bypass
        && (opens || packet.seen().has(END) || is_its_turn(flow, maps::about_now_secs()));
    packet.is_fragment() || is_due
}

/// Returns true if this packet takes the stack to refresh conntrack's entry. `flow` is the state
/// before the packet.
#[inline(always)]
fn is_its_turn<A: Addr>(flow: &Flow<A>, now_secs: u32) -> bool {
    let idle_secs = flow.idle_secs(now_secs);
    idle_secs >= SILENCE_SECS || idle_secs != 0 && now_secs.is_multiple_of(TURN_SECS)
}
