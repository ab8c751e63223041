//! The outcomes of each service port's TCP connections to each backend, and the datagrams that a
//! backend refused.

use aya_ebpf::bindings::BPF_NOEXIST;
use proxy_common::addr::{Proto, SockAddr};
use proxy_common::connect::{Connects, DialTime, Outcome, PortsAndOutcome, Voter, Votes, bucket};
use proxy_common::counter::Event;
use proxy_common::flow::{Flow, Signals};
use proxy_common::frontend::{EndpointKey, FrontendKey};
use proxy_macros::global_fn;

use super::live::part;
use super::{Find, Live, Maps, again, count, in_this_tick, undnat};
use crate::clock::{now_ns, now_secs};

/// In the object's read-only data: the stack has no room for it.
static NOTHING: &Connects = &Connects::NOTHING;

/// Counts the outcome of a flow's connection, unless the flow has no service port.
#[inline(always)]
pub fn note_outcome<A: Maps>(flow: &Flow<A>, outcome: Outcome) {
    if !flow.service.addr.is_unspecified() {
        let ports = PortsAndOutcome::new(flow.service.port, flow.backend.port, outcome);
        count_outcome(&flow.service.addr, &flow.backend.addr, ports);
    }
}

/// Counts the outcome of a socket's connection to a service port's backend, as [`count_outcome`]
/// does. The outcome is no evidence for or against the backend: a pod's process chooses the network
/// namespace in which its socket connects, and may answer itself there.
#[inline(always)]
pub fn note_connection<A: Maps>(service: &FrontendKey<A>, backend: &SockAddr<A>, outcome: Outcome) {
    if let Some(connects) = row(&EndpointKey::new(*service, *backend)) {
        add(&connects, outcome);
    }
}

/// Counts the outcome that the backend's first packet shows. The caller has read the signals again.
#[inline(always)]
pub fn note_answer<A: Maps>(flow: &Flow<A>, signals: Signals) {
    // Read again, because the caller still uses this number.
    let dialled = DialTime(again(&flow.generation));
    if signals.resets() {
        note_outcome(
            flow,
            Outcome::refused(Voter::of(&flow.client.addr, flow.is_far())),
        );
    } else if signals.answers_opener()
        && flow.has(Flow::<A>::NUMBERED)
        && dialled != DialTime::UNKNOWN
    {
        note_outcome(flow, Outcome::answered(dialled.units_until(now_ns())));
    }
}

/// Returns the units of [`DialTime`] since the first SYN of an unanswered flow; 0 if unknown.
#[inline(never)]
pub fn waited<A: Maps>(flow: &Flow<A>) -> u32 {
    let dialled = undnat(flow, Proto::TCP).map_or(DialTime::UNKNOWN, |entry| {
        DialTime(entry.read(|flow| flow.generation))
    });
    if dialled == DialTime::UNKNOWN {
        0
    } else {
        dialled.units_until(now_ns())
    }
}

/// Counts an outcome without a lock: if two CPUs count for one backend at the same instant, one
/// count is lost. Without room for a row, nothing is counted.
#[global_fn(kpx_outcome4, kpx_outcome6)]
fn count_outcome<A: Maps>(service: &A, backend: &A, ports: PortsAndOutcome) {
    let outcome = ports.outcome();
    let service = FrontendKey::new(*service, ports.service(), outcome.proto());
    let Some(connects) = row(&EndpointKey::new(
        service,
        SockAddr::new(*backend, ports.backend()),
    )) else {
        return;
    };
    add(&connects, outcome);
    // Written only where it changes: backends answer much more often than they fail.
    if outcome.units().is_some() && part!(connects.votes).copy() != Votes::NONE {
        part!(connects.votes).set(Votes::NONE);
    }
    if let Some(voter) = outcome.voter() {
        part!(connects.votes).update(|votes| votes.with(voter));
        count(Event::BackendFailed);
    }
}

/// Adds an outcome to the counters of a row.
#[inline(always)]
fn add(connects: &Live<Connects>, outcome: Outcome) {
    let counter = match outcome.units() {
        Some(units) => {
            part!(connects.units).update(|sum| sum.wrapping_add(units.into()));
            // Read again: otherwise the compiler would omit the bounds check, which the verifier
            // needs.
            part!(connects.buckets).at(again(&bucket(units)))
        }
        None if outcome.is_refusal() => Some(part!(connects.refused)),
        None if outcome.is_unanswered() => Some(part!(connects.unanswered)),
        None if outcome.is_unreachable() => None,
        None => Some(part!(connects.retransmitted)),
    };
    if let Some(counter) = counter {
        counter.update(|count| count.wrapping_add(1));
    }
    part!(connects.last_secs).set(in_this_tick(now_secs));
}

#[inline(always)]
fn row<A: Maps>(key: &EndpointKey<A>) -> Option<Live<Connects>> {
    let map = A::MAPS.connects;
    if let Some(connects) = map.find_here(key) {
        return Some(connects);
    }
    let _first = map.insert(key, NOTHING, u64::from(BPF_NOEXIST));
    map.find_here(key)
}
