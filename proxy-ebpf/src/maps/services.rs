//! The counters of each service port.

use aya_ebpf::bindings::BPF_NOEXIST;
use proxy_common::counter::Verdict;
use proxy_common::frontend::FrontendKey;
use proxy_common::service_counts::{Passed, ServiceCounts};

use super::live::part;
use super::{Find, Live, Maps};

/// In the object's read-only data: the stack has no room for it.
static NOTHING: &ServiceCounts = &ServiceCounts::NOTHING;

#[inline(always)]
pub fn service_opened<A: Maps>(service: &FrontendKey<A>) {
    if let Some(counts) = counts(service) {
        add(&part!(counts.opened), 1);
    }
}

/// Counts a packet that was dropped or rejected instead of opening a flow.
#[inline(always)]
pub fn service_refused<A: Maps>(service: &FrontendKey<A>, verdict: Verdict) {
    if let Some(counts) = counts(service) {
        match verdict {
            Verdict::Pass => {}
            Verdict::Drop => add(&part!(counts.dropped), 1),
            Verdict::Reject => add(&part!(counts.rejected), 1),
        }
    }
}

/// Counts the packets and bytes of a removed flow.
#[inline(always)]
pub fn service_closed<A: Maps>(service: &FrontendKey<A>, sent: &Passed, returned: &Passed) {
    if let Some(counts) = counts(service) {
        add(&part!(counts.sent.packets), sent.packets);
        add(&part!(counts.sent.bytes), sent.bytes);
        add(&part!(counts.returned.packets), returned.packets);
        add(&part!(counts.returned.bytes), returned.bytes);
    }
}

/// Returns the counters of a service port, which it creates if missing. `None` without a service
/// port, or without room: then nothing is counted.
#[inline(never)]
fn counts<A: Maps>(service: &FrontendKey<A>) -> Option<Live<ServiceCounts>> {
    let map = A::MAPS.service_counts;
    if let Some(counts) = map.find_here(service) {
        return Some(counts);
    }
    if service.addr.is_unspecified() {
        return None;
    }
    let _first = map.insert(service, NOTHING, u64::from(BPF_NOEXIST));
    map.find_here(service)
}

/// Adds without a lock, which the compiler does not offer here: if two CPUs add at the same
/// instant, one addition is lost.
#[inline(always)]
fn add(counter: &Live<u64>, n: u64) {
    counter.update(|count| count.wrapping_add(n));
}
