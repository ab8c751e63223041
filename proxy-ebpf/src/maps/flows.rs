//! The flow table: entries claimed, found, changed, removed.

use core::ptr::copy_nonoverlapping;

use aya_ebpf::bindings::BPF_NOEXIST;
use aya_ebpf::helpers::bpf_map_pop_elem;
use proxy_common::addr::{Addr, Proto, SockAddr};
use proxy_common::flow::{Flow, FlowKey, Hook, Kind, Seen};
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

/// Puts an opener's key at the end of the line of those that may have to make room. False if the line is full.
#[inline(always)]
pub fn enlist<A: Net>(key: &FlowKey<A>) -> bool {
    A::MAPS.nursery.push(key, 0).is_ok()
}

/// Takes the first key out of the line, into `key`. False if there is none.
#[inline(always)]
pub fn next_in_line<A: Net>(key: &mut FlowKey<A>) -> bool {
    let nursery = core::ptr::from_ref(A::MAPS.nursery).cast_mut().cast();
    // SAFETY: a queue's static is its definition, which stands for the map; its elements are such keys.
    unsafe { bpf_map_pop_elem(nursery, core::ptr::from_mut(key).cast()) == 0 }
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

/// The entry at `key`, nothing of it copied. What was read of it counts if [`Entry::is_at`] says so *after* that.
///
/// The kernel gives an element its new value from the front, and what makes up the key is in front of most of what is read.
#[inline(always)]
pub fn live_flow<A: Net>(key: &FlowKey<A>) -> Option<Entry<A>> {
    A::MAPS.flows.get_ptr_mut(key).map(Entry)
}

/// What a packet's own end of its flow is called at the other side of `hook`: of programs that do nothing else.
#[inline(always)]
pub fn other_end<A: Net>(key: &FlowKey<A>, hook: Hook) -> Option<SockAddr<A>> {
    let live = A::MAPS.flows.get_ptr(key)?;
    // SAFETY: map memory outlives the program.
    Some(unsafe { if hook == Hook::INGRESS { (*live).backend } else { (*live).frontend } })
}

/// Whether there is an entry at `key`.
#[inline(always)]
pub fn is_flow<A: Net>(key: &FlowKey<A>) -> bool {
    A::MAPS.flows.get_ptr(key).is_some()
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
    /// Is this still the entry at `key`?
    #[inline(always)]
    pub fn is_at(&self, key: &FlowKey<A>) -> bool {
        // SAFETY: as in `flow`.
        unsafe { (*self.0).key(key.proto()) == *key }
    }

    #[inline(always)]
    pub fn is_snat_on_devices(&self) -> bool {
        // SAFETY: as in `flow`.
        unsafe { (*self.0).is_snat_on_devices() }
    }

    #[inline(always)]
    pub fn kind(&self) -> Kind {
        // SAFETY: as in `flow`.
        unsafe { (*self.0).kind }
    }

    #[inline(always)]
    pub fn client(&self) -> SockAddr<A> {
        // SAFETY: as in `flow`.
        unsafe { (*self.0).client }
    }

    #[inline(always)]
    pub fn client_between(&self) -> SockAddr<A> {
        // SAFETY: as in `flow`.
        unsafe { (*self.0).client_between() }
    }

    #[inline(always)]
    pub fn frontend(&self) -> SockAddr<A> {
        // SAFETY: as in `flow`.
        unsafe { (*self.0).frontend }
    }

    #[inline(always)]
    pub fn backend(&self) -> SockAddr<A> {
        // SAFETY: as in `flow`.
        unsafe { (*self.0).backend }
    }

    #[inline(always)]
    pub fn source(&self) -> SockAddr<A> {
        // SAFETY: as in `flow`.
        unsafe { (*self.0).source }
    }

    #[inline(always)]
    pub fn last_secs(&self) -> u32 {
        // SAFETY: as in `flow`.
        unsafe { (*self.0).last_secs }
    }

    #[inline(always)]
    pub fn generation(&self) -> u32 {
        // SAFETY: as in `flow`.
        unsafe { (*self.0).generation }
    }

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
