//! kpx ends, and another one starts.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::Scale;
use super::bed::{BACKENDS, Bed};
use super::report::Report;
use crate::agent::Agent;

/// Between two faults, and before the first: what goes wrong late shows too.
const CALM: Duration = Duration::from_millis(500);

/// SIGKILL, and at once a new process.
pub fn restart(scale: Scale) -> Result<Report> {
    let killed = |agent: Agent| {
        drop(agent);
        Ok(())
    };
    again_and_again("restart", "killed (SIGKILL) and started", scale, killed, |_| Vec::new())
}

/// SIGTERM, and a new process that brings other kernel programs: those of `object` and its own, in turns.
pub fn upgrade(scale: Scale, object: &Path) -> Result<Report> {
    let with_object = |round: u32| match round % 2 {
        0 => Vec::new(),
        _ => vec!["--bpf-object".to_owned(), object.display().to_string()],
    };
    again_and_again(
        "upgrade",
        "ended (SIGTERM) and started with another BPF object",
        scale,
        |agent| agent.stop(),
        with_object,
    )
}

/// With the arguments of each round, from 0.
fn again_and_again(
    scenario: &'static str,
    how: &str,
    scale: Scale,
    end: fn(Agent) -> Result<()>,
    args: impl Fn(u32) -> Vec<String>,
) -> Result<Report> {
    let bed = Bed::build()?;
    let mut agent = bed.agent(&args(0))?;
    let load = bed.load(scale.rate, |exchange| BACKENDS.contains(&exchange.backend))?;
    let started = Instant::now();
    let mut slowest = Duration::ZERO;
    let mut rounds = 0;
    while rounds < scale.rounds || started.elapsed() < scale.at_least {
        thread::sleep(CALM);
        let ended = Instant::now();
        end(agent)?;
        rounds += 1;
        agent = bed.agent(&args(rounds))?;
        slowest = slowest.max(ended.elapsed());
    }
    thread::sleep(CALM);
    let seen = load.finish()?;
    agent.stop()?;
    let what = format!("kpx {how} {rounds} times; healthy again after {slowest:.1?} at worst");
    Ok(Report::new(scenario, what, &seen))
}
