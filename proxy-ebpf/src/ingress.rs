//! The ingress of devices: destinations are rewritten.

use proxy_common::counter::{Event, Reason};
use proxy_common::device::{Device, Node, pod_net};
use proxy_common::flow::{EntryKind, Flow, Hook};
use proxy_common::frontend::FrontendKey;
use proxy_common::hook::PacketHook;
use proxy_common::policy::Decision;

use crate::decide;
use crate::maps::{Memory, Scratch};
use crate::net::{At, Net, NextHop, is_spoofed, route_and_source};
use crate::open;
use crate::opening::{Opening, Source, Way};
use crate::outcome::Outcome;
use crate::packet::Packet;
use crate::redirect::{self, Forward};
use crate::skb::{ETH_LEN, LinkHeader, PacketMark, Skb};
use crate::{Action, flow, foreign_nat, host, maps, monitor};

#[inline(always)]
pub fn run<A: Forward>(skb: Skb, link: LinkHeader, mut memory: Memory) -> Result<Action, Reason> {
    let is_known = look_up::<A>(skb, link, memory.lend())?;
    // In bits: no branch on what is known follows the calls below.
    if !is_first_of_connection(skb, is_known)
        && redirect::is_on()
        && let Some(delivered) = redirect::run::<A>(skb, is_known, memory.lend())
    {
        return delivered;
    }
    if !is_known {
        let opened = open::<A>(skb, memory.lend());
        if let Err(reason) = opened {
            return if opens_connection(skb) {
                pass_on::<A>(skb, reason, memory)
            } else {
                Err(reason)
            };
        }
        if redirect::opens_flows()
            && let Some(delivered) = redirect::first::<A>(skb, memory.lend())
        {
            return delivered;
        }
    }
    translate::<A>(skb, memory).result()
}

/// Translates a packet of the flow in `scratch.flow`. A function of its own: what opens a flow needs
/// the room on the stack.
#[inline(never)]
fn translate<A: Net>(skb: Skb, memory: Memory) -> Outcome {
    Outcome::new(try_translate::<A>(skb, memory))
}

#[inline(always)]
fn try_translate<A: Net>(skb: Skb, mut memory: Memory) -> Result<Action, Reason> {
    let (scratch, _) = memory.lend().scratch::<A>().ok_or(Reason::FlowsFull)?;
    let Scratch {
        packet,
        flow,
        becomes,
        ..
    } = scratch;
    match flow.kind.known() {
        Some(EntryKind::Dnat) => {
            let port_shows =
                !packet.is_fragment() && foreign_nat::is_known_by(packet.proto, packet.signals());
            let mark = PacketMark::forward(flow.is_snat_on_devices(), port_shows);
            becomes.set(flow.client_between(), flow.backend, flow.is_far());
            A::rewrite_packet(skb, memory)?;
            maps::count(Event::Forwarded);
            skb.set_packet_mark(mark);
            Ok(Action::PASS)
        }
        Some(EntryKind::Unsnat) => {
            becomes.set(packet.src, flow.client_between(), flow.is_far());
            A::rewrite_packet(skb, memory)?;
            skb.set_packet_mark(PacketMark::BACK);
            Ok(Action::PASS)
        }
        Some(EntryKind::Undnat | EntryKind::Snat) | None => host::give_back::<A>(skb, memory),
    }
}

/// Returns true if the packet opens a connection that no flow knows.
#[inline(always)]
fn is_first_of_connection(skb: Skb, is_known: bool) -> bool {
    opens_connection(skb) & !is_known
}

/// Returns true if the packet opens a connection. One that dials a Service is no answer of a
/// backend, and its sender is judged where its frontend is found.
#[inline(always)]
fn opens_connection(skb: Skb) -> bool {
    skb.found().signals.opens_connection()
}

/// Looks after a connection's opener that has opened no flow here, for this reason: a backend may
/// send it where its answers go.
#[inline(always)]
fn pass_on<A: Forward>(skb: Skb, reason: Reason, memory: Memory) -> Result<Action, Reason> {
    if matches!(reason, Reason::NotOurs | Reason::Draining)
        && redirect::is_on()
        && let Some(delivered) = redirect::run::<A>(skb, false, memory)
    {
        return delivered;
    }
    Err(reason)
}

/// Returns true if the frame is for a macvlan above this device, whose hook meets it next, or for
/// another machine. A bridge's port receives what is for the bridge's own link address, and there a
/// frame does not tell.
#[inline(always)]
pub fn is_for_macvlan(skb: Skb) -> bool {
    skb.is_anothers()
        && maps::node().is_some_and(|node| node.has(Node::MACVLANS))
        && maps::place_of(skb.ifindex()).1 == 0
}

