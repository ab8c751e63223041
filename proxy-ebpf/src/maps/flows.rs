//! The flow table: entries claimed, found, changed, removed.

use aya_ebpf::bindings::BPF_NOEXIST;
use proxy_common::addr::Proto;
use proxy_common::flow::{Acked, CachedRoute, EntryKind, Flow, FlowKey, Kind, Proof, Seen};

use super::live::part;
use super::{Find, Live, ends};
use crate::net::Net;

/// A reason for which an entry could not be made.
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
    // Before the entry: a packet that finds no mark does not look for it.
    ends::mark(key, flow);
    A::MAPS
        .flows
        .insert(key, flow, u64::from(BPF_NOEXIST))
        .map_err(|error| match error {
            EEXIST => Refused::Taken,
            _ => Refused::Full,
        })
}

/// Returns false if there was none.
#[inline(always)]
pub fn remove_flow<A: Net>(key: &FlowKey<A>) -> bool {
    A::MAPS.flows.remove(key).is_ok()
}

/// An entry of the flow table, where it lives.
pub type Entry<A> = Live<Flow<A>>;

/// The entry at `key`, its value copied to `flow`.
///
/// The kernel may give a deleted element to another key while we read it. So a value that does not
/// belong to its key counts as none.
#[inline(never)]
pub fn flow<A: Net>(key: &FlowKey<A>, flow: &mut Flow<A>) -> Option<Entry<A>> {
    let live = A::MAPS.flows.find_here(key)?;
    live.copy_to(flow);
    (flow.key(key.proto()) == *key).then_some(live)
}

/// The entry at `key`, nothing of it copied. What was read of it counts if [`Entry::is_at`] says so
/// *after* that.
///
/// The kernel gives an element its new value from the front. The fields of the key are in front of
/// most fields that are read.
#[inline(always)]
pub fn live_flow<A: Net>(key: &FlowKey<A>) -> Option<Entry<A>> {
    A::MAPS.flows.find(key)
}

/// The same for what most packets take: see [`Find::find_here`].
#[inline(always)]
pub fn live_flow_here<A: Net>(key: &FlowKey<A>) -> Option<Entry<A>> {
    A::MAPS.flows.find_here(key)
}

/// Returns true if there is an entry at `key`.
#[inline(always)]
pub fn is_flow<A: Net>(key: &FlowKey<A>) -> bool {
    A::MAPS.flows.find(key).is_some()
}

/// Returns true if the entry at `key` gives a backend's answers their frontend's address back.
#[inline(always)]
pub fn is_undnat<A: Net>(key: &FlowKey<A>) -> bool {
    live_flow(key)
        .is_some_and(|entry| entry.read(|flow| flow.kind) == Kind::UNDNAT && entry.is_at(key))
}

/// The opener's entry of `flow`.
#[inline(never)]
pub fn opener<A: Net>(flow: &Flow<A>, proto: Proto) -> Option<Entry<A>> {
    A::MAPS.flows.find_here(&flow.opener_key(proto))
}

/// The entry that gives replies of `flow` their frontend's address back.
#[inline(never)]
pub fn undnat<A: Net>(flow: &Flow<A>, proto: Proto) -> Option<Entry<A>> {
    A::MAPS.flows.find_here(&flow.undnat_key(proto))
}

/// The opener's entry of the TCP flow that a live entry belongs to.
#[inline(always)]
pub fn opener_of<A: Net>(entry: &Entry<A>) -> Option<Entry<A>> {
    A::MAPS
        .flows
        .find_here(&entry.read(|flow| flow.opener_key(Proto::TCP)))
}

/// The reply's entry of the TCP flow that a live entry belongs to: see [`undnat`].
#[inline(always)]
pub fn undnat_of<A: Net>(entry: &Entry<A>) -> Option<Entry<A>> {
    A::MAPS
        .flows
        .find_here(&entry.read(|flow| flow.undnat_key(Proto::TCP)))
}

impl<A: Net> Entry<A> {
    /// Returns true if this still is the entry at `key`.
    #[inline(always)]
    pub fn is_at(&self, key: &FlowKey<A>) -> bool {
        // Compared in each arm: behind the match the compiler would read by pointers that it has
        // chosen there.
        self.read(|flow| match flow.kind.known() {
            Some(EntryKind::Dnat) => flow.opener_key(key.proto()) == *key,
            Some(EntryKind::Undnat) => flow.undnat_key(key.proto()) == *key,
            Some(EntryKind::Snat) => flow.key_as(Kind::SNAT, key.proto()) == *key,
            Some(EntryKind::Unsnat) => flow.key_as(Kind::UNSNAT, key.proto()) == *key,
            None => false,
        })
    }

    // The element may change hands while it is written. Its new owner is a flow of the same second,
    // whose end is noticed early or late once: the timeouts bound what that can cost.

    /// Counts a packet: see [`Passed`](proxy_common::service_counts::Passed).
    #[inline(always)]
    pub fn count(&self, packets: u32, bytes: u32) {
        part!(self.passed.packets).update(|count| count.wrapping_add(packets.into()));
        part!(self.passed.bytes).update(|count| count.wrapping_add(bytes.into()));
    }

    #[inline(always)]
    pub fn set_generation(&self, generation: u32) {
        part!(self.generation).set(generation);
    }

    #[inline(always)]
    pub fn set_acked(&self, Acked(acked): Acked) {
        part!(self.generation).set(acked);
    }

    #[inline(always)]
    pub fn set_proof(&self, Proof(proof): Proof) {
        part!(self.generation).set(proof);
    }

    /// Keeps a judgement of the sender. The term comes last: until then another CPU finds a
    /// judgement of another term.
    #[inline(always)]
    pub fn set_cached_route(&self, cached_route: CachedRoute) {
        let [client, frontend, backend, source] = cached_route.spares();
        part!(self.source.spare).set_in_order(!source);
        part!(self.client.spare).set_in_order(client);
        part!(self.frontend.spare).set_in_order(frontend);
        part!(self.backend.spare).set_in_order(backend);
        part!(self.source.spare).set_in_order(source);
    }

    #[inline(always)]
    pub fn set_last_secs(&self, last_secs: u32) {
        part!(self.last_secs).set(last_secs);
    }

    #[inline(always)]
    pub fn set_tx(&self, tx: Seen) {
        part!(self.tx).set(tx);
    }

    #[inline(always)]
    pub fn set_rx(&self, rx: Seen) {
        part!(self.rx).set(rx);
    }
}
