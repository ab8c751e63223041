//! An idle agent, which must sleep.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, idle};
use testbed::netns::NetNs;

use std::time::Duration;

/// The time after which a start has no more effects, and the time of observation.
const SETTLED: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_secs(10);

/// The test counts wakes instead of time, which is independent of other load on the machine.
#[test]
fn agent_with_nothing_to_do_wakes_a_few_times_a_second() -> Result<()> {
    const A_SECOND: u64 = 60;
    let node = NetNs::create(format!("kpx-rest-{}", std::process::id()))?;
    node.ip(
        "link add eth0 type veth peer name eth1\nlink set eth0 up\naddr add 192.0.2.1/24 dev eth0",
    )?;
    let agent = Agent::start_alone(node, &[], "--node-ip 192.0.2.1 --service-cidr 10.96.0.0/16")?;
    idle(SETTLED)?;
    let before = wakes(&agent)?;
    idle(LOOK)?;
    let after = wakes(&agent)?;
    let woken = |(thread, wakes): (&u32, &u64)| wakes - before.get(thread).unwrap_or(&0);
    let woken: u64 = after.iter().map(woken).sum();
    ensure!(
        woken <= LOOK.as_secs() * A_SECOND,
        "{woken} wakes in {LOOK:?}; before {before:?}, after {after:?}"
    );
    agent.stop()
}

/// Returns the number of times that each thread of an agent has slept.
fn wakes(agent: &Agent) -> Result<BTreeMap<u32, u64>> {
    let mut wakes = BTreeMap::new();
    for thread in fs::read_dir(format!("/proc/{}/task", agent.pid())).context("list threads")? {
        let thread = thread?;
        // A thread may have ended.
        let Ok(text) = fs::read_to_string(thread.path().join("status")) else {
            continue;
        };
        let number = text
            .lines()
            .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        let number = number
            .and_then(|number| number.trim().parse().ok())
            .context("no number of switches")?;
        let thread = thread
            .file_name()
            .to_string_lossy()
            .parse()
            .context("the number of a thread")?;
        wakes.insert(thread, number);
    }
    Ok(wakes)
}
