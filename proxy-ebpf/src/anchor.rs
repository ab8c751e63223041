//! What the host's own sockets send to services elsewhere: the routes to them lead here, to the egress of the anchor.

use proxy_common::counter::Reason;
use proxy_common::flow::Hook;

use crate::net::Net;
use crate::skb::Skb;
use crate::{Answer, host, maps};

#[inline(always)]
pub fn run<A: Net>(skb: Skb) -> Result<Answer, Reason> {
    let scratch = maps::scratch::<A>().ok_or(Reason::FlowsFull)?;
    scratch.packet.parse(skb, Hook::ANCHOR)?;
    host::send(skb, scratch, 0)
}
