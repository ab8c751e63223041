//! Flows of the host's own sockets.
//!
//! The only egress hooks that rewrite destinations are here, because a local socket has no ingress
//! hook. The hook routes the packet again, as if it had arrived, and sends it without returning it
//! to the host's stack.

use aya_ebpf::bindings::BPF_F_INGRESS;
use proxy_common::counter::{Event, Reason};
use proxy_common::device::Node;
use proxy_common::flow::{CachedRoute, Flow, Hook, Term};
use proxy_common::hook::PacketHook;
use proxy_common::policy::Decision;

use crate::maps::{Memory, Scratch};
use crate::net::Net;
use crate::open;
use crate::opening::{Opening, Source, Way};
use crate::outcome::Action;
use crate::packet::Packet;
use crate::redirect::{self, Forward};
use crate::route::{self, NextHop};
use crate::skb::{LinkHeader, PacketMark, Skb};
use crate::{decide, flow, maps, monitor, packet};

/// The interface index of lo, in every network namespace.
pub const LO: u32 = 1;

/// Sends a packet of the host to the backend of its flow. Opens the flow if there is none, with
/// these flags of [`Flow`].
#[inline(always)]
pub fn send<A: Forward>(skb: Skb, flags: u8, mut memory: Memory) -> Result<Action, Reason> {
    let node = maps::node().ok_or(Reason::NoRoute)?;
    if !flow::follow::<A>(skb, Hook::ANCHOR, PacketMark::NONE, memory.lend())? {
        open::<A>(skb, node, flags, memory.lend())?;
    }
    let (scratch, _) = memory.lend().scratch::<A>().ok_or(Reason::FlowsFull)?;
    let kept = if flags == 0 {
        link(skb, scratch, node)
    } else {
        0
    };
    let Scratch {
        packet,
        flow,
        becomes,
        ..
    } = scratch;
    // Where the kernel chooses the next hop again, it chooses by the rewritten source.
    let is_by_source = A::CHOOSES_AGAIN || flow.client.addr.is_loopback();
    let from = if is_by_source {
        &flow.source.addr
    } else {
        &packet.src.addr
    };
    // A lost route may return, and connections survive that, so the packet is dropped, not
    // rejected.
    let next_hop = match kept {
        0 => way(skb, from, node, &flow.backend.addr).map_err(|_| Reason::RouteLost)?,
        ifindex => NextHop::Device(ifindex),
    };
    becomes.set(flow.source, flow.backend, false);
    packet::rewrite::<A>(skb, memory.lend())?;
    maps::count(Event::Forwarded);
    // This hook has replaced the source as well, so no egress hook has to.
    skb.set_packet_mark(PacketMark::DONE);
    let (Scratch { flow, .. }, _) = memory.scratch::<A>().ok_or(Reason::FlowsFull)?;
    match next_hop {
        NextHop::Device(ifindex)
            if flow.starts_on_lo() && skb.is_longer_than(maps::mtu_of(ifindex)) =>
        {
            skb.route_again()?;
            Ok(Action::PASS)
        }
        next_hop => leave(skb, next_hop),
    }
}

/// Finds the link to the flow's pod, and caches it for the flow's packets of this second: see
/// [`anchor::quick`](crate::anchor::quick). Returns the interface index of the pod's device, or 0
/// if there is nothing to cache.
///
/// This packet still goes by the kernel's neighbour, which keeps that entry fresh.
#[inline(never)]
fn link<A: Forward>(skb: Skb, scratch: &mut Scratch<A>, node: &Node) -> u32 {
    let Scratch {
        packet,
        flow,
        route,
        ..
    } = scratch;
    // Read before the routes: a result from before a change must not count for the epoch after it.
    let term = Term::new(maps::about_now_secs(), maps::epoch());
    if flow.has(Flow::<A>::HOST_BACKEND) || flow.cached_route().holds(skb.ifindex(), term) {
        return 0;
    }
    route.ask(flow.source.port, flow.backend.port, 0, false);
    if !redirect::find(
        skb,
        packet.proto,
        route,
        &packet.src.addr,
        &flow.backend.addr,
    ) {
        return 0;
    }
    let exit = route.keep(&flow.backend.addr);
    if exit == node.anchor_ifindex {
        return 0;
    }
    if let Some(entry) = maps::opener(flow, packet.proto) {
        entry.set_cached_route(CachedRoute::new(skb.ifindex(), exit, term));
    }
    exit
}

