//! What arrives at a device: destinations are rewritten.

use proxy_common::addr::SockAddr;
use proxy_common::counter::{Event, Reason};
use proxy_common::flow::{Flow, Hook, Kind};

use crate::flow::{self, Source};
use crate::net::Net;
use crate::packet::{Packet, Skb};
use crate::{Answer, PASS, anchor, lookup, maps};

#[inline(always)]
pub fn run<A: Net>(skb: Skb) -> Result<Answer, Reason> {
    let packet = Packet::<A>::parse(skb)?;
    if skb.note().is_translated() {
        return Err(Reason::SeenBefore);
    }
    let flow = maps::scratch(0).ok_or(Reason::FlowsFull)?;
    if !flow::follow(&packet, Hook::INGRESS, false, flow) {
        open(&packet, flow)?;
    }
    match flow.kind {
        Kind::DNAT => {
            maps::count(Event::Forwarded);
            packet.rewrite(flow.client_between(), flow.backend)?;
            skb.set_note(true);
            Ok(PASS)
        }
        Kind::UNSNAT => {
            packet.rewrite(packet.src, flow.client_between())?;
            skb.set_note(false);
            Ok(PASS)
        }
        _ => anchor::give_back(&packet, flow),
    }
}

/// Opens the flow that starts with this packet.
#[inline(always)]
fn open<A: Net>(packet: &Packet<A>, flow: &mut Flow<A>) -> Result<(), Reason> {
    if !packet.opens() {
        return Err(Reason::NoFlow);
    }
    let frontend = match lookup::frontend(packet.dst, packet.proto) {
        Ok(frontend) => frontend,
        Err(Reason::NotOurs) => return open_direct(packet, flow),
        Err(reason) => return Err(reason),
    };
    let backend = lookup::backend(&frontend)?;
    // A pod that is served by itself would answer itself directly, past every hook: it must see the node instead.
    let source = if backend.addr == packet.src.addr { node_addr()? } else { packet.src.addr };
    let backend = SockAddr::new(backend.addr, backend.port);
    flow::open(packet, backend, Source { addr: source, port_taken: false }, 0, flow)
}

/// A pod dials a backend directly, from the port with which it also reaches it through a service. The two would be one
/// conversation to the backend, so the direct one gets another source port.
#[inline(always)]
fn open_direct<A: Net>(packet: &Packet<A>, flow: &mut Flow<A>) -> Result<(), Reason> {
    let from_pod = maps::device(packet.skb.ifindex()).is_some_and(|device| device.is_pod());
    if !from_pod || !flow::shadows(packet, flow) {
        return Err(Reason::NotOurs);
    }
    flow::open(packet, packet.dst, Source { addr: packet.src.addr, port_taken: true }, 0, flow)
}

#[inline(always)]
fn node_addr<A: Net>() -> Result<A, Reason> {
    let node = maps::node().ok_or(Reason::NoNodeAddress)?;
    let addr = A::of_node(&node);
    if addr.is_unspecified() { Err(Reason::NoNodeAddress) } else { Ok(addr) }
}
