//! kpx ends, and a new kpx starts.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::Scale;
use super::fixture::{BACKENDS, Fixture};
use super::kpx::AnyAgent;
use super::report::Report;

/// The time before the first fault and between two faults: late failures show too.
const CALM: Duration = Duration::from_millis(500);

/// SIGKILL, followed by a new process at once.
pub fn restart(scale: Scale) -> Result<Report> {
    let killed = |agent: AnyAgent| {
        drop(agent);
        Ok(())
    };
    again_and_again(
        "restart",
        "killed (SIGKILL) and started",
        scale,
        killed,
        None,
    )
}

/// SIGTERM, followed by a new process with other kernel programs: those of `object` and its own in
/// turn.
pub fn upgrade(scale: Scale, object: &Path) -> Result<Report> {
    let how = "ended (SIGTERM) and started with another BPF object";
    again_and_again("upgrade", how, scale, |kpx| kpx.stop(), Some(object))
}

/// Uses the BPF object `other` in every second round.
fn again_and_again(
    scenario: &'static str,
    how: &str,
    scale: Scale,
    end: fn(AnyAgent) -> Result<()>,
    other: Option<&Path>,
) -> Result<Report> {
    let fixture = Fixture::build(scale.place)?;
    let other = other.map(|object| fixture.show(object)).transpose()?;
    let with_other =
        other.map(|object| vec!["--bpf-object".to_owned(), object.display().to_string()]);
    let mut agent = fixture.kpx(&[])?;
    let load = fixture.load(scale.rate, |exchange| BACKENDS.contains(&exchange.backend))?;
    let started = Instant::now();
    let mut slowest = Duration::ZERO;
    let mut rounds = 0;
    while rounds < scale.rounds || started.elapsed() < scale.at_least {
        thread::sleep(CALM);
        let ended = Instant::now();
        end(agent)?;
        rounds += 1;
        agent = fixture.kpx(
            with_other
                .as_deref()
                .filter(|_| rounds % 2 == 1)
                .unwrap_or_default(),
        )?;
        slowest = slowest.max(ended.elapsed());
    }
    thread::sleep(CALM);
    let seen = load.finish()?;
    agent.stop()?;
    let what = format!("kpx {how} {rounds} times; healthy again after {slowest:.1?} at worst");
    Ok(Report::new(scenario, what, &seen))
}
