//! Packets of open connections that skip the node's stack: see README.md.
//!
//! A packet of an established flow goes straight to the pod's end of its veth, or to the neighbour through another device.
//! In doubt the packet takes the stack, so that no doubt loses one.

mod fib;
mod quick;

use proxy_common::addr::{Addr, Proto};
use proxy_common::counter::{Event, Reason};
use proxy_common::device::Node;
use proxy_common::flow::{EntryKind, Flow, Hook, Judged, Kind, Seen, State, Term};

use self::fib::{find, leave};
use crate::maps::{self, Scratch};
use crate::net::{Net, is_forged};
use crate::packet::Packet;
use crate::skb::{ETH_LEN, LinkHeader, PacketMark, Skb};
use crate::{Action, flow};

pub use self::fib::{FibResult, Forward};
pub use self::quick::run as quick;

/// The fate of a packet here, in one register: a tc action, or none.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
struct Delivery(i32);

impl Delivery {
    /// The packet is as it was, and takes the stack.
    const LEFT: Self = Self(i32::MIN);
    /// The kernel has refused to change the packet, half of which may be done.
    const FAILED: Self = Self(i32::MIN + 1);

    #[inline(always)]
    fn result(self) -> Option<Result<Action, Reason>> {
        match self {
            Self::LEFT => None,
            Self::FAILED => Some(Err(Reason::Rewrite)),
            Self(action) => Some(Ok(Action(action))),
        }
    }
}

/// After this many seconds of silence nothing of a flow is on its way that could be overtaken, ...
const SILENCE_SECS: u32 = 2;
/// ... and a flow that is never silent sends one packet through the stack in as many seconds (a power of two). Conntrack
/// forgets a UDP exchange after 30.
const TURN_SECS: u32 = 16;

/// The end of a flow, or the beginning of its end.
const END: Seen = Seen::FIN.with(Seen::RST);

#[inline(always)]
pub fn is_on() -> bool {
    fib::is_built_in() && maps::node().is_some_and(|node| node.has(Node::FAST_PATH))
}

/// Delivers a packet that has come in, if its flow is one for it; `is_known` if `scratch.flow` has been found for it at
/// this hook. None: it is left to the stack, as it was.
#[inline(always)]
pub fn run<A: Forward>(skb: Skb, scratch: &mut Scratch<A>, is_known: bool) -> Option<Result<Action, Reason>> {
    deliver(skb, scratch, is_known).result()
}

#[inline(never)]
fn deliver<A: Forward>(skb: Skb, scratch: &mut Scratch<A>, is_known: bool) -> Delivery {
    let Scratch { packet, flow, .. } = &*scratch;
    // This direction takes the stack from now on, and so shall the other, which knows its own end only. (The end may have come
    // before, while nothing was fast.)
    if is_known && flow.kind == Kind::DNAT && flow.tx.has(Seen::DIRECT) && flow.tx.with(packet.seen()).has(END) {
        note_direct(flow, packet.proto, false);
    }
    // The bridge routes the packets of its ports. What comes in by a device without Ethernet headers brings no room for one.
    let found = skb.found();
    let is_plain = u32::from(found.l4) == ETH_LEN + A::IP_LEN && found.link() == LinkHeader::Ethernet;
    if !skb.is_ours() || skb.is_tagged() || !is_plain {
        return Delivery::LEFT;
    }
    let delivered = match scratch.flow.kind.known() {
        _ if !is_known => back(skb, scratch, false),
        Some(EntryKind::Dnat) => there(skb, scratch),
        Some(EntryKind::Unsnat) => back(skb, scratch, true),
        Some(EntryKind::Snat | EntryKind::Undnat) | None => Ok(Delivery::LEFT),
    };
    delivered.unwrap_or(Delivery::FAILED)
}

/// A packet to the backend. Its flow has been brought up to date by the ingress hook.
#[inline(always)]
fn there<A: Forward>(skb: Skb, scratch: &mut Scratch<A>) -> Result<Delivery, Reason> {
    let Scratch { packet, flow, route, .. } = scratch;
    // Conntrack forgets a connection within a minute if it sees no more of it than the two SYNs. So the packet that completes
    // the handshake takes the stack.
    if !flow.rx.has(Seen::DIRECT) || flow.state() != State::Established {
        return Ok(Delivery::LEFT);
    }
    if is_for_stack(packet, flow) {
        // A judgement that is not renewed would count again once its term has come round.
        keep_judgement(flow, packet.proto, Judged::NONE);
        return Ok(Delivery::LEFT);
    }
    // The kernel does not judge what skips it.
    let (term, epoch) = term();
    if !flow.judged().holds(skb.ifindex(), term)
        && is_forged(skb, skb.ifindex(), &packet.src.addr, &packet.dst.addr)
    {
        return Ok(Delivery::LEFT);
    }
    route.ask(flow.source.port, flow.backend.port, 0);
    if !find(skb, packet.proto, route, &flow.client.addr, &flow.backend.addr) {
        return Ok(Delivery::LEFT);
    }
    keep_judgement(flow, packet.proto, Judged::new(skb.ifindex(), route.keep(epoch), term));
    if !flow.tx.has(Seen::DIRECT) {
        note_direct(flow, packet.proto, true);
    }
    let source = if route.to_peer { flow.source } else { flow.client_between() };
    packet.rewrite(skb, &source, &flow.backend, flow.is_far())?;
    maps::count(Event::Forwarded);
    if !route.to_peer {
        skb.set_packet_mark(PacketMark::forward(flow.is_snat_on_devices(), false));
    }
    leave::<A>(skb, route).map(|Action(action)| Delivery(action))
}

