//! The anchor's egress, to which the routes lead that the host's own sockets take to services elsewhere.

use proxy_common::counter::Reason;
use proxy_common::flow::Hook;

use crate::maps::{self, Memory};
use crate::net::Net;
use crate::packet::Packet;
use crate::skb::{LinkHeader, Skb};
use crate::{Action, host};

#[inline(always)]
pub fn run<A: Net>(skb: Skb, memory: Memory) -> Result<Action, Reason> {
    let (scratch, decision) = memory.scratch::<A>().ok_or(Reason::FlowsFull)?;
    scratch.packet.parse(skb, LinkHeader::Ethernet, Hook::ANCHOR)?;
    match host::send(skb, scratch, 0, decision) {
        Err(Reason::NoFlow) if skb.came_in() && is_met_at_ingress(&scratch.packet) => Err(Reason::Unhooked),
        sent => sent,
    }
}

/// Returns true if the packet belongs to a flow that is followed where packets come in.
///
/// If so, another program took ours off the device. The agent soon puts it back, and the client sends the packet again. A
/// refusal would end the connection.
#[inline(never)]
fn is_met_at_ingress<A: Net>(packet: &Packet<A>) -> bool {
    maps::is_flow(&packet.flow_key(Hook::INGRESS))
}