/// Looks up the next hop of the host's packet to `dst`.
#[inline(always)]
fn way<A: Net>(skb: Skb, src: &A, node: &Node, dst: &A) -> Result<NextHop, Reason> {
    not_back(route::way(skb, node, src, dst)?, node)
}

/// Rejects a route back into the anchor: a backend with a Service's address is unreachable.
#[inline(always)]
fn not_back(next_hop: NextHop, node: &Node) -> Result<NextHop, Reason> {
    match next_hop {
        NextHop::Device(ifindex) if ifindex == node.anchor_ifindex => Err(Reason::NoRoute),
        next_hop => Ok(next_hop),
    }
}

/// Sends a packet to its next hop, without returning it to the host's stack.
#[inline(always)]
pub fn leave(skb: Skb, next_hop: NextHop) -> Result<Action, Reason> {
    match next_hop {
        NextHop::Host => {
            skb.set_destination_mac(&[0; 6])?;
            Ok(skb.redirect(LO, u64::from(BPF_F_INGRESS)))
        }
        NextHop::Device(ifindex) => Ok(skb.redirect_neigh(ifindex)),
    }
}

#[inline(always)]
fn open<A: Net>(skb: Skb, node: &Node, flags: u8, mut memory: Memory) -> Result<(), Reason> {
    let (scratch, _) = memory.lend().scratch::<A>().ok_or(Reason::FlowsFull)?;
    if !scratch.packet.opens() {
        return Err(Reason::NoFlow);
    }
    let chosen = choose::<A>(skb, node, flags, memory.lend());
    let opened = chosen.and_then(|()| open::flow::<A>(memory.lend()));
    let (scratch, mut decision) = memory.scratch::<A>().ok_or(Reason::FlowsFull)?;
    let on_lo = flags & Flow::<A>::HOST_FRONTEND != 0;
    let hook = if on_lo {
        PacketHook::Lo
    } else {
        PacketHook::Anchor
    };
    match opened {
        Ok(()) => {
            monitor::decided(skb, hook, &scratch.packet, &scratch.flow, decision.lend());
            decide::remember(scratch, decision);
        }
        Err(reason) if on_lo => decide::refused::<A>(reason.verdict(), decision),
        Err(reason) => decide::refused::<A>(reason.verdict_at_anchor(), decision),
    }
    opened
}

/// Chooses the backend, and writes the decision to `scratch.opening`.
#[inline(never)]
fn choose<A: Net>(skb: Skb, node: &Node, flags: u8, mut memory: Memory) -> Result<(), Reason> {
    if node.has(Node::DRAINING) {
        return Err(Reason::Draining);
    }
    let generation = maps::generation();
    let (scratch, _) = memory.lend().scratch::<A>().ok_or(Reason::FlowsFull)?;
    let origin = decide::origin_inside(skb, &scratch.packet, node);
    // An ingress hook should have handled a packet that came in through a device. Behind the
    // anchor, no policy of the node would see it.
    let objection = |_: &Packet<A>| skb.came_in().then_some(Reason::Unhooked);
    let (scratch, decision) = decide::run(memory, origin, node, objection)?;
    let Scratch {
        packet, opening, ..
    } = scratch;
    // In map memory: the stack has no room for it.
    let by_route = &mut opening.source.addr;
    // The kernel does not forward packets from a loopback address.
    *by_route = if packet.src.addr.is_loopback() {
        *A::at_node(node)
    } else {
        packet.src.addr
    };
    let next_hop = not_back(
        route::way_and_source(skb, node, by_route, &decision.backend.addr)?,
        node,
    )?;
    let mut flags = Flow::<A>::HOST | flags;
    if decision.has(Decision::<A>::COUNTED) {
        flags |= Flow::<A>::COUNTED;
    }
    // On the wire such a flow has a tuple of the host, which neither a socket nor conntrack
    // reserves. A direct connection of the host, or of a masqueraded pod, may get the same port. So
    // the flow needs a port from kpx's range.
    let addr = match next_hop {
        NextHop::Host => {
            flags |= Flow::<A>::HOST_BACKEND;
            // A backend may trust packets from a loopback address.
            if packet.src.addr.is_loopback() {
                A::of_node(node)
            } else {
                packet.src.addr
            }
        }
        NextHop::Device(ifindex) => source_addr(packet, node, decision, (ifindex, by_route)),
    };
    // A loopback address must not leave the host, and the node may have no other address yet.
    if addr.is_unspecified() {
        return Err(Reason::NoRoute);
    }
    let source = Source {
        addr,
        port_taken: true,
        generation,
    };
    *opening = Opening {
        service: decision.service,
        backend: decision.backend_at(),
        source,
        flags,
        device: 0,
        way: Way::STACK,
    };
    Ok(())
}

