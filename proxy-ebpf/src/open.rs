//! Opens flows.

use proxy_common::addr::{Port, Proto, SockAddr};
use proxy_common::connect::DialTime;
use proxy_common::counter::{Event, Reason};
use proxy_common::flow::{
    CLIENT_PORT_FIRST, CLIENT_PORT_LAST, Flow, FlowKey, Hook, Kind, Proof, SOURCE_PORT_FIRST, Seen,
    is_recent,
};
use proxy_common::half_open::Place;
use proxy_common::service_counts::Passed;
use proxy_common::share::Register;
use proxy_macros::global_fn;

use crate::clock::{in_secs, now_ns, now_secs};
use crate::flow::{close, remove};
use crate::global_fn;
use crate::maps::{self, Eviction, Memory, Refused, Scratch};
use crate::net::Net;
use crate::opening::Opening;
use crate::packet::Packet;
use crate::random::below;
use crate::ring::Ring;
use crate::setting::timeouts;

/// Source ports tried per draw. With nine tenths of the ports taken, one in five flows would need
/// more.
const PORT_TRIES: u32 = 16;

/// The tries of these that avoid foreign NAT ports.
const FOREIGN_NAT_TRIES: u32 = 12;

/// Draws for a masqueraded client that already has flows from the drawn ports.
const DRAWS: u32 = 4;

/// Attempts to free a place in the half-open queue for one flow, before the flow is refused.
const PLACE_TRIES: u32 = 16;

/// The flows of two entries to evict for a flow of four, and the places to search for them.
const FORGET_FLOWS: u32 = 2;
const FORGET_TRIES: u32 = 16;

/// Opens a flow: claims a source port by creating the entries that must be unique. The original
/// entry comes last, so that the reply entries exist before the first reply comes in.
///
/// The packet and the opening are in the scratch.
#[global_fn(kpx_open4, kpx_open6)]
pub fn flow<A: Net>(mut memory: Memory) -> Result<(), Reason> {
    let keeps_port = begin::<A>(memory.lend())?;
    let mut claimed = if keeps_port || draw_port::<A>(false, memory.lend()) {
        claim::<A>(memory.lend())
    } else {
        Claim::Taken
    };
    // Another flow has the port. A second draw avoids the ports of other flows. If the draw fails,
    // the flow that has the port is evicted, if it may be.
    if claimed == Claim::Taken && (draw_port::<A>(true, memory.lend()) || evict::<A>(memory.lend()))
    {
        claimed = claim::<A>(memory.lend());
    }
    if claimed == Claim::Full && make_room::<A>() {
        claimed = if keeps_port || draw_port::<A>(true, memory.lend()) {
            claim::<A>(memory.lend())
        } else {
            Claim::Taken
        };
    }
    conclude::<A>(claimed, memory)
}

/// Creates the flow in the scratch, and gives it a place among the half-open flows. Returns true if
/// the flow keeps its client's port.
#[inline(always)]
fn begin<A: Net>(memory: Memory) -> Result<bool, Reason> {
    let (scratch, _) = memory.scratch::<A>().ok_or(Reason::FlowsFull)?;
    let Scratch {
        packet,
        flow,
        opening,
        ..
    } = scratch;
    let Opening { source, .. } = opening;
    let client = SockAddr::new(source.addr, packet.src.port);
    let now_ns = now_ns();
    let flags = opening.flags | Flow::<A>::NUMBERED;
    *flow = Flow::new(
        packet.src,
        packet.dst,
        opening.backend,
        client,
        flags,
        in_secs(now_ns),
    );
    flow.generation = if packet.proto == Proto::TCP {
        DialTime::at(now_ns).0
    } else {
        source.generation
    };
    flow.service = opening.service;
    flow.note_width();
    if opening.way.is_known() {
        flow.tx = flow.tx.with(Seen::DIRECT);
        flow.rx = Seen::DIRECT.with(Seen::BYPASS);
    }
    if !maps::share(&flow.holder(), &flow.service, Register::ASK) {
        return Err(Reason::ClientShare);
    }
    // With a changed address, the client's port would be among the node's own, so it must come from
    // kpx's ranges.
    let keeps_port = !flow.is_snat() && !source.port_taken;
    if !enqueue(flow, packet.proto) {
        return Err(Reason::FlowsFull);
    }
    Ok(keeps_port)
}

/// Appends a flow, before its entries exist, to this CPU's ring. Returns false if no place is free.
///
/// A flow of four entries takes two places, so that half-open flows fill at most half of the table.
/// The second place is void once the first is gone.
#[inline(always)]
fn enqueue<A: Net>(flow: &Flow<A>, proto: Proto) -> bool {
    take_place(flow, proto) && (!flow.has(Flow::<A>::WIDE) || take_place(flow, proto))
}

