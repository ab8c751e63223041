//! The counts of the flow table's entries beyond half-open: in total, and for each client and each
//! namespace.
//!
//! Updates are not atomic, like all counts here: the agent recounts in each sweep.

use aya_ebpf::bindings::BPF_NOEXIST;
use proxy_common::frontend::{FrontendKey, Namespace};
use proxy_common::share::{self, PortAndShare, Register, Share};
use proxy_macros::global_fn;

use super::{Find, Live, Maps};
use crate::setting::FLOW_ROOM;

/// Queries or changes the shares of a client and of a service port's namespace. Returns false if
/// either share is used up.
#[inline(always)]
pub fn share<A: Maps>(client: &A, service: &FrontendKey<A>, share: Register) -> bool {
    change(client, &service.addr, PortAndShare::new(service, share))
}

/// Implements [`share`], with the address of the service port in `service`.
#[global_fn(kpx_share4, kpx_share6)]
fn change<A: Maps>(client: &A, service: &A, rest: PortAndShare) -> bool {
    let service = &rest.service(*service);
    let share = rest.share();
    if share == Share::Hold(0) {
        return true;
    }
    let Some(lasting) = A::MAPS.lasting.find_here(&0) else {
        return true;
    };
    if share == Share::Ask && share::is_ample(lasting.copy(), FLOW_ROOM.get()) {
        return true;
    }
    let namespace = super::frontend(service).map_or(Namespace::NONE, |row| row.namespace);
    let group = A::of_namespace(namespace);
    let of_client = A::MAPS.clients.find_here(client);
    let of_group = if namespace.is_none() {
        None
    } else {
        A::MAPS.clients.find_here(&group)
    };
    match share {
        Share::Release(entries) => {
            lasting.update(|count| count.saturating_sub(entries));
            release(of_client, entries);
            release(of_group, entries);
        }
        _ if !may_hold(lasting.copy(), &of_client, &of_group) => return false,
        Share::Hold(entries) => {
            lasting.update(|count| count.wrapping_add(entries));
            hold(client, of_client, entries);
            if !namespace.is_none() {
                hold(&group, of_group, entries);
            }
        }
        Share::Ask => {}
    }
    true
}

/// Returns true if neither the client nor the namespace has used up its share. A holder without a
/// row holds 0 entries.
#[inline(always)]
fn may_hold(lasting: u32, of_client: &Option<Live<u32>>, of_group: &Option<Live<u32>>) -> bool {
    let room = FLOW_ROOM.get();
    let held = |row: &Option<Live<u32>>| row.as_ref().map_or(0, Live::copy);
    share::is_ample(lasting, room)
        || !share::is_used_up(held(of_client), lasting, room)
            && !share::is_used_up_by_namespace(held(of_group), lasting, room)
}

#[inline(always)]
fn hold<A: Maps>(holder: &A, row: Option<Live<u32>>, entries: u32) {
    match row {
        Some(held) => drop(held.update(|count| count.wrapping_add(entries))),
        // If the insert fails or another CPU is first, the count is low until the next sweep.
        None => drop(
            A::MAPS
                .clients
                .insert(holder, entries, u64::from(BPF_NOEXIST)),
        ),
    }
}

#[inline(always)]
fn release(row: Option<Live<u32>>, entries: u32) {
    if let Some(held) = row {
        held.update(|count| count.saturating_sub(entries));
    }
}