/// Keeps a judgement of the client in the opener's entry, if it is news.
#[inline(never)]
fn keep_judgement<A: Net>(flow: &Flow<A>, proto: Proto, judged: Judged) {
    if flow.judged() != judged
        && let Some(entry) = maps::opener(flow, proto)
    {
        entry.set_judged(judged);
    }
}

/// Lets the other direction know that this one is fast, or is no more: seldom more than once for each flow.
#[inline(never)]
fn note_direct<A: Net>(flow: &Flow<A>, proto: Proto, is_direct: bool) {
    for entry in [maps::undnat(flow, proto), maps::opener(flow, proto)].into_iter().flatten() {
        let tx = entry.read(|flow| flow.tx).without(Seen::DIRECT);
        entry.set_tx(if is_direct { tx.with(Seen::DIRECT) } else { tx });
    }
}

/// A packet from the backend; `is_unsnat` if the ingress hook knows it as one that the backend has sent to the node.
#[inline(always)]
fn back<A: Forward>(skb: Skb, scratch: &mut Scratch<A>, is_unsnat: bool) -> Result<Delivery, Reason> {
    let Scratch { packet, flow, other, route, .. } = scratch;
    let key = if is_unsnat { flow.undnat_key(packet.proto) } else { packet.flow_key(Hook::EGRESS) };
    let Some(entry) = maps::flow(&key, other) else { return Ok(Delivery::LEFT) };
    if other.kind != Kind::UNDNAT || other.has(Flow::<A>::HOST) || other.is_snat() != is_unsnat {
        return Ok(Delivery::LEFT);
    }
    if !other.rx.has(Seen::DIRECT) {
        if is_forged(skb, skb.ifindex(), &packet.src.addr, &packet.dst.addr) {
            return Ok(Delivery::LEFT);
        }
        entry.set_rx(other.rx.with(Seen::DIRECT));
    }
    // The first answer has to pass all that the stack has to say to it.
    if !other.tx.has(Seen::DIRECT) || !other.rx.has(Seen::PACKET) || other.rx.has(END) {
        return Ok(Delivery::LEFT);
    }
    if is_for_stack(packet, other) {
        entry.set_judged(Judged::NONE);
        return Ok(Delivery::LEFT);
    }
    let (term, epoch) = term();
    if !other.judged().holds(skb.ifindex(), term)
        && is_forged(skb, skb.ifindex(), &packet.src.addr, &packet.dst.addr)
    {
        return Ok(Delivery::LEFT);
    }
    route.ask(packet.src.port, packet.dst.port, 0);
    if !find(skb, packet.proto, route, &packet.src.addr, &other.client.addr) {
        return Ok(Delivery::LEFT);
    }
    let judged = Judged::new(skb.ifindex(), route.keep(epoch), term);
    if other.judged() != judged && entry.is_at(&key) {
        entry.set_judged(judged);
    }
    if route.to_peer {
        flow::back(&entry, other, packet);
        packet.rewrite(skb, &other.frontend, &other.client, other.is_far())?;
        maps::count(Event::Returned);
    } else if is_unsnat {
        packet.rewrite(skb, &packet.src, &other.client_between(), other.is_far())?;
        skb.set_packet_mark(PacketMark::BACK);
    }
    leave::<A>(skb, route).map(|Action(action)| Delivery(action))
}

/// Returns the present term, and its epoch.
#[inline(always)]
fn term() -> (Term, u32) {
    let epoch = maps::epoch();
    (Term::new(flow::about_now_secs(), epoch), epoch)
}

/// Returns true if the stack has to see this packet.
#[inline(always)]
fn is_for_stack<A: Net>(packet: &Packet<A>, flow: &Flow<A>) -> bool {
    let opens = packet.opens() && packet.proto != Proto::UDP;
    opens || packet.seen().has(END) || packet.is_fragment() || is_its_turn(flow, flow::about_now_secs())
}

/// Returns true if the stack hears of the flow with this packet, and so does not forget it. `flow` is as before the packet.
#[inline(always)]
fn is_its_turn<A: Addr>(flow: &Flow<A>, now_secs: u32) -> bool {
    let idle_secs = flow.idle_secs(now_secs);
    idle_secs >= SILENCE_SECS || idle_secs != 0 && now_secs.is_multiple_of(TURN_SECS)
}
