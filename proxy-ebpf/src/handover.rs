//! The hand-over of packets of external clients to the node of their backend: the entry step, and the
//! hook of the tunnel devices. See "Handing clients over" in the README.

use proxy_common::addr::Proto;
use proxy_common::counter::{Event, Reason};
use proxy_common::device::{Device, Node, pod_net};
use proxy_common::flow::{AnyKey, Hook};
use proxy_common::frontend::{FrontendKind, Service, Set, SlotKey};
use proxy_common::hook::PacketHook;
use proxy_common::peer::{Peer, PeerKey};
use proxy_common::policy::{Decision, Origin};
use proxy_macros::global_fn;

use crate::maps::{self, DecisionMemory, Memory, Scratch};
use crate::net::Net;
use crate::outcome::{Action, Outcome};
use crate::packet::{Packet, Reading};
use crate::route::{NextHop, route};
use crate::setting::HANDS_OVER;
use crate::skb::{Found, FragmentPart, LinkHeader, Skb};
use crate::spoof::{self, At};
use crate::{decide, foreign_nat, fragment, lookup, packet, select, tcp};

/// Sends the packet of the scratch, with the decision about it, to the node of the backend. Returns
/// [`Outcome::NOT_ESTABLISHED`] if that node does not take clients over.
#[global_fn(kpx_hand_over4, kpx_hand_over6)]
pub fn send<A: Net>(skb: Skb, memory: Memory) -> Outcome {
    match to_node::<A>(skb, memory) {
        Ok(Some(action)) => Outcome::new(Ok(action)),
        Ok(None) => Outcome::NOT_ESTABLISHED,
        Err(reason) => Outcome::new(Err(reason)),
    }
}

#[inline(always)]
fn to_node<A: Net>(skb: Skb, memory: Memory) -> Result<Option<Action>, Reason> {
    let (scratch, decision) = memory.scratch::<A>().ok_or(Reason::FlowsFull)?;
    let Some(decision) = decision.get::<A>() else {
        return Ok(None);
    };
    let tunnel = maps::tunnel(A::IS_IPV4);
    if decision.set != Set::DIRECT || tunnel == 0 || !skb.is_ours() {
        return Ok(None);
    }
    let Some(node) = node_of(scratch, decision)? else {
        return if scratch.packet.opens_again() {
            Ok(None)
        } else {
            Err(Reason::NotHandedOver)
        };
    };
    let found = skb.found();
    if found.marks & Found::FIRST != 0 {
        fragment::remember::<A>(skb, true);
    }
    into_tunnel::<A>(skb, found.link(), &node, tunnel).map(Some)
}

/// Returns the node of the packet's connection, or of the client's backend for a packet that opens a
/// connection. `None` if the backend is here, or its node takes no clients over.
///
/// An open connection stays at its node when the Service's endpoints change: its backend may
/// terminate, and serve the connection until then. The agent removes the rows of nodes that take
/// no clients over any more.
#[inline(always)]
fn node_of<A: Net>(
    scratch: &Scratch<A>,
    decision: &Decision<A>,
) -> Result<Option<PeerKey>, Reason> {
    let packet = &scratch.packet;
    let connection = AnyKey::of(&packet.flow_key(Hook::INGRESS));
    if !packet.opens_again()
        && let Some(node) = maps::handed_over_to(&connection)
    {
        return Ok(Some(node));
    }
    if !is_of_another_node(packet, decision) {
        return Ok(None);
    }
    let index = select::direct_slot(&packet.src, &scratch.service, decision);
    let slot = SlotKey::new(decision.service, Set::NODES, index as u16);
    let node = maps::slot(&slot).ok_or(Reason::StaleSlot)?.addr;
    if node.is_unspecified() {
        return Err(Reason::StaleSlot);
    }
    let node = peer_key::<A>(node.words());
    if packet.proto == Proto::TCP {
        maps::note_handed_over(&connection, &node);
    }
    Ok(Some(node))
}

/// Returns true if the packet goes to a backend whose node takes clients over.
#[inline(always)]
fn is_of_another_node<A: Net>(packet: &Packet<A>, decision: &Decision<A>) -> bool {
    decision.backend.is_tunnelled()
        && (decision.kind != FrontendKind::NODE_PORT || is_of_node_object(&packet.dst.addr))
}

