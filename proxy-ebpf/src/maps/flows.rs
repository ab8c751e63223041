//! The flow table: entries claimed, found, changed, removed.

use core::ptr::copy_nonoverlapping;

use aya_ebpf::bindings::BPF_NOEXIST;
use proxy_common::addr::{Addr, Proto};
use proxy_common::flow::{Flow, FlowKey, Seen};
use proxy_common::service_counts::Passed;

use crate::net::Net;

/// Why an entry could not be made.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// Its key is taken.
    Taken,
    Full,
}

/// Makes an entry, unless its key is taken.
#[inline(always)]
pub fn claim_flow<A: Net>(key: &FlowKey<A>, flow: &Flow<A>) -> Result<(), Refused> {
    const EEXIST: i32 = -17;
    A::MAPS.flows.insert(key, flow, u64::from(BPF_NOEXIST)).map_err(|error| match error {
        EEXIST => Refused::Taken,
        _ => Refused::Full,
    })
}

/// False if there was none.
#[inline(always)]
pub fn remove_flow<A: Net>(key: &FlowKey<A>) -> bool {
    A::MAPS.flows.remove(key).is_ok()
}

/// An entry of the flow table: the way to read and write the little that changes while it lives.
pub struct Entry<A: Addr>(*mut Flow<A>);

/// The entry at `key`, its value copied to `flow`.
///
/// The kernel may give a deleted element to another key while we read it, so a value that does not belong to its key
/// counts as none.
#[inline(always)]
pub fn flow<A: Net>(key: &FlowKey<A>, flow: &mut Flow<A>) -> Option<Entry<A>> {
    let live = A::MAPS.flows.get_ptr_mut(key)?;
    // SAFETY: map memory outlives the program, and no entry is the scratch. The copy may be torn, which the comparison
    // below catches. (By assignment the compiler would allow for an overlap, and copy byte by byte.)
    unsafe { copy_nonoverlapping(live, flow, 1) };
    (flow.key(key.proto()) == *key).then_some(Entry(live))
}

/// The opener's entry of `flow`.
#[inline(always)]
pub fn opener<A: Net>(flow: &Flow<A>, proto: Proto) -> Option<Entry<A>> {
    A::MAPS.flows.get_ptr_mut(flow.opener_key(proto)).map(Entry)
}

/// The entry that gives replies of `flow` their frontend's address back.
#[inline(always)]
pub fn undnat<A: Net>(flow: &Flow<A>, proto: Proto) -> Option<Entry<A>> {
    A::MAPS.flows.get_ptr_mut(flow.undnat_key(proto)).map(Entry)
}

impl<A: Net> Entry<A> {
    #[inline(always)]
    pub fn tx(&self) -> Seen {
        // SAFETY: as in `flow`; a byte is never torn.
        unsafe { (*self.0).tx }
    }

    #[inline(always)]
    pub fn rx(&self) -> Seen {
        // SAFETY: as in `tx`.
        unsafe { (*self.0).rx }
    }

    #[inline(always)]
    pub fn passed(&self) -> Passed {
        // SAFETY: as in `flow`.
        unsafe { (*self.0).passed }
    }

    // If the element changes hands while it is written, its new owner is a flow of the same second whose end is noticed
    // early or late once: the timeouts below bound what that can cost.

    /// Counts a packet: see [`Passed`].
    #[inline(always)]
    pub fn count(&self, packets: u32, bytes: u32) {
        // SAFETY: as in `flow`.
        let passed = unsafe { &mut (*self.0).passed };
        passed.packets += u64::from(packets);
        passed.bytes += u64::from(bytes);
    }

    #[inline(always)]
    pub fn set_generation(&self, generation: u32) {
        // SAFETY: as in `flow`.
        unsafe { (*self.0).generation = generation };
    }

    #[inline(always)]
    pub fn set_last_secs(&self, last_secs: u32) {
        // SAFETY: as in `flow`.
        unsafe { (*self.0).last_secs = last_secs };
    }

    #[inline(always)]
    pub fn set_tx(&self, tx: Seen) {
        // SAFETY: as in `flow`.
        unsafe { (*self.0).tx = tx };
    }

    #[inline(always)]
    pub fn set_rx(&self, rx: Seen) {
        // SAFETY: as in `flow`.
        unsafe { (*self.0).rx = rx };
    }
}
