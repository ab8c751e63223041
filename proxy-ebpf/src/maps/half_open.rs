//! The half-open queue: rings of the keys of original entries, two for each CPU.

use proxy_common::flow::FlowKey;
use proxy_common::half_open::Place;

use super::Find;
use super::Maps;
use super::live::part;
use crate::ring::Ring;

/// Takes the place at the end of a ring of this CPU. Returns its number, or `None` if the ring is
/// full.
#[inline(always)]
pub fn free_place<A: Maps>(ring: Ring) -> Option<u32> {
    let ends = A::MAPS.half_open_ends.find_here(&ring.0)?;
    let ends = part!(ends.ends);
    let now = ends.copy();
    let free = now.free(ring.places())?;
    part!(ends.next).set(now.next.wrapping_add(1));
    Some(ring.index(free))
}

/// Returns true if a ring has no free place.
#[inline(always)]
pub fn is_full<A: Maps>(ring: Ring) -> bool {
    A::MAPS
        .half_open_ends
        .find_here(&ring.0)
        .is_some_and(|ends| part!(ends.ends).copy().free(ring.places()).is_none())
}

/// Assigns a taken place to a flow.
#[inline(always)]
pub fn set_place<A: Maps>(number: u32, opener: &FlowKey<A>, since_secs: u32) {
    // Without a place, the flow ends by its timeout.
    if let Some(place) = A::MAPS.half_open.find_here(&number) {
        part!(place.opener).set(*opener);
        part!(place.since_secs).set(since_secs);
    }
}

/// Appends the key of an original entry to a ring of this CPU. Returns false if the ring is full.
#[inline(always)]
pub fn enqueue<A: Maps>(ring: Ring, opener: &FlowKey<A>, since_secs: u32) -> bool {
    let place = free_place::<A>(ring);
    if let Some(place) = place {
        set_place(place, opener, since_secs);
    }
    place.is_some()
}

/// Removes the first place from a ring, and copies it to `to`. Returns false if the ring is empty.
#[inline(always)]
pub fn dequeue<A: Maps>(ring: Ring, to: &mut Place<A>) -> bool {
    let Some(ends) = A::MAPS.half_open_ends.find_here(&ring.0) else {
        return false;
    };
    let ends = part!(ends.ends);
    let now = ends.copy();
    let Some(oldest) = now.oldest(ring.places()) else {
        return false;
    };
    part!(ends.first).set(now.first(ring.places()).wrapping_add(1));
    let Some(place) = A::MAPS.half_open.find_here(&ring.index(oldest)) else {
        return false;
    };
    place.copy_to(to);
    true
}
