//! Find, follow and close flows.

use proxy_common::addr::Proto;
use proxy_common::counter::{Event, Reason};
use proxy_common::flow::{
    Acked, Ahead, AtHook, EntryKind, Flow, FlowKey, Hook, Kind, LINGER_SECS, Proof, Seen, Sender,
    is_recent, is_stream, step,
};
use proxy_common::service_counts::Passed;
use proxy_common::share::Register;
use proxy_macros::global_fn;

use crate::global_fn;
use crate::maps::{self, Closing, DecisionMemory, Entry, Memory, Scratch};
use crate::net::Net;
use crate::packet::Packet;
use crate::setting::timeouts;
use crate::skb::{PacketMark, Skb};
use crate::spoof::{At, is_spoofed};
use crate::{decide, select};

/// Finds the flow of the scratch's packet at `hook`, and updates the flow with the packet. Returns
/// false if the packet has no flow. A packet that is marked as on the way to a backend is not a
/// reply, even if it has the tuple of one.
///
/// Between the hooks of a masqueraded flow, packets have the client's address with a port that kpx
/// has assigned. The client may use the same port for another connection. So at the second hook, a
/// packet belongs to the flow only if the first hook has marked it, or if the host answers for a
/// backend (netfilter's REJECT). Where another program has overwritten the mark, the addresses and
/// ports alone decide.
///
/// Spoofed packets ([`Reason::Spoofed`]) and packets of a flow that the agent has ended
/// ([`Reason::BackendLost`]) never change flow state.
#[global_fn(kpx_follow4, kpx_follow6)]
pub fn follow<A: Net>(
    skb: Skb,
    hook: Hook,
    mark: PacketMark,
    memory: Memory,
) -> Result<bool, Reason> {
    let (scratch, decision) = memory.scratch::<A>().ok_or(Reason::FlowsFull)?;
    let Scratch { packet, flow, .. } = scratch;
    let Some(entry) = maps::flow(&packet.flow_key(hook), flow) else {
        return Ok(false);
    };
    let Some(kind) = flow.kind.known() else {
        return Ok(false);
    };
    let is_change = match kind {
        EntryKind::Dnat => {
            let proves = proves(packet, flow);
            // The acknowledgement number proves that the sender has received the backend's answer,
            // which is stronger evidence than the route back.
            let is_shown = proves && packet.proto == Proto::TCP && flow.has(Flow::<A>::NUMBERED);
            let tx = if is_shown {
                flow.tx.with(Seen::ASSURED)
            } else {
                flow.tx
            };
            step(
                Sender::Client {
                    tx,
                    rx: flow.rx,
                    proves,
                },
                packet.signals(),
            )
            .is_change
        }
        EntryKind::Undnat if advances(packet, flow) => true,
        // A datagram that only turns its flow into an assured stream needs no source validation.
        EntryKind::Snat | EntryKind::Unsnat | EntryKind::Undnat => {
            step(
                Sender::Backend {
                    rx: flow.rx,
                    is_stream: false,
                },
                packet.signals(),
            )
            .is_change
        }
    };
    // The kernel's source validation (`rp_filter`) suffices for a packet that changes only
    // counters. A reply that the hook injects into the host skips `rp_filter`, so the hook
    // validates it as well, with one look-up of the routes per term.
    let is_given_back = hook == Hook::INGRESS && kind == EntryKind::Undnat;
    let needs_validation = is_given_back || is_change || flow.last_secs != maps::about_now_secs();
    if needs_validation && is_spoofed_packet(skb, packet, hook, mark, kind) {
        return Err(Reason::Spoofed);
    }
    if kind == EntryKind::Undnat
        && !is_marked_otherwise(packet, mark, flow)
        && is_of_another_connection(packet, flow)
    {
        if flow.kind == Kind::DNAT {
            close(&flow.opener_key(packet.proto));
        } else {
            note_clash(flow, packet.proto);
        }
        return Ok(false);
    }
    // The short paths need no such check: the agent has aged the entry, and client packets do not
    // refresh it, so the short paths leave all of them to this function.
    if flow.is_lost() && !packet.opens() {
        return Err(Reason::BackendLost);
    }
    update(&entry, packet, mark, flow, kind, decision)
}