#[inline(always)]
fn into_tunnel<A: Net>(
    skb: Skb,
    link: LinkHeader,
    node: &PeerKey,
    tunnel: u32,
) -> Result<Action, Reason> {
    let keeps_whole = skb.gso_size() == 0 && is_kept_whole::<A>(skb, link);
    skb.set_tunnel(node.addr, A::IS_IPV4, keeps_whole)?;
    maps::count(Event::HandedOver);
    Ok(skb.redirect(tunnel, 0))
}

/// Sends the ICMP error of the scratch to the node that answers the client, if the error is about
/// such an answer. A router may send it to any node.
#[global_fn(kpx_hand_over_error4, kpx_hand_over_error6)]
pub fn send_error<A: Net>(skb: Skb, link: LinkHeader, memory: Memory) -> Outcome {
    Outcome::new(try_send_error::<A>(skb, link, memory))
}

#[inline(always)]
fn try_send_error<A: Net>(
    skb: Skb,
    link: LinkHeader,
    mut memory: Memory,
) -> Result<Action, Reason> {
    const LEFT_ALONE: Reason = Reason::Protocol;
    const PODS: u32 = Device::POD | Device::POD_BRIDGE;
    let node = maps::node().ok_or(LEFT_ALONE)?;
    let tunnel = maps::tunnel(A::IS_IPV4);
    let is_of_pod = maps::place_of(skb.ifindex()).0 & PODS != 0;
    let (scratch, decision) = memory.lend().scratch::<A>().ok_or(LEFT_ALONE)?;
    let decision = decision.get::<A>().ok_or(LEFT_ALONE)?;
    if tunnel == 0
        || is_of_pod
        || node.has(Node::DRAINING | Node::HOST)
        || !skb.is_ours()
        || maps::again(&scratch.handed_over)
    {
        return Err(LEFT_ALONE);
    }
    scratch.error.answers(&mut scratch.packet);
    // The kernel judges the source of an error that it gets.
    let (src, dst) = (scratch.error.src(), scratch.error.dst());
    if foreign_nat::is_answer(&scratch.packet) || spoof::is_spoofed(skb, At::Here, src, dst) {
        return Err(LEFT_ALONE);
    }
    decision.origin = Origin::EXTERNAL;
    decide::find_frontend::<A>(memory.lend()).map_err(|_| LEFT_ALONE)?;
    let (scratch, decision) = memory.scratch::<A>().ok_or(LEFT_ALONE)?;
    let decision = decision.get::<A>().ok_or(LEFT_ALONE)?;
    if decision.set != Set::DIRECT {
        return Err(LEFT_ALONE);
    }
    select::direct(&scratch.packet.src, &scratch.service, decision).map_err(|_| LEFT_ALONE)?;
    match node_of(scratch, decision) {
        Ok(Some(node)) => into_tunnel::<A>(skb, link, &node, tunnel).map_err(|_| LEFT_ALONE),
        Ok(None) | Err(_) => Err(LEFT_ALONE),
    }
}

/// Returns true if the backend's node knows the address as this node's. A node port at another
/// address of this node looks there like an address of any machine.
#[inline(always)]
fn is_of_node_object<A: Net>(addr: &A) -> bool {
    maps::own_addr(addr).is_some_and(|own| own.is_of_node_object())
}

/// Returns true if no router may fragment the packet: with IPv4's DF. The kernel then answers a
/// packet that is too long, and fragments the outer packet of any other. A merged packet is segmented
/// behind the tunnel device, where the kernel drops a segment that is too long without an answer.
#[inline(always)]
fn is_kept_whole<A: Net>(skb: Skb, link: LinkHeader) -> bool {
    const FRAGMENT_OFFSET: u32 = 6;
    const DF: u16 = 0x4000;
    A::IS_IPV4
        && skb
            .load::<u16>(link.len() + FRAGMENT_OFFSET)
            .is_ok_and(|bits| u16::from_be(bits) & DF != 0)
}

