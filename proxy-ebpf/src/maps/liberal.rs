//! The flows of which conntrack need not see all packets: their questions, and the agent's answers.

use aya_ebpf::bindings::BPF_F_NO_PREALLOC;
use aya_ebpf::macros::map;
use aya_ebpf::maps::{HashMap, Queue};
use proxy_common::flow::{AnyKey, Offer};

use super::copied;

/// The questions between two looks of the agent. One that finds no room is asked again in its
/// flow's next second.
const OFFERS_MAX: u32 = 4_096;
const LIBERAL_MAX: u32 = 65_536;

#[map]
static OFFERS: Queue<Offer> = Queue::with_max_entries(OFFERS_MAX, 0);
/// The second in which a flow asked.
#[map]
static TOLERATED: HashMap<AnyKey, u32> = HashMap::with_max_entries(LIBERAL_MAX, BPF_F_NO_PREALLOC);

/// Returns the second in which the flow with this opener asked, if the agent has said yes.
#[inline(always)]
pub fn liberal_since(opener: &AnyKey) -> Option<u32> {
    copied(&TOLERATED, opener)
}

/// Asks the agent.
#[inline(always)]
pub fn offer(opener: AnyKey, now_secs: u32) {
    let _full = OFFERS.push(Offer::new(opener, now_secs), 0);
}