/// Returns true if a packet from the backend has the flow's tuple, but belongs to another
/// connection between the same ports. If the flow has ended and must be closed, `flow` is then a
/// copy of the original entry (`Kind::DNAT`).
#[inline(never)]
pub fn is_of_another_connection<A: Net>(packet: &Packet<A>, flow: &mut Flow<A>) -> bool {
    let proto = packet.proto;
    let signals = packet.signals();
    let now_secs = maps::about_now_secs();
    let is_unexpected = is_answered_by_another(packet, flow);
    if !is_unexpected && !signals.answers_opener() && flow.idle_secs(now_secs) <= LINGER_SECS {
        return false;
    }
    let opener_key = flow.opener_key(proto);
    let Some(opener) = maps::live_flow(&opener_key) else {
        return false;
    };
    // The agent may have restored the reply entry from before the answer, so the original entry
    // decides.
    if is_unexpected && opener.read(|flow| !flow.rx.has(Seen::PACKET)) {
        return true;
    }
    let is_outlived = opener.read(|flow| flow.is_outlived_by(signals, proto, now_secs, timeouts()));
    if is_outlived && maps::flow(&opener_key, flow).is_none() {
        // Another CPU has closed the flow.
        flow.kind = Kind::UNDNAT;
    }
    is_outlived
}

/// Records that another connection uses the client's port: the client's next SYN gets another
/// source port.
#[inline(never)]
fn note_clash<A: Net>(flow: &Flow<A>, proto: Proto) {
    if let Some(opener) = maps::opener(flow, proto) {
        opener.set_rx(opener.read(|flow| flow.rx).with(Seen::CLASHES));
    }
}

/// Returns true if the mark shows that a packet with the tuple of a reply does not come from the
/// backend.
#[inline(always)]
fn is_marked_otherwise<A: Net>(packet: &Packet<A>, mark: PacketMark, flow: &Flow<A>) -> bool {
    mark.is_forward() || flow.is_snat_on_devices() && mark.is_unmarked_ingress(packet.is_fragment())
}

/// Returns true if a packet from the backend comes in place of its answer: see
/// [`Flow::is_answered_by_another`].
#[inline(always)]
fn is_answered_by_another<A: Net>(packet: &Packet<A>, flow: &Flow<A>) -> bool {
    packet
        .seq()
        .is_some_and(|seq| flow.is_answered_by_another(packet.proto, packet.signals(), seq))
}

/// Returns true if the packet's source is spoofed: see [`is_spoofed`](crate::spoof::is_spoofed).
#[inline(always)]
fn is_spoofed_packet<A: Net>(
    skb: Skb,
    packet: &Packet<A>,
    hook: Hook,
    mark: PacketMark,
    kind: EntryKind,
) -> bool {
    let came_in_by = match (hook.known(), kind) {
        // Only the host's own packets belong here, and they have no ingress device.
        (Some(AtHook::Anchor), _) => return skb.came_in(),
        (Some(AtHook::Ingress), EntryKind::Dnat | EntryKind::Undnat) => At::Here,
        (Some(AtHook::Egress), EntryKind::Undnat)
            if !mark.is_forward() && skb.ingress_ifindex() != 0 =>
        {
            At::Before
        }
        // A reply to the node changes flow state at its egress hook.
        (Some(AtHook::Ingress), EntryKind::Snat | EntryKind::Unsnat)
        | (Some(AtHook::Egress), _)
        | (None, _) => {
            return false;
        }
    };
    is_spoofed(skb, came_in_by, &packet.src.addr, &packet.dst.addr)
}

