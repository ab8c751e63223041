//! One packet at a time.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, bail};

use crate::reference::bed::{Bed, Observed};
use crate::reference::seed;
use crate::reference::tally::Tally;
use testbed::reference::generate::{self, dice};
use testbed::reference::model::{self, Answer, Entry};
use testbed::reference::node;
use testbed::reference::world::{Packet, World};

const PAIRS: u64 = 100_000;
/// Packets to one world, since a world costs as much as many packets.
const PACKETS: u64 = 200;

#[test]
fn the_kernel_does_what_the_model_says() -> Result<()> {
    let first = seed()?;
    let netns = node::namespace("reference")?;
    netns.run(|| {
        let mut bed = Bed::new("here")?;
        let mut tally = Tally::default();
        for seed in (first..).take((PAIRS / PACKETS) as usize) {
            compare(&mut bed, seed, &mut tally)?;
        }
        println!("{tally}");
        tally.check()
    })
}

/// Which backend a client has of a service port.
type Affinities = BTreeMap<(Entry, IpAddr), SocketAddr>;

fn compare(bed: &mut Bed, seed: u64, tally: &mut Tally) -> Result<()> {
    let mut dice = dice(seed);
    let world = generate::world(&mut dice);
    bed.enter(&world).with_context(|| format!("KPX_SEED={seed}"))?;
    let mut affinities = Affinities::new();
    for _ in 0..PACKETS {
        let packet = generate::packet(&mut dice, &world);
        let answer = model::answer(&world, &packet);
        tally.add(&packet, &answer);
        if let Err(difference) = check(bed, &packet, &answer, &mut affinities) {
            let world = smallest(bed, &world, &packet)?;
            let answer = model::answer(&world, &packet);
            bail!(
                "KPX_SEED={seed}: {difference:#}\n{world}\n{packet:#?}\nshould be {answer:#?}\nskipped {:#?}",
                bed.skipped()
            );
        }
    }
    Ok(())
}

/// Sends the packet, and says how what becomes of it differs from the answer.
fn check(bed: &mut Bed, packet: &Packet, answer: &Answer, affinities: &mut Affinities) -> Result<()> {
    let observed = bed.send(packet)?;
    agree(answer, &observed)?;
    let (Answer::Forward(forward), Observed::Forward(forwarded)) = (answer, observed) else { return Ok(()) };
    if forward.has_affinity {
        let last = affinities.insert((forward.entry.clone(), packet.src.ip()), forwarded.backend);
        if let Some(last) = last.filter(|last| forward.backends.contains_key(last) && *last != forwarded.backend) {
            bail!("the client had {last} and got {}", forwarded.backend);
        }
    }
    Ok(())
}

/// Whether what was observed is what the model says; the error says how it differs.
pub(crate) fn agree(answer: &Answer, observed: &Observed) -> Result<()> {
    match (answer, observed) {
        (Answer::Forward(forward), Observed::Forward(forwarded)) => match forward.backends.get(&forwarded.backend) {
            Some(source) if *source == forwarded.source.ip() => Ok(()),
            Some(_) => bail!("the backend sees another address: {forwarded:?}"),
            None => bail!("not a backend: {forwarded:?}"),
        },
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

/// Leaves out of the world what is not needed for the difference to show.
fn smallest(bed: &mut Bed, world: &World, packet: &Packet) -> Result<World> {
    /// A backend at random may be a right one by chance.
    const TRIES: usize = 30;
    let mut differs = |world: &World| -> Result<bool> {
        bed.enter(world)?;
        let answer = model::answer(world, packet);
        Ok((0..TRIES).any(|_| check(bed, packet, &answer, &mut Affinities::new()).is_err()))
    };
    let mut smallest = world.clone();
    for index in (0..world.services.len()).rev() {
        let mut smaller = smallest.clone();
        smaller.services.remove(index);
        if differs(&smaller)? {
            smallest = smaller;
        }
    }
    for index in (0..world.slices.len()).rev() {
        let mut smaller = smallest.clone();
        smaller.slices.remove(index);
        if differs(&smaller)? {
            smallest = smaller;
        }
    }
    bed.enter(&smallest)?;
    Ok(smallest)
}
