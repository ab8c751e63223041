//! Runs sessions until the time is up, and minimises differences.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{env, fs};

use anyhow::{Context, Error, Result, bail, ensure};
use testbed::reference::generate::dice;
use testbed::reference::node;

use crate::corpus;
use crate::fast::Fast;
use crate::fixture::Fixture;
use crate::kernel_log::KernelLog;
use crate::session::{Results, Session};
use crate::steps::{self, Step};
use crate::stranger::Pretence;

/// A table of which no session uses half: no flow is evicted, and no share is used up.
const ROOM: u32 = 1 << 16;
/// Packets per cluster: building a cluster costs as much as many packets.
const STEPS: usize = 1_000;
/// Time between two progress lines of a long run.
const REPORT: Duration = Duration::from_secs(30);
/// The duration within all tests.
const SECS: u64 = 8;
/// The number of packets after which every outcome has occurred.
const ENOUGH: u64 = 20_000;
/// The outcomes that a valid run must have.
const SEEN: [&str; 26] = [
    "established_beside_strangers",
    "blind",
    "misplaced",
    "unhooked",
    "passing",
    "flow_opened",
    "forwarded",
    "returned",
    "rejected",
    "not_ip",
    "seen_before",
    "malformed",
    "fragment",
    "protocol",
    "not_unicast",
    "not_ours",
    "no_flow",
    "no_endpoints",
    "unknown_port",
    "no_local_endpoints",
    "outside",
    "source_range",
    "unallocated",
    "rewrite",
    "cut_header",
    "weights",
];
#[test]
fn programs_and_model_agree_on_random_packets() -> Result<()> {
    let first = testbed::cases::seed()?;
    let secs = env::var("KPX_FUZZ_SECS")
        .map_or(Ok(SECS), |secs| secs.parse())
        .context("KPX_FUZZ_SECS")?;
    let mut kernel_log = KernelLog::open()?;
    let netns = node::namespace("fuzz")?;
    netns.run(|| {
        let mut fixtures = [Fixture::new(false, ROOM)?, Fixture::new(true, ROOM)?];
        let mut results = Results::new();
        let mut reported = Instant::now();
        let start = Instant::now();
        let mut sessions = 0_u64;
        let mut packets = 0_u64;
        let mut blurred = 0_u64;
        while start.elapsed() < Duration::from_secs(secs) {
            let seed = first + sessions;
            let mut steps = Vec::new();
            let fixture = &mut fixtures[usize::from(seed % 2 == 1)];
            match random(fixture, seed, STEPS, &mut steps, &mut results) {
                Ok(whole) => blurred += u64::from(!whole),
                Err(difference) => bail!("KPX_SEED={seed}: {:#}", smallest(fixture, seed, steps, difference)?),
            }
            sessions += 1;
            packets += steps.len() as u64;
            if reported.elapsed() > REPORT {
                println!("{packets} packets in {} s, none became what it must not", start.elapsed().as_secs());
                reported = Instant::now();
            }
        }
        let rate = packets as f64 / start.elapsed().as_secs_f64();
        println!(
            "{packets} packets in {sessions} sessions, {rate:.0} a second; {blurred} cut short at the end of a second"
        );
        results.iter().for_each(|(what, n)| println!("{n:10} {what}"));
        if packets < ENOUGH {
            println!("too few packets on this machine to say that something never happens");
            return kernel_log.check();
        }
        let never: Vec<_> = SEEN.iter().filter(|what| !results.contains_key(*what)).collect();
        ensure!(never.is_empty(), "never seen: {never:?}");
        // Two of ten thousand packets.
        let is_fast_seen = ["fast_local", "fast_remote"].iter().any(|what| results.contains_key(what));
        ensure!(is_fast_seen || packets < 10 * ENOUGH, "no packet has skipped the stack");
        kernel_log.check()
    })
}

