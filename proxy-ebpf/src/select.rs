//! The choice of a backend for a new flow, and the failover of a flow from a silent backend.

use core::num::NonZeroU32;

use proxy_common::addr::{Port, Proto, SockAddr};
use proxy_common::balance::{Affinity, AffinityKey, maglev_place};
use proxy_common::connect::{AFFINITY_PATIENCE, Outcome, PATIENCE, Voter};
use proxy_common::counter::Reason;
use proxy_common::flow::{Flow, Seen};
use proxy_common::frontend::{Backend, Choice, MAGLEV_PLACES, Service, Set, SetKey, SlotKey};
use proxy_common::policy::Decision;

use crate::clock::now_secs;
use crate::maps;
use crate::net::Net;
use crate::packet::Packet;
use crate::random::below;

/// Chooses a backend from the decision's set, which must have slots.
#[inline(always)]
pub fn backend<A: Net>(
    client: &SockAddr<A>,
    service: &Service,
    decision: &mut Decision<A>,
) -> Result<(), Reason> {
    let sticks = service.affinity_secs > 0;
    if sticks && by_affinity(&client.addr, service, decision) {
        decision.flags |= Decision::<A>::AFFINITY;
    } else {
        by_algorithm(client, service, decision)?;
    }
    decision.flags |= Decision::<A>::BACKEND;
    // A client outside may be spoofed: see `decide::remember`.
    if sticks && !decision.origin.is_remote() {
        remember(&client.addr, decision);
    }
    Ok(())
}

/// Chooses a random backend from the decision's set, other than the silent backend if there is
/// another. A client with affinity stays with the new backend.
#[inline(never)]
pub fn another<A: Net>(
    client: &A,
    service: &Service,
    decision: &mut Decision<A>,
    silent: &SockAddr<A>,
) -> Result<(), Reason> {
    let count = NonZeroU32::new(service.count(decision.set).into()).ok_or(Reason::StaleSlot)?;
    let first = below(count.get());
    decision.backend = match slot(decision, first) {
        Some(backend) => backend,
        None => retry(decision)?,
    };
    // Read again: the compiler would pass the address in more registers than there are.
    if decision.backend_at() == maps::again(silent)
        && let Some(next) = slot(decision, (first + 1) % count)
    {
        decision.backend = next;
    }
    decision.flags |= Decision::<A>::BACKEND;
    if service.affinity_secs > 0 && !decision.origin.is_remote() {
        remember(client, decision);
    }
    Ok(())
}

/// Counts a repeated SYN on a flow without an answer. Returns true if the flow leaves its backend
/// for another.
///
/// A spoofed SYN cannot shorten the wait: it counts from the first SYN.
#[inline(never)]
pub fn leaves_silent<A: Net>(packet: &Packet<A>, flow: &Flow<A>) -> bool {
    // Read again, so that the verifier checks the code below once, for any value.
    if maps::again(&packet.proto) != Proto::TCP
        || !packet.opens_again()
        || maps::again(&flow.rx).has(Seen::PACKET)
    {
        return false;
    }
    let waited = maps::waited(flow);
    let is_silent = waited >= PATIENCE;
    let outcome = if is_silent {
        Outcome::unheard(Voter::of(&flow.client.addr, flow.is_far()))
    } else {
        Outcome::RETRANSMITTED
    };
    maps::note_outcome(flow, outcome);
    let Some(service) = maps::service(&flow.service) else {
        return false;
    };
    let patience = if service.affinity_secs > 0 {
        AFFINITY_PATIENCE
    } else {
        PATIENCE
    };
    service.has(Service::FAILS_OVER) && waited >= patience
}

// Separate functions, so that their keys are not on the stack at the same time.

/// Chooses the client's previous backend. Returns false if the affinity has expired or the backend
/// is no longer in the set.
#[inline(never)]
fn by_affinity<A: Net>(client: &A, service: &Service, decision: &mut Decision<A>) -> bool {
    let Some(had) = maps::affinity(&AffinityKey::new(decision.service, *client)) else {
        return false;
    };
    if now_secs().saturating_sub(had.last_secs) >= service.affinity_secs {
        return false;
    }
    let Some(endpoint) = maps::endpoint(decision.service, had.backend) else {
        return false;
    };
    let flags = if endpoint.is_local() {
        Backend::<A>::LOCAL
    } else {
        0
    };
    if !endpoint.is_in(decision.set) {
        return false;
    }
    decision.backend = Backend::new(had.backend.addr, had.backend.port, flags);
    true
}

#[inline(never)]
fn remember<A: Net>(client: &A, decision: &Decision<A>) {
    let key = AffinityKey::new(decision.service, *client);
    maps::set_affinity(&key, &Affinity::new(decision.backend_at(), now_secs()));
}

/// Stores the affinity of a client that may be spoofed.
#[inline(never)]
pub fn remember_new<A: Net>(client: &A, decision: &Decision<A>) {
    let key = AffinityKey::new(decision.service, *client);
    maps::set_new_affinity(&key, &Affinity::new(decision.backend_at(), now_secs()));
}

