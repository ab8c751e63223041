//! What is written for those who watch.

use core::ptr::copy_nonoverlapping;

use proxy_common::flow::Flow;
use proxy_common::monitor::{Place, Record, What};

use super::{MONITOR, MONITORED, WATCHED};
use crate::flow::now_secs;
use crate::net::Net;
use crate::packet::Packet;

/// Does somebody watch?
#[inline(always)]
pub fn is_watched() -> bool {
    WATCHED.get(0).is_some_and(|per_second| *per_second != 0)
}

/// Tells of a packet: see [`Record`]. `say` is place, what and reason, a byte each.
#[inline(always)]
pub fn monitor<A: Net>(say: u32, ifindex: u32, packet: &Packet<A>, flow: Option<&Flow<A>>) {
    let Some(monitored) = MONITORED.get_ptr_mut(0) else { return };
    // SAFETY: the slot is this CPU's own, and no other program runs on it before this one ends.
    let monitored = unsafe { &mut *monitored };
    let Some(decision) = super::decision::<A>() else { return };
    let second = now_secs();
    if monitored.second != second {
        monitored.second = second;
        monitored.written = 0;
    }
    if WATCHED.get(0).is_none_or(|per_second| monitored.written >= *per_second) {
        monitored.lost += 1;
        return;
    }
    let Some(mut entry) = MONITOR.reserve::<Record<A>>(0) else {
        monitored.lost += 1;
        return;
    };
    monitored.written += 1;
    let record = entry.as_mut_ptr();
    // SAFETY: the kernel has reserved room for all of the record, and each field is written. Copied from one map's memory
    // to another's: by assignment the compiler would allow for an overlap.
    unsafe {
        (*record).place = Place(say as u8);
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