/// Takes a packet from a tunnel device: hands the packet to the ingress of the device by which its
/// client is reached, or drops the packet.
#[inline(always)]
pub fn receive<A: Net>(skb: Skb, mut memory: Memory) -> i32 {
    // The parser needs the stack.
    let reading = Reading::behind(LinkHeader::None);
    let parsed = packet::parse::<A>(skb, Hook::INGRESS, reading, memory.lend());
    let outcome = match parsed {
        Ok(()) => take::<A>(skb, memory),
        Err(Reason::Protocol) => take_error::<A>(skb, memory),
        Err(reason) => Outcome::new(Err(reason)),
    };
    match outcome.result() {
        Ok(Action(action)) => action,
        Err(reason) => {
            maps::count(reason);
            Action::DROP.0
        }
    }
}

/// Judges a parsed packet. A separate function, so that its stack is free while the parser runs.
#[inline(never)]
fn take<A: Net>(skb: Skb, memory: Memory) -> Outcome {
    Outcome::new(try_take::<A>(skb, memory))
}

#[inline(always)]
fn try_take<A: Net>(skb: Skb, memory: Memory) -> Result<Action, Reason> {
    let (Scratch { packet, .. }, decision) = memory.scratch::<A>().ok_or(Reason::FlowsFull)?;
    check_frontend(skb, packet, decision)?;
    if skb.found().marks & Found::FIRST != 0 {
        // The uplink's hook may come after the next packet here. It removes the ports again.
        fragment::remember::<A>(skb, true);
    }
    into_uplink(skb, &packet.src.addr, &packet.dst.addr)
}

/// Judges a packet of another protocol: an ICMP error may be about an answer of this node.
#[inline(never)]
fn take_error<A: Net>(skb: Skb, memory: Memory) -> Outcome {
    Outcome::new(try_take_error::<A>(skb, memory))
}

#[inline(always)]
fn try_take_error<A: Net>(skb: Skb, memory: Memory) -> Result<Action, Reason> {
    let (Scratch { packet, error, .. }, decision) =
        memory.scratch::<A>().ok_or(Reason::FlowsFull)?;
    error.read(skb, LinkHeader::None)?;
    error.answers(packet);
    check_frontend(skb, packet, decision)?;
    // The sender has validated the router's address by its own routes.
    let router = *error.src();
    if maps::own_addr(&router).is_some() || maps::pod_net(router) & pod_net::NODE_CIDR != 0 {
        return Err(Reason::Spoofed);
    }
    into_uplink(skb, &packet.src.addr, &packet.dst.addr)
}

/// Refuses a packet that did not come from a node of this cluster, or does not go to a frontend
/// that this node serves for that node.
#[inline(always)]
fn check_frontend<A: Net>(
    skb: Skb,
    packet: &Packet<A>,
    decision: DecisionMemory,
) -> Result<(), Reason> {
    let sender = skb
        .tunnel_source(A::IS_IPV4)
        .and_then(|addr| peer::<A>(addr))
        .ok_or(Reason::HandoverRefused)?;
    let decision = decision.get::<A>().ok_or(Reason::FlowsFull)?;
    if is_for_frontend(packet, sender, decision) {
        Ok(())
    } else {
        Err(Reason::HandoverRefused)
    }
}

/// Returns true if the packet goes to an external frontend of a Service that hands clients over, or
/// to a node port of one at an address of the sender.
#[inline(always)]
fn is_for_frontend<A: Net>(packet: &Packet<A>, sender: Peer, decision: &mut Decision<A>) -> bool {
    let is_external = lookup::find(&packet.dst, packet.proto, decision).is_ok()
        && matches!(
            decision.kind,
            FrontendKind::EXTERNAL_IP | FrontendKind::LOAD_BALANCER
        );
    let is_of_sender = || peer::<A>(packet.dst.addr.words()) == Some(sender);
    let is_frontend =
        is_external || is_of_sender() && lookup::node_port(packet.dst.port, packet.proto, decision);
    is_frontend
        && maps::service(&decision.service).is_some_and(|service| service.has(Service::HANDS_OVER))
}

#[inline(always)]
fn peer<A: Net>(addr: [u32; 4]) -> Option<Peer> {
    maps::peer(&peer_key::<A>(addr))
}

#[inline(always)]
fn peer_key<A: Net>(addr: [u32; 4]) -> PeerKey {
    PeerKey {
        addr,
        family: A::AF.into(),
    }
}

