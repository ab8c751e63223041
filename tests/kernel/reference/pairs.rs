//! One packet at a time.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, bail};

use crate::reference::fixture::{Fixture, Observed};
use crate::reference::outcomes::Outcomes;
use testbed::cases::seed;
use testbed::reference::cluster::{Cluster, Packet};
use testbed::reference::generate::{self, dice};
use testbed::reference::model::{self, Answer, Entry};
use testbed::reference::node;
use testbed::reference::weights;

const PAIRS: u64 = 100_000;
/// Packets per cluster. A cluster costs as much as many packets.
const PACKETS: u64 = 200;

#[test]
fn kernel_and_model_agree_on_random_pairs() -> Result<()> {
    let first = seed()?;
    let netns = node::namespace("reference")?;
    netns.run(|| {
        let mut fixture = Fixture::new("here")?;
        let mut outcomes = Outcomes::default();
        for seed in (first..).take((PAIRS / PACKETS) as usize) {
            compare(&mut fixture, seed, &mut outcomes)?;
        }
        println!("{outcomes}");
        outcomes.check()
    })
}

/// The backend of each client of a service port.
type Affinities = BTreeMap<(Entry, IpAddr), SocketAddr>;

fn compare(fixture: &mut Fixture, seed: u64, outcomes: &mut Outcomes) -> Result<()> {
    let mut dice = dice(seed);
    let mut cluster = generate::cluster(&mut dice);
    if seed % 2 == 1 {
        weights::give(&mut dice, &mut cluster);
    }
    fixture
        .enter(&cluster)
        .with_context(|| format!("KPX_SEED={seed}"))?;
    let mut affinities = Affinities::new();
    for _ in 0..PACKETS {
        let packet = generate::packet(&mut dice, &cluster);
        let answer = model::answer(&cluster, &packet);
        outcomes.add(&packet, &answer);
        if let Err(difference) = check(fixture, &packet, &answer, &mut affinities) {
            let cluster = smallest(fixture, &cluster, &packet)?;
            let answer = model::answer(&cluster, &packet);
            bail!(
                "KPX_SEED={seed}: {difference:#}\n{cluster}\n{packet:#?}\nshould be {answer:#?}\nskipped {:#?}",
                fixture.skipped()
            );
        }
    }
    Ok(())
}

/// Sends the packet, and returns the difference between its fate and the model's answer.
fn check(
    fixture: &mut Fixture,
    packet: &Packet,
    answer: &Answer,
    affinities: &mut Affinities,
) -> Result<()> {
    let observed = fixture.send(packet)?;
    agree(answer, &observed)?;
    let (Answer::Forward(forward), Observed::Forward(forwarded)) = (answer, observed) else {
        return Ok(());
    };
    if forward.has_affinity {
        let last = affinities.insert((forward.entry.clone(), packet.src.ip()), forwarded.backend);
        if let Some(last) =
            last.filter(|last| forward.backends.contains_key(last) && *last != forwarded.backend)
        {
            bail!("the client had {last} and got {}", forwarded.backend);
        }
    }
    Ok(())
}

/// Compares an observation with the model; the error describes the difference.
pub(crate) fn agree(answer: &Answer, observed: &Observed) -> Result<()> {
    match (answer, observed) {
        (Answer::Forward(forward), Observed::Forward(forwarded)) => {
            match forward.backends.get(&forwarded.backend) {
                Some(source) if *source == forwarded.source.ip() => Ok(()),
                Some(_) => bail!("the backend sees another address: {forwarded:?}"),
                None => bail!("not a backend: {forwarded:?}"),
            }
        }
        (Answer::Pass(want), Observed::Pass(reason))
        | (Answer::Reject(want), Observed::Reject(reason))
        | (Answer::Drop(want), Observed::Drop(reason))
            if want == reason =>
        {
            Ok(())
        }
        _ => bail!("the kernel says {observed:?}"),
    }
}

/// Removes from the cluster the objects that the difference does not need.
fn smallest(fixture: &mut Fixture, cluster: &Cluster, packet: &Packet) -> Result<Cluster> {
    /// A random backend may be correct by chance.
    const TRIES: usize = 30;
    let mut differs = |cluster: &Cluster| -> Result<bool> {
        fixture.enter(cluster)?;
        let answer = model::answer(cluster, packet);
        Ok((0..TRIES).any(|_| check(fixture, packet, &answer, &mut Affinities::new()).is_err()))
    };
    let mut smallest = cluster.clone();
    for index in (0..cluster.services.len()).rev() {
        let mut smaller = smallest.clone();
        smaller.services.remove(index);
        if differs(&smaller)? {
            smallest = smaller;
        }
    }
    for index in (0..cluster.slices.len()).rev() {
        let mut smaller = smallest.clone();
        smaller.slices.remove(index);
        if differs(&smaller)? {
            smallest = smaller;
        }
    }
    fixture.enter(&smallest)?;
    Ok(smallest)
}
