//! What is counted for each service port.

use aya_ebpf::bindings::BPF_NOEXIST;
use proxy_common::counter::Verdict;
use proxy_common::frontend::FrontendKey;
use proxy_common::service_counts::{Passed, ServiceCounts};

use crate::net::Net;

/// In the object's read-only data: the stack has no room for it.
static NOTHING: ServiceCounts = ServiceCounts::NOTHING;

#[inline(always)]
pub fn service_opened<A: Net>(service: &FrontendKey<A>) {
    if let Some(counts) = counts(service) {
        // SAFETY: see `counts`.
        add(unsafe { &raw mut (*counts).opened }, 1);
    }
}

/// A packet that would have opened a flow did not.
#[inline(always)]
pub fn service_refused<A: Net>(service: &FrontendKey<A>, verdict: Verdict) {
    if let Some(counts) = counts(service) {
        match verdict {
            Verdict::Pass => {}
            // SAFETY: see `counts`.
            Verdict::Drop => add(unsafe { &raw mut (*counts).dropped }, 1),
            // SAFETY: see `counts`.
            Verdict::Reject => add(unsafe { &raw mut (*counts).rejected }, 1),
        }
    }
}

/// A flow is removed, with what had passed.
#[inline(always)]
pub fn service_closed<A: Net>(service: &FrontendKey<A>, sent: &Passed, returned: &Passed) {
    if let Some(counts) = counts(service) {
        // SAFETY: see `counts`.
        let (to_sent, to_returned) = unsafe { (&raw mut (*counts).sent, &raw mut (*counts).returned) };
        // SAFETY: see `counts`.
        unsafe {
            add(&raw mut (*to_sent).packets, sent.packets);
            add(&raw mut (*to_sent).bytes, sent.bytes);
            add(&raw mut (*to_returned).packets, returned.packets);
            add(&raw mut (*to_returned).bytes, returned.bytes);
        }
    }
}

/// The counters of a service port, made where there are none. Map memory outlives the program. None where there is no
/// service port, or no room: that costs the count alone.
#[inline(always)]
fn counts<A: Net>(service: &FrontendKey<A>) -> Option<*mut ServiceCounts> {
    let map = A::MAPS.service_counts;
    if let Some(counts) = map.get_ptr_mut(service) {
        return Some(counts);
    }
    if service.addr.is_unspecified() {
        return None;
    }
    let _first = map.insert(service, NOTHING, u64::from(BPF_NOEXIST));
    map.get_ptr_mut(service)
}

/// Without a lock, which the compiler does not offer here: of two CPUs that add in the same instant, one is not counted.
#[inline(always)]
fn add(counter: *mut u64, n: u64) {
    // SAFETY: the counter is in map memory, which outlives the program.
    unsafe { *counter = (*counter).wrapping_add(n) };
}
