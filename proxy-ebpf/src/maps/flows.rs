//! The flow table: creates, finds, changes and removes entries.

use aya_ebpf::bindings::BPF_NOEXIST;
use proxy_common::addr::Proto;
use proxy_common::flow::{Acked, CachedRoute, EntryKind, Flow, FlowKey, Kind, Proof, Seen};

use super::live::part;
use super::{Find, Live, Maps, ends};

/// The reason why an entry was not created.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The key is taken.
    Taken,
    Full,
}

/// Creates an entry, unless its key is taken.
#[inline(always)]
pub fn claim_flow<A: Maps>(key: &FlowKey<A>, flow: &Flow<A>) -> Result<(), Refused> {
    const EEXIST: i32 = -17;
    // Before the entry: hooks do not look up packets without a mark.
    ends::mark(key, flow);
    A::MAPS
        .flows
        .insert(key, flow, u64::from(BPF_NOEXIST))
        .map_err(|error| match error {
            EEXIST => Refused::Taken,
            _ => Refused::Full,
        })
}

/// Removes an entry. Returns false if it does not exist.
#[inline(always)]
pub fn remove_flow<A: Maps>(key: &FlowKey<A>) -> bool {
    A::MAPS.flows.remove(key).is_ok()
}

/// An entry of the flow table, in place.
pub type Entry<A> = Live<Flow<A>>;

/// Finds the entry at `key`, and copies its value to `flow`.
///
/// The kernel may give a deleted element to another key during the copy. So a value that does not
/// match its key counts as missing.
#[inline(never)]
pub fn flow<A: Maps>(key: &FlowKey<A>, flow: &mut Flow<A>) -> Option<Entry<A>> {
    let live = A::MAPS.flows.find_here(key)?;
    live.copy_to(flow);
    (flow.key(key.proto()) == *key).then_some(live)
}

/// Finds the entry at `key`, without a copy. Reads from the entry are valid if [`Entry::is_at`]
/// returns true *after* them.
///
/// The kernel writes an element's new value from the front. The fields of the key precede most
/// fields that are read.
#[inline(always)]
pub fn live_flow<A: Maps>(key: &FlowKey<A>) -> Option<Entry<A>> {
    A::MAPS.flows.find(key)
}

/// The same, looked up inline: see [`Find::find_here`].
#[inline(always)]
pub fn live_flow_here<A: Maps>(key: &FlowKey<A>) -> Option<Entry<A>> {
    A::MAPS.flows.find_here(key)
}

/// Returns true if `key` has an entry.
#[inline(always)]
pub fn is_flow<A: Maps>(key: &FlowKey<A>) -> bool {
    A::MAPS.flows.find(key).is_some()
}

/// Returns true if the entry at `key` restores the frontend's address in a backend's replies.
#[inline(always)]
pub fn is_undnat<A: Maps>(key: &FlowKey<A>) -> bool {
    live_flow(key)
        .is_some_and(|entry| entry.read(|flow| flow.kind) == Kind::UNDNAT && entry.is_at(key))
}

/// Finds the original entry of `flow`.
#[inline(never)]
pub fn opener<A: Maps>(flow: &Flow<A>, proto: Proto) -> Option<Entry<A>> {
    A::MAPS.flows.find_here(&flow.opener_key(proto))
}

/// Finds the entry that restores the frontend's address in replies of `flow`.
#[inline(never)]
pub fn undnat<A: Maps>(flow: &Flow<A>, proto: Proto) -> Option<Entry<A>> {
    A::MAPS.flows.find_here(&flow.undnat_key(proto))
}

/// Finds the original entry of the TCP flow of a live entry.
#[inline(always)]
pub fn opener_of<A: Maps>(entry: &Entry<A>) -> Option<Entry<A>> {
    A::MAPS
        .flows
        .find_here(&entry.read(|flow| flow.opener_key(Proto::TCP)))
}

/// Finds the reply entry of the TCP flow of a live entry: see [`undnat`].
#[inline(always)]
pub fn undnat_of<A: Maps>(entry: &Entry<A>) -> Option<Entry<A>> {
    A::MAPS
        .flows
        .find_here(&entry.read(|flow| flow.undnat_key(Proto::TCP)))
}

impl<A: Maps> Entry<A> {
    /// Returns true if this still is the entry at `key`.
    #[inline(always)]
    pub fn is_at(&self, key: &FlowKey<A>) -> bool {
        // Compared in each arm: after the match, the compiler would read through pointers that it
        // has chosen there.
        self.read(|flow| match flow.kind.known() {
            Some(EntryKind::Dnat) => flow.opener_key(key.proto()) == *key,
            Some(EntryKind::Undnat) => flow.undnat_key(key.proto()) == *key,
            Some(EntryKind::Snat) => flow.key_as(Kind::SNAT, key.proto()) == *key,
            Some(EntryKind::Unsnat) => flow.key_as(Kind::UNSNAT, key.proto()) == *key,
            None => false,
        })
    }

    // The kernel may give the element to another key before a write. Then the new owner is a flow
    // of the same second, whose end may be recorded early or late once: the timeouts bound the
    // cost.

    /// Counts packets: see [`Passed`](proxy_common::service_counts::Passed).
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

    /// Stores a validated route. The term comes last: until then, other CPUs read a route of
    /// another term.
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