#[inline(never)]
fn take_place<A: Net>(flow: &Flow<A>, proto: Proto) -> bool {
    let place = half_open_place::<A>();
    if let Some(place) = place {
        maps::set_place(place, &flow.opener_key(proto), flow.last_secs);
    }
    place.is_some()
}

/// Takes a place at the end of this CPU's ring of half-open flows. If the ring is full, its first
/// flow has to leave.
///
/// If flows beyond half-open fill more than half of the table, [`make_room`] makes room for new
/// flows. Returns `None` if spared streams take every place.
#[global_fn(kpx_place4, kpx_place6)]
fn half_open_place<A: Net>() -> Option<u32> {
    let ring = Ring::own();
    // Frees a place for a stream that has to leave this CPU's ring.
    if maps::is_full::<A>(ring.streams()) {
        forget_first::<A>(ring.streams(), true);
    }
    for nth in 0..PLACE_TRIES {
        let place = maps::free_place::<A>(ring);
        if place.is_some() {
            return place;
        }
        forget_first::<A>(ring, nth < PLACE_TRIES / 2);
    }
    None
}

/// Makes room in a full table by closing half-open flows: of this CPU's ring first, then of any
/// ring. Returns true if it has closed a flow.
#[global_fn(kpx_make_room4, kpx_make_room6)]
fn make_room<A: Net>() -> bool {
    let mut forgotten = 0;
    for nth in 0..FORGET_TRIES {
        let ring = if nth < FORGET_TRIES / 2 {
            Ring::own()
        } else {
            Ring::any()
        };
        // A sum without a branch: the verifier would follow both branches through all tries.
        forgotten += forget_first::<A>(ring, false);
        if forgotten >= FORGET_FLOWS {
            break;
        }
    }
    forgotten != 0
}

/// Removes the first flow from a half-open ring, and closes the flow if it is half-open or expired.
/// Returns the number of flows that it has closed.
///
/// While no agent sweeps, no other code closes expired flows. The key may belong to a later flow of
/// the same client, which is then evicted one round early. If the caller `spares` active UDP flows
/// ([`Flow::is_stream_since`]), these move to the end of the ring instead, and keep their backend.
/// Only a flood of such streams evicts them. An assured flow moves to the ring of streams, if that
/// has a place.
#[global_fn(kpx_forget4, kpx_forget6)]
fn forget_first<A: Net>(ring: Ring, spares: bool) -> u32 {
    let Some(Eviction { place, flow }) = global_fn::eviction::<A>() else {
        return 0;
    };
    let is_place = maps::dequeue(ring, place);
    let key = &place.opener;
    if !is_place || maps::flow(key, flow).is_none() {
        return 0;
    }
    if flow.is_half_open(key.proto()) {
        if keeps_place(ring, place, flow, spares) {
            return 0;
        }
        maps::count(Event::FlowForgotten);
    } else if !is_evictable(flow, key.proto()) {
        return 0;
    }
    close(key);
    1
}

/// Moves a half-open flow to another place, if it may stay. Returns true if the flow has moved. A
/// separate function, for the reason of [`is_evictable`].
#[inline(never)]
fn keeps_place<A: Net>(ring: Ring, place: &Place<A>, flow: &Flow<A>, spares: bool) -> bool {
    let proto = place.opener.proto();
    let now_secs = now_secs();
    let is_stream = flow.is_assured();
    let moves = is_stream && !ring.is_of_streams();
    let goes_on = spares && proto == Proto::UDP && flow.is_stream_since(place.since_secs, now_secs);
    if !moves && !goes_on || flow.is_evictable(proto, now_secs, timeouts()) {
        return false;
    }
    let to = if is_stream {
        Ring::own().streams()
    } else {
        ring
    };
    maps::enqueue(to, &place.opener, now_secs)
}

/// A separate function, so that its stack is free again before [`close`] needs stack.
#[inline(never)]
fn is_evictable<A: Net>(flow: &Flow<A>, proto: Proto) -> bool {
    flow.is_evictable(proto, now_secs(), timeouts())
}

/// Counts a flow whose entries are made, and returns the reason if they are not.
#[inline(never)]
fn conclude<A: Net>(claimed: Claim, memory: Memory) -> Result<(), Reason> {
    let (scratch, _) = memory.scratch::<A>().ok_or(Reason::FlowsFull)?;
    let Scratch { packet, flow, .. } = scratch;
    let proto = packet.proto;
    match claimed {
        Claim::Made => {
            maps::count(Event::FlowOpened);
            maps::service_opened(&flow.service);
            if flow.has(Flow::<A>::COUNTED) {
                maps::connection_opened(flow.backend, proto);
            }
            Ok(())
        }
        // Another CPU has opened this flow for a copy of the same packet: the other CPU's choice
        // counts.
        Claim::Opened => {
            let opener = flow.opener_key(proto);
            maps::flow(&opener, flow)
                .map(|_winner| ())
                .ok_or(Reason::NoSourcePort)
        }
        Claim::Taken => Err(Reason::NoSourcePort),
        Claim::Full => Err(Reason::FlowsFull),
    }
}

