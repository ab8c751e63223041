//! The usual state changes of established TCP flows, on the short paths: the client's first
//! acknowledgement of an answer, the backend's first acknowledgement of data, and a FIN of either
//! side.
//!
//! `flow.rs` does the same for these packets, and handles all others.

use proxy_common::addr::{Addr, Proto};
use proxy_common::flow::{Acked, Ahead, Flow, Proof, Seen, Signals, is_recent};
use proxy_common::share::Register;

use crate::header::Head;
use crate::maps::{self, Entry};
use crate::net::Net;
use crate::tcp;

/// Returns true if [`take`] may apply the packet's state change.
#[inline(always)]
pub fn may_be_taken<A: Addr>(head: &Head<A>) -> bool {
    head.proto == Proto::TCP && head.flags & (tcp::SYN | tcp::RST | tcp::ACK) == tcp::ACK
}

/// Applies a packet's state change to a flow. Returns false if the slow path has to, with the flow
/// unchanged.
#[inline(never)]
pub fn take<A: Net>(
    entry: &Entry<A>,
    signals: Signals,
    seq: u32,
    acked: u32,
    is_original: bool,
) -> bool {
    // One branch for each direction: see "Do not" in the README.
    if is_original {
        let is_taken = settles(entry, original(entry, signals, seq, acked));
        if is_taken {
            entry.set_tx(after_original(entry.read(|flow| flow.tx), signals));
        }
        return is_taken;
    }
    settles(entry, reply(entry, signals, seq, acked))
}

/// Applies a state change to the share of the flow's holder. Returns false if the slow path has to
/// handle the packet.
#[inline(always)]
fn settles<A: Net>(entry: &Entry<A>, taken: Taken) -> bool {
    // A share that is given back is never refused.
    if taken == Taken::LEFT || taken.0 == 0 {
        return taken != Taken::LEFT;
    }
    let (holder, service) = entry.read(|flow| (flow.holder(), flow.service));
    maps::share(&holder, &service, Register(taken.0))
}

/// The change of the share of a flow's holder in entries, in a register, or [`Self::LEFT`].
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
struct Taken(u32);

impl Taken {
    /// The slow path has to handle the packet. The flow is unchanged.
    const LEFT: Self = Self(1 << 31);
}

/// Evaluates a packet towards the backend. The caller applies the step, because the client may have
/// used up its share.
#[inline(never)]
fn original<A: Net>(entry: &Entry<A>, signals: Signals, seq: u32, acked: u32) -> Taken {
    let (tx, rx) = entry.read(|flow| (flow.tx, flow.rx));
    let is_of_numbers = entry.read(|flow| flow.has(Flow::<A>::NUMBERED));
    if !is_of_numbers || tx.with(rx).has(Seen::RST) || !rx.has(Seen::PACKET) {
        return Taken::LEFT;
    }
    if tx.has(Seen::ASSURED) {
        if signals.ends(tx) && !is_likely_end(entry, seq) {
            return Taken::LEFT;
        }
    } else {
        // When a client outside has proven itself, the slow path stores its affinity.
        let is_shown = Proof(entry.read(|flow| flow.generation)).is_met(Acked(acked));
        if !is_shown || signals.is_goodbye() || entry.read(Flow::is_far) {
            return Taken::LEFT;
        }
    }
    change(entry, (tx, rx), (after_original(tx, signals), rx))
}

/// Returns the client's bits after a packet that [`original`] has accepted.
#[inline(always)]
fn after_original(tx: Seen, signals: Signals) -> Seen {
    tx.with(signals.seen()).with(Seen::ASSURED)
}

/// Applies the step of a packet from the backend.
#[inline(never)]
fn reply<A: Net>(entry: &Entry<A>, signals: Signals, seq: u32, acked: u32) -> Taken {
    let (rx, of_client) = entry.read(|flow| (flow.rx, flow.generation));
    // Read before the original entry, which shows whether a SYN has come: a SYN sets the reply
    // entry's `last_secs` to 0.
    let now_secs = now_secs(entry);
    let is_of_numbers = entry.read(|flow| flow.has(Flow::<A>::NUMBERED));
    let Some(opener) = maps::opener_of(entry) else {
        return Taken::LEFT;
    };
    let (tx, before) = opener.read(|flow| (flow.tx, flow.rx));
    let is_dialled = tx.has(Seen::DIALLED.with(Seen::REDIALLED));
    if !is_of_numbers
        || !rx.has(Seen::PACKET)
        || tx.with(before).with(rx).has(Seen::RST)
        || is_dialled
    {
        return Taken::LEFT;
    }
    if signals.ends(rx) && tx.has(Seen::ASSURED) {
        let is_recent = is_recent(opener.read(|flow| flow.idle_secs(now_secs)));
        let ahead = if is_recent {
            Ahead::GOODBYE
        } else {
            Ahead::NOTHING
        };
        if !Acked(opener.read(|flow| flow.generation)).permits_end(seq, ahead) {
            return Taken::LEFT;
        }
    }
    let advanced = if acked == of_client {
        Seen::NOTHING
    } else {
        Seen::ADVANCED
    };
    let seen = rx.with(signals.seen()).with(advanced);
    let change = change(&opener, (tx, before), (tx, seen));
    if change != Taken::LEFT {
        entry.set_rx(seen);
        opener.set_rx(seen);
        opener.set_last_secs(now_secs);
    }
    change
}

/// Returns the current second, which every entry on the short paths holds in `last_secs`.
#[inline(always)]
fn now_secs<A: Net>(entry: &Entry<A>) -> u32 {
    entry.read(|flow| flow.last_secs)
}

/// Returns true if a FIN of the client has the number that the backend expects.
#[inline(always)]
fn is_likely_end<A: Net>(entry: &Entry<A>, seq: u32) -> bool {
    maps::undnat_of(entry).is_some_and(|undnat| {
        Acked(undnat.read(|flow| flow.generation)).permits_end(seq, Ahead::NOTHING)
    })
}

/// Returns the change of the share of the flow's holder with a step.
#[inline(always)]
fn change<A: Net>(opener: &Entry<A>, before: (Seen, Seen), after: (Seen, Seen)) -> Taken {
    let ends = Seen::is_over(after.0, after.1) & !Seen::is_over(before.0, before.1);
    // The slow path counts the backend's connections.
    if ends & opener.read(Flow::counted) != 0 {
        return Taken::LEFT;
    }
    let difference =
        Seen::goes_on(after.0, after.1).wrapping_sub(Seen::goes_on(before.0, before.1));
    Taken(
        opener
            .read(|flow| flow.countable_entries(Proto::TCP))
            .wrapping_mul(difference),
    )
}
