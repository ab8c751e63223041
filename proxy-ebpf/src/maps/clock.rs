//! The time, which costs more to ask for than most of what a packet costs.

use aya_ebpf::helpers::generated::bpf_jiffies64;

use super::live::part;
use super::{CPUS, Find};
use crate::global_fn;

/// The time in seconds as `ask` tells it, asked once in each tick of the kernel's.
#[inline(always)]
pub fn in_this_tick(ask: impl FnOnce() -> u32) -> u32 {
    // SAFETY: the helper takes no arguments and cannot fail.
    let jiffies = unsafe { bpf_jiffies64() };
    let Some(cpu) = CPUS.find_here(&0) else {
        return ask();
    };
    let last = part!(cpu.jiffies);
    let secs = part!(cpu.secs);
    // The ticks are written last: if another program comes in between, it asks itself.
    if last.copy() != jiffies {
        secs.set_in_order(ask());
        last.set_in_order(jiffies);
    }
    secs.copy()
}

/// Seconds since boot, late by a tick of the kernel's at the most, and cheaper: for what is asked
/// of every packet.
#[inline(always)]
pub fn about_now_secs() -> u32 {
    global_fn::kpx_about_now()
}