/// Puts a packet into the ingress of the device by which the route to the client leads, which must
/// not lead to a pod. The hook there validates the source, because the kernel cannot see the tunnel.
#[inline(always)]
fn into_uplink<A: Net>(skb: Skb, client: &A, frontend: &A) -> Result<Action, Reason> {
    const NO_UPLINK: u32 = Device::POD | Device::POD_BRIDGE | Device::HEADERLESS;
    let node = maps::node().ok_or(Reason::NoNodeAddress)?;
    let NextHop::Device(ifindex) = route(skb, node.anchor_ifindex, frontend, client)? else {
        return Err(Reason::Spoofed);
    };
    let device = maps::device(ifindex).ok_or(Reason::Spoofed)?;
    if device.flags() & NO_UPLINK != 0 {
        return Err(Reason::Spoofed);
    }
    skb.mark_as_handed_over();
    skb.add_ethernet(&device.mac, A::ETHERTYPE)?;
    Ok(skb.into_ingress(ifindex))
}

/// Lowers the maximum segment size in a SYN-ACK to a client whose packets other nodes may hand over,
/// so that its segments fit with the outer header. An entry's "too big" may not reach the client, and
/// the router may move the connection to another entry at any time. An option that cannot be read
/// stays as it is.
#[inline(never)]
pub fn lower_mss<A: Net>(skb: Skb, memory: Memory) -> Result<(), Reason> {
    let (Scratch { packet, flow, .. }, _) = memory.scratch::<A>().ok_or(Reason::FlowsFull)?;
    if packet.proto != Proto::TCP
        || !packet.signals_again().answers_opener()
        || !flow.is_far()
        || flow.is_snat()
    {
        return Ok(());
    }
    if maps::service(&flow.service).is_some_and(|service| service.has(Service::HANDS_OVER)) {
        // The outer header is of the packet's family, without options.
        tcp::lower_mss(skb, skb.found().l4.into(), A::IP_LEN as u16)
    } else {
        Ok(())
    }
}

/// Notes whether another node has handed over the packet that arrives at a device, and removes the
/// mark, which no other program must see. Returns true if so.
#[inline(always)]
pub fn arrives<A: Net>(skb: Skb, memory: Memory) -> bool {
    if HANDS_OVER.get() == 0 {
        return false;
    }
    // Another network namespace cannot set the mark, unless its device leaves marks alone (netkit).
    let handed_over = skb.take_handed_over() && maps::place_of(skb.ifindex()).0 & Device::POD == 0;
    if let Some((scratch, _)) = memory.scratch::<A>() {
        scratch.handed_over = handed_over;
    }
    handed_over
}

/// Notes that no other node has handed over the packet: the tunnel's hook leaves devices without
/// Ethernet headers alone.
#[inline(always)]
pub fn none_arrives<A: Net>(memory: Memory) {
    if HANDS_OVER.get() != 0
        && let Some((scratch, _)) = memory.scratch::<A>()
    {
        scratch.handed_over = false;
    }
}

/// Returns true if another node has handed over the hook's packet. Nothing of the tunnel passes
/// untranslated: the stack would forward a packet for the sender's node port to the sender again.
#[inline(always)]
pub fn is_from_tunnel<A: Net>(hook: PacketHook, memory: Memory) -> bool {
    HANDS_OVER.get() != 0
        && hook == PacketHook::Ingress
        && memory
            .scratch::<A>()
            .is_some_and(|(scratch, _)| maps::again(&scratch.handed_over))
}

/// Returns true for a packet with an outer header whose source cannot be behind the device where it
/// came in: a pod must not hand packets over with a node's address. A separate function, so that its
/// stack is free again.
#[inline(never)]
pub fn is_spoofed<A: Net>(skb: Skb, link: LinkHeader) -> bool {
    const IPIP: u8 = 4;
    const IPV6: u8 = 41;
    let proto = if A::IS_IPV4 { IPIP } else { IPV6 };
    A::header(skb, link).is_ok_and(|header| {
        header.proto.0 == proto
            // The kernel puts fragments together behind the hook, and needs the first.
            && header.part != FragmentPart::LATER
            && maps::own_addr(&header.dst).is_some()
            && spoof::is_spoofed(skb, At::Here, &header.src, &header.dst)
    })
}
