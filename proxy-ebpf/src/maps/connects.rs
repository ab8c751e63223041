//! What became of the TCP connections of each service port to each backend.

use aya_ebpf::bindings::BPF_NOEXIST;
use proxy_common::addr::{Proto, SockAddr};
use proxy_common::connect::{Connects, DialTime, Outcome, PortsAndOutcome, bucket};
use proxy_common::flow::{Flow, Told};
use proxy_common::frontend::{EndpointKey, FrontendKey};

use super::live::part;
use super::{Find, Live, again, in_this_tick};
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

/// Counts what the first packet of the backend makes of the connection. The caller has read again what the packet tells.
#[inline(always)]
pub fn note_answer<A: Net>(flow: &Flow<A>, told: Told) {
    // The caller goes on with this number.
    let dialled = DialTime(again(&flow.generation));
    if told.resets() {
        note_outcome(flow, Outcome::REFUSED);
    } else if told.answers_opener() && flow.has(Flow::<A>::NUMBERED) && dialled != DialTime::UNKNOWN {
        note_outcome(flow, Outcome::answered(dialled.units_until(now_ns())));
    }
}

/// Without a lock: of two CPUs that count for one backend in the same instant, one is not counted. Where there is no room, nothing is
/// counted.
#[inline(always)]
pub fn count_outcome<A: Net>(service: A, backend: A, ports: PortsAndOutcome) {
    let service = FrontendKey::new(service, ports.service(), Proto::TCP);
    let Some(connects) = row(&EndpointKey::new(service, SockAddr::new(backend, ports.backend()))) else { return };
    let counter = match ports.outcome() {
        Outcome::REFUSED => Some(part!(connects.refused)),
        Outcome::RETRANSMITTED => Some(part!(connects.retransmitted)),
        Outcome(units) => {
            part!(connects.units).update(|sum| sum.wrapping_add(units.into()));
            // The compiler would leave the check of the place out, for it knows more than the verifier.
            part!(connects.buckets).at(again(&bucket(units)))
        }
    };
    if let Some(counter) = counter {
        counter.update(|count| count.wrapping_add(1));
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
