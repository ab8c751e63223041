//! The records for `kpx monitor`.

use core::ptr::copy_nonoverlapping;

use proxy_common::flow::Flow;
use proxy_common::hook::HookId;
use proxy_common::monitor::{Record, What};

use super::live::part;
use super::{CPUS, DecisionMemory, Find, MONITOR, Maps, WATCHED};
use crate::clock::now_secs;
use crate::packet::Packet;

/// Returns true while `kpx monitor` runs.
#[inline(never)]
pub fn is_watched() -> bool {
    WATCHED.get(0).is_some_and(|per_second| *per_second != 0)
}

/// Writes the record of a packet: see [`Record`]. `say` packs the hook's id, a [`What`] and the
/// reason, one byte each from the lowest.
#[inline(always)]
pub fn monitor<A: Maps>(
    say: u32,
    ifindex: u32,
    packet: &Packet<A>,
    flow: Option<&Flow<A>>,
    decision: DecisionMemory,
) {
    let Some(cpu) = CPUS.find_here(&0) else {
        return;
    };
    let Some(decision) = decision.get::<A>() else {
        return;
    };
    let of_second = part!(cpu.second);
    let written = part!(cpu.written);
    let lost = part!(cpu.lost);
    let second = now_secs();
    if of_second.copy() != second {
        of_second.set(second);
        written.set(0);
    }
    if WATCHED
        .get(0)
        .is_none_or(|per_second| written.copy() >= *per_second)
    {
        lost.update(|lost| lost.wrapping_add(1));
        return;
    }
    let Some(mut entry) = MONITOR.reserve::<Record<A>>(0) else {
        lost.update(|lost| lost.wrapping_add(1));
        return;
    };
    written.update(|written| written.wrapping_add(1));
    let record = entry.as_mut_ptr();
    // SAFETY: the kernel has reserved room for the whole record, and each field is written. Copied
    // from one map's memory to another's: for an assignment the compiler would allow for an
    // overlap.
    unsafe {
        (*record).hook_id = HookId(say as u8);
        (*record).what = What((say >> 8) as u8);
        (*record).reason = (say >> 16) as u8;
        (*record).proto = packet.proto;
        (*record).ifindex = ifindex;
        copy_nonoverlapping(&raw const packet.src, &raw mut (*record).src, 1);
        copy_nonoverlapping(&raw const packet.dst, &raw mut (*record).dst, 1);
        let source = flow.map_or(&raw const packet.src, |flow| &raw const flow.source);
        copy_nonoverlapping(source, &raw mut (*record).source, 1);
        copy_nonoverlapping(&raw const *decision, &raw mut (*record).decision, 1);
        if !packet.decided {
            (*record).decision.flags = 0;
        }
    }
    entry.submit(0);
}