/// Returns true if the frame has two tags that name no VLAN, while conntrack may believe an end
/// that no hook meets. The kernel takes both tags off, the second one behind this hook.
#[inline(always)]
pub fn is_hidden_by_tags(skb: Skb) -> bool {
    const TAGS: [u32; 2] = [0x8100_u16.to_be() as u32, 0x88a8_u16.to_be() as u32];
    const IDENTIFIER: u16 = 0x0fff;
    skb.is_tagged()
        && !skb.is_in_vlan()
        && TAGS.contains(&skb.ethertype())
        && redirect::is_on()
        && skb
            .load::<u16>(ETH_LEN)
            .is_ok_and(|tag| u16::from_be(tag) & IDENTIFIER == 0)
}

/// Reads the packet, and finds its flow.
#[inline(always)]
fn look_up<A: Net>(skb: Skb, link: LinkHeader, mut memory: Memory) -> Result<bool, Reason> {
    let (scratch, _) = memory.lend().scratch::<A>().ok_or(Reason::FlowsFull)?;
    if let Err(reason) = scratch.packet.parse(skb, link, Hook::INGRESS) {
        return Err(if A::is_hidden_and_spoofed(skb, link) {
            Reason::Spoofed
        } else {
            reason
        });
    }
    if skb.is_seen_before() {
        return Err(Reason::SeenBefore);
    }
    let is_known = flow::follow::<A>(skb, Hook::INGRESS, PacketMark::NONE, memory.lend())?;
    let (scratch, _) = memory.scratch::<A>().ok_or(Reason::FlowsFull)?;
    if !is_known && speaks_for_node(&scratch.packet) {
        return Err(Reason::Spoofed);
    }
    Ok(is_known)
}

/// Returns true if a packet that comes in has an address of the node's own as source, and the tuple
/// of a backend's answers. The kernel drops such a packet where it routes IPv4 without
/// `accept_local`. It forwards IPv6, and a bridge routes nothing. The egress hook cannot judge it:
/// there the source may be one that netfilter has given back.
#[inline(never)]
fn speaks_for_node<A: Net>(packet: &Packet<A>) -> bool {
    maps::own_addr(&packet.src.addr).is_some() && maps::is_undnat(&packet.flow_key(Hook::EGRESS))
}

/// Opens the flow that starts with this packet.
#[inline(always)]
fn open<A: Forward>(skb: Skb, mut memory: Memory) -> Result<(), Reason> {
    let (scratch, _) = memory.lend().scratch::<A>().ok_or(Reason::FlowsFull)?;
    if !scratch.packet.opens() {
        return Err(Reason::NoFlow);
    }
    let chosen = choose::<A>(skb, memory.lend());
    if chosen.is_ok() && redirect::opens_flows() {
        redirect::find_way::<A>(skb, memory.lend());
    }
    let opened = chosen.and_then(|()| open::flow::<A>(memory.lend()));
    let (scratch, mut decision) = memory.scratch::<A>().ok_or(Reason::FlowsFull)?;
    match opened {
        Ok(()) => {
            monitor::decided(
                skb,
                PacketHook::Ingress,
                &scratch.packet,
                &scratch.flow,
                decision.lend(),
            );
            decide::remember(scratch, decision);
        }
        Err(reason) => decide::refused::<A>(reason.verdict(), decision),
    }
    opened
}

/// Decides who serves the packet, into `scratch.opening`.
#[inline(never)]
fn choose<A: Net>(skb: Skb, mut memory: Memory) -> Result<(), Reason> {
    let node = maps::node().ok_or(Reason::NoNodeAddress)?;
    if node.has(Node::HOST) {
        return Err(Reason::NotOurs);
    }
    let generation = maps::generation();
    let (device, _) = maps::place_of(skb.ifindex());
    let (scratch, _) = memory.lend().scratch::<A>().ok_or(Reason::FlowsFull)?;
    let origin = decide::origin(device, &scratch.packet, node);
    // In bits: no branch on the flags follows the calls below.
    let remote = (((device / Device::POD) & 1) ^ 1) as u8 * Flow::<A>::REMOTE;
    let objection = |packet: &Packet<A>| {
        if node.has(Node::DRAINING) {
            return Some(Reason::Draining);
        }
        if foreign_nat::is_answer(packet) {
            return Some(Reason::NotOurs);
        }
        is_spoofed(skb, At::Here, &packet.src.addr, &packet.dst.addr).then_some(Reason::Spoofed)
    };
    let (scratch, decision) = match decide::run(memory.lend(), origin, node, objection) {
        Ok(decided) => decided,
        Err(Reason::NotOurs) => return open_direct::<A>(skb, memory),
        // A network of the node may lie within a range of ClusterIPs, as one of Docker's does by
        // default.
        Err(Reason::Unallocated | Reason::UnknownPort) if is_between_neighbours(skb) => {
            return Err(Reason::NotOurs);
        }
        Err(reason) => return Err(reason),
    };
    if origin.is_external() {
        note_pod_outside(scratch.packet.src.addr, node);
    }
    let Scratch {
        packet, opening, ..
    } = scratch;
    let addr = source_addr(skb, packet, node, decision, &mut opening.source.addr)?;
    let source = Source {
        addr,
        port_taken: maps::again(&packet.port_taken),
        generation,
    };
    let mut flags = if decision.has(Decision::<A>::COUNTED) {
        Flow::<A>::COUNTED
    } else {
        0
    };
    flags |= remote;
    *opening = Opening {
        service: decision.service,
        backend: decision.backend_at(),
        source,
        flags,
        device,
        way: Way::STACK,
    };
    Ok(())
}

