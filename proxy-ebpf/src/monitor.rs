//! Writes a record for `kpx monitor` of each packet that opened a flow, or was dropped or rejected.
//! Only these paths check whether a monitor runs, so packets of open flows pay nothing.

use proxy_common::counter::{Reason, Verdict};
use proxy_common::flow::Flow;
use proxy_common::hook::PacketHook;
use proxy_common::monitor::What;

use crate::maps::{self, DecisionMemory, Memory};
use crate::net::Net;
use crate::packet::Packet;
use crate::skb::Skb;

/// Records a packet that has opened `flow`.
#[inline(always)]
pub fn decided<A: Net>(
    skb: Skb,
    hook: PacketHook,
    packet: &Packet<A>,
    flow: &Flow<A>,
    decision: DecisionMemory,
) {
    if maps::is_watched() {
        record(skb, u32::from(hook.id().0), packet, Some(flow), decision);
    }
}

/// Records a packet that is dropped or rejected.
#[inline(always)]
pub fn refused<A: Net>(
    skb: Skb,
    hook: PacketHook,
    reason: Reason,
    verdict: Verdict,
    memory: Memory,
) {
    let what = match verdict {
        Verdict::Pass => return,
        Verdict::Drop => What::DROPPED,
        Verdict::Reject => What::REJECTED,
    };
    if maps::is_watched()
        && let Some((scratch, decision)) = memory.scratch::<A>()
    {
        let say = u32::from(hook.id().0) | u32::from(what.0) << 8 | (reason as u32) << 16;
        record(skb, say, &scratch.packet, None, decision);
    }
}

/// Writes a record. `say` packs the hook's id, a [`What`] and the reason, one byte each from the
/// lowest.
#[inline(never)]
fn record<A: Net>(
    skb: Skb,
    say: u32,
    packet: &Packet<A>,
    flow: Option<&Flow<A>>,
    decision: DecisionMemory,
) {
    maps::monitor(say, skb.ifindex(), packet, flow, decision);
}
