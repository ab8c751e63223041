//! The wall clock steps under a running kpx. The clocks of the programs and of timers stay
//! monotonic.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use testbed::agent::{DEADLINE, Service, wait_until};
use testbed::echo::{Dial, Protocol};
use testbed::http::{self, HEALTH};
use testbed::lab::Family;
use testbed::wall_clock::WallClock;
use testbed::watched_lab::WatchedLab;

use crate::faults::fixture::{PORT, Run};

const DAY: i64 = 86_400;
/// Steps in seconds from the true time.
const STEPS: [(&str, i64); 4] = [
    ("a day on", DAY),
    ("a day back", -DAY),
    ("ten years on", 3_652 * DAY),
    ("right again", 0),
];

#[test]
fn steps_of_the_wall_clock_change_nothing() -> Result<()> {
    let fixture = WatchedLab::start(PORT)?;
    let clock = WallClock::new(fixture.lab.dir())?;
    let run = Run::start_by(&fixture, Some(clock.env()))?;
    let sticky = Service::new("sticky", 30, &["p1b", "p2a", "p2b"], PORT).affinity(10_800);
    fixture.put_service(&sticky)?;
    run.recovers("a Service with affinity")?;
    let backends = || {
        Family::ALL
            .into_iter()
            .map(|family| ask(&run, &sticky, family))
            .collect::<Result<Vec<_>>>()
    };
    let before = backends()?;
    let steps = STEPS.into_iter().try_for_each(|(step, secs)| {
        clock.set(secs)?;
        wait_until(DEADLINE, "kpx has that time", || {
            Ok((agents_time(&run)? - secs).abs() < 60)
        })
        .context(step)?;
        run.change()?;
        run.recovers(&format!("the clock is {step}"))?;
        // Certificates are validated against the new time.
        run.api().cut_watches();
        run.change()?;
        run.recovers(&format!("new watches, the clock is {step}"))?;
        run.pass(Duration::from_millis(500), |_| {
            ensure!(
                backends()? == before,
                "the clock is {step}: affinity is lost"
            );
            Ok(())
        })?;
        run.is_well().context(step)
    });
    steps.with_context(|| run.log())?;
    run.stop()
}

fn ask(run: &Run, service: &Service, family: Family) -> Result<String> {
    let dial = Dial::new(Protocol::Tcp, service.frontend(family));
    let answer = dial.exchange(&run.fixture.lab.host("p1a").ns, b"hello");
    Ok(answer
        .with_context(|| format!("{} by {family}", service.name))?
        .backend)
}

/// Returns the agent's time minus the true time, in seconds.
fn agents_time(run: &Run) -> Result<i64> {
    let body = http::ask(&run.fixture.lab.n1.host.ns, HEALTH, "GET", "/healthz")?.body;
    let answer: serde_json::Value =
        serde_json::from_str(&body).context("the answer of /healthz")?;
    let time: Timestamp = answer["currentTime"]
        .as_str()
        .context("its time")?
        .parse()?;
    Ok(time.as_second() - Timestamp::now().as_second())
}