/// Updates a flow with a packet that has its tuple. Returns false if the packet belongs to another
/// connection, or has to open a new flow.
#[inline(always)]
fn update<A: Net>(
    entry: &Entry<A>,
    packet: &mut Packet<A>,
    mark: PacketMark,
    flow: &Flow<A>,
    kind: EntryKind,
    decision: DecisionMemory,
) -> Result<bool, Reason> {
    match kind {
        EntryKind::Dnat => {
            let now_secs = maps::about_now_secs();
            if packet.opens() && flow.may_be_reused(packet.proto, now_secs, timeouts()) {
                close(&flow.opener_key(packet.proto));
                return Ok(false);
            }
            if packet.opens() && flow.clashes() {
                close(&flow.opener_key(packet.proto));
                packet.port_taken = true;
                return Ok(false);
            }
            if packet.proto == Proto::UDP && has_moved(entry, flow, decision) {
                maps::count(Event::FlowMoved);
                close(&flow.opener_key(packet.proto));
                return Ok(false);
            }
            if select::leaves_silent(packet, flow) {
                maps::count(Event::FlowMoved);
                close(&flow.opener_key(packet.proto));
                packet.moves = true;
                return Ok(false);
            }
            let end = original(entry, flow, packet, now_secs);
            // The backend would ignore this RST. Conntrack would accept it within its window, and
            // forget an idle connection ten seconds later.
            if end == End::Ignored && packet.resets() && flow.is_far() {
                return Err(Reason::Spoofed);
            }
        }
        EntryKind::Undnat if is_marked_otherwise(packet, mark, flow) => return Ok(false),
        EntryKind::Snat if !mark.source_changes() && !mark.is_lost() => return Ok(false),
        EntryKind::Undnat => reply(entry, flow, packet),
        // Packets of both directions also pass a `Dnat` or `Undnat` entry, which holds the state.
        EntryKind::Snat | EntryKind::Unsnat => {}
    }
    Ok(true)
}

/// Returns true if the flow's backend no longer serves its frontend. Checked once after each
/// removal of an endpoint or a frontend.
#[inline(always)]
fn has_moved<A: Net>(entry: &Entry<A>, flow: &Flow<A>, decision: DecisionMemory) -> bool {
    let generation = maps::generation();
    if flow.generation == generation {
        return false;
    }
    let serves = decide::still_serves(flow, decision);
    if serves {
        entry.set_generation(generation);
    }
    !serves
}

/// Returns true if a client's packet proves that the client has received the backend's answer, if
/// there is an answer.
///
/// A sender of spoofed packets does not see the number that it would have to acknowledge.
#[inline(never)]
fn proves<A: Net>(packet: &Packet<A>, flow: &Flow<A>) -> bool {
    if packet.proto == Proto::TCP && flow.has(Flow::<A>::NUMBERED) && !flow.is_assured() {
        return packet
            .acked()
            .is_some_and(|acked| Proof(flow.generation).is_met(acked));
    }
    packet.proto == Proto::UDP || packet.proto == Proto::TCP && !flow.has(Flow::<A>::NUMBERED)
}

/// Returns true if a backend's packet acknowledges other data than the backend's previous packets.
/// The source of such a packet must be validated.
#[inline(never)]
fn advances<A: Net>(packet: &Packet<A>, flow: &Flow<A>) -> bool {
    !flow.rx.has(Seen::ADVANCED)
        && packet
            .acked()
            .is_some_and(|acked| acked != Acked(flow.generation))
}

/// The plausibility of a FIN or RST, in a register.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
enum End {
    /// The sequence number is plausible: see [`Acked`].
    Likely,
    /// A FIN beyond data that the other side has not acknowledged. The other side accepts it if it
    /// has received the data.
    Early,
    /// The sequence number is not plausible. The other side ignores the packet as well, unless it
    /// is a RST beyond data in flight.
    Ignored,
}