/// Returns true if a frame goes from one port of a bridge to another, past this host. Open vSwitch
/// has no address by which to tell.
#[inline(never)]
fn is_between_neighbours(skb: Skb) -> bool {
    let (flags, bridge) = maps::place_of(skb.ifindex());
    let is_for_bridge = || {
        skb.peek::<[u8; 6]>(0)
            .is_none_or(|mac| maps::mac_of(skb.ifindex()) == Some(mac))
    };
    bridge != 0 && flags & Device::LOOSE == 0 && !is_for_bridge()
}

/// Counts a client that this node's podCIDRs call a pod, where detection says otherwise: the
/// operator must hear of it.
#[inline(always)]
fn note_pod_outside<A: Net>(client: A, node: &Node) {
    // kube-proxy, too, tells no clients apart if it is given no way to.
    let tells = !node.has(Node::COMPAT) || A::is_detected_by(node);
    if tells && maps::pod_net(client) & pod_net::NODE_CIDR != 0 {
        maps::count(Event::PodOutside);
    }
}

/// A client dials a backend directly, from the port with which it also reaches it through a
/// service. The client may be another node, which masquerades many, or that another proxy serves
/// while this one drains. The two would be one conversation to the backend, so the direct one gets
/// another source port.
#[inline(always)]
fn open_direct<A: Net>(skb: Skb, memory: Memory) -> Result<(), Reason> {
    let (scratch, _) = memory.scratch::<A>().ok_or(Reason::FlowsFull)?;
    let packet = &scratch.packet;
    let (flags, _) = maps::place_of(skb.ifindex());
    let from_pod = flags & Device::POD != 0;
    // Above other devices of ours, a packet that a hook has rewritten may have lost its mark, and
    // looks like a direct one.
    if flags & (Device::POD | Device::EDGE) == 0
        || !open::collides(packet, from_pod, &mut scratch.flow)
    {
        return Err(Reason::NotOurs);
    }
    if is_spoofed(skb, At::Here, &packet.src.addr, &packet.dst.addr) {
        // A packet of a pod's Service comes back by an uplink if a firewall elsewhere looks at it.
        return Err(if from_pod {
            Reason::Spoofed
        } else {
            Reason::NotOurs
        });
    }
    let source = Source {
        addr: packet.src.addr,
        port_taken: true,
        generation: maps::generation(),
    };
    let service = FrontendKey::address(A::UNSPECIFIED);
    let flags = if from_pod { 0 } else { Flow::<A>::REMOTE };
    scratch.opening = Opening {
        service,
        backend: packet.dst,
        source,
        flags,
        device: 0,
        way: Way::STACK,
    };
    Ok(())
}

/// The address that the backend shall see. `by_route` is room in map memory: the stack has none.
#[inline(always)]
fn source_addr<A: Net>(
    skb: Skb,
    packet: &Packet<A>,
    node: &Node,
    decision: &Decision<A>,
    by_route: &mut A,
) -> Result<A, Reason> {
    let client = packet.src.addr;
    let backend = decision.backend.addr;
    // A pod that is served by itself would answer itself directly, past every hook: it must see the
    // node instead.
    let masquerade = backend == client || decision.has(Decision::<A>::MASQUERADE);
    // A packet to a socket of the host leaves through no device, and kube-proxy does not masquerade
    // it either.
    if !masquerade || maps::own_addr(&backend).is_some() {
        return Ok(client);
    }
    *by_route = client;
    match route_and_source(skb, skb.ifindex(), by_route, &backend) {
        Ok(NextHop::Device(ifindex)) => {
            maps::address_at(ifindex, by_route).map_or_else(|| node_addr(node), Ok)
        }
        _ => node_addr(node),
    }
}

#[inline(always)]
fn node_addr<A: Net>(node: &Node) -> Result<A, Reason> {
    let addr = A::of_node(node);
    if addr.is_unspecified() {
        Err(Reason::NoNodeAddress)
    } else {
        Ok(addr)
    }
}
