//! The flow table's entries beyond half-open: how many there are, and how many each client and each
//! namespace holds.
//!
//! Adds are not atomic, as all counts here: the agent counts again in each sweep.

use aya_ebpf::bindings::BPF_NOEXIST;
use proxy_common::frontend::{FrontendKey, Namespace};
use proxy_common::share::{self, Share};

use super::{Find, copied};
use crate::net::Net;
use crate::setting::FLOW_ROOM;

/// Asks for the share of a client and of a service port's namespace, or changes both. Returns false
/// if either is used up.
#[inline(always)]
pub fn share<A: Net>(client: &A, service: &FrontendKey<A>, share: Share) -> bool {
    if share == Share::Hold(0) {
        return true;
    }
    let Some(lasting) = A::MAPS.lasting.find(&0) else {
        return true;
    };
    if share == Share::Ask && share::is_ample(lasting.copy(), FLOW_ROOM.get()) {
        return true;
    }
    let namespace = super::frontend(service).map_or(Namespace::NONE, |row| row.namespace);
    if let Share::Release(entries) = share {
        lasting.update(|count| count.saturating_sub(entries));
        release(client, entries);
        if !namespace.is_none() {
            release(&A::of_namespace(namespace), entries);
        }
        return true;
    }
    if !may_hold(lasting.copy(), client, namespace) {
        return false;
    }
    if let Share::Hold(entries) = share {
        lasting.update(|count| count.wrapping_add(entries));
        hold(client, entries);
        if !namespace.is_none() {
            hold(&A::of_namespace(namespace), entries);
        }
    }
    true
}

#[inline(always)]
fn may_hold<A: Net>(lasting: u32, client: &A, namespace: Namespace) -> bool {
    let room = FLOW_ROOM.get();
    if share::is_ample(lasting, room) {
        return true;
    }
    let held = |holder: &A| copied(A::MAPS.clients, holder).unwrap_or(0);
    if share::is_used_up(held(client), lasting, room) {
        return false;
    }
    namespace.is_none()
        || !share::is_used_up_by_namespace(held(&A::of_namespace(namespace)), lasting, room)
}

#[inline(always)]
fn hold<A: Net>(holder: &A, entries: u32) {
    match A::MAPS.clients.find(holder) {
        Some(held) => drop(held.update(|count| count.wrapping_add(entries))),
        // Refused or beaten, the count is low until the next sweep.
        None => drop(
            A::MAPS
                .clients
                .insert(holder, entries, u64::from(BPF_NOEXIST)),
        ),
    }
}

#[inline(always)]
fn release<A: Net>(holder: &A, entries: u32) {
    if let Some(held) = A::MAPS.clients.find(holder) {
        held.update(|count| count.saturating_sub(entries));
    }
}
