//! What leaves a device: sources are rewritten. Never looks at services.

use proxy_common::counter::{Event, Reason};
use proxy_common::flow::{Flow, Hook, Kind};

use crate::net::Net;
use crate::packet::{Packet, Skb};
use crate::{Answer, PASS, anchor, flow, maps};

#[inline(always)]
pub fn run<A: Net>(skb: Skb) -> Result<Answer, Reason> {
    let forward = skb.note().is_forward();
    skb.clear_note();
    let packet = Packet::<A>::parse(skb)?;
    let flow = maps::scratch(0).ok_or(Reason::NotOurs)?;
    if !flow::follow(&packet, Hook::EGRESS, forward, flow) {
        return Err(Reason::NotOurs);
    }
    if flow.kind == Kind::SNAT {
        packet.rewrite(flow.source, packet.dst)?;
    } else if flow.has(Flow::<A>::HOST) {
        // On lo: a socket of the host answers another one.
        return anchor::give_back(&packet, flow);
    } else {
        maps::count(Event::Returned);
        packet.rewrite(flow.frontend, flow.client)?;
    }
    Ok(PASS)
}
