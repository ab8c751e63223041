//! The egress of lo, through which the host's own sockets send to addresses of the host.
//!
//! The packets are replies of the host's backends, or go to node ports (also at a loopback address)
//! or to Service addresses on a device. At the ingress of lo it would be too late: the kernel has
//! already decided to deliver them.

use proxy_common::counter::Reason;
use proxy_common::device::Node;
use proxy_common::flow::{Flow, Hook};

use crate::maps::{self, Memory};
use crate::net::Net;
use crate::outcome::Action;
use crate::packet::Reading;
use crate::redirect::Forward;
use crate::skb::Skb;
use crate::{flow, host, packet};

#[inline(always)]
pub fn run<A: Forward>(skb: Skb, mut memory: Memory) -> Result<Action, Reason> {
    let mark = skb.packet_mark();
    skb.clear_packet_mark();
    packet::parse::<A>(skb, Hook::EGRESS, Reading::WITHIN_HOST, memory.lend())?;
    let (scratch, _) = memory.lend().scratch::<A>().ok_or(Reason::NotOurs)?;
    if is_of_no_service(&scratch.packet.dst.addr) {
        return Err(Reason::NotUnicast);
    }
    if flow::follow::<A>(skb, Hook::EGRESS, mark, memory.lend())? {
        let (scratch, _) = memory.lend().scratch::<A>().ok_or(Reason::NotOurs)?;
        // A foreign NAT connection gets another port only when it leaves by a device. Here its peer
        // is this host, which accepts the packet unchanged.
        if scratch.flow.has(Flow::<A>::FOREIGN_NAT) {
            return Err(Reason::NotOurs);
        }
        return host::give_back::<A>(skb, memory);
    }
    if maps::node().is_some_and(|node| node.has(Node::HOST)) {
        return Err(Reason::NotOurs);
    }
    host::send::<A>(skb, Flow::<A>::HOST_FRONTEND, memory)
}

/// Returns true for a loopback address at which no node ports are served.
#[inline(never)]
fn is_of_no_service<A: Net>(dst: &A) -> bool {
    dst.is_loopback() && !maps::own_addr(dst).is_some_and(|own| own.takes_node_ports())
}
