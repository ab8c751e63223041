//! The half-open queue: the openers' keys of flows that make room for others, oldest first.
//!
//! Each CPU has rings of its own, so that CPUs under a flood share neither a lock nor a cache line.
//! `HALF_OPEN_RING` has the places of all rings one behind the other, and `HALF_OPEN_ENDS` the ends
//! of each.
//!
//! A CPU has two rings. Each flow gets its place in the ring of waiting flows. A flow that has both
//! spoken and been answered, but whose client can never show that it exists
//! ([`Flow::shows_no_client`](crate::flow::Flow::shows_no_client)), moves to the ring of streams
//! when its place is needed. So a flood of openers displaces no such flow, as long as there are
//! fewer than the ring of streams has places.

use crate::addr::{Addr, Addr4, Addr6};
use crate::assert_size;
use crate::flow::FlowKey;

/// Value of `HALF_OPEN_RING`: a flow's place in the queue.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place<A: Addr> {
    /// The key of the opener's entry.
    pub opener: FlowKey<A>,
    /// When the flow got the place: seconds since boot.
    pub since_secs: u32,
}
assert_size!(Place<Addr4> = 16 + 4);
assert_size!(Place<Addr6> = 40 + 4);

/// Value of `HALF_OPEN_ENDS`: how many places of a ring were ever given up, and given. Both counts
/// wrap around.
///
/// The programs of one CPU write them. Those of another CPU do so only to make room in a full
/// table, or where CPUs share a ring. A lost update then costs a place: its flow goes with its
/// time, or goes early.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    pub first: u32,
    pub next: u32,
}
assert_size!(Ends = 4 + 4);

/// The bytes from one ring's ends to the next one's: two cache lines, because the kernel aligns no
/// array to one.
pub const ENDS_STRIDE: usize = 128;

/// Value of `HALF_OPEN_ENDS`, with the room that keeps two CPUs' ends apart.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PaddedEnds {
    pub ends: Ends,
    pad: [u32; (ENDS_STRIDE - size_of::<Ends>()) / 4],
}
assert_size!(PaddedEnds = ENDS_STRIDE);

impl PaddedEnds {
    /// The ends of a ring without flows.
    pub const EMPTY: Self = Self {
        ends: Ends { first: 0, next: 0 },
        pad: [0; (ENDS_STRIDE - size_of::<Ends>()) / 4],
    };
}

impl Ends {
    /// Returns the oldest place of a ring of so many places; None if all are free.
    #[inline(always)]
    pub const fn oldest(&self, places: u32) -> Option<u32> {
        let first = self.first(places);
        if first == self.next {
            None
        } else {
            first.checked_rem(places)
        }
    }

    /// Returns the place for the next flow; None if all are taken.
    #[inline(always)]
    pub const fn free(&self, places: u32) -> Option<u32> {
        let taken = self.next.wrapping_sub(self.first(places));
        if taken >= places {
            None
        } else {
            self.next.checked_rem(places)
        }
    }

    /// Returns the number of the oldest place. Ends that are further apart than the ring is long
    /// come from a ring of another length, or from a lost update: then the last places count.
    #[inline(always)]
    pub const fn first(&self, places: u32) -> u32 {
        if self.next.wrapping_sub(self.first) > places {
            self.next.wrapping_sub(places)
        } else {
            self.first
        }
    }
}

/// The rings of a CPU: of waiting flows and of streams.
pub const CLASSES: u32 = 2;

/// Places of a waiting ring for one of streams, as a power of two. Flows of two entries take a
/// place among those that wait, flows of four take two. So half of the table is for flows that
/// wait, and a quarter for streams.
pub const STREAMS_SHIFT: u32 = 2;

/// Returns the places of all rings beside so many places of waiting flows.
#[inline(always)]
pub const fn all_places(waiting: u32) -> u32 {
    waiting + (waiting >> STREAMS_SHIFT)
}

/// The most rings of a class; more CPUs share them.
pub const RINGS_MAX: u32 = 256;

/// A ring shorter than this forgets flows that a handshake is about to establish.
const PLACES_MIN: u32 = 16;

/// The division of the places of waiting flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rings {
    /// The rings of a class, a power of two: a CPU's number, cut off there, names its ring.
    pub count: u32,
    /// Places of each ring of waiting flows.
    pub places: u32,
}

impl Rings {
    /// Divides `places` among the CPUs that a machine may have.
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
