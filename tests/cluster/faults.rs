//! A node while its API server fails in every known way. The last state stays programmed, kpx
//! reports the reason and limits its requests, and the node recovers with the server.
//!
//! Each group of faults has its own lab and kpx. The groups run in parallel, because they mostly
//! wait.

mod clock;
mod credentials;
mod fixture;
mod garbage;
mod moved;
mod objects;
mod outages;
mod reboot;
mod storms;

use std::thread;

use anyhow::{Context, Result, anyhow};

use testbed::watched_lab::WatchedLab;

use crate::faults::fixture::{PORT, Run};

/// A group of faults, one after the other.
type Group = (&'static str, fn(&Run) -> Result<()>);

const GROUPS: [Group; 6] = [
    ("outages", outages::come_and_go),
    ("silence", outages::the_server_vanishes_without_a_word),
    ("storms", storms::pass),
    ("objects", objects::of_all_sorts),
    ("garbage", garbage::is_sent),
    ("credentials", credentials::expire_and_are_refused),
];

#[test]
fn node_serves_through_every_failure_of_the_api_server() -> Result<()> {
    let results = thread::scope(|scope| {
        let groups = GROUPS.map(|(name, group)| (name, scope.spawn(move || play(group))));
        groups.map(|(name, thread)| match thread.join() {
            Ok(result) => result.with_context(|| name.to_owned()),
            Err(_) => Err(anyhow!("{name}: panicked")),
        })
    });
    let failures: Vec<_> = results
        .into_iter()
        .filter_map(Result::err)
        .map(|error| format!("{error:#}"))
        .collect();
    match failures.is_empty() {
        true => Ok(()),
        false => Err(anyhow!("{}", failures.join("\n\n"))),
    }
}

fn play(group: fn(&Run) -> Result<()>) -> Result<()> {
    let fixture = WatchedLab::start(PORT)?;
    let run = Run::start(&fixture)?;
    group(&run).with_context(|| run.log())?;
    run.stop()
}