/// Repeats former differences and good examples.
#[test]
fn programs_and_model_agree_on_the_corpus() -> Result<()> {
    let netns = node::namespace("corpus")?;
    netns.run(|| {
        let mut fixtures = [Fixture::new(false, ROOM)?, Fixture::new(true, ROOM)?];
        if let Ok(seed) = env::var("KPX_FUZZ_KEEP") {
            keep(&mut fixtures[0], seed.parse()?)?;
        }
        let mut files: Vec<PathBuf> = fs::read_dir(folder())?
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<_>>()?;
        files.sort();
        ensure!(!files.is_empty(), "the corpus is empty");
        for file in files {
            let (cluster, steps) = corpus::read(&fs::read_to_string(&file)?)
                .with_context(|| file.display().to_string())?;
            for fixture in &mut fixtures {
                let replayed = replay(fixture, cluster, &steps);
                replayed.with_context(|| {
                    format!("{}, fast path: {}", file.display(), fixture.is_fast)
                })?;
            }
        }
        Ok(())
    })
}

fn folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus"))
}

/// Adds a short session to the corpus.
fn keep(fixture: &mut Fixture, seed: u64) -> Result<()> {
    const SHORT: usize = 150;
    let mut steps = Vec::new();
    random(fixture, seed, SHORT, &mut steps, &mut Results::new())?;
    let why = "A bit of everything.";
    Ok(fs::write(
        folder().join(format!("{seed}.txt")),
        corpus::write(why, seed, &steps),
    )?)
}

/// Runs a session. Returns false if the session was cut short.
fn random(
    fixture: &mut Fixture,
    seed: u64,
    count: usize,
    steps: &mut Vec<Step>,
    results: &mut Results,
) -> Result<bool> {
    let mut session = Session::start(fixture, seed, false)?;
    let mut dice = dice(seed);
    let mut last = None;
    let first = Step::Fast(Fast::random(&mut dice));
    steps.push(first.clone());
    let _told = session.step(&first)?;
    for _ in 0..count {
        let step = steps::next(
            &mut dice,
            &session.model,
            last.as_ref().map(|(sent, got)| (sent, got)),
        );
        steps.push(step.clone());
        let Ok(got) = session.step(&step)? else {
            return Ok(false);
        };
        last = match (step, got) {
            (Step::Packet(sent) | Step::Stranger(Pretence { sent, .. }), Some(got)) => {
                Some((sent, got))
            }
            _ => None,
        };
    }
    session.finish()?;
    session
        .results
        .iter()
        .for_each(|(what, n)| *results.entry(what).or_default() += n);
    Ok(true)
}

/// Repeats the steps, and compares the counters after each.
fn replay(fixture: &mut Fixture, cluster: u64, steps: &[Step]) -> Result<()> {
    let mut session = Session::start(fixture, cluster, true)?;
    for (number, step) in steps.iter().enumerate() {
        let Ok(_) = session
            .step(step)
            .with_context(|| format!("step {number}"))?
        else {
            return Ok(());
        };
    }
    session.finish()
}

/// Removes the steps that a difference does not need.
fn smallest(
    fixture: &mut Fixture,
    cluster: u64,
    mut steps: Vec<Step>,
    difference: Error,
) -> Result<Error> {
    /// Random backends and ports may hide a difference.
    const TRIES: usize = 3;
    const TIMEOUT: Duration = Duration::from_secs(60);
    let start = Instant::now();
    let mut differs =
        |steps: &[Step]| (0..TRIES).find_map(|_| replay(fixture, cluster, steps).err());
    let Some(mut why) = differs(&steps) else {
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{cluster}.txt"));
        fs::write(
            &file,
            corpus::write(&format!("{difference:#}"), cluster, &steps),
        )?;
        return Ok(difference.context(format!(
            "it did not come again, its {} steps are in {}",
            steps.len(),
            file.display()
        )));
    };
    let mut size = steps.len() / 2;
    while size > 0 && start.elapsed() < TIMEOUT {
        let mut at = 0;
        while at < steps.len() && start.elapsed() < TIMEOUT {
            let rest = [&steps[..at], &steps[(at + size).min(steps.len())..]].concat();
            match differs(&rest) {
                Some(error) => (steps, why) = (rest, error),
                None => at += size,
            }
        }
        size /= 2;
    }
    let file = folder().join(format!("{cluster}.txt"));
    fs::write(&file, corpus::write(&format!("{why:#}"), cluster, &steps))?;
    println!("{}", corpus::write("", cluster, &steps));
    Ok(why.context(format!("{} steps are in {}", steps.len(), file.display())))
}