/// Gives the flow in the scratch a random source port. If it `looks`, it avoids the ports of other
/// flows. Returns false if all tries fail.
#[global_fn(kpx_draw_port4, kpx_draw_port6)]
fn draw_port<A: Net>(looks: bool, memory: Memory) -> bool {
    let Some((scratch, _)) = memory.scratch::<A>() else {
        return false;
    };
    let Scratch { packet, flow, .. } = scratch;
    let proto = packet.proto;
    let is_clients = flow.is_snat_on_devices() || flow.has(Flow::<A>::FOREIGN_NAT);
    let replies = if flow.is_snat_on_devices() {
        flow.key_as(Kind::UNSNAT, proto)
    } else {
        flow.undnat_key(proto)
    };
    let (src, dst) = replies.addrs();
    let rest = replies.rest() | Draw::new(looks, is_clients).0;
    for _ in 0..DRAWS {
        let Some(port) = draw(src, dst, rest) else {
            return false;
        };
        flow.source.port = port;
        // If a pod is its own backend, and its source port is the port that it serves, both
        // directions look alike between the hooks.
        let is_own_port = flow.client_between() == flow.backend;
        // Between the hooks a masqueraded flow has another tuple, which only flows of the same
        // client can have.
        let is_taken = looks && flow.is_snat_on_devices() && maps::is_flow(&flow.undnat_key(proto));
        if !is_own_port && !is_taken {
            return true;
        }
    }
    false
}

/// The mode of a draw, in bits that a key's [`FlowKey::rest`] leaves free.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Draw(u64);

impl Draw {
    const LOOKS: u64 = 1 << 48;
    const CLIENTS: u64 = 1 << 49;

    #[inline(always)]
    fn new(looks: bool, is_clients: bool) -> Self {
        Self((u64::from(looks) * Self::LOOKS) | (u64::from(is_clients) * Self::CLIENTS))
    }

    #[inline(always)]
    fn has(self, bit: u64) -> bool {
        self.0 & bit != 0
    }
}

/// Draws a port for the destination of a flow's replies, whose key has this packed `rest` with a
/// [`Draw`]. Returns `None` if all tries met ports of other flows.
#[global_fn(kpx_draw4, kpx_draw6)]
fn draw<A: Net>(src: &A, dst: &A, rest: u64) -> Option<Port> {
    let mut replies = FlowKey::joined(*src, *dst, rest);
    let draw = Draw(rest);
    let (first, count) = if draw.has(Draw::CLIENTS) {
        (CLIENT_PORT_FIRST, CLIENT_PORTS)
    } else {
        (SOURCE_PORT_FIRST, SOURCE_PORTS)
    };
    let hook = replies.hook();
    let now_secs = now_secs();
    for nth in 0..PORT_TRIES {
        let port = Port::new(first + below(count) as u16);
        replies.set_dport(port);
        // One key for both look-ups halves this function's stack.
        replies.set_hook(Hook::INGRESS);
        // Falls back to a port that another program may use.
        let is_foreign_nat =
            nth < FOREIGN_NAT_TRIES && maps::foreign_nat(&replies).is_there(now_secs);
        replies.set_hook(hook);
        let is_avoided = is_foreign_nat || draw.has(Draw::LOOKS) && maps::is_flow(&replies);
        if !is_avoided {
            return Some(port);
        }
    }
    None
}

const SOURCE_PORTS: u32 = u16::MAX as u32 + 1 - SOURCE_PORT_FIRST as u32;
const CLIENT_PORTS: u32 = CLIENT_PORT_LAST as u32 + 1 - CLIENT_PORT_FIRST as u32;

/// The result of a claim, in a register.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Claim {
    Made,
    /// Another flow has this source port.
    Taken,
    /// Another CPU has opened this flow.
    Opened,
    Full,
}

/// Makes room for `flow` by closing a flow that has its tuple, and is expired or half-open. Returns
/// true if it has closed a flow.
///
/// Only after failed draws: while few ports are taken, the flows that a backend may still remember
/// are better left alone.
#[inline(never)]
fn evict<A: Net>(memory: Memory) -> bool {
    let Some((scratch, _)) = memory.scratch::<A>() else {
        return false;
    };
    let Scratch {
        packet,
        flow,
        other: old,
        ..
    } = scratch;
    let proto = packet.proto;
    // A flow of another client collides only if both have the node's address.
    let is_taken = holder(flow, Kind::UNDNAT, old, proto)
        || flow.is_snat_on_devices() && holder(flow, Kind::UNSNAT, old, proto);
    if !is_taken {
        return false;
    }
    let opener = old.opener_key(proto);
    if maps::flow(&opener, old).is_none() {
        return false;
    }
    if !is_expired(old, proto) {
        if lasts(old, proto) {
            return false;
        }
        maps::count(Event::FlowForgotten);
    }
    close(&opener);
    true
}

