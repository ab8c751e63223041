//! The rings of the half-open queue, by their numbers.

use aya_ebpf::helpers::bpf_get_smp_processor_id;
use proxy_common::half_open::{CLASSES, STREAMS_SHIFT, all_places};

use crate::random::below;
use crate::setting::{HALF_OPEN_PLACES, HALF_OPEN_RINGS};

/// A ring of the queue, by its number.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Ring(pub u32);

impl Ring {
    /// The ring of waiting flows of the CPU that this program runs on.
    #[inline(always)]
    pub fn own() -> Self {
        // SAFETY: the helper takes no arguments and cannot fail.
        let cpu = unsafe { bpf_get_smp_processor_id() };
        Self((cpu & HALF_OPEN_RINGS.get().wrapping_sub(1)) * CLASSES)
    }

    /// The ring of streams of the same CPU.
    #[inline(always)]
    pub fn streams(self) -> Self {
        Self(self.0 | 1)
    }

    #[inline(always)]
    pub fn is_of_streams(self) -> bool {
        self.0 & 1 != 0
    }

    /// Returns a random ring, for a program that looks for flows to evict.
    #[inline(always)]
    pub fn any() -> Self {
        Self(below(HALF_OPEN_RINGS.get() * CLASSES))
    }

    /// Returns the number of places in the ring.
    #[inline(always)]
    pub fn places(self) -> u32 {
        HALF_OPEN_PLACES.get() >> ((self.0 & 1) * STREAMS_SHIFT)
    }

    /// Returns the index of a place of the ring in `HALF_OPEN_RING`.
    #[inline(always)]
    pub fn index(self, place: u32) -> u32 {
        let waiting = HALF_OPEN_PLACES.get();
        (self.0 >> 1)
            .wrapping_mul(all_places(waiting))
            .wrapping_add((self.0 & 1) * waiting)
            .wrapping_add(place)
    }
}
