//! A BPF file system that is unmounted under a running agent, in mounts of the test's own.

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use testbed::agent::{Agent, wait_until};
use testbed::lab::Family;
use testbed::mounts::{MOUNT_BPF, Mounts};

use crate::churn::fixture::{Fixture, PROMPT, repairs};
use crate::faults::process::{CLIENTS, serves_for};

/// Two of the agent's checks of its pins.
const LOOKS: Duration = Duration::from_millis(2_500);
/// The agent holds an open file there, so the mount ends with the agent.
const UNMOUNT: &str = "umount --lazy /sys/fs/bpf";

#[test]
fn unmounted_bpf_file_system_costs_no_connection_while_the_agent_runs() -> Result<()> {
    // The two runs mostly wait, so they run in parallel.
    thread::scope(|scope| {
        let runs = ["tcx", "clsact"].map(|attach| (attach, scope.spawn(move || survives(attach))));
        runs.into_iter().try_for_each(|(attach, run)| {
            run.join()
                .map_err(|_| anyhow!("it panicked"))
                .flatten()
                .with_context(|| format!("by {attach}"))
        })
    })
}

fn survives(attach: &str) -> Result<()> {
    let fixture = Fixture::new()?;
    let mounts = Mounts::new()?;
    let kpx = start(&mounts, &fixture, attach)?;
    let mut kept = fixture.connect("p1a", Family::V4)?;
    let reported = |kpx: &Agent<'_>| {
        kpx.wait(PROMPT, "it is reported", |status| {
            status
                .problems
                .iter()
                .any(|p| p.why.contains("was unmounted"))
        })
    };
    mounts.sh(UNMOUNT)?;
    reported(&kpx)?;
    serves_for(LOOKS, &fixture).context("without a BPF file system")?;
    kept.exchange(b"without a BPF file system")?;
    ensure!(
        repairs(&kpx, "program")? == 0.0,
        "a program was taken off:\n{}",
        kpx.log()
    );

    mounts.sh(MOUNT_BPF)?;
    kpx.wait(PROMPT, "nothing is wrong", |status| {
        status.healthy && status.problems.is_empty()
    })?;
    kpx.crash()?;
    kept.exchange(b"without an agent")?;
    fixture.all_served(&CLIENTS).context("without an agent")?;
    let kpx = start(&mounts, &fixture, attach)?;
    kept.exchange(b"with the next")?;

    // The agent ends before the file system is mounted again. Filters stay, links go.
    mounts.sh(UNMOUNT)?;
    reported(&kpx)?;
    kpx.crash()?;
    let stays = attach == "clsact";
    wait_until(PROMPT, "programs go or stay", || {
        Ok(fixture.serves(&["p1a"]) == stays)
    })?;
    mounts.sh(MOUNT_BPF)?;
    let kpx = start(&mounts, &fixture, attach)?;
    fixture
        .all_served(&CLIENTS)
        .context("with a new BPF file system")?;
    ensure!(
        kept.exchange(b"after all that").is_ok() == stays,
        "the old connection"
    );
    kpx.stop()
}

/// Starts kpx in these mounts, like [`Fixture::kpx`].
fn start<'a>(mounts: &Mounts, fixture: &'a Fixture, attach: &str) -> Result<Agent<'a>> {
    let source = fixture.cluster.source();
    let args = ["--attach", attach, "--iptables-sync-period", "1s"];
    Agent::launch_by(
        Some(mounts.enter()),
        &fixture.lab,
        &fixture.lab.n1.host,
        source,
        &args,
    )?
    .healthy()
}
