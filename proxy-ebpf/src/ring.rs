//! The rings of the half-open queue, by their numbers.

use aya_ebpf::helpers::bpf_get_smp_processor_id;
use proxy_common::half_open::CLASSES;

use crate::random::below;
use crate::setting::{HALF_OPEN_PLACES, HALF_OPEN_RINGS};

/// A ring of the queue, by its number.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Ring(pub u32);

impl Ring {
    /// The ring of the CPU that this program runs on, for flows whose client can show itself, or for the others.
    #[inline(always)]
    pub fn own(shows_no_client: bool) -> Self {
        // SAFETY: the helper takes no arguments and cannot fail.
        let cpu = unsafe { bpf_get_smp_processor_id() };
        Self((cpu & HALF_OPEN_RINGS.get().wrapping_sub(1)) * CLASSES + u32::from(shows_no_client))
    }

    /// A ring at random, for a program that looks for flows to forget.
    #[inline(always)]
    pub fn any() -> Self {
        Self(below(HALF_OPEN_RINGS.get() * CLASSES))
    }

    /// Returns the number that a place of the ring has among those of all rings.
    #[inline(always)]
    pub fn index(self, place: u32) -> u32 {
        self.0.wrapping_mul(HALF_OPEN_PLACES.get()).wrapping_add(place)
    }
}
