//! An agent that is stopped, starved or killed. Packets need no agent.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use serde_json::json;
use testbed::agent::{Object, Service, wait_until};
use testbed::echo::{Dial, Protocol};
use testbed::lab::Family;
use testbed::limits::{CPU, Limits, MEMORY};

use crate::churn::fixture::{Fixture, PORT, PROMPT, Running, TRY};

/// The time without an agent, longer than the agent's periods except the sweep's.
pub(crate) const STILL: Duration = Duration::from_secs(5);
pub(crate) const CLIENTS: [&str; 3] = ["p1a", "n1", "x"];

pub(super) fn stopped_agent_keeps_serving_and_catches_up(running: &Running) -> Result<()> {
    let Running { fixture, kpx, .. } = running;
    let mut kept = fixture.connect("p1a", Family::V4)?;
    kill(kpx.pid(), Signal::SIGSTOP)?;
    // The agent reads the change once it runs again.
    fixture.put(&late())?;
    serves_for(STILL, fixture).context("while the agent stands still")?;
    kept.exchange(b"while the agent stands still")?;
    ensure!(
        !serves_late(fixture),
        "no agent can have written the new Service"
    );
    kill(kpx.pid(), Signal::SIGCONT)?;
    wait_until(PROMPT, "the new Service is served", || {
        Ok(serves_late(fixture))
    })?;
    kpx.wait(PROMPT, "healthy", |status| status.healthy)?;
    kept.exchange(b"after that")?;
    remove_late(fixture)
}

pub(super) fn starved_agent_keeps_serving_and_follows_late(running: &Running) -> Result<()> {
    let Running { fixture, kpx, .. } = running;
    let mut kept = fixture.connect("p1a", Family::V4)?;
    // One per cent of a core.
    let starved = Limits::around(kpx.pid(), &CPU, 1_000)?;
    fixture.put(&late())?;
    fixture
        .all_served(&CLIENTS)
        .context("while the agent starves")?;
    kept.exchange(b"while the agent starves")?;
    wait_until(Duration::from_secs(60), "the new Service is served", || {
        Ok(serves_late(fixture))
    })?;
    drop(starved);
    kpx.wait(PROMPT, "healthy", |status| status.healthy)?;
    remove_late(fixture)
}

#[test]
fn agent_killed_for_its_memory_costs_no_connection() -> Result<()> {
    let fixture = Fixture::new()?;
    let mut kpx = fixture.kpx("tcx")?;
    let mut kept = fixture.connect("p1a", Family::V4)?;
    let limited = Limits::around(kpx.pid(), &MEMORY, 4 << 20)?;
    fixture.put(&late())?;
    grow(&fixture)?;
    let ended = kpx.ended(Duration::from_secs(60))?;
    ensure!(!ended.success(), "{ended}");
    drop(limited);
    fixture.all_served(&CLIENTS).context("without an agent")?;
    kept.exchange(b"without an agent")?;
    let next = fixture.kpx("tcx")?;
    kept.exchange(b"with the next")?;
    fixture.all_served(&CLIENTS).context("with the next")?;
    wait_until(PROMPT, "the new Service is served", || {
        Ok(serves_late(&fixture))
    })?;
    next.stop()
}

/// Dials repeatedly for this time; every dial must be answered.
pub(crate) fn serves_for(time: Duration, fixture: &Fixture) -> Result<()> {
    let started = Instant::now();
    while started.elapsed() < time {
        fixture.all_served(&CLIENTS)?;
    }
    Ok(())
}

/// Gives the agent more Services than it has memory for.
pub(crate) fn grow(fixture: &Fixture) -> Result<()> {
    (0..20).try_for_each(|nth| {
        let ports: Vec<_> = (1..1_000)
            .map(|n| json!({ "name": format!("p{n}"), "port": n, "protocol": "TCP" }))
            .collect();
        let ip = format!("10.96.9.{nth}");
        fixture.cluster.put(&Object(json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": format!("grown-{nth}"), "namespace": "default" },
            "spec": { "clusterIP": ip, "clusterIPs": [ip], "ports": ports },
        })))
    })
}

/// Returns a Service that arrives while the agent cannot react.
pub(crate) fn late() -> Service {
    Service::new("late", 11, &["p1b"], PORT)
}

pub(crate) fn serves_late(fixture: &Fixture) -> bool {
    let to = late().frontend(Family::V4);
    let dial = Dial::new(Protocol::Tcp, to).deadline(TRY);
    dial.exchange(&fixture.lab.host("p1a").ns, b"hello").is_ok()
}

/// Removes the Service of [`late`], and waits until the agent has done so too.
fn remove_late(fixture: &Fixture) -> Result<()> {
    fixture.delete(&late())?;
    wait_until(PROMPT, "the new Service is gone", || {
        Ok(!serves_late(fixture))
    })
}