/// Stores the affinity of a flow's client, which has proven that it exists.
#[inline(never)]
pub fn remember_shown<A: Net>(flow: &Flow<A>, proto: Proto) {
    if !flow.shows_no_client(proto)
        && maps::service(&flow.service).is_some_and(|service| service.affinity_secs > 0)
    {
        let key = AffinityKey::new(flow.service, flow.client.addr);
        maps::set_affinity(&key, &Affinity::new(flow.backend, now_secs()));
    }
}

#[inline(never)]
fn by_algorithm<A: Net>(
    client: &SockAddr<A>,
    service: &Service,
    decision: &mut Decision<A>,
) -> Result<(), Reason> {
    let count = NonZeroU32::new(service.count(decision.set).into()).ok_or(Reason::StaleSlot)?;
    let index = index(client, service, decision, count);
    decision.backend = match slot(decision, index) {
        Some(backend) => backend,
        // Slots are deleted after the count has shrunk, so a second look sees the new count.
        None => retry(decision)?,
    };
    Ok(())
}

/// Returns the index of a slot by the Service's algorithm.
#[inline(always)]
fn index<A: Net>(
    client: &SockAddr<A>,
    service: &Service,
    decision: &Decision<A>,
    count: NonZeroU32,
) -> u32 {
    let key = SetKey::new(decision.service, decision.set);
    let count = if service.has(Service::WEIGHTED) {
        PLACES
    } else {
        count
    };
    let number = match service.algorithm.known() {
        Some(Choice::Maglev) => return place(&key, maglev_place(*client, &decision.service)),
        Some(Choice::RoundRobin) => maps::next_turn(&key) % count,
        Some(Choice::LeastConnections) => {
            let first = below(count.get());
            // A different slot, if there is one.
            let second = (first + 1 + below(count.get() - 1)) % count;
            if service.has(Service::WEIGHTED) {
                return lighter(
                    decision,
                    place(&key, first as usize),
                    place(&key, second as usize),
                );
            }
            return lighter(decision, first, second);
        }
        Some(Choice::Random) | None => below(count.get()),
    };
    if service.has(Service::WEIGHTED) {
        place(&key, number as usize)
    } else {
        number
    }
}

/// Chooses a client's backend from [`Set::DIRECT`]. Sockets never do, so their programs lack this.
/// Affinity is by the client's address.
#[inline(always)]
pub fn direct<A: Net>(
    client: &SockAddr<A>,
    service: &Service,
    decision: &mut Decision<A>,
) -> Result<(), Reason> {
    let index = direct_slot(client, service, decision);
    decision.backend = slot(decision, index).ok_or(Reason::StaleSlot)?;
    decision.flags |= Decision::<A>::BACKEND;
    Ok(())
}

/// Returns the index of a client's slot in [`Set::DIRECT`], the same on every node.
#[inline(never)]
pub fn direct_slot<A: Net>(client: &SockAddr<A>, service: &Service, decision: &Decision<A>) -> u32 {
    let port = if service.affinity_secs > 0 {
        Port::ANY
    } else {
        client.port
    };
    let client = SockAddr::new(client.addr, port);
    let key = SetKey::new(decision.service, Set::DIRECT);
    place(&key, maglev_place(client, &decision.service))
}

const PLACES: NonZeroU32 = NonZeroU32::new(MAGLEV_PLACES as u32).unwrap();

/// Returns the slot at a place of the Maglev table. Without a table, the first slot serves.
#[inline(always)]
fn place<A: Net>(set: &SetKey<A>, place: usize) -> u32 {
    maps::maglev_slot(set, place).unwrap_or(0)
}

/// Returns the slot of the backend with fewer open flows for its weight.
#[inline(always)]
fn lighter<A: Net>(decision: &Decision<A>, first: u32, second: u32) -> u32 {
    let (flows1, weight1) = load(decision, first);
    let (flows2, weight2) = load(decision, second);
    if flows2 * weight1 < flows1 * weight2 {
        second
    } else {
        first
    }
}

/// Returns the number of a backend's open flows, and its weight.
#[inline(always)]
fn load<A: Net>(decision: &Decision<A>, index: u32) -> (u64, u64) {
    slot(decision, index).map_or((u64::from(u32::MAX), 1), |backend| {
        let flows = maps::connections(
            SockAddr::new(backend.addr, backend.port),
            decision.service.proto,
        );
        (u64::from(flows), u64::from(backend.weight()))
    })
}

#[inline(always)]
fn slot<A: Net>(decision: &Decision<A>, index: u32) -> Option<Backend<A>> {
    maps::slot(&SlotKey::new(decision.service, decision.set, index as u16))
}

#[inline(always)]
fn retry<A: Net>(decision: &Decision<A>) -> Result<Backend<A>, Reason> {
    let service = maps::service(&decision.service).ok_or(Reason::StaleSlot)?;
    slot(decision, below(u32::from(service.count(decision.set)))).ok_or(Reason::StaleSlot)
}
