//! Random numbers.

use aya_ebpf::helpers::bpf_get_prandom_u32;

/// A random number below `bound`, without a division: the upper half of a 64-bit product.
#[inline(always)]
pub fn below(bound: u32) -> u32 {
    // SAFETY: the helper takes no arguments and cannot fail.
    let random = unsafe { bpf_get_prandom_u32() };
    ((u64::from(random) * u64::from(bound)) >> 32) as u32
}
