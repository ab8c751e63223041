//! The news that TCP's packets have for an established flow, on the short ways: the client's first
//! acknowledgement of an answer, the backend's first one that goes further, and a FIN of either.
//!
//! `flow.rs` does the same with these packets, and more with all others.

use proxy_common::addr::{Addr, Proto};
use proxy_common::flow::{Acked, Ahead, Flow, Proof, Seen, Signals, is_recent};
use proxy_common::share::Register;

use crate::established::Head;
use crate::maps::{self, Entry};
use crate::net::Net;
use crate::tcp;

/// Returns true if [`there`] or [`back`] may take the packet's news.
#[inline(always)]
pub fn may_be_taken<A: Addr>(head: &Head<A>) -> bool {
    head.proto == Proto::TCP && head.flags & (tcp::SYN | tcp::RST | tcp::ACK) == tcp::ACK
}

/// Brings a flow up to date with a packet's news. Returns false if that is for the slow path: the
/// flow is as it was then.
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

/// Changes the share of a flow's holder by what was looked at. Returns false if the slow path has
/// to look.
#[inline(always)]
fn settles<A: Net>(entry: &Entry<A>, taken: Taken) -> bool {
    // A share that is given back is never refused.
    if taken == Taken::LEFT || taken.0 == 0 {
        return taken != Taken::LEFT;
    }
    let (holder, service) = entry.read(|flow| (flow.holder(), flow.service));
    A::share(&holder, &service, Register(taken.0))
}

/// The result of a look at a packet's news, in a register: by how many entries its flow's share
/// changes, or that the slow path has to look.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
struct Taken(u32);

impl Taken {
    /// The flow is as it was.
    const LEFT: Self = Self(1 << 31);
}

/// Looks at a packet towards the backend. Its step is left to the caller, because the client may
/// have used up its share.
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
        // The slow path asks for the service of a client from afar that has shown itself.
        let is_shown = Proof(entry.read(|flow| flow.generation)).is_met(Acked(acked));
        if !is_shown || signals.is_goodbye() || entry.read(Flow::is_far) {
            return Taken::LEFT;
        }
    }
    change(entry, (tx, rx), (after_original(tx, signals), rx))
}

/// Returns what the client has shown with a packet whose news [`there`] has looked at.
#[inline(always)]
fn after_original(tx: Seen, signals: Signals) -> Seen {
    tx.with(signals.seen()).with(Seen::ASSURED)
}

/// Applies the step of a packet from the backend.
#[inline(never)]
fn reply<A: Net>(entry: &Entry<A>, signals: Signals, seq: u32, acked: u32) -> Taken {
    let (rx, of_client) = entry.read(|flow| (flow.rx, flow.generation));
    // Before the opener tells whether a SYN has come since, which takes this second away.
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

/// Returns the present second: an entry has it whose packets take the short ways.
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

/// Returns by how much a flow's share changes with a step.
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
