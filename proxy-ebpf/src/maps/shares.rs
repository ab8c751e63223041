//! The flow table's entries beyond half-open: how many there are, and how many each client holds.
//!
//! Adds are not atomic, as all counts here: the agent counts again in each sweep.

use aya_ebpf::bindings::BPF_NOEXIST;
use proxy_common::share::{self, Share};

use super::{Find, Live, copied};
use crate::net::Net;
use crate::setting::FLOW_ROOM;

/// Asks for a client's share, or changes it. Returns false if the share is used up.
#[inline(always)]
pub fn share<A: Net>(client: &A, share: Share) -> bool {
    let Some(lasting) = A::MAPS.lasting.find(&0) else { return true };
    match share {
        Share::Hold(0) => true,
        Share::Ask => may_hold(lasting.copy(), || copied(A::MAPS.clients, client)),
        Share::Hold(entries) => {
            let held = A::MAPS.clients.find(client);
            if !may_hold(lasting.copy(), || held.as_ref().map(Live::copy)) {
                return false;
            }
            lasting.update(|count| count.wrapping_add(entries));
            match held {
                Some(held) => drop(held.update(|count| count.wrapping_add(entries))),
                // Refused or beaten, the count is low until the next sweep.
                None => drop(A::MAPS.clients.insert(client, entries, u64::from(BPF_NOEXIST))),
            }
            true
        }
        Share::Release(entries) => {
            lasting.update(|count| count.saturating_sub(entries));
            if let Some(held) = A::MAPS.clients.find(client) {
                held.update(|count| count.saturating_sub(entries));
            }
            true
        }
    }
}

#[inline(always)]
fn may_hold(lasting: u32, held: impl FnOnce() -> Option<u32>) -> bool {
    let room = FLOW_ROOM.get();
    share::is_ample(lasting, room) || !share::is_used_up(held().unwrap_or(0), lasting, room)
}
