//! What the host's own sockets send to services elsewhere: the routes to them lead here, to the egress of the anchor.

use proxy_common::counter::Reason;
use proxy_common::flow::Hook;

use crate::maps::{self, Memory};
use crate::net::Net;
use crate::packet::Packet;
use crate::skb::Skb;
use crate::{Action, host};

#[inline(always)]
pub fn run<A: Net>(skb: Skb, memory: Memory) -> Result<Action, Reason> {
    let (scratch, decision) = memory.scratch::<A>().ok_or(Reason::FlowsFull)?;
    scratch.packet.parse(skb, Hook::ANCHOR)?;
    match host::send(skb, scratch, 0, decision) {
        Err(Reason::NoFlow) if skb.came_in() && is_met_at_ingress(&scratch.packet) => Err(Reason::Unhooked),
        sent => sent,
    }
}

/// Does it belong to a flow that is followed where packets come in? That it was not met there is the fault of whoever has
/// taken our program off the device. Soon it is put back, and the packet sent again; refused, its connection would end.
#[inline(never)]
fn is_met_at_ingress<A: Net>(packet: &Packet<A>) -> bool {
    maps::is_flow(&packet.flow_key(Hook::INGRESS))
}
