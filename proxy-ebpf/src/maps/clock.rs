//! A cheap clock: reading the kernel's clock would be a large part of a packet's cost.

use aya_ebpf::helpers::generated::bpf_jiffies64;

use super::live::part;
use super::{CPUS, Find};
use crate::clock::now_secs;
use proxy_macros::global_fn;

/// Returns the time in seconds that `ask` returns, and calls `ask` once per kernel tick.
#[inline(always)]
pub fn in_this_tick(ask: impl FnOnce() -> u32) -> u32 {
    // SAFETY: the helper takes no arguments and cannot fail.
    let jiffies = unsafe { bpf_jiffies64() };
    let Some(cpu) = CPUS.find_here(&0) else {
        return ask();
    };
    let last = part!(cpu.jiffies);
    let secs = part!(cpu.secs);
    // The tick is written last: a program that interrupts this function calls `ask` itself.
    if last.copy() != jiffies {
        secs.set_in_order(ask());
        last.set_in_order(jiffies);
    }
    secs.copy()
}

/// Returns the seconds since boot, at most one kernel tick late: cheap enough for every packet.
#[global_fn(kpx_about_now)]
pub fn about_now_secs() -> u32 {
    in_this_tick(now_secs)
}
