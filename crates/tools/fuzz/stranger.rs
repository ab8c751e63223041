//! A stranger: it sends packets with the addresses of either end of other flows, and reads none of
//! their packets.
//!
//! The stranger is another tenant's pod, a machine outside or behind another uplink, or it sends
//! through a device without hooks. In the last case its packets reach the anchor, or a hook where
//! they leave. It sets any class on its packets. The model computes each packet's outcome. The
//! [`Witness`] checks the model's flows for effects that no such packet may have.

use std::net::SocketAddr;

use anyhow::{Result, bail, ensure};
use proxy_common::device::{INJECTED_MARK, INJECTED_MASK};
use rand::RngExt;
use testbed::reference::generate::{self, Dice, one};
use testbed::reference::place::Device;
use testbed::test_run::Verdict;

use crate::craft::{self, Between};
use crate::model::wire::TCP;
use crate::model::{
    At, CLASS, DONE, Flow, Got, Leg, MADE_HERE, Model, Sent, Table, Tuple, is_spoofed,
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pretence {
    pub(crate) place: Place,
    pub(crate) sent: Sent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// At the spoofed sender's device, without its sequence numbers.
    Blind,
    /// Behind a device where the spoofed sender cannot be.
    Misplaced,
    /// Behind a device without hooks: the packet reaches the anchor.
    Unhooked,
    /// The same, and the packet is seen where it leaves. The spoofed sender cannot be behind that
    /// device.
    Passing,
}

impl Place {
    const ALL: [Self; 4] = [Self::Blind, Self::Misplaced, Self::Unhooked, Self::Passing];

    fn name(self) -> &'static str {
        match self {
            Self::Blind => "blind",
            Self::Misplaced => "misplaced",
            Self::Unhooked => "unhooked",
            Self::Passing => "passing",
        }
    }
}

impl Pretence {
    pub(crate) fn name(&self) -> &'static str {
        self.place.name()
    }

    pub(crate) fn named(name: &str, sent: Sent) -> Result<Self> {
        match Place::ALL.into_iter().find(|place| place.name() == name) {
            Some(place) => Ok(Self { place, sent }),
            None => bail!("{name}: no stranger's place"),
        }
    }
}

/// A protocol, the spoofed source and the destination, and the transport's bytes.
type Speech = (u8, SocketAddr, SocketAddr, Vec<u8>);

/// Returns a spoofed packet; `None` without a flow to attack.
pub(crate) fn pretence(dice: &mut Dice, model: &Model) -> Option<Pretence> {
    let at = match dice.random_range(0..10) {
        0 => At::Anchor,
        1 | 2 => At::Egress(one(dice, &Device::OUTER)),
        _ => At::Ingress(one(dice, &Device::OUTER)),
    };
    let opens = !matches!(at, At::Egress(_)) && dice.random_bool(0.2);
    let (proto, src, dst, transport) = if opens {
        opener(dice, model)
    } else {
        of_flow(dice, model, at)?
    };
    // No hook has seen a packet that came in by lo, as on any device without hooks.
    let by = if matches!(at, At::Egress(_)) {
        Some(Device::Lo)
    } else {
        None
    };
    let place = match at {
        At::Anchor => Place::Unhooked,
        _ if !is_spoofed(by.map_or(at, At::Ingress), proto, src, dst) => Place::Blind,
        At::Egress(_) => Place::Passing,
        _ => Place::Misplaced,
    };
    // A datagram has no number to guess: see docs/limits.md.
    if place == Place::Blind && proto != TCP {
        return None;
    }
    let frame = craft::frame(
        dice,
        src.ip(),
        dst.ip(),
        proto,
        &Between::default(),
        &transport,
    );
    Some(Pretence {
        place,
        sent: Sent {
            at,
            came_in: true,
            by,
            mark: class(dice, at),
            segments: 0,
            frame,
        },
    })
}

/// Returns the class that a stranger or a filter has set. Some devices are on top of other devices,
/// whose hooks remove anything like a note.
fn class(dice: &mut Dice, at: At) -> u32 {
    if dice.random_bool(0.5) {
        return 0;
    }
    let class = dice.random_range(0..=DONE | CLASS) & !MADE_HERE;
    match at {
        At::Ingress(device) if !device.is_edge() => class & CLASS,
        At::Egress(_) => class & CLASS,
        _ => class,
    }
}

fn opener(dice: &mut Dice, model: &Model) -> Speech {
    let packet = generate::packet(dice, model.cluster());
    let src = SocketAddr::new(packet.src.ip(), dice.random_range(40_000..40_008));
    (
        TCP,
        src,
        packet.dst,
        craft::transport(dice, src, packet.dst, TCP, 2),
    )
}

