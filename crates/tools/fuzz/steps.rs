//! Chooses the next step of a session: mostly packets related to existing state.

use std::net::{IpAddr, SocketAddr};

use rand::RngExt;
use testbed::reference::cluster::{Hook, Proto};
use testbed::reference::generate::{self, Dice, one};
use testbed::reference::place::{self, Device, Family, OUTSIDE};
use testbed::test_run::Verdict;

use crate::craft::{self, Between};
use crate::fast::Fast;
use crate::model::wire::{self, SCTP, TCP, UDP};
use crate::model::{
    At, CLASS, DONE, FORWARD, Flow, Got, Leg, MADE_HERE, Model, PORT_SHOWS, Sent, TRANSLATED,
    Table, made_here,
};
use crate::mutate;
use crate::stranger::{self, Pretence};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Packet(Sent),
    /// A stranger sends the packet.
    Stranger(Pretence),
    /// Nothing happens for this number of seconds.
    Age(u32),
    /// Endpoints change, by this seed.
    Endpoints(u64),
    /// Endpoints' weights change, by this seed.
    Weights(u64),
    /// The fast path's settings change.
    Fast(Fast),
}

/// Times after which no flow is just about to expire.
const AGES: [u32; 6] = [2, 25, 45, 100, 1_000, 20_000];

pub(crate) fn next(dice: &mut Dice, model: &Model, last: Option<(&Sent, &Got)>) -> Step {
    if let Some((sent, got)) = last
        && dice.random_bool(0.3)
        && let Some(sent) = onwards(dice, sent, got)
    {
        return Step::Packet(sent);
    }
    match dice.random_range(0..1_000) {
        0..4 => return Step::Age(one(dice, &AGES)),
        4..6 => return Step::Endpoints(dice.random()),
        6..10 => return Step::Fast(Fast::random(dice)),
        10..12 => return Step::Weights(dice.random()),
        _ => {}
    }
    if dice.random_bool(0.2)
        && let Some(sent) = handshake(dice, model)
    {
        return Step::Packet(sent);
    }
    if dice.random_bool(0.2)
        && let Some(sent) = of_bypass(dice, model)
    {
        return Step::Packet(sent);
    }
    if dice.random_bool(0.2)
        && let Some(pretence) = stranger::pretence(dice, model)
    {
        return Step::Stranger(pretence);
    }
    let mut sent = match dice.random_range(0..100) {
        0..35 => first(dice, model),
        35..75 => of_flow(dice, model),
        75..93 => error(dice, model),
        _ => anything(dice),
    };
    mutate::frame(dice, &mut sent.frame);
    Step::Packet(sent)
}

/// Returns the step at the egress hook for a packet that an ingress hook passed or redirected.
fn onwards(dice: &mut Dice, sent: &Sent, got: &Got) -> Option<Sent> {
    let At::Ingress(device) = sent.at else {
        return None;
    };
    if got.verdict == Verdict::Drop || got.mark & TRANSLATED == 0 {
        return None;
    }
    let at = At::Egress(one(dice, &Device::OUTER));
    // Some filters set a class, others clear it.
    let is_rewritten = device.is_filtered() && dice.random_bool(0.5);
    let class = if dice.random_bool(0.5) {
        0
    } else {
        dice.random_range(0..=DONE | CLASS) & !MADE_HERE
    };
    let mark = if is_rewritten && !is_note(class) {
        class
    } else {
        got.mark
    };
    Some(Sent {
        at,
        came_in: true,
        by: Some(device),
        mark,
        segments: sent.segments,
        frame: got.frame.clone(),
    })
}

/// Returns true if a class looks exactly like a hook's note, which the programs cannot distinguish:
/// see docs/limits.md.
pub(crate) fn is_note(class: u32) -> bool {
    [TRANSLATED, TRANSLATED | FORWARD, DONE, PORT_SHOWS].contains(&class)
}

fn first(dice: &mut Dice, model: &Model) -> Sent {
    let packet = generate::packet(dice, model.cluster());
    let at = match packet.hook {
        Hook::Ingress(device) => At::Ingress(device),
        Hook::Anchor => At::Anchor,
        Hook::Lo => At::Lo,
    };
    let mut src = packet.src;
    // Few ports, so that clients return and tuples collide.
    if dice.random_bool(0.7) {
        src.set_port(dice.random_range(40_000..40_008));
    }
    let (proto, opens) = match packet.proto {
        Proto::Tcp => (TCP, 2),
        Proto::Udp => (UDP, 0),
        Proto::Sctp => (SCTP, 1),
    };
    let says = if dice.random_bool(0.9) {
        opens
    } else {
        dice.random()
    };
    let transport = craft::transport(dice, src, packet.dst, proto, says);
    let between = Between::random(dice);
    let frame = craft::frame(dice, src.ip(), packet.dst.ip(), proto, &between, &transport);
    sent(dice, at, None, frame)
}

