//! The ingress of devices, where kpx rewrites destinations.

use proxy_common::counter::{Event, Reason, Verdict};
use proxy_common::device::{Device, Node, pod_net};
use proxy_common::flow::{EntryKind, Flow, Hook};
use proxy_common::frontend::{FrontendKey, Set};
use proxy_common::hook::PacketHook;
use proxy_common::policy::{Decision, Origin};

use crate::decide;
use crate::maps::{Memory, Scratch};
use crate::net::Net;
use crate::open;
use crate::opening::{Opening, Source, Way};
use crate::outcome::{Action, Outcome};
use crate::packet::{Packet, Reading};
use crate::redirect::{self, Forward};
use crate::route::{NextHop, route_and_source, source_at};
use crate::setting::HANDS_OVER;
use crate::skb::{ETH_LEN, LinkHeader, PacketMark, Skb};
use crate::spoof::{At, is_spoofed};
use crate::{fast_path, flow, foreign_nat, handover, host, maps, monitor, packet};

#[inline(always)]
pub fn run<A: Forward>(skb: Skb, link: LinkHeader, mut memory: Memory) -> Result<Action, Reason> {
    let is_known = look_up::<A>(skb, link, memory.lend())?;
    // In bits, so that `if !is_known` below is the only branch on that value: see "Do not" in the
    // README.
    if !is_first_of_connection(skb, is_known)
        && fast_path::is_on()
        && let Some(delivered) = redirect::run::<A>(skb, is_known, memory.lend())
    {
        return delivered;
    }
    if !is_known {
        match open::<A>(skb, memory.lend()) {
            Ok(None) => {}
            Ok(Some(sent)) => return Ok(sent),
            Err(reason) if opens_connection(skb) => return pass_on::<A>(skb, reason, memory),
            Err(reason) => return Err(reason),
        }
        if fast_path::opens_flows()
            && let Some(delivered) = redirect::first::<A>(skb, memory.lend())
        {
            return delivered;
        }
    }
    translate::<A>(skb, memory).result()
}

/// Translates a packet of the flow in `scratch.flow`. A separate function, because opening a flow
/// needs the stack.
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
            packet::rewrite::<A>(skb, memory)?;
            maps::count(Event::Forwarded);
            skb.set_packet_mark(mark);
            Ok(Action::PASS)
        }
        Some(EntryKind::Unsnat) => {
            becomes.set(packet.src, flow.client_between(), flow.is_far());
            packet::rewrite::<A>(skb, memory)?;
            skb.set_packet_mark(PacketMark::BACK);
            Ok(Action::PASS)
        }
        Some(EntryKind::Undnat | EntryKind::Snat) | None => host::give_back::<A>(skb, memory),
    }
}

/// Returns true if the packet opens a connection and has no flow.
#[inline(always)]
fn is_first_of_connection(skb: Skb, is_known: bool) -> bool {
    opens_connection(skb) & !is_known
}

/// Returns true for a SYN or INIT. A SYN to a Service is never a backend's reply; its source is
/// validated after the frontend look-up.
#[inline(always)]
fn opens_connection(skb: Skb) -> bool {
    skb.found().signals.opens_connection()
}

/// Handles a SYN or INIT that has opened no flow, for this reason: a backend may send it with the
/// tuple of a reply.
#[inline(always)]
fn pass_on<A: Forward>(skb: Skb, reason: Reason, memory: Memory) -> Result<Action, Reason> {
    if matches!(reason, Reason::NotOurs | Reason::Draining)
        && fast_path::is_on()
        && let Some(delivered) = redirect::run::<A>(skb, false, memory)
    {
        return delivered;
    }
    Err(reason)
}

/// Returns true if the frame is for a macvlan on this device, where its own hook handles it, or for
/// another machine. Returns false on a bridge's port, which also receives frames for the bridge's
/// own MAC address.
#[inline(always)]
pub fn is_for_macvlan(skb: Skb) -> bool {
    skb.is_anothers()
        && maps::node().is_some_and(|node| node.has(Node::MACVLANS))
        && maps::place_of(skb.ifindex()).1 == 0
}

