//! What the host's own sockets send to services: the route to them leads here, to the egress of the anchor.
//!
//! The one place where an egress hook rewrites destinations, because a local socket has no ingress hook. The packet is
//! then routed again, as if it had arrived, and sent on its way without coming back to the host's stack.

use aya_ebpf::bindings::BPF_F_INGRESS;
use proxy_common::addr::SockAddr;
use proxy_common::counter::{Event, Reason};
use proxy_common::flow::{Flow, Hook};
use proxy_common::frontend::Backend;

use crate::flow::{self, Source};
use crate::net::{Net, NextHop};
use crate::packet::{Packet, Skb};
use crate::{Answer, lookup, maps};

/// Interface index of lo, in every network namespace.
const LO: u32 = 1;

#[inline(always)]
pub fn run<A: Net>(skb: Skb) -> Result<Answer, Reason> {
    let packet = Packet::<A>::parse(skb)?;
    let flow = maps::scratch(0).ok_or(Reason::FlowsFull)?;
    let next_hop = if flow::follow(&packet, Hook::ANCHOR, false, flow) {
        // A route that is gone may come back, and a connection outlives that.
        A::route(&packet, flow.backend.addr).map_err(|_| Reason::RouteLost)?
    } else {
        open(&packet, flow)?
    };
    maps::count(Event::Forwarded);
    packet.rewrite(flow.source, flow.backend)?;
    skb.set_note(true);
    match next_hop {
        NextHop::Host => {
            packet.skb.set_destination_mac(&[0; 6])?;
            Ok(packet.skb.redirect(LO, u64::from(BPF_F_INGRESS)))
        }
        NextHop::Device(ifindex) => Ok(packet.skb.redirect_neigh(ifindex)),
    }
}

#[inline(always)]
fn open<A: Net>(packet: &Packet<A>, flow: &mut Flow<A>) -> Result<NextHop, Reason> {
    if !packet.opens() {
        return Err(Reason::NoFlow);
    }
    let frontend = lookup::frontend(packet.dst, packet.proto)?;
    let backend = lookup::backend(&frontend)?;
    let next_hop = A::route(packet, backend.addr)?;
    let (addr, flags) = match &next_hop {
        NextHop::Host => (packet.src.addr, Flow::<A>::HOST | Flow::<A>::HOST_BACKEND),
        NextHop::Device(ifindex) => (source_addr(packet.src.addr, &backend, *ifindex), Flow::<A>::HOST),
    };
    // On the wire such a flow is the host's, but neither its sockets nor connection tracking know it by that tuple: a
    // direct connection of the host, or a pod that is masqueraded, may get the same port. So it must be one of ours.
    let port_taken = matches!(next_hop, NextHop::Device(_));
    let backend = SockAddr::new(backend.addr, backend.port);
    flow::open(packet, backend, Source { addr, port_taken }, flags, flow)?;
    // Another CPU may have been first, and have chosen another backend.
    if flow.backend == backend { Ok(next_hop) } else { A::route(packet, flow.backend.addr) }
}

/// The address with which the host reaches `backend` through a device.
///
/// The route to the service chose the source without knowing the backend. Beyond a device with addresses of its own
/// (another uplink, an overlay) only those are sure to be answered through it.
#[inline(always)]
fn source_addr<A: Net>(chosen: A, backend: &Backend<A>, ifindex: u32) -> A {
    let on_device = match maps::addr_ifindex(&chosen) {
        // Not the host's own: a packet forwarded from a device without our hooks.
        None => return chosen,
        Some(carrier) => carrier == ifindex,
    };
    if on_device || backend.is_local() {
        return chosen;
    }
    match maps::device(ifindex).map(|device| A::of_device(&device)) {
        Some(addr) if !addr.is_unspecified() => addr,
        _ => chosen,
    }
}

/// A reply to a socket of the host, wherever it is met: it takes the service's address and goes in where the host's
/// route to that address leads out. So rp_filter finds nothing odd, and conntrack a reply to what it saw leave.
#[inline(always)]
pub fn give_back<A: Net>(packet: &Packet<A>, flow: &Flow<A>) -> Result<Answer, Reason> {
    let node = maps::node().ok_or(Reason::NoRoute)?;
    maps::count(Event::Returned);
    packet.rewrite(flow.frontend, flow.client)?;
    // With a strange MAC address the kernel would take the packet for another host's and drop it.
    packet.skb.set_destination_mac(&node.anchor_mac)?;
    Ok(packet.skb.redirect(node.anchor_ifindex, u64::from(BPF_F_INGRESS)))
}
