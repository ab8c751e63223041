//! Hundreds of devices come and go while backends change. The kernel holds its lock on devices in
//! that time.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use testbed::netns::NetNs;

use super::Scale;
use super::endpoints::{History, Turns};
use super::fixture::Fixture;
use super::report::Report;

/// Creates `count` devices at once, and removes them at once with the namespace of their peers.
pub fn devices(scale: Scale, count: u32) -> Result<Report> {
    let fixture = Fixture::build(scale.place)?;
    let agent = fixture.kpx(&[])?;
    let history = History::default();
    let mut turns = Turns::new(&history);
    turns.next(&fixture, agent.pid())?;
    let load = fixture.load(scale.rate, history.judge())?;
    let node = &fixture.lab.n1.host.ns;
    let done = AtomicBool::new(false);
    let started = Instant::now();
    let waited = thread::scope(|scope| {
        let churn = scope.spawn(|| {
            let rounds = (0..)
                .take_while(|round| *round < scale.rounds || started.elapsed() < scale.at_least);
            let result = rounds
                .map(|round| come_and_go(node, round, count))
                .collect::<Result<Vec<_>>>();
            done.store(true, Ordering::Relaxed);
            result
        });
        let other = scope.spawn(|| longest_wait(node, &done));
        while !done.load(Ordering::Relaxed) {
            turns.next(&fixture, agent.pid())?;
        }
        churn
            .join()
            .map_err(|_| anyhow!("the thread of devices panicked"))??;
        other
            .join()
            .map_err(|_| anyhow!("the thread that waits panicked"))?
    })?;
    let lasted = started.elapsed();
    let seen = load.finish()?;
    agent.stop()?;
    let changes = turns.changes;
    let slowest = turns.slowest;
    let rounds = scale.rounds;
    let what = format!(
        "{count} devices came and went {rounds} times in {lasted:.1?}, and `ip link set lo up` took {waited:.1?} at worst; \
         {changes} EndpointSlices changed, in force within {slowest:.1?} at worst"
    );
    Ok(Report::new("devices", what, &seen))
}

fn come_and_go(node: &NetNs, round: u32, count: u32) -> Result<()> {
    let peers = NetNs::create(format!("{}-devices{round}", node.name()))?;
    let mut lines = String::new();
    for nth in 0..count {
        let name = format!("d{round}x{nth}");
        writeln!(
            lines,
            "link add {name} type veth peer name eth{nth} netns {}\nlink set {name} up",
            peers.name()
        )?;
    }
    node.ip(&lines)
}

/// Returns the longest wait of another program for a change of a device.
fn longest_wait(node: &NetNs, done: &AtomicBool) -> Result<Duration> {
    let mut longest = Duration::ZERO;
    while !done.load(Ordering::Relaxed) {
        let begun = Instant::now();
        node.ip("link set lo up")?;
        longest = longest.max(begun.elapsed());
    }
    Ok(longest)
}
