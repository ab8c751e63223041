//! What became of the TCP connections of each service port to each backend, and the datagrams that
//! a backend refused.

use aya_ebpf::bindings::BPF_NOEXIST;
use proxy_common::addr::{Proto, SockAddr};
use proxy_common::connect::{Connects, DialTime, Outcome, PortsAndOutcome, Voter, Votes, bucket};
use proxy_common::counter::Event;
use proxy_common::flow::{Flow, Signals};
use proxy_common::frontend::{EndpointKey, FrontendKey};

use super::live::part;
use super::{Find, Live, again, count, in_this_tick, undnat};
use crate::clock::{now_ns, now_secs};
use crate::net::Net;

/// In the object's read-only data: the stack has no room for it.
static NOTHING: &Connects = &Connects::NOTHING;

/// Counts what became of a flow's connection. A flow of no service port counts nowhere.
#[inline(always)]
pub fn note_outcome<A: Net>(flow: &Flow<A>, outcome: Outcome) {
    if !flow.service.addr.is_unspecified() {
        let ports = PortsAndOutcome::new(flow.service.port, flow.backend.port, outcome);
        A::count_outcome(&flow.service.addr, &flow.backend.addr, ports);
    }
}

/// Counts what the first packet of the backend makes of the connection. The caller has read again
/// what the packet tells.
#[inline(always)]
pub fn note_answer<A: Net>(flow: &Flow<A>, signals: Signals) {
    // The caller goes on with this number.
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

/// Returns the units since the first SYN of a flow whose backend has sent nothing: 0 if that is
/// unknown.
#[inline(never)]
pub fn waited<A: Net>(flow: &Flow<A>) -> u32 {
    let dialled = undnat(flow, Proto::TCP).map_or(DialTime::UNKNOWN, |entry| {
        DialTime(entry.read(|flow| flow.generation))
    });
    if dialled == DialTime::UNKNOWN {
        0
    } else {
        dialled.units_until(now_ns())
    }
}

/// Without a lock: of two CPUs that count for one backend in the same instant, one is not counted.
/// Where there is no room, nothing is counted.
#[inline(always)]
pub fn count_outcome<A: Net>(service: A, backend: A, ports: PortsAndOutcome) {
    let outcome = ports.outcome();
    let service = FrontendKey::new(service, ports.service(), outcome.proto());
    let Some(connects) = row(&EndpointKey::new(
        service,
        SockAddr::new(backend, ports.backend()),
    )) else {
        return;
    };
    let counter = match outcome.units() {
        Some(units) => {
            part!(connects.units).update(|sum| sum.wrapping_add(units.into()));
            // Written only where it changes: backends answer much more often than they fail.
            if part!(connects.votes).copy() != Votes::NONE {
                part!(connects.votes).set(Votes::NONE);
            }
            // The compiler would leave the check of the place out, for it knows more than the
            // verifier.
            part!(connects.buckets).at(again(&bucket(units)))
        }
        None if outcome.is_refusal() => Some(part!(connects.refused)),
        None if outcome.is_unreachable() => None,
        None => Some(part!(connects.retransmitted)),
    };
    if let Some(counter) = counter {
        counter.update(|count| count.wrapping_add(1));
    }
    if let Some(voter) = outcome.voter() {
        part!(connects.votes).update(|votes| votes.with(voter));
        count(Event::BackendFailed);
    }
    part!(connects.last_secs).set(in_this_tick(now_secs));
}

#[inline(always)]
fn row<A: Net>(key: &EndpointKey<A>) -> Option<Live<Connects>> {
    let map = A::MAPS.connects;
    if let Some(connects) = map.find(key) {
        return Some(connects);
    }
    let _first = map.insert(key, NOTHING, u64::from(BPF_NOEXIST));
    map.find(key)
}
