//! The clock of the programs: time since boot, sleep included.

use aya_ebpf::helpers::bpf_ktime_get_boot_ns;

/// Nanoseconds since boot, sleep included.
#[inline(always)]
pub fn now_ns() -> u64 {
    // SAFETY: the helper takes no arguments and cannot fail.
    unsafe { bpf_ktime_get_boot_ns() }
}

#[inline(always)]
pub const fn in_secs(ns: u64) -> u32 {
    (ns / 1_000_000_000) as u32
}

/// Seconds since boot, sleep included.
#[inline(always)]
pub fn now_secs() -> u32 {
    in_secs(now_ns())
}
