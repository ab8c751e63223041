//! Another program holds RTNL while devices and endpoints change.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use testbed::agent::{Agent, SERVICE_PORT, Service, wait_until};
use testbed::echo::{Dial, Protocol};
use testbed::lab::{EXTERNAL, Family};
use testbed::rtnl::HeldRtnl;

use crate::churn::fixture::{Fixture, PORT, PROMPT, Running, TRY};

const DEVICES: usize = 100;

pub(super) fn endpoints_change_while_the_work_on_devices_waits(running: &Running) -> Result<()> {
    let Running { fixture, kpx, .. } = running;
    let mut devices = String::new();
    for nth in 0..DEVICES {
        writeln!(
            devices,
            "link add burst{nth} type veth peer name away{nth}\nlink set burst{nth} up"
        )?;
    }
    // The agent finds all devices at once, and attaches programs only after the release.
    kill(kpx.pid(), Signal::SIGSTOP)?;
    fixture.node().ip(&devices)?;
    let held = HeldRtnl::hold(kpx.run_dir())?;
    kill(kpx.pid(), Signal::SIGCONT)?;
    change_backends(fixture, held_secs()?)?;
    ensure!(attached(kpx) == 0, "RTNL kept the agent from nothing");
    held.release()?;
    wait_until(PROMPT, "all devices are attached", || {
        Ok(attached(kpx) >= DEVICES)
    })?;
    kpx.wait(PROMPT, "nothing is wrong", |status| {
        status.healthy && status.problems.is_empty()
    })?;

    // This Service needs rules of the host, which wait for RTNL.
    let held = HeldRtnl::hold(kpx.run_dir())?;
    let ips = EXTERNAL.host(9);
    let external = Service::new("external", 12, &["p1b"], PORT).external_ips(ips);
    fixture.put(&external)?;
    change_backends(fixture, Duration::ZERO)?;
    held.release()?;
    for family in Family::ALL {
        let to = (ips.ip(family), SERVICE_PORT).into();
        let dial = Dial::new(Protocol::Tcp, to).deadline(TRY);
        let is_served = || Ok(dial.exchange(fixture.node(), b"hello").is_ok());
        wait_until(PROMPT, &format!("the node reaches {to}"), is_served)?;
    }
    fixture.delete(&external)?;
    fixture.put(&fixture.web)?;
    let devices = (0..DEVICES).map(|nth| format!("link del burst{nth}\n"));
    fixture.node().ip(&devices.collect::<String>())
}

/// Returns the time for which the test holds RTNL while the agent attaches programs: as long as
/// three changes take, or `KPX_RTNL_SECS`.
fn held_secs() -> Result<Duration> {
    let secs = std::env::var("KPX_RTNL_SECS").map_or(Ok(0), |secs| secs.parse());
    secs.map(Duration::from_secs).context("KPX_RTNL_SECS")
}

/// Gives the Service one backend after the other, and waits for each: three times, and until `time`
/// has passed.
fn change_backends(fixture: &Fixture, time: Duration) -> Result<()> {
    let started = Instant::now();
    let mut changes = 0;
    let mut slowest = Duration::ZERO;
    for backend in ["p1b", "p2a", "n1"].into_iter().cycle() {
        if changes >= 3 && started.elapsed() >= time {
            break;
        }
        let changed = Instant::now();
        fixture.put(&fixture.web.backed_by(&[backend]))?;
        let serves = || {
            Ok(Family::ALL
                .into_iter()
                .all(|family| is_served_by(fixture, family, backend)))
        };
        wait_until(PROMPT / 5, &format!("{backend} serves"), serves)
            .context("while RTNL is held")?;
        (changes, slowest) = (changes + 1, slowest.max(changed.elapsed()));
    }
    println!(
        "RTNL held for {:.1?}: {changes} changes, served within {slowest:.1?}",
        started.elapsed()
    );
    Ok(())
}

/// Returns the number of new devices with programs, from the agent's log, because a query of the
/// kernel needs RTNL.
fn attached(kpx: &Agent<'_>) -> usize {
    kpx.log()
        .lines()
        .filter(|line| line.contains("attached") && line.contains("burst"))
        .count()
}

fn is_served_by(fixture: &Fixture, family: Family, backend: &str) -> bool {
    let answer = fixture
        .dial("p1a", family)
        .deadline(TRY)
        .exchange(&fixture.lab.host("p1a").ns, b"hello");
    answer.is_ok_and(|answer| answer.backend == backend)
}
