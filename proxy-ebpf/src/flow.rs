//! Find, follow and close flows.

use aya_ebpf::helpers::bpf_ktime_get_boot_ns;
use proxy_common::addr::Proto;
use proxy_common::counter::{Event, Reason};
use proxy_common::flow::{Flow, Hook, Kind, Seen, State};
use proxy_common::service_counts::Passed;

use crate::Answer;
use crate::decide;
use crate::maps::{self, Entry};
use crate::net::{Net, is_forged};
use crate::packet::Packet;
use crate::skb::{Note, Skb};

/// A backend that goes on after as many datagrams serves somebody who listens: a stream, asked for once.
pub const ANSWERS: u64 = 4;

/// Finds the flow that `packet` belongs to at `hook`, and brings it up to date with the packet. One that is known to be
/// on its way forward to a backend is nobody's reply, even if it looks like one. And between the hooks of a masqueraded
/// flow the client has a port of ours, which on its own machine may be another conversation's: only what the first hook
/// has noted belongs to such a flow at the second, and what the host answers in a backend's name (netfilter's REJECT).
///
/// A packet in another's name changes nothing: [`Reason::Forged`].
#[inline(always)]
pub fn follow<A: Net>(
    skb: Skb,
    packet: &Packet<A>,
    hook: Hook,
    note: Note,
    flow: &mut Flow<A>,
) -> Result<bool, Reason> {
    match learn(skb, packet, hook, note, flow) {
        FORGED => Err(Reason::Forged),
        known => Ok(known == KNOWN),
    }
}

// What `learn` answers, in a register.
const UNKNOWN: Answer = 0;
const KNOWN: Answer = 1;
const FORGED: Answer = 2;

#[inline(never)]
fn learn<A: Net>(skb: Skb, packet: &Packet<A>, hook: Hook, note: Note, flow: &mut Flow<A>) -> Answer {
    let Some(entry) = maps::flow(&packet.flow_key(hook), flow) else { return UNKNOWN };
    // What is put into the host past its own check is judged each time.
    let is_given_back = hook == Hook::INGRESS && flow.kind == Kind::UNDNAT;
    if (is_given_back || is_news(flow, packet)) && is_in_anothers_name(skb, packet, hook, note, flow) {
        return FORGED;
    }
    if heed(&entry, packet, note, flow) { KNOWN } else { UNKNOWN }
}

/// Would the packet change more of its flow than counts? The kernel judges the sources of all others (`rp_filter`).
#[inline(always)]
fn is_news<A: Net>(flow: &Flow<A>, packet: &Packet<A>) -> bool {
    let before = if flow.kind == Kind::DNAT { flow.tx } else { flow.rx };
    let opens = packet.opens() && packet.proto != Proto::UDP;
    let assures = flow.kind == Kind::DNAT && flow.rx.has(Seen::PACKET) && !before.has(Seen::ASSURED);
    let was_reset = flow.tx.has(Seen::RST) || flow.rx.has(Seen::RST);
    let tells = packet.seen().without(before) != Seen::NOTHING;
    opens || assures || was_reset || tells || flow.last_secs != about_now_secs()
}

/// Has the packet come in through a device at which its sender cannot be? See [`net::is_forged`](crate::net::is_forged).
#[inline(always)]
fn is_in_anothers_name<A: Net>(skb: Skb, packet: &Packet<A>, hook: Hook, note: Note, flow: &Flow<A>) -> bool {
    let came_in_by = match (hook, flow.kind) {
        // The host's own packets have not come in.
        (Hook::ANCHOR, _) => return skb.came_in(),
        (Hook::INGRESS, Kind::DNAT | Kind::UNDNAT) => skb.ifindex(),
        (Hook::EGRESS, Kind::UNDNAT) if !note.is_forward() => skb.ingress_ifindex(),
        // Of a reply to the node, the state changes where it leaves.
        _ => 0,
    };
    came_in_by != 0 && is_forged(skb, came_in_by, &packet.src.addr, &packet.dst.addr)
}

/// Brings a flow up to date with a packet that looks like one of it. False if it is none.
#[inline(always)]
fn heed<A: Net>(entry: &Entry<A>, packet: &Packet<A>, note: Note, flow: &Flow<A>) -> bool {
    match flow.kind {
        Kind::DNAT => {
            let now_secs = about_now_secs();
            if packet.opens() && flow.yields_to_opener(packet.proto, now_secs) {
                close(flow, packet.proto);
                return false;
            }
            if packet.proto == Proto::UDP && has_moved(entry, flow) {
                maps::count(Event::FlowMoved);
                close(flow, packet.proto);
                return false;
            }
            there(entry, flow, packet, now_secs);
        }
        Kind::UNDNAT if note.is_forward() => return false,
        Kind::UNDNAT if flow.is_snat_on_devices() && note.is_strange(packet.is_fragment()) => return false,
        Kind::SNAT if !note.is_forward() => return false,
        Kind::UNDNAT => back(entry, flow, packet),
        // Both directions pass one of the above as well.
        _ => {}
    }
    true
}