/// Returns true if the frame has two tags with identifier 0, while conntrack entries may be
/// liberal, or a tunnel device may be up. The kernel removes both tags, the second behind this hook,
/// so conntrack could accept a spoofed FIN or RST that no hook has checked, and the tunnel device a
/// spoofed outer header.
#[inline(always)]
pub fn is_hidden_by_tags(skb: Skb) -> bool {
    const TAGS: [u32; 2] = [0x8100_u16.to_be() as u32, 0x88a8_u16.to_be() as u32];
    const IDENTIFIER: u16 = 0x0fff;
    skb.is_tagged()
        && !skb.is_in_vlan()
        && TAGS.contains(&skb.ethertype())
        && (HANDS_OVER.get() != 0 || fast_path::is_on())
        && skb
            .load::<u16>(ETH_LEN)
            .is_ok_and(|tag| u16::from_be(tag) & IDENTIFIER == 0)
}

/// Reads the packet, and finds its flow.
#[inline(always)]
fn look_up<A: Net>(skb: Skb, link: LinkHeader, mut memory: Memory) -> Result<bool, Reason> {
    if link == LinkHeader::None {
        handover::none_arrives::<A>(memory.lend());
    }
    let parsed = packet::parse::<A>(skb, Hook::INGRESS, Reading::behind(link), memory.lend());
    if let Err(reason) = parsed {
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
    if !is_known && has_node_source(&scratch.packet) {
        return Err(Reason::Spoofed);
    }
    Ok(is_known)
}

/// Returns true if an incoming packet has a node address as its source, and the tuple of a
/// backend's replies. The kernel drops such IPv4 packets when it routes them without
/// `accept_local`. It forwards IPv6, and a bridge does not route. The egress hook cannot validate
/// such a source, because netfilter's reverse NAT may have set it.
#[inline(never)]
fn has_node_source<A: Net>(packet: &Packet<A>) -> bool {
    maps::own_addr(&packet.src.addr).is_some() && maps::is_undnat(&packet.flow_key(Hook::EGRESS))
}

/// Opens the flow that starts with this packet, or hands the packet over to the node of its
/// backend.
#[inline(always)]
fn open<A: Forward>(skb: Skb, mut memory: Memory) -> Result<Option<Action>, Reason> {
    let (scratch, _) = memory.lend().scratch::<A>().ok_or(Reason::FlowsFull)?;
    if HANDS_OVER.get() == 0 && !scratch.packet.opens() {
        return Err(Reason::NoFlow);
    }
    let chosen = choose::<A>(skb, memory.lend());
    if HANDS_OVER.get() != 0 {
        if let Some(sent) = hand_over::<A>(skb, chosen, memory.lend()) {
            return sent.map(Some);
        }
        let (scratch, _) = memory.lend().scratch::<A>().ok_or(Reason::FlowsFull)?;
        if !scratch.packet.opens_again() {
            return Err(Reason::NoFlow);
        }
    }
    if chosen.is_ok() && fast_path::opens_flows() {
        redirect::find_route::<A>(skb, memory.lend());
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
    opened.map(|()| None)
}

/// Hands a packet over to the node of its backend, or refuses a packet that another node has handed
/// over. Returns `None` for all other packets.
#[inline(always)]
fn hand_over<A: Net>(
    skb: Skb,
    chosen: Result<(), Reason>,
    mut memory: Memory,
) -> Option<Result<Action, Reason>> {
    let (scratch, decision) = memory.lend().scratch::<A>()?;
    if maps::again(&scratch.handed_over) {
        let is_here = || {
            decision
                .get::<A>()
                .is_some_and(|decision| decision.set == Set::DIRECT && decision.backend.is_local())
        };
        let is_refused = match chosen {
            Ok(()) => !is_here() || !scratch.packet.opens_again(),
            Err(reason) => reason.verdict() == Verdict::Pass,
        };
        return is_refused.then_some(Err(Reason::HandoverRefused));
    }
    if chosen.is_err() {
        return None;
    }
    let sent = handover::send::<A>(skb, memory);
    (!sent.is_for_slow_path()).then(|| sent.result())
}

/// Chooses the backend, and writes the decision to `scratch.opening`.
#[inline(never)]
fn choose<A: Net>(skb: Skb, mut memory: Memory) -> Result<(), Reason> {
    let node = maps::node().ok_or(Reason::NoNodeAddress)?;
    if node.has(Node::HOST) {
        return Err(Reason::NotOurs);
    }
    let generation = maps::generation();
    let (device, _) = maps::place_of(skb.ifindex());
    let (scratch, _) = memory.lend().scratch::<A>().ok_or(Reason::FlowsFull)?;
    let mut origin = decide::origin(device, &scratch.packet, node);
    if HANDS_OVER.get() != 0 && maps::again(&scratch.handed_over) {
        origin = Origin::HANDED_OVER;
    }
    // In bits, to avoid a branch on the flags: see "Do not" in the README.
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
        // A network of the node may lie within a ClusterIP range, as a default network of Docker
        // does.
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

/// Returns true if a frame goes from one port of a bridge to another, past this host. Returns false
/// for Open vSwitch, where no MAC address identifies frames for this host.
#[inline(never)]
fn is_between_neighbours(skb: Skb) -> bool {
    let (flags, bridge) = maps::place_of(skb.ifindex());
    let is_for_bridge = || {
        skb.peek::<[u8; 6]>(0)
            .is_none_or(|mac| maps::mac_of(skb.ifindex()) == Some(mac))
    };
    bridge != 0 && flags & Device::LOOSE == 0 && !is_for_bridge()
}

/// Counts a client in this node's podCIDRs that pod detection treats as outside: a problem that the
/// operator must solve.
#[inline(always)]
fn note_pod_outside<A: Net>(client: A, node: &Node) {
    // Without a detection mode, kube-proxy does not distinguish clients either.
    let tells = !node.has(Node::COMPAT) || A::is_detected_by(node);
    if tells && maps::pod_net(client) & pod_net::NODE_CIDR != 0 {
        maps::count(Event::PodOutside);
    }
}

/// Opens a flow for a client that dials a backend directly, from a port with which it also reaches
/// the backend through a Service. To the backend both would be one connection, so the direct
/// connection gets another source port. Such a client may be another node, which masquerades many
/// clients, or a client that another proxy serves while this node drains.
#[inline(always)]
fn open_direct<A: Net>(skb: Skb, memory: Memory) -> Result<(), Reason> {
    let (scratch, _) = memory.scratch::<A>().ok_or(Reason::FlowsFull)?;
    let packet = &scratch.packet;
    let (flags, _) = maps::place_of(skb.ifindex());
    let from_pod = flags & Device::POD != 0;
    // On a device above other devices with hooks, a rewritten packet may have lost its mark, and
    // then looks like a direct packet.
    if flags & (Device::POD | Device::EDGE) == 0
        || !open::collides(packet, from_pod, &mut scratch.flow)
    {
        return Err(Reason::NotOurs);
    }
    if is_spoofed(skb, At::Here, &packet.src.addr, &packet.dst.addr) {
        // A pod's packet to a Service comes back through an uplink if it passes a firewall
        // elsewhere.
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

/// Returns the source address towards the backend. `by_route` is map memory for the look-up: the
/// stack has no room.
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
    // A pod that is its own backend would answer itself directly, past every hook, so it must see
    // the node's address.
    let masquerade = backend == client || decision.has(Decision::<A>::MASQUERADE);
    // A packet to a socket of the host does not leave through a device, and kube-proxy does not
    // masquerade it either.
    if !masquerade || maps::own_addr(&backend).is_some() {
        return Ok(client);
    }
    *by_route = client;
    match route_and_source(skb, skb.ifindex(), by_route, &backend) {
        Ok(NextHop::Device(ifindex)) => {
            source_at(ifindex, by_route).map_or_else(|| node_addr(node), Ok)
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