#[inline(never)]
fn judge_end<A: Net>(packet: &Packet<A>, acked: u32, ahead: Ahead) -> End {
    let Some(seq) = packet.seq() else {
        return End::Likely;
    };
    if Acked(acked).permits_end(seq, ahead) {
        return End::Likely;
    }
    if packet.signals().is_goodbye() && Acked(acked).permits_end(seq, Ahead::GOODBYE) {
        return End::Early;
    }
    maps::count(Event::EndIgnored);
    End::Ignored
}

/// Applies the step of a packet towards the backend, unless the packet is an implausible FIN or
/// RST. Returns the plausibility.
#[inline(always)]
fn original<A: Net>(entry: &Entry<A>, flow: &Flow<A>, packet: &Packet<A>, now_secs: u32) -> End {
    entry.count(packet.segments, packet.len);
    // Anyone can make the backend send packets. Only the client can make it acknowledge more data.
    let advances =
        |flow: &Flow<A>| flow.rx.has(Seen::ADVANCED) && is_recent(flow.idle_secs(now_secs));
    if packet.signals().ends(flow.tx)
        && flow.has(Flow::<A>::NUMBERED)
        && flow.is_assured()
        && let Some(undnat) = maps::undnat(flow, packet.proto)
    {
        let ahead = ahead(packet, undnat.read(advances), true);
        let end = judge_end(packet, undnat.read(|flow| flow.generation), ahead);
        if end == End::Early && !flow.tx.has(Seen::LEAVING) {
            entry.set_tx(flow.tx.with(Seen::LEAVING));
        }
        if end != End::Likely {
            return end;
        }
    }
    let proves = proves(packet, flow);
    let mut step = step(
        Sender::Client {
            tx: flow.tx,
            rx: flow.rx,
            proves,
        },
        packet.signals(),
    );
    let rx = if step.revokes_reset {
        flow.rx.without(Seen::RST)
    } else {
        flow.rx
    };
    let after = Seen::goes_on(step.seen, rx);
    if settle(flow, packet.proto, Seen::goes_on(flow.tx, flow.rx), after) {
        if after != 0 && !flow.is_assured() && flow.is_far() {
            select::remember_shown(flow, packet.proto);
        }
    } else {
        step.seen = step.seen.without(Seen::ASSURED);
    }
    if step.seen.has(Seen::ASSURED)
        && flow.has(Flow::<A>::NUMBERED)
        && let Some(acked) = packet.acked()
    {
        entry.set_acked(acked);
    }
    let dials = packet.proto == Proto::TCP && packet.opens() && flow.is_assured();
    let mut seen = if dials {
        step.seen.with(Seen::DIALLED)
    } else {
        step.seen
    };
    if dials && flow.is_redialled_by(packet.signals(), now_secs) {
        seen = seen.with(Seen::REDIALLED);
    }
    if seen != flow.tx {
        entry.set_tx(seen);
        note_end(
            flow,
            Seen::is_over(flow.tx, flow.rx),
            Seen::is_over(seen, flow.rx),
            packet.proto,
        );
    }
    if flow.rx.has(Seen::RST) && step.revokes_reset {
        entry.set_rx(flow.rx.without(Seen::RST));
        if let Some(undnat) = maps::undnat(flow, packet.proto) {
            undnat.set_rx(undnat.read(|flow| flow.rx).without(Seen::RST));
        }
    }
    // The backend's time to answer starts at the first SYN: later SYNs do not extend it.
    let waits = flow.tx.has(Seen::REDIALLED) && packet.opens();
    if flow.last_secs != now_secs && !waits {
        entry.set_last_secs(now_secs);
    }
    // Forces the backend's next packet to update the original entry. That packet shows whether the
    // backend has ignored this RST, or still has the connection that this SYN ignores.
    if (packet.resets() || dials)
        && let Some(undnat) = maps::undnat(flow, packet.proto)
    {
        undnat.set_last_secs(0);
    }
    End::Likely
}