/// Returns a packet of a flow, at one of its hooks.
fn of_flow(dice: &mut Dice, model: &Model) -> Sent {
    let Some((at, leg, proto, src, dst)) = any_leg(dice, model) else {
        return first(dice, model);
    };
    let says = match proto {
        // SYN, SYN ACK, ACK, FIN ACK, RST, RST ACK
        TCP => one(dice, &[2, 0x12, 0x10, 0x10, 0x18, 0x11, 0x11, 4, 0x14]),
        // INIT, INIT ACK, COOKIE ECHO, COOKIE ACK, DATA, ABORT, SHUTDOWN, SHUTDOWN ACK, SHUTDOWN
        // COMPLETE
        _ => one(dice, &[1, 2, 10, 11, 11, 0, 0, 6, 7, 8, 14]),
    };
    let transport = craft::transport(dice, src, dst, proto, says);
    let between = Between::random(dice);
    let frame = craft::frame(dice, src.ip(), dst.ip(), proto, &between, &transport);
    sent(dice, at, Some(leg), frame)
}

/// Returns the next packet of a handshake, as the kernels of both ends send it; `None` without a
/// half-open connection.
pub(crate) fn handshake(dice: &mut Dice, model: &Model) -> Option<Sent> {
    let (_, flow) = model
        .flows
        .iter()
        .rev()
        .take(4)
        .find(|(_, flow)| flow.proto == TCP && !flow.assured)?;
    let answer = flow.answer;
    let (goal, says, numbers) = match answer {
        None => (Leg::ToClient, 0x12, [1_000, 1_001]),
        Some(answer) => (Leg::ToBackend, 0x10, [1_001, answer + 1]),
    };
    clean(dice, flow, goal, says, numbers)
}

/// Returns a packet of a TCP flow as the kernel of one end sends it, where it enters the node;
/// `None` if that is not a device.
pub(crate) fn clean(
    dice: &mut Dice,
    flow: &Flow,
    goal: Leg,
    says: u8,
    numbers: [u32; 2],
) -> Option<Sent> {
    let legs = flow.legs();
    let ((table, proto, src, dst), _) = legs.into_iter().find(|(_, leg)| *leg == goal)?;
    let at = match table {
        Table::Arriving => At::Ingress(place::route(src.ip())?),
        Table::Starting if flow.on_lo => At::Lo,
        Table::Starting => At::Anchor,
        Table::Leaving if flow.to_host => At::Lo,
        Table::Leaving => At::Egress(place::route(dst.ip())?),
    };
    if matches!(at, At::Ingress(device) | At::Egress(device) if !Device::OUTER.contains(&device)) {
        return None;
    }
    let mut transport = craft::transport(dice, src, dst, proto, says);
    craft::renumber(&mut transport, src.ip(), dst.ip(), numbers);
    let frame = craft::frame(
        dice,
        src.ip(),
        dst.ip(),
        proto,
        &Between::default(),
        &transport,
    );
    let came_in = matches!(at, At::Ingress(_)) || matches!(at, At::Egress(_)) && !flow.to_host;
    let mark = if matches!(at, At::Egress(_)) && flow.changes_address() {
        TRANSLATED
    } else {
        0
    };
    let by = if came_in && matches!(at, At::Egress(_)) {
        place::route(src.ip())
    } else {
        None
    };
    Some(Sent {
        at,
        came_in,
        by,
        mark: mark | made_here(came_in),
        segments: 0,
        frame,
    })
}

/// Returns a packet of a bypass flow, at its sender's device; `None` without a bypass flow.
fn of_bypass(dice: &mut Dice, model: &Model) -> Option<Sent> {
    let newest = model
        .flows
        .values()
        .rev()
        .filter(|flow| flow.is_bypass)
        .take(4)
        .collect::<Vec<_>>();
    let flow = *newest.get(dice.random_range(0..newest.len().max(1)))?;
    let (src, dst) = if dice.random() {
        (flow.client, flow.frontend)
    } else {
        (flow.backend, flow.between())
    };
    // ACK, PSH ACK, SYN, SYN ACK, FIN ACK, RST, RST ACK
    let says = one(
        dice,
        &[0x10, 0x10, 0x18, 0x18, 0x18, 2, 0x12, 0x11, 4, 0x14],
    );
    let transport = craft::transport(dice, src, dst, flow.proto, says);
    let between = if dice.random_bool(0.8) {
        Between::default()
    } else {
        Between::random(dice)
    };
    let frame = craft::frame(dice, src.ip(), dst.ip(), flow.proto, &between, &transport);
    Some(Sent {
        at: At::Ingress(place::route(src.ip())?),
        came_in: true,
        by: None,
        mark: 0,
        segments: 0,
        frame,
    })
}

