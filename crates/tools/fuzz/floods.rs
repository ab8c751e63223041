//! Handshakes of a few or very many clients, until a small flow table is full. Each handshake is
//! finished before the next begins, so no half-open flow is evicted.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, ensure};
use rand::RngExt;
use testbed::reference::cluster::{Hook, Proto};
use testbed::reference::generate::{self, Dice, dice, one};
use testbed::reference::node;

use crate::craft::{self, Between};
use crate::fixture::Fixture;
use crate::model::wire::TCP;
use crate::model::{At, Flow, Leg, Model, Sent};
use crate::session::{Results, Session};
use crate::steps::{self, Step};

/// The size of each flow table: some hundred flows use up all shares.
const ROOM: u32 = 256;
/// Sessions of a run, and how many it takes at most until it has seen all that it looks for. On a
/// busy machine many are cut short, for the model knows whole seconds.
const SESSIONS: u64 = 12;
const SESSIONS_MAX: u64 = 120;
const WANTED: [&str; 3] = [
    "client_at_its_share",
    "namespace_at_its_share",
    "opened_beside_a_namespace_at_its_share",
];
const STEPS: usize = 800;
const SYN: u8 = 2;
const RST_ACK: u8 = 0x14;

#[test]
fn clients_and_namespaces_hold_no_more_than_their_shares() -> Result<()> {
    let first = testbed::cases::seed()?;
    let netns = node::namespace("floods")?;
    netns.run(|| {
        let mut fixture = Fixture::new(false, ROOM)?;
        let mut results = Results::new();
        let unseen =
            |results: &Results| WANTED.into_iter().find(|what| !results.contains_key(what));
        for nth in 0..SESSIONS_MAX {
            if nth >= SESSIONS && unseen(&results).is_none() {
                break;
            }
            let seed = first + nth;
            let flooded = flood(&mut fixture, seed, &mut results);
            flooded.with_context(|| format!("KPX_SEED={seed}"))?;
        }
        println!("{results:?}");
        let unseen = unseen(&results);
        ensure!(unseen.is_none(), "never seen: {unseen:?}");
        Ok(())
    })
}

fn flood(fixture: &mut Fixture, seed: u64, results: &mut Results) -> Result<()> {
    let mut session = Session::start(fixture, seed, false)?;
    let mut dice = dice(seed);
    let clients = [1, 4, 200][(seed % 3) as usize];
    let mut is_cut = false;
    for step in 0..STEPS {
        let Some(sent) = next(&mut dice, &session.model, clients) else {
            break;
        };
        let got = session.step(&Step::Packet(sent));
        is_cut = got.with_context(|| format!("step {step}"))?.is_err();
        if is_cut {
            break;
        }
    }
    for (what, n) in &session.model.shares {
        *results.entry(what).or_default() += n;
    }
    if is_cut { Ok(()) } else { session.finish() }
}

/// Continues the current handshake, or begins one. Sometimes a backend ends a connection, and its
/// client dials again from the same port.
fn next(dice: &mut Dice, model: &Model, clients: u8) -> Option<Sent> {
    if let Some(sent) = steps::handshake(dice, model) {
        return Some(sent);
    }
    let ended = model
        .flows
        .values()
        .find(|flow| flow.assured && !flow.goes_on());
    if let Some(flow) = ended {
        return steps::clean(dice, flow, Leg::ToBackend, SYN, [1_000, 0]);
    }
    let lasting: Vec<&Flow> = model.flows.values().filter(|flow| flow.goes_on()).collect();
    if !lasting.is_empty() && dice.random_bool(0.05) {
        let flow = one(dice, &lasting);
        let numbers = [flow.client_acked, flow.backend_acked];
        return steps::clean(dice, flow, Leg::ToClient, RST_ACK, numbers);
    }
    opener(dice, model, clients)
}

/// Returns the SYN of one of `clients` behind a device; `None` without a TCP Service.
fn opener(dice: &mut Dice, model: &Model, clients: u8) -> Option<Sent> {
    const TRIES: usize = 1_000;
    let (device, packet) = (0..TRIES).find_map(|_| {
        let packet = generate::packet(dice, model.cluster());
        match packet.hook {
            Hook::Ingress(device) if packet.proto == Proto::Tcp => Some((device, packet)),
            _ => None,
        }
    })?;
    let host = 40 + dice.random_range(0..clients);
    let ip = match packet.src.ip() {
        IpAddr::V4(ip) => IpAddr::V4((ip.to_bits() >> 8 << 8 | u32::from(host)).into()),
        IpAddr::V6(ip) => IpAddr::V6((ip.to_bits() >> 8 << 8 | u128::from(host)).into()),
    };
    let src = SocketAddr::new(ip, packet.src.port());
    let transport = craft::transport(dice, src, packet.dst, TCP, SYN);
    let frame = craft::frame(
        dice,
        src.ip(),
        packet.dst.ip(),
        TCP,
        &Between::default(),
        &transport,
    );
    Some(Sent {
        at: At::Ingress(device),
        came_in: true,
        by: None,
        mark: 0,
        segments: 0,
        frame,
    })
}