/// The client has sent a SYN on the flow, and the backend has not answered it.
const DIALLED: Seen = Seen::DIALLED.with(Seen::REDIALLED);

/// Applies the step of a packet from the backend. Updates the original entry once a second, with
/// each change of state, and with every RST, because a client's packet may have revoked the
/// previous RST.
#[inline(always)]
pub fn reply<A: Net>(entry: &Entry<A>, flow: &Flow<A>, packet: &Packet<A>) {
    entry.count(packet.segments, packet.len);
    // Read again, so that the verifier checks the code below once, for any value.
    if !maps::again(&flow.rx).has(Seen::PACKET) && maps::again(&packet.proto) == Proto::TCP {
        maps::note_answer(flow, packet.signals_again());
    }
    let now_secs = maps::about_now_secs();
    let mut opener = None;
    if packet.signals().ends(flow.rx) && flow.has(Flow::<A>::NUMBERED) {
        opener = maps::opener(flow, packet.proto);
    }
    if opener
        .as_ref()
        .is_some_and(|opener| is_unlikely_end(opener, packet, now_secs))
    {
        return;
    }
    let is_stream = is_stream(packet.proto, flow.passed.packets);
    let step = step(
        Sender::Backend {
            rx: flow.rx,
            is_stream,
        },
        packet.signals(),
    );
    let mut rx = step.seen;
    if flow.has(Flow::<A>::NUMBERED)
        && let Some(acked) = packet.acked()
    {
        if acked != Acked(flow.generation) {
            entry.set_acked(acked);
            rx = rx.with(Seen::ADVANCED);
        } else if flow.last_secs != now_secs {
            rx = rx.without(Seen::ADVANCED);
        }
    }
    let answers = packet.signals().answers_opener();
    if rx == flow.rx && flow.last_secs == now_secs && !packet.resets() && !answers {
        return;
    }
    entry.set_rx(rx);
    entry.set_last_secs(now_secs);
    let Some(opener) = opener.or_else(|| maps::opener(flow, packet.proto)) else {
        return;
    };
    let mut tx = opener.read(|flow| flow.tx);
    let before = opener.read(|flow| Seen::goes_on(flow.tx, flow.rx));
    // A backend without state of its last answer (SYN cookies), or of the connection, begins a new
    // connection. On an assured flow, only a SYN of the client can cause that.
    if answers
        && flow.has(Flow::<A>::NUMBERED)
        && (!tx.has(Seen::ASSURED) || tx.has(DIALLED))
        && let Some(seq) = packet.seq()
    {
        rx = Seen::PACKET
            .with(Seen::ADVANCED)
            .with(rx.only(Seen::DIRECT.with(Seen::BYPASS)));
        entry.set_rx(rx);
        // Conntrack begins a new connection as well, and is no longer liberal.
        entry.set_tx(flow.tx.without(Seen::LIBERAL));
        opener.set_proof(Proof::of(seq));
        tx = Seen::PACKET.with(tx.only(Seen::DIRECT));
        opener.set_tx(tx);
    }
    let revoked = if step.revokes_reset {
        DIALLED.with(Seen::RST)
    } else {
        DIALLED
    };
    // An SCTP flow becomes assured here. The client's affinity stays in the table of unproven
    // clients.
    if !settle(
        flow,
        packet.proto,
        before,
        Seen::goes_on(tx.without(revoked), rx),
    ) {
        rx = rx.without(Seen::ASSURED);
        entry.set_rx(rx);
    }
    let was_over = opener.read(|flow| Seen::is_over(flow.tx, flow.rx));
    note_end(flow, was_over, Seen::is_over(tx, rx), packet.proto);
    opener.set_rx(rx);
    opener.set_last_secs(now_secs);
    // Read again, because the client's packets write these bits on other CPUs.
    let tx = opener.read(|flow| flow.tx);
    if tx.has(revoked) {
        opener.set_tx(tx.without(revoked));
    }
}