/// Returns the source address with which the host reaches the decision's backend through a device.
///
/// The kernel selected the packet's source for the route to the Service, not to the backend. Behind
/// a device with its own addresses (another uplink, an overlay), replies are certain to return only
/// to the source of the route to the backend.
#[inline(always)]
fn source_addr<A: Net>(
    packet: &Packet<A>,
    node: &Node,
    decision: &Decision<A>,
    (ifindex, by_route): (u32, &A),
) -> A {
    let chosen = packet.src.addr;
    let own = if chosen.is_loopback() {
        None
    } else {
        maps::own_addr(&chosen)
    };
    let (chosen, on_device) = match own {
        None if chosen.is_loopback() => (A::of_node(node), false),
        // Not an address of the host: its sockets may send from any address (`IP_TRANSPARENT`).
        None if !decision.has(Decision::<A>::MASQUERADE) => return chosen,
        None => (chosen, false),
        // For a Service's address on this host, the kernel selects that address as the source. The
        // address may move to another node at any time.
        Some(_) if chosen == packet.dst.addr && !A::of_node(node).is_unspecified() => {
            (A::of_node(node), false)
        }
        Some(own) => (chosen, own.ifindex == ifindex),
    };
    if on_device || decision.backend.is_local() && !decision.has(Decision::<A>::MASQUERADE) {
        return chosen;
    }
    route::source_at(ifindex, by_route).unwrap_or(chosen)
}

/// Delivers a reply of the flow in `scratch.flow` to a socket of the host, from any hook. The reply
/// gets the frontend's address as its source, and enters through the device by which the host's
/// packets to the frontend leave. So rp_filter accepts it, and conntrack matches it with a packet
/// that it saw leave.
#[inline(always)]
pub fn give_back<A: Net>(skb: Skb, mut memory: Memory) -> Result<Action, Reason> {
    let (scratch, _) = memory.lend().scratch::<A>().ok_or(Reason::NotOurs)?;
    let Scratch { flow, becomes, .. } = scratch;
    becomes.set(flow.frontend, flow.client, false);
    packet::rewrite::<A>(skb, memory.lend())?;
    let (Scratch { flow, .. }, _) = memory.scratch::<A>().ok_or(Reason::NotOurs)?;
    // The kernel delivers the replies of another program's connection.
    if flow.has(Flow::<A>::FOREIGN_NAT) {
        return Ok(Action::PASS);
    }
    maps::count(Event::Returned);
    // Read from the packet again: an argument would take stack space.
    inject::<A>(skb, skb.found().link(), flow.starts_on_lo())
}

/// Injects a packet from a frontend to a socket of the host, into lo or the anchor, where the
/// flow's packets start.
#[inline(always)]
pub fn inject<A: Net>(skb: Skb, link: LinkHeader, starts_on_lo: bool) -> Result<Action, Reason> {
    let (ifindex, mac) = if starts_on_lo {
        (LO, &[0; 6])
    } else {
        let node = maps::node().ok_or(Reason::NoRoute)?;
        (node.anchor_ifindex, &node.anchor_mac)
    };
    // With any other MAC address the kernel would drop the packet as another host's.
    match link {
        LinkHeader::Ethernet => skb.set_destination_mac(mac)?,
        LinkHeader::None => skb.add_ethernet(mac, A::ETHERTYPE)?,
    }
    Ok(skb.inject(ifindex))
}
