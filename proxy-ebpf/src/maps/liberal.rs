//! Requests for liberal conntrack entries, so that flows may bypass the stack, and the agent's
//! replies.

use aya_ebpf::bindings::BPF_F_NO_PREALLOC;
use aya_ebpf::macros::map;
use aya_ebpf::maps::{HashMap, Queue};
use proxy_common::flow::{AnyKey, Offer};

use super::copied;

/// The requests between two reads by the agent. A flow repeats a request without room in its next
/// second.
const OFFERS_MAX: u32 = 4_096;
const LIBERAL_MAX: u32 = 65_536;

#[map]
static OFFERS: Queue<Offer> = Queue::with_max_entries(OFFERS_MAX, 0);
/// The second since boot of a flow's request.
#[map]
static TOLERATED: HashMap<AnyKey, u32> = HashMap::with_max_entries(LIBERAL_MAX, BPF_F_NO_PREALLOC);

/// Returns the second of the request for the flow with this original entry, if the agent has made
/// the conntrack entry liberal.
#[inline(always)]
pub fn liberal_since(opener: &AnyKey) -> Option<u32> {
    copied(&TOLERATED, opener)
}

/// Requests a liberal conntrack entry from the agent.
#[inline(always)]
pub fn offer(opener: AnyKey, now_secs: u32) {
    let _full = OFFERS.push(Offer::new(opener, now_secs), 0);
}
