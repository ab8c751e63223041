//! Open flows.

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

use crate::clock::{in_secs, now_ns, now_secs};
use crate::flow::{close, remove};
use crate::maps::{self, Eviction, Memory, Refused, Scratch};
use crate::net::Net;
use crate::opening::Opening;
use crate::packet::Packet;
use crate::random::below;
use crate::ring::Ring;
use crate::setting::timeouts;

/// Source ports tried in a draw. At nine tenths full one in five flows would need more.
const PORT_TRIES: u32 = 16;

/// Tries among them that pass by the ports of other programs' connections.
const FOREIGN_NAT_TRIES: u32 = 12;

/// Draws for a masqueraded client that has flows from the drawn ports already.
const DRAWS: u32 = 4;

/// Places in the half-open queue that are made for one flow, before it is given up.
const PLACE_TRIES: u32 = 16;

/// Flows of two entries that make room for one of four, and how far the queue is searched for them.
const FORGET_FLOWS: u32 = 2;
const FORGET_TRIES: u32 = 16;

/// Opens a flow: claims a source port by making the entries that must be unique. The opener's entry
/// comes last, so that no packet of the flow can come back before its reply entries stand.
#[inline(always)]
pub fn flow<A: Net>(memory: Memory) -> Result<(), Reason> {
    A::open(memory).number().map(drop)
}

/// Does what [`flow`] says, for the packet and the opening of the scratch.
#[inline(always)]
pub fn claim_entries<A: Net>(mut memory: Memory) -> Result<(), Reason> {
    let keeps_port = begin::<A>(memory.lend())?;
    let mut claimed = if keeps_port || A::draw_port(false, memory.lend()) {
        A::claim(memory.lend())
    } else {
        Claim::Taken
    };
    // Another flow has the port. A second draw looks before it takes one. If it finds none, the
    // port of before is made free.
    if claimed == Claim::Taken && (A::draw_port(true, memory.lend()) || evict::<A>(memory.lend())) {
        claimed = A::claim(memory.lend());
    }
    if claimed == Claim::Full && A::make_room() {
        claimed = if keeps_port || A::draw_port(true, memory.lend()) {
            A::claim(memory.lend())
        } else {
            Claim::Taken
        };
    }
    conclude::<A>(claimed, memory)
}

/// Makes the flow in the scratch, and gives it its place among those that wait for an answer.
/// Returns true if it keeps its client's port.
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
    if !A::share(&flow.holder(), &flow.service, Register::ASK) {
        return Err(Reason::ClientShare);
    }
    // A changed address brings the client's port among the node's own: there it must come from our
    // range.
    let keeps_port = !flow.is_snat() && !source.port_taken;
    if !enqueue(flow, packet.proto) {
        return Err(Reason::FlowsFull);
    }
    Ok(keeps_port)
}

/// Puts a flow that does not exist yet at the end of this CPU's ring. Returns false if there is no
/// place.
///
/// A flow of four entries takes two places, so that flows that wait fill no more than half of the
/// table. The second one stands for nothing once the first has gone.
#[inline(always)]
fn enqueue<A: Net>(flow: &Flow<A>, proto: Proto) -> bool {
    take_place(flow, proto) && (!flow.has(Flow::<A>::WIDE) || take_place(flow, proto))
}

#[inline(never)]
fn take_place<A: Net>(flow: &Flow<A>, proto: Proto) -> bool {
    let place = A::half_open_place();
    if let Some(place) = place {
        maps::set_place(place, &flow.opener_key(proto), flow.last_secs);
    }
    place.is_some()
}

/// Finds a place at the end of this CPU's ring of waiting flows. If the ring is full, its first
/// flow has to go.
///
/// Where flows beyond half-open take more than half of the table, [`make_room`] makes room for
/// others. Returns None if streams that are spared took every place.
#[inline(always)]
pub fn half_open_place<A: Net>() -> Option<u32> {
    let ring = Ring::own();
    // A stream that has to leave the ring finds a place then.
    if maps::is_full::<A>(ring.streams()) {
        A::forget_first_flow(ring.streams(), true);
    }
    for nth in 0..PLACE_TRIES {
        let place = maps::free_place::<A>(ring);
        if place.is_some() {
            return place;
        }
        A::forget_first_flow(ring, nth < PLACE_TRIES / 2);
    }
    None
}

/// Makes room in a full table, where there are half-open flows: of this CPU's ring first, then of
/// any. Returns true if so.
#[inline(always)]
pub fn make_room<A: Net>() -> bool {
    let mut forgotten = 0;
    for nth in 0..FORGET_TRIES {
        let ring = if nth < FORGET_TRIES / 2 {
            Ring::own()
        } else {
            Ring::any()
        };
        // A sum without a branch: the verifier follows each of two ways through all tries.
        forgotten += A::forget_first_flow(ring, false);
        if forgotten >= FORGET_FLOWS {
            break;
        }
    }
    forgotten != 0
}

