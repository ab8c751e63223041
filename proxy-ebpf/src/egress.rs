//! What leaves a device: sources are rewritten. Never looks at services.

use proxy_common::counter::{Event, Reason};
use proxy_common::flow::{Hook, Kind};

use crate::maps::Scratch;
use crate::net::Net;
use crate::skb::Skb;
use crate::{Answer, PASS, flow, maps};

#[inline(always)]
pub fn run<A: Net>(skb: Skb) -> Result<Answer, Reason> {
    let note = skb.note();
    skb.clear_note();
    let Scratch { packet, flow, .. } = maps::scratch::<A>().ok_or(Reason::NotOurs)?;
    packet.parse(skb, Hook::EGRESS)?;
    if !flow::follow(packet, Hook::EGRESS, note, flow) {
        return Err(Reason::NotOurs);
    }
    if flow.kind == Kind::SNAT {
        packet.rewrite(skb, &flow.source, &packet.dst)?;
    } else {
        packet.rewrite(skb, &flow.frontend, &flow.client)?;
        maps::count(Event::Returned);
    }
    Ok(PASS)
}
