//! The half-open queue: the keys of the original entries of evictable flows, oldest first.
//!
//! Each CPU has its own rings, so that CPUs under a flood share neither locks nor cache lines.
//! `HALF_OPEN_RING` holds the places of all rings in sequence, and `HALF_OPEN_ENDS` the ends of
//! each.
//!
//! A CPU has two rings. Each flow first gets a place in the ring of waiting flows. When that place
//! is needed, an answered flow whose client cannot prove that it exists
//! ([`Flow::shows_no_client`](crate::flow::Flow::shows_no_client)) moves to the ring of streams. So
//! a flood of new flows does not evict streams while that ring has free places.

use crate::addr::{Addr, Addr4, Addr6};
use crate::assert_size;
use crate::flow::FlowKey;

/// Value of `HALF_OPEN_RING`: a flow's place in the queue.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place<A: Addr> {
    /// The key of the original entry.
    pub opener: FlowKey<A>,
    /// The time of insertion, in seconds since boot.
    pub since_secs: u32,
}
assert_size!(Place<Addr4> = 16 + 4);
assert_size!(Place<Addr6> = 40 + 4);

/// Value of `HALF_OPEN_ENDS`: the total numbers of places freed and used in a ring. Both wrap.
///
/// The CPU's own programs write them. Other CPUs write them only to free entries of a full flow
/// table, or if CPUs share a ring. A lost update then loses a place: its flow times out, or is
/// evicted early.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    pub first: u32,
    pub next: u32,
}
assert_size!(Ends = 4 + 4);

/// The stride of `HALF_OPEN_ENDS` in bytes: two cache lines, because the kernel does not align
/// arrays to cache lines.
pub const ENDS_STRIDE: usize = 128;

/// Value of `HALF_OPEN_ENDS`, padded to keep CPUs' ends in separate cache lines.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PaddedEnds {
    pub ends: Ends,
    pad: [u32; (ENDS_STRIDE - size_of::<Ends>()) / 4],
}
assert_size!(PaddedEnds = ENDS_STRIDE);

impl PaddedEnds {
    pub const EMPTY: Self = Self {
        ends: Ends { first: 0, next: 0 },
        pad: [0; (ENDS_STRIDE - size_of::<Ends>()) / 4],
    };
}

impl Ends {
    /// Returns the oldest place of a ring. `None` if the ring is empty.
    #[inline(always)]
    pub const fn oldest(&self, places: u32) -> Option<u32> {
        let first = self.first(places);
        if first == self.next {
            None
        } else {
            first.checked_rem(places)
        }
    }

    /// Returns the next free place of a ring. `None` if the ring is full.
    #[inline(always)]
    pub const fn free(&self, places: u32) -> Option<u32> {
        let taken = self.next.wrapping_sub(self.first(places));
        if taken >= places {
            None
        } else {
            self.next.checked_rem(places)
        }
    }

    /// Returns the number of the oldest place. A distance greater than the ring's length comes from
    /// a ring of another length or a lost update; then the newest places count.
    #[inline(always)]
    pub const fn first(&self, places: u32) -> u32 {
        if self.next.wrapping_sub(self.first) > places {
            self.next.wrapping_sub(places)
        } else {
            self.first
        }
    }
}

/// The rings of a CPU: waiting flows, and streams.
pub const CLASSES: u32 = 2;

/// The ratio of waiting places to stream places, as a power of two. Two entries take a waiting
/// place, and flows of four entries take two. So waiting flows get half of the table, and streams a
/// quarter.
pub const STREAMS_SHIFT: u32 = 2;

/// Returns the places of both rings for `waiting` places.
#[inline(always)]
pub const fn all_places(waiting: u32) -> u32 {
    waiting + (waiting >> STREAMS_SHIFT)
}

/// The maximum number of rings in a class. More CPUs share rings.
pub const RINGS_MAX: u32 = 256;

/// The minimum ring length. A shorter ring would evict flows during their handshake.
const PLACES_MIN: u32 = 16;

/// The division of waiting places among rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rings {
    /// The number of rings in a class, a power of two. The low bits of the CPU number select the
    /// ring.
    pub count: u32,
    /// The places in each ring of waiting flows.
    pub places: u32,
}

impl Rings {
    /// Divides `places` among the machine's possible CPUs.
    pub const fn new(places: u32, cpus: u32) -> Self {
        let mut count = 1;
        while count < cpus && count < RINGS_MAX && places / (count * 2) >= PLACES_MIN {
            count *= 2;
        }
        let places = places / count;
        Self {
            count,
            places: if places == 0 { 1 } else { places },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_gives_its_places_in_turn_and_back_oldest_first() {
        let mut ends = Ends {
            first: u32::MAX - 1,
            next: u32::MAX - 1,
        };
        assert_eq!(ends.oldest(4), None);
        let mut given = Vec::new();
        while let Some(place) = ends.free(4) {
            given.push(place);
            ends.next = ends.next.wrapping_add(1);
        }
        assert_eq!(given.len(), 4);
        let mut taken = Vec::new();
        while let Some(place) = ends.oldest(4) {
            taken.push(place);
            ends.first = ends.first.wrapping_add(1);
        }
        assert_eq!(taken, given);
        assert_eq!(
            (ends.oldest(0), Ends { first: 1, next: 2 }.oldest(0)),
            (None, None),
            "a ring without places"
        );
    }

    #[test]
    fn ring_recovers_from_ends_that_are_too_far_apart() {
        for ends in [
            Ends {
                first: 0,
                next: 65_536,
            },
            Ends { first: 5, next: 4 },
        ] {
            assert_eq!(ends.first(16), ends.next.wrapping_sub(16));
            assert_eq!(ends.free(16), None, "the ring is full");
            let ends = Ends {
                first: ends.first(16).wrapping_add(1),
                ..ends
            };
            assert!(
                ends.free(16).is_some() && ends.oldest(16).is_some(),
                "{ends:?}"
            );
        }
    }

    #[test]
    fn every_cpu_has_a_ring_as_long_as_the_places_suffice() {
        let rings = |places, cpus| {
            (
                Rings::new(places, cpus).count,
                Rings::new(places, cpus).places,
            )
        };
        assert_eq!(rings(65_536, 2), (2, 32_768));
        assert_eq!(rings(65_536, 6), (8, 8_192));
        assert_eq!(rings(262_144, 64), (64, 4_096));
        assert_eq!(rings(262_144, 1_000), (256, 1_024));
        assert_eq!(rings(16, 2), (1, 16), "two halves would be too short");
        assert_eq!(rings(0, 2), (1, 1));
    }
}
