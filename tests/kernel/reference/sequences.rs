//! The state that later packets find: flows, affinities, other nodes.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result, ensure};

use crate::reference::fixture::{Fixture, Forwarded, Observed};
use crate::reference::pairs::agree;
use testbed::cases::seed;
use testbed::reference::cluster::{Cluster, Packet, Proto};
use testbed::reference::generate::{self, Dice, dice};
use testbed::reference::model::{self, Answer};
use testbed::reference::node;
use testbed::reference::weights;

/// A UDP flow leaves a backend that no longer serves; every other flow stays with its backend.
#[test]
fn flows_stay_with_their_backends_or_leave_them() -> Result<()> {
    const WORLDS: usize = 60;
    const STEPS: usize = 5;
    let first = seed()?;
    let netns = node::namespace("moves")?;
    netns.run(|| {
        let mut fixture = Fixture::new("here")?;
        let mut outcomes = BTreeMap::new();
        for seed in (first..).take(WORLDS) {
            let mut dice = dice(seed);
            let mut cluster = generate::cluster(&mut dice);
            keep_silent_backends(&mut cluster);
            fixture.enter(&cluster)?;
            let mut flows = open_some(&mut fixture, &mut dice, &cluster)?;
            for step in 0..STEPS {
                generate::change_endpoints(&mut dice, &mut cluster);
                if step % 2 == 1 {
                    weights::give(&mut dice, &mut cluster);
                }
                fixture.enter(&cluster)?;
                for (packet, flow, outcomes_so_far) in &mut flows {
                    let context = || {
                        format!("KPX_SEED={seed}, step {step}: {packet:?} had {flow:?} {outcomes_so_far:?}\n{cluster}")
                    };
                    let (now, outcome) = follow(&mut fixture, &cluster, packet, *flow).with_context(context)?;
                    *flow = now;
                    outcomes_so_far.push(outcome);
                    *outcomes.entry(outcome).or_insert(0) += 1;
                }
            }
            for (packet, ..) in flows.iter().filter(|(_, flow, _)| flow.is_some()) {
                fixture.forget(packet)?;
            }
        }
        println!("{outcomes:?}");
        for outcome in ["stays", "moves", "ends", "starts"] {
            ensure!(outcomes.contains_key(outcome), "never {outcome}");
        }
        Ok(())
    })
}

/// Makes every Service keep flows to backends that send no answer. By default a SYN that comes again
/// after a second leaves such a backend, and the steps of a world take longer on a busy machine.
fn keep_silent_backends(cluster: &mut Cluster) {
    for service in &mut cluster.services {
        let annotations = service.metadata.annotations.get_or_insert_default();
        annotations.insert("kpx.dev/backend-health".to_owned(), "off".to_owned());
    }
}

/// A packet, its flow if open, and the history of the flow.
type Flow = (Packet, Option<Forwarded>, Vec<&'static str>);

fn open_some(fixture: &mut Fixture, dice: &mut Dice, cluster: &Cluster) -> Result<Vec<Flow>> {
    const PACKETS: usize = 300;
    let mut flows: BTreeMap<_, Flow> = BTreeMap::new();
    for _ in 0..PACKETS {
        let packet = generate::packet(dice, cluster);
        let is_forwarded = matches!(model::answer(cluster, &packet), Answer::Forward(_));
        let key = (packet.src, packet.dst, packet.proto);
        if !is_forwarded || flows.contains_key(&key) {
            continue;
        }
        let Observed::Forward(forwarded) = fixture.send_and_keep(&packet)? else {
            continue;
        };
        flows.insert(key, (packet, Some(forwarded), Vec::new()));
    }
    Ok(flows.into_values().collect())
}

/// Sends the packet again, and adds its fate to the flow's history.
fn follow(
    fixture: &mut Fixture,
    cluster: &Cluster,
    packet: &Packet,
    flow: Option<Forwarded>,
) -> Result<(Option<Forwarded>, &'static str)> {
    let observed = fixture.send_and_keep(packet)?;
    let now = match observed {
        Observed::Forward(forwarded) => Some(forwarded),
        _ => None,
    };
    let serving = model::serving(cluster, packet);
    let leaves = |flow: &Forwarded| {
        packet.proto == Proto::Udp && !serving.iter().flatten().any(|at| *at == flow.backend)
    };
    if let Some(flow) = flow.filter(|flow| !leaves(flow)) {
        ensure!(now == Some(flow), "it should stay, but: {observed:?}");
        return Ok((now, "stays"));
    }
    let answer = model::answer(cluster, packet);
    agree(&answer, &observed).with_context(|| format!("it should be {answer:?}"))?;
    let outcome = match (flow, now) {
        (Some(_), Some(_)) => "moves",
        (Some(_), None) => "ends",
        (None, Some(_)) => "starts",
        (None, None) => "is nothing",
    };
    Ok((now, outcome))
}

/// Maglev gives all nodes the same choice without communication.
#[test]
fn every_node_chooses_alike_by_maglev() -> Result<()> {
    const WORLDS: usize = 40;
    const PACKETS: usize = 300;
    let first = seed()?;
    let netns = node::namespace("maglev")?;
    netns.run(|| {
        let mut here = Fixture::new("here")?;
        let mut there = Fixture::new("there")?;
        let mut alike = 0;
        let mut backends = BTreeSet::new();
        for seed in (first..).take(WORLDS) {
            let mut dice = dice(seed);
            let mut cluster = generate::cluster(&mut dice);
            choose_by_maglev(&mut cluster);
            let mut elsewhere = cluster.clone();
            elsewhere.node.name = "there";
            here.enter(&cluster)?;
            there.enter(&elsewhere)?;
            for _ in 0..PACKETS {
                let packet = generate::packet(&mut dice, &cluster);
                let at_here = here.send(&packet)?;
                let at_there = there.send(&packet)?;
                if let (Observed::Forward(at_here), Observed::Forward(at_there)) = (at_here, at_there) {
                    let same = at_here.backend == at_there.backend;
                    ensure!(same, "KPX_SEED={seed}: {packet:?}: {at_here:?} here, {at_there:?} there\n{cluster}");
                    alike += 1;
                    backends.insert(at_here.backend);
                }
            }
        }
        ensure!(alike > WORLDS * PACKETS / 10 && backends.len() > 20, "{alike} packets to {} backends", backends.len());
        Ok(())
    })
}

/// Makes every Service use Maglev, and removes everything that differs between nodes.
fn choose_by_maglev(cluster: &mut Cluster) {
    for service in &mut cluster.services {
        let annotations = service.metadata.annotations.get_or_insert_default();
        annotations.insert("kpx.dev/lb-algorithm".to_owned(), "maglev".to_owned());
        let spec = service.spec.as_mut().expect("every Service has a spec");
        spec.session_affinity = None;
        spec.internal_traffic_policy = None;
        spec.external_traffic_policy = None;
    }
    for endpoint in cluster
        .slices
        .iter_mut()
        .flat_map(|slice| slice.endpoints.iter_mut().flatten())
    {
        endpoint.hints = None;
    }
}