/// Returns a packet of one end of a flow as a hook sees it, with numbers that no end would send. A
/// stranger is near one end only.
fn of_flow(dice: &mut Dice, model: &Model, at: At) -> Option<Speech> {
    /// Offsets beyond every window. Strangers at both ends use different offsets.
    const FAR: [u32; 2] = [1 << 31, 3 << 29];
    let established: Vec<_> = model
        .flows
        .iter()
        .filter(|(_, flow)| flow.assured && is_safe(flow))
        .collect();
    let (id, flow) = if established.is_empty() || dice.random_bool(0.3) {
        let newest = *model.flows.keys().next_back()?;
        model.flows.range(dice.random_range(0..=newest)..).next()?
    } else {
        one(dice, &established)
    };
    let is_client = id % 2 == 0;
    let leaves = matches!(at, At::Egress(_));
    let legs = flow.legs().into_iter().filter(|((table, ..), leg)| {
        goes_to_backend(*leg) == is_client && (!leaves || *table == Table::Leaving)
    });
    let legs: Vec<_> = legs.collect();
    let ((_, proto, src, dst), _) = *legs.get(dice.random_range(0..legs.len().max(1)))?;
    let says = match proto {
        // SYN, SYN ACK, ACK, FIN ACK, RST, RST ACK
        TCP => one(dice, &[2, 0x12, 0x10, 0x18, 0x11, 4, 0x14]),
        // INIT, INIT ACK, COOKIE ECHO, COOKIE ACK, DATA, ABORT, SHUTDOWN, SHUTDOWN ACK, SHUTDOWN
        // COMPLETE
        _ => one(dice, &[1, 2, 10, 11, 0, 6, 7, 8, 14]),
    };
    let mut transport = craft::transport(dice, src, dst, proto, says);
    if proto == TCP {
        let far = FAR[usize::from(is_client)];
        let numbers = expected(flow, is_client).map(|number| number.wrapping_add(far));
        // The packet may match another flow with the same addresses and ports, whose numbers may be
        // these by chance.
        let is_namesake = |tuple: &Tuple| (tuple.1, tuple.2, tuple.3) == (proto, src, dst);
        let is_met = |flow: &Flow| {
            let mut legs = flow
                .legs()
                .into_iter()
                .filter(|(tuple, _)| is_namesake(tuple));
            legs.any(|(_, leg)| !are_guesses(flow, goes_to_backend(leg), numbers))
        };
        if model.flows.values().any(is_met) {
            return None;
        }
        craft::renumber(&mut transport, src.ip(), dst.ip(), numbers);
    }
    Some((proto, src, dst, transport))
}

fn goes_to_backend(leg: Leg) -> bool {
    matches!(leg, Leg::ToBackend | Leg::AsNode)
}

/// Returns the next sequence number and acknowledgement of one end of a flow.
fn expected(flow: &Flow, is_client: bool) -> [u32; 2] {
    match is_client {
        true => [flow.backend_acked, flow.answer.unwrap_or(0)],
        false => [flow.client_acked, flow.backend_acked],
    }
}

/// Returns true if these numbers are outside every window of a flow.
fn are_guesses(flow: &Flow, is_client: bool, numbers: [u32; 2]) -> bool {
    /// Twice the window of the programs.
    const NEAR: u32 = 1 << 26;
    let is_out = |(number, expected): (u32, u32)| {
        number.wrapping_sub(expected).wrapping_add(NEAR) > 2 * NEAR
    };
    numbers
        .into_iter()
        .zip(expected(flow, is_client))
        .all(is_out)
}

/// The state of other parties before a stranger's packet.
pub(crate) struct Witness {
    /// The live flows, and whether each is established.
    flows: Vec<(u64, bool)>,
    opened: u64,
    place: Place,
}

impl Witness {
    pub(crate) fn before(model: &Model, Pretence { place, .. }: &Pretence) -> Self {
        let flows = model
            .flows
            .iter()
            .filter(|(_, flow)| is_safe(flow) && !model.is_over(flow));
        Self {
            flows: flows.map(|(id, flow)| (*id, flow.assured)).collect(),
            opened: model.opened(),
            place: *place,
        }
    }

    /// Returns true if it includes an established flow.
    pub(crate) fn watches_established(&self) -> bool {
        self.flows.iter().any(|(_, assured)| *assured)
    }

    /// Returns an error if the packet changed the state of other parties.
    pub(crate) fn after(&self, model: &Model, got: &Got) -> Result<()> {
        for (id, assured) in &self.flows {
            let after = model.flows.get(id);
            ensure!(
                after.is_some() || !assured,
                "a stranger has closed an established flow"
            );
            let Some(flow) = after else { continue };
            ensure!(
                flow.assured == *assured,
                "a stranger has changed whether a flow is established: {flow:?}"
            );
            ensure!(
                !assured || !has_end(flow),
                "a stranger has ended an established flow: {flow:?}"
            );
        }
        if self.place == Place::Blind {
            return Ok(());
        }
        ensure!(
            model.opened() == self.opened,
            "a stranger has opened a flow in another's name"
        );
        let is_given = self.place == Place::Misplaced
            && got.verdict == Verdict::Redirect
            && got.mark & INJECTED_MASK == INJECTED_MARK;
        ensure!(
            !is_given,
            "the host has got a stranger's packet as an answer"
        );
        Ok(())
    }
}

/// Returns true for a flow that no stranger may change. A client that dials again accepts any
/// answer, and datagrams prove nothing.
fn is_safe(flow: &Flow) -> bool {
    flow.proto == TCP && !flow.is_foreign_nat && !flow.dialled && !flow.redialled && !has_end(flow)
}

fn has_end(flow: &Flow) -> bool {
    let client = flow.client_said;
    let backend = flow.backend_said;
    client.reset || backend.reset || client.goodbye || backend.goodbye
}
