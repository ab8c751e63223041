//! Maps whose cgroup has no memory left: the kernel refuses new rows of the agent and of the
//! programs.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, Service, wait_until};
use testbed::echo::{Dial, Protocol};
use testbed::lab::Family;
use testbed::limits::{Limits, MEMORY};

use crate::churn::fixture::{Fixture, PORT, PROMPT};
use crate::faults::process::{CLIENTS, grow, late, serves_late};

#[test]
fn maps_without_memory_cost_no_service_that_is_there() -> Result<()> {
    let fixture = Fixture::new()?;
    // No packet has reached these Services yet, so the programs first count them without memory.
    let unmet: Vec<_> = (0..20)
        .map(|nth| Service::new(UNMET[nth], 100 + nth as u8, &["p1b"], PORT))
        .collect();
    unmet.iter().try_for_each(|service| fixture.put(service))?;
    let limits = Limits::new(&std::process::id().to_string(), &MEMORY)?;
    let kpx = started_in(&limits, &fixture)?;
    let mut kept = fixture.connect("p1a", Family::V4)?;
    // The kernel charges the maps to the cgroup in which they were created. The agent leaves it.
    limits.leave()?;
    limits.set(limits.memory()?)?;
    grow(&fixture)?;
    kpx.wait(PROMPT, "the kernel refuses rows", |status| {
        status
            .problems
            .iter()
            .any(|problem| problem.what == "maps" && problem.why.contains("Cannot allocate memory"))
    })?;
    fixture.all_served(&CLIENTS).context("without memory")?;
    kept.exchange(b"without memory")?;
    for (service, family) in unmet
        .iter()
        .flat_map(|service| Family::ALL.map(|family| (service, family)))
    {
        let to = service.frontend(family);
        Dial::new(Protocol::Tcp, to)
            .exchange(&fixture.lab.host("p1a").ns, b"hello")
            .with_context(|| format!("{to}, for the first time"))?;
    }
    fixture.put(&late())?;
    limits.set(1 << 40)?;
    wait_until(PROMPT, "the new Service is served", || {
        Ok(serves_late(&fixture))
    })?;
    kpx.wait(PROMPT, "nothing is wrong", |status| {
        status.healthy && status.problems.is_empty()
    })?;
    kept.exchange(b"with memory again")?;
    ensure!(
        kpx.log().contains("Cannot allocate memory"),
        "the log does not say why"
    );
    kpx.stop()
}

const UNMET: [&str; 20] = [
    "u0", "u1", "u2", "u3", "u4", "u5", "u6", "u7", "u8", "u9", "u10", "u11", "u12", "u13", "u14",
    "u15", "u16", "u17", "u18", "u19",
];

/// Starts kpx in a cgroup, like [`Fixture::kpx`].
fn started_in<'a>(limits: &Limits, fixture: &'a Fixture) -> Result<Agent<'a>> {
    let mut into = Command::new("sh");
    into.args(["-c", "echo $$ > \"$0\" && exec \"$@\""])
        .arg(limits.procs());
    let source = fixture.cluster.source();
    let args = ["--attach", "tcx", "--iptables-sync-period", "1s"];
    Agent::launch_by(
        Some(into),
        &fixture.lab,
        &fixture.lab.n1.host,
        source,
        &args,
    )?
    .healthy()
}