/// Returns true if a FIN or RST of the backend has another number than the client expects.
#[inline(always)]
fn is_unlikely_end<A: Net>(opener: &Entry<A>, packet: &Packet<A>, now_secs: u32) -> bool {
    // A backend without the connection sends a RST with the number 0.
    if opener.read(|flow| !flow.is_assured() || flow.tx.has(DIALLED)) {
        return false;
    }
    let is_recent = is_recent(opener.read(|flow| flow.idle_secs(now_secs)));
    judge_end(
        packet,
        opener.read(|flow| flow.generation),
        ahead(packet, is_recent, false),
    ) != End::Likely
}

/// Returns the bytes that may be in flight before a packet that ends a flow.
#[inline(always)]
fn ahead<A: Net>(packet: &Packet<A>, is_lively: bool, is_client: bool) -> Ahead {
    if is_lively {
        Ahead::of_lively(packet.resets(), is_client)
    } else {
        Ahead::NOTHING
    }
}

/// Adds a flow to its client's and its namespace's share of the table when it is no longer
/// half-open, and removes it when it ends. `before` and `after` are results of [`Seen::goes_on`].
/// Returns false if either share is used up: the flow then stays half-open.
#[inline(always)]
fn settle<A: Net>(flow: &Flow<A>, proto: Proto, before: u32, after: u32) -> bool {
    let change = flow
        .countable_entries(proto)
        .wrapping_mul(after.wrapping_sub(before));
    change == 0 || maps::share(&flow.holder(), &flow.service, Register(change))
}

/// Removes an ended flow from its backend's count of connections. `before` and `after` are results
/// of [`Seen::is_over`].
#[inline(always)]
fn note_end<A: Net>(flow: &Flow<A>, before: u32, after: u32, proto: Proto) {
    let ends = after & !before;
    if ends & flow.counted() != 0 {
        maps::connection_closed(flow.backend, proto);
    }
}

/// Closes the flow with this key of its original entry, unless another program has closed it.
#[inline(always)]
pub fn close<A: Net>(opener: &FlowKey<A>) {
    let (src, dst) = opener.addrs();
    close_at(src, dst, opener.rest());
}

/// Removes all entries of a flow, the original entry last: the program that removes the original
/// entry counts the flow. `rest` is the [`FlowKey::rest`] of the original entry's key.
#[global_fn(kpx_close4, kpx_close6)]
fn close_at<A: Net>(src: &A, dst: &A, rest: u64) {
    let Some(Closing { opener, flow }) = global_fn::closing::<A>() else {
        return;
    };
    *opener = FlowKey::joined(*src, *dst, rest);
    let proto = opener.proto();
    if maps::flow(opener, flow).is_none() {
        return;
    }
    note_end(flow, Seen::is_over(flow.tx, flow.rx), 1, proto);
    // Two programs that close the same flow return its share twice. The agent's next sweep corrects
    // the count.
    maps::share(
        &flow.holder(),
        &flow.service,
        Register(flow.counted_entries(proto).wrapping_neg()),
    );
    let returned =
        maps::undnat(flow, proto).map_or(Passed::NOTHING, |entry| entry.read(|flow| flow.passed));
    remove(flow, Kind::UNDNAT, proto);
    if flow.is_snat_on_devices() {
        remove(flow, Kind::SNAT, proto);
        remove(flow, Kind::UNSNAT, proto);
    }
    if remove(flow, Kind::DNAT, proto) {
        maps::service_closed(&flow.service, &flow.passed, &returned);
    }
}

/// Removes an entry. Returns false if it was already gone.
#[inline(always)]
pub fn remove<A: Net>(flow: &Flow<A>, kind: Kind, proto: Proto) -> bool {
    maps::remove_flow(&flow.key_as(kind, proto))
}