/// Returns an ICMP error about a packet of a flow in the opposite direction.
fn error(dice: &mut Dice, model: &Model) -> Sent {
    let Some((at, leg, proto, src, dst)) = any_leg(dice, model) else {
        return anything(dice);
    };
    let transport = craft::transport(dice, dst, src, proto, 0x10);
    let between = Between::random(dice);
    let quoted = craft::ip(dice, dst.ip(), src.ip(), proto, &between, &transport);
    let router = OUTSIDE.addr(Family::of(src.ip()), 99);
    let from = if dice.random_bool(0.6) {
        src.ip()
    } else {
        router
    };
    let (icmp, message) = craft::error(dice, from, dst.ip(), &quoted);
    let between = if dice.random_bool(0.9) {
        Between::default()
    } else {
        Between::random(dice)
    };
    let frame = craft::frame(dice, from, dst.ip(), icmp, &between, &message);
    sent(dice, at, Some(leg), frame)
}

/// Returns a place, the translation there, and the tuple of the packets that pass it.
fn any_leg(dice: &mut Dice, model: &Model) -> Option<(At, Leg, u8, SocketAddr, SocketAddr)> {
    let newest = *model.flows.keys().next_back()?;
    let oldest = *model.flows.keys().next()?;
    // Mostly one of the latest flows, so that some flows advance far.
    let from = if dice.random_bool(0.6) {
        newest.saturating_sub(4).max(oldest)
    } else {
        oldest
    };
    let (_, flow) = model
        .flows
        .range(dice.random_range(from..=newest)..)
        .next()?;
    let legs = flow.legs();
    let ((table, proto, src, dst), leg) = legs[dice.random_range(0..legs.len())];
    let device = one(dice, &Device::OUTER);
    let at = match table {
        Table::Arriving => At::Ingress(device),
        // The packet has come in from the backend.
        Table::Leaving if leg == Leg::ToClient && dice.random_bool(0.4) => At::Ingress(device),
        Table::Leaving if flow.to_host || dice.random_bool(0.05) => At::Lo,
        Table::Leaving => At::Egress(device),
        Table::Starting if flow.on_lo => At::Lo,
        Table::Starting => At::Anchor,
    };
    Some((at, leg, proto, src, dst))
}

/// Returns a packet of any protocol, with random bytes, between any two addresses.
fn anything(dice: &mut Dice) -> Sent {
    let family = one(dice, &Family::ALL);
    let mut addr = || -> IpAddr {
        let net = one(
            dice,
            &[
                OUTSIDE,
                testbed::reference::place::PODS,
                testbed::reference::place::CLUSTER_IPS,
            ],
        );
        net.addr(family, dice.random_range(1..20))
    };
    let src = addr();
    let dst = addr();
    let at = match dice.random_range(0..6) {
        0 => At::Anchor,
        1 => At::Lo,
        2 => At::Egress(one(dice, &Device::OUTER)),
        _ => At::Ingress(one(dice, &Device::OUTER)),
    };
    let body = craft::random_bytes(dice, 0, 100);
    let between = Between::random(dice);
    let proto = dice.random();
    let frame = craft::frame(dice, src, dst, proto, &between, &body);
    sent(dice, at, None, frame)
}

/// Adds the note of earlier hooks, likely or not.
fn sent(dice: &mut Dice, at: At, leg: Option<Leg>, frame: Vec<u8>) -> Sent {
    let notes = [0, TRANSLATED, TRANSLATED | FORWARD, DONE, PORT_SHOWS];
    let likely = dice.random_bool(0.8);
    let mark = match (at, leg) {
        (At::Ingress(_), _) if dice.random_bool(0.02) => one(dice, &notes[1..]),
        (At::Egress(_), Some(Leg::AsNode)) if likely => TRANSLATED | FORWARD,
        (At::Egress(_), Some(_)) if likely => one(dice, &notes[..2]),
        (At::Egress(_), _) => one(dice, &notes),
        _ => 0,
    };
    let others = if dice.random_bool(0.1) {
        dice.random_range(0..FORWARD) & !MADE_HERE
    } else {
        0
    };
    let came_in = match at {
        At::Ingress(_) => true,
        At::Egress(_) => dice.random_bool(0.7),
        At::Anchor | At::Lo => dice.random_bool(0.05),
    };
    let by = if came_in && matches!(at, At::Egress(_)) {
        came_in_by(dice, &frame)
    } else {
        None
    };
    let segments = if dice.random_bool(0.05) {
        dice.random_range(1..45)
    } else {
        0
    };
    Sent {
        at,
        came_in,
        by,
        mark: mark | others | made_here(came_in),
        segments,
        frame,
    }
}

/// Returns the incoming device of a leaving packet: mostly the sender's, or unknown.
fn came_in_by(dice: &mut Dice, frame: &[u8]) -> Option<Device> {
    let ip = wire::family(frame).and_then(|family| wire::outer(frame, family).ok());
    match dice.random_range(0..10) {
        0..6 => ip.and_then(|ip| place::route(ip.src)),
        6..8 => Some(one(dice, &Device::OUTER)),
        _ => None,
    }
}