/// Closes a flow that has a foreign NAT port, if the flow is half-open and silent. A pod chooses
/// its ports, and must not receive an answer for which another client waits.
#[inline(never)]
pub fn end_if_silent<A: Net>(flow: &Flow<A>, proto: Proto) {
    if flow.is_half_open(proto) && !is_recent(flow.idle_secs(now_secs())) {
        maps::count(Event::FlowForgotten);
        close(&flow.opener_key(proto));
    }
}

#[inline(never)]
fn is_expired<A: Net>(flow: &Flow<A>, proto: Proto) -> bool {
    flow.is_expired(proto, now_secs(), timeouts())
}

/// Returns true if a flow keeps its port: it is beyond half-open, or a stream with a recent packet.
#[inline(never)]
fn lasts<A: Net>(flow: &Flow<A>, proto: Proto) -> bool {
    !flow.is_half_open(proto) || flow.is_assured() && is_recent(flow.idle_secs(now_secs()))
}

/// Copies the flow that has the key of an entry of `flow` to `old`. Returns false if the key is
/// free.
#[inline(never)]
fn holder<A: Net>(flow: &Flow<A>, kind: Kind, old: &mut Flow<A>, proto: Proto) -> bool {
    maps::flow(&flow.key_as(kind, proto), old).is_some()
}

/// Creates all entries of the flow in the scratch, or removes them again.
#[global_fn(kpx_claim4, kpx_claim6)]
fn claim<A: Net>(memory: Memory) -> Claim {
    let Some((scratch, _)) = memory.scratch::<A>() else {
        return Claim::Full;
    };
    let Scratch {
        packet,
        flow,
        opening,
        ..
    } = scratch;
    let way = &opening.way;
    let proto = packet.proto;
    let snat = flow.is_snat_on_devices();
    flow.passed = Passed::NOTHING;
    flow.set_cached_route(way.reply);
    let mut claimed = put(flow, Kind::UNDNAT, proto);
    if claimed != Claim::Made {
        return claimed;
    }
    if snat {
        claimed = put(flow, Kind::UNSNAT, proto);
        if claimed == Claim::Made {
            claimed = put(flow, Kind::SNAT, proto);
            if claimed != Claim::Made {
                remove(flow, Kind::UNSNAT, proto);
            }
        }
    }
    if claimed == Claim::Made {
        // The original entry counts this packet.
        flow.passed = Passed {
            packets: packet.segments.into(),
            bytes: packet.len.into(),
        };
        flow.set_cached_route(way.original);
        if proto == Proto::TCP {
            // The reply entry has the time of the SYN. A second claim lacks the time, which costs
            // only the measurement.
            flow.generation = Proof::NONE.0;
        }
        claimed = put(flow, Kind::DNAT, proto);
        if claimed == Claim::Made {
            return Claim::Made;
        }
        if claimed == Claim::Taken {
            claimed = Claim::Opened;
        }
        if snat {
            remove(flow, Kind::SNAT, proto);
            remove(flow, Kind::UNSNAT, proto);
        }
    }
    remove(flow, Kind::UNDNAT, proto);
    claimed
}

#[inline(never)]
fn put<A: Net>(flow: &mut Flow<A>, kind: Kind, proto: Proto) -> Claim {
    flow.kind = kind;
    match maps::claim_flow(&flow.key_as(kind, proto), flow) {
        Ok(()) => Claim::Made,
        Err(Refused::Taken) => Claim::Taken,
        Err(Refused::Full) => Claim::Full,
    }
}

/// Returns true if a flow's packets to its backend have this packet's tuple.
///
/// On the wire a masqueraded flow has another source, so there it collides with no packet. Only
/// packets of pods are seen between the hooks as well.
#[inline(never)]
pub fn collides<A: Net>(packet: &Packet<A>, from_pod: bool, flow: &mut Flow<A>) -> bool {
    let back = FlowKey::new(Hook::EGRESS, packet.proto, packet.dst, packet.src);
    if maps::flow(&back, flow).is_none()
        || flow.kind != Kind::UNDNAT
        || !from_pod && flow.is_snat_on_devices()
    {
        return false;
    }
    // Not if this packet is a reply: two peers may dial each other's services from the ports that
    // they serve.
    let itself = FlowKey::new(Hook::EGRESS, packet.proto, packet.src, packet.dst);
    maps::flow(&itself, flow).is_none() || flow.kind != Kind::UNDNAT
}