/// Takes the first flow out of a half-open ring, and closes it if it is half-open or expired.
/// Returns true if so.
///
/// While no agent sweeps, no other code closes expired flows. The flow may be another one that the
/// same client has opened since: that one goes a round too early. If the caller `spares` UDP flows
/// that go on ([`Flow::is_stream_since`]), they go to the end of the ring instead, and keep their
/// backend. Only a flood of such streams makes them go. A flow that is a stream for as long as it
/// lives goes to the ring of streams, if that has a place.
#[inline(always)]
pub fn forget_first<A: Net>(
    ring: Ring,
    Eviction { place, flow }: &mut Eviction<A>,
    spares: bool,
) -> bool {
    let is_place = maps::dequeue(ring, place);
    let key = &place.opener;
    if !is_place || maps::flow(key, flow).is_none() {
        return false;
    }
    if flow.is_half_open(key.proto()) {
        if keeps_place(ring, place, flow, spares) {
            return false;
        }
        maps::count(Event::FlowForgotten);
    } else if !is_evictable(flow, key.proto()) {
        return false;
    }
    close(key);
    true
}

/// Gives a half-open flow another place, if it shall have one. A function of its own, as the next
/// one.
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

/// A function of its own: what it needs of the stack is free again before [`close`] needs its own.
#[inline(never)]
fn is_evictable<A: Net>(flow: &Flow<A>, proto: Proto) -> bool {
    flow.is_evictable(proto, now_secs(), timeouts())
}

/// Counts a flow that has its entries.
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
        // Another CPU has opened this very flow meanwhile, for a copy of the same packet: its
        // choice counts.
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

/// Gives the flow in the scratch a source port at random. One that `looks` returns false if all that
/// it tries are other flows'.
#[inline(always)]
pub fn draw_port<A: Net>(looks: bool, memory: Memory) -> bool {
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
    for _ in 0..DRAWS {
        let Some(port) = A::draw(&replies, Draw::new(looks, is_clients)) else {
            return false;
        };
        flow.source.port = port;
        // A pod that is served by itself, from the port that it serves: both directions would look
        // alike between the hooks.
        let is_own_port = flow.client_between() == flow.backend;
        // Between the hooks a masqueraded flow has another tuple, which only the same client's
        // flows can have.
        let is_taken = looks && flow.is_snat_on_devices() && maps::is_flow(&flow.undnat_key(proto));
        if !is_own_port && !is_taken {
            return true;
        }
    }
    false
}

/// The way to draw a port, in the bits of a key's last word that the key leaves free.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Draw(pub u64);

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

/// Draws a port for the destination of a flow's replies. Returns None if all tries met other
/// flows'.
#[inline(always)]
pub fn draw<A: Net>(mut replies: FlowKey<A>, draw: Draw) -> Option<Port> {
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
        // One key for both looks: it takes the half of this function's stack.
        replies.set_hook(Hook::INGRESS);
        // Rather another program's port than none.
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

impl Claim {
    #[inline(always)]
    pub fn of(number: u32) -> Self {
        const MADE: u32 = Claim::Made as u32;
        const TAKEN: u32 = Claim::Taken as u32;
        const OPENED: u32 = Claim::Opened as u32;
        match number {
            MADE => Self::Made,
            TAKEN => Self::Taken,
            OPENED => Self::Opened,
            _ => Self::Full,
        }
    }
}

/// Makes room for `flow` where an expired flow has its tuple, before the agent has swept it, or
/// half-open. True if so.
///
/// Not at every try: where few ports are taken, it is better to leave those alone that a backend
/// may still remember.
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
    // Another client's flow is in the way only where both show the node's address.
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

/// Closes a flow that has a port of another program's connection, if the flow is half-open and
/// silent. A pod chooses its ports, and must not get an answer that another client waits for.
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

/// Returns true if a flow keeps its port: one beyond half-open, and a stream that was just heard.
#[inline(never)]
fn lasts<A: Net>(flow: &Flow<A>, proto: Proto) -> bool {
    !flow.is_half_open(proto) || flow.is_assured() && is_recent(flow.idle_secs(now_secs()))
}

/// Finds the flow that has the key of an entry of `flow`.
#[inline(never)]
fn holder<A: Net>(flow: &Flow<A>, kind: Kind, old: &mut Flow<A>, proto: Proto) -> bool {
    maps::flow(&flow.key_as(kind, proto), old).is_some()
}

/// Makes all entries of the flow in the scratch, or none.
#[inline(always)]
pub fn claim<A: Net>(memory: Memory) -> Claim {
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
        // This packet passes the opener's entry.
        flow.passed = Passed {
            packets: packet.segments.into(),
            bytes: packet.len.into(),
        };
        flow.set_cached_route(way.original);
        if proto == Proto::TCP {
            // The moment is in the reply's entry. A second try without it costs the measurement
            // alone.
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

/// Returns true if a flow's packets to its backend look just like this one.
///
/// A masqueraded flow has another source on the wire, so it collides with nothing there. Only
/// packets of pods count between the hooks as well.
#[inline(never)]
pub fn collides<A: Net>(packet: &Packet<A>, from_pod: bool, flow: &mut Flow<A>) -> bool {
    let back = FlowKey::new(Hook::EGRESS, packet.proto, packet.dst, packet.src);
    if maps::flow(&back, flow).is_none()
        || flow.kind != Kind::UNDNAT
        || !from_pod && flow.is_snat_on_devices()
    {
        return false;
    }
    // Unless this is itself a reply: two peers may dial each other's services from the ports that
    // they serve.
    let itself = FlowKey::new(Hook::EGRESS, packet.proto, packet.src, packet.dst);
    maps::flow(&itself, flow).is_none() || flow.kind != Kind::UNDNAT
}