/// Has the flow's backend ceased to serve? Asked once for each time that any endpoint has, and again and again while
/// nobody serves: the first who does takes the flow over, and that changes no generation.
#[inline(always)]
fn has_moved<A: Net>(entry: &Entry<A>, flow: &Flow<A>) -> bool {
    let generation = maps::generation();
    if flow.generation == generation {
        return false;
    }
    match decide::still_serves(flow) {
        Some(true) => {
            entry.set_generation(generation);
            false
        }
        serves => serves == Some(false),
    }
}

/// A packet towards the backend.
#[inline(always)]
fn there<A: Net>(entry: &Entry<A>, flow: &Flow<A>, packet: &Packet<A>, now_secs: u32) {
    entry.count(packet.segments, packet.len);
    let mut tx = see(flow.tx, packet);
    // An opener sent again shows nobody, but all packets of UDP are openers.
    if flow.rx.has(Seen::PACKET) && !packet.resets() && (!packet.opens() || packet.proto == Proto::UDP) {
        tx = tx.with(Seen::ASSURED);
    }
    if tx != flow.tx {
        entry.set_tx(tx);
        note_end(flow, flow.state(), State::of(tx, flow.rx), packet.proto);
    }
    // A side that goes on talking has not accepted the other's RST, so that was not the end.
    if flow.rx.has(Seen::RST) && !packet.resets() {
        entry.set_rx(flow.rx.without(Seen::RST));
        if let Some(undnat) = maps::undnat(flow, packet.proto) {
            undnat.set_rx(undnat.rx().without(Seen::RST));
        }
    }
    if flow.last_secs != now_secs {
        entry.set_last_secs(now_secs);
    }
    // If the backend does not accept this RST, its next packet shall tell the opener so at once.
    if packet.resets()
        && let Some(undnat) = maps::undnat(flow, packet.proto)
    {
        undnat.set_last_secs(0);
    }
}

/// A packet from the backend. The opener's entry is told once a second, when the state changes, and of
/// every RST: it may have heard from the client since the last one.
#[inline(always)]
pub fn back<A: Net>(entry: &Entry<A>, flow: &Flow<A>, packet: &Packet<A>) {
    entry.count(packet.segments, packet.len);
    let now_secs = about_now_secs();
    let mut rx = see(flow.rx, packet);
    if packet.proto == Proto::UDP && flow.passed.packets >= ANSWERS {
        rx = rx.with(Seen::ASSURED);
    }
    if rx == flow.rx && flow.last_secs == now_secs && !packet.resets() {
        return;
    }
    entry.set_rx(rx);
    entry.set_last_secs(now_secs);
    let Some(opener) = maps::opener(flow, packet.proto) else { return };
    note_end(flow, State::of(opener.tx(), opener.rx()), State::of(opener.tx(), rx), packet.proto);
    opener.set_rx(rx);
    opener.set_last_secs(now_secs);
    if opener.tx().has(Seen::RST) && !packet.resets() {
        opener.set_tx(opener.tx().without(Seen::RST));
    }
}

/// A flow that is counted counts until it has ended.
#[inline(always)]
fn note_end<A: Net>(flow: &Flow<A>, before: State, after: State, proto: Proto) {
    if flow.has(Flow::<A>::COUNTED) && after.is_end() && !before.is_end() {
        maps::connection_closed(flow.backend, proto);
    }
}

#[inline(always)]
fn see<A: Net>(before: Seen, packet: &Packet<A>) -> Seen {
    let before = if packet.resets() { before } else { before.without(Seen::RST) };
    before.with(packet.seen())
}

/// Removes all entries of a flow, the opener's last: whoever removes that one counts the flow.
#[inline(never)]
pub fn close<A: Net>(flow: &Flow<A>, proto: Proto) {
    note_end(flow, flow.state(), State::Reset, proto);
    let returned = maps::undnat(flow, proto).map_or(Passed::NOTHING, |entry| entry.passed());
    remove(flow, Kind::UNDNAT, proto);
    if flow.is_snat_on_devices() {
        remove(flow, Kind::SNAT, proto);
        remove(flow, Kind::UNSNAT, proto);
    }
    if remove(flow, Kind::DNAT, proto) {
        maps::service_closed(&flow.service, &flow.passed, &returned);
    }
}

/// False if it was gone.
#[inline(always)]
pub fn remove<A: Net>(flow: &Flow<A>, kind: Kind, proto: Proto) -> bool {
    maps::remove_flow(&flow.key_as(kind, proto))
}

/// Seconds since boot, sleep included.
#[inline(always)]
pub fn now_secs() -> u32 {
    // SAFETY: the helper takes no arguments and cannot fail.
    (unsafe { bpf_ktime_get_boot_ns() } / 1_000_000_000) as u32
}

/// The same, late by a tick of the kernel's at the most, and cheaper: for what is asked of every packet.
#[inline(always)]
pub fn about_now_secs() -> u32 {
    maps::in_this_tick(now_secs)
}
