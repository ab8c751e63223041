//! The egress of devices, where kpx rewrites sources. Egress hooks look up flows, and Services only
//! for SYN-ACKs of the mode that hands clients over.

use proxy_common::counter::{Event, Reason};
use proxy_common::flow::{EntryKind, Hook};

use crate::maps::{Memory, Scratch};
use crate::net::Net;
use crate::outcome::Action;
use crate::packet::Reading;
use crate::setting::HANDS_OVER;
use crate::skb::{LinkHeader, Skb};
use crate::{flow, foreign_nat, handover, maps, packet};

#[inline(always)]
pub fn run<A: Net>(skb: Skb, link: LinkHeader, mut memory: Memory) -> Result<Action, Reason> {
    let noted = skb.packet_mark();
    skb.clear_packet_mark();
    packet::parse::<A>(skb, Hook::EGRESS, Reading::behind(link), memory.lend())?;
    let mark = skb.weigh(noted, skb.found().is_fragment());
    if mark.port_shows() {
        foreign_nat::track::<A>(memory.lend());
    }
    if mark.is_done() || mark.port_shows() {
        skb.settle_packet_mark();
        return Err(Reason::NotOurs);
    }
    let is_known = flow::follow::<A>(skb, Hook::EGRESS, mark, memory.lend())?;
    // A rewritten packet does not belong to another program's connection.
    if !is_known && (noted.is_translated() || !foreign_nat::meet::<A>(memory.lend())?) {
        return Err(Reason::NotOurs);
    }
    let (scratch, _) = memory.lend().scratch::<A>().ok_or(Reason::NotOurs)?;
    let Scratch {
        packet,
        flow,
        becomes,
        ..
    } = scratch;
    match flow.kind.known() {
        Some(EntryKind::Snat | EntryKind::Dnat) => {
            becomes.set(flow.source, packet.dst, flow.is_far());
            packet::rewrite::<A>(skb, memory)?;
        }
        Some(EntryKind::Undnat | EntryKind::Unsnat) | None => {
            becomes.set(flow.frontend, flow.client, flow.is_far());
            packet::rewrite::<A>(skb, memory.lend())?;
            // After the rewrite, which starts from the checksum that the parser has read.
            if HANDS_OVER.get() != 0 {
                handover::lower_mss::<A>(skb, memory)?;
            }
            maps::count(Event::Returned);
        }
    }
    skb.settle_packet_mark();
    Ok(Action::PASS)
}
