//! The API server is down, loses its history, and ends watches, while endpoints change.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::Scale;
use super::endpoints::{History, Turns};
use super::fixture::Fixture;
use super::kpx::AnyAgent;
use super::report::Report;
use testbed::agent::Cluster;
use testbed::apiserver::History as Versions;

/// Time limit for the kernel's tables to match the objects after the API server's return.
const RECOVERY: Duration = Duration::from_secs(1);
/// The number of watches per round that the server answers with "too old".
const STORM: u32 = 20;
/// The duration of watches that flap.
const LIFE: Duration = Duration::from_millis(200);
/// The minimum duration of a storm or of flapping.
const SPELL: Duration = Duration::from_secs(3);

/// The faults of the API server, in sequence in every round.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// The server is down for this time, and accepts old versions afterwards.
    Gone(Duration),
    /// The server is down for this time, and answers old versions with 410 afterwards.
    Forgetful(Duration),
    /// The server answers all watches with 410.
    Storm,
    /// The server ends every watch after a moment.
    Flaps,
}

/// `outage` is the length of each downtime.
pub fn outage(scale: Scale, outage: Duration) -> Result<Report> {
    let mut fixture = Fixture::build(scale.place)?;
    let history = History::default();
    // Started without the fixture, whose cluster fails later.
    let agent = AnyAgent::start(&fixture.home, &fixture.lab, fixture.cluster.source(), &[])?;
    let mut turns = Turns::new(&history);
    turns.next(&fixture, agent.pid())?;
    let load = fixture.load(scale.rate, history.judge())?;
    let started = Instant::now();
    let mut recoveries = Vec::new();
    while recoveries.is_empty() || started.elapsed() < scale.at_least {
        for fault in [
            Fault::Gone(outage),
            Fault::Forgetful(outage),
            Fault::Storm,
            Fault::Flaps,
        ] {
            fault.inject(&mut fixture.cluster, |cluster| {
                turns.change_in(cluster, &fixture.web, &fixture.lab)
            })?;
            let over = Instant::now();
            turns.wait(&fixture, agent.pid())?;
            recoveries.push((fault, over.elapsed()));
        }
    }
    let seen = load.finish()?;
    agent.stop()?;
    let times = recoveries.len();
    let changes = turns.changes;
    let what =
        format!("the API server failed {times} times, {changes} EndpointSlices changed meanwhile");
    let mut report = Report::new("outage", what, &seen);
    for (fault, recovery) in recoveries {
        let what =
            format!("{fault:?}: the tables equal the objects {recovery:.3?} after it was over");
        report.note(what.clone());
        report.in_time(recovery <= RECOVERY, what);
    }
    Ok(report)
}

impl Fault {
    /// Injects the fault, and changes objects by `change` during it.
    fn inject(
        self,
        cluster: &mut Cluster,
        mut change: impl FnMut(&Cluster) -> Result<()>,
    ) -> Result<()> {
        match self {
            Self::Gone(outage) | Self::Forgetful(outage) => {
                cluster.server()?.stop()?;
                thread::sleep(outage / 2);
                change(cluster)?;
                thread::sleep(outage / 2);
                let versions = if matches!(self, Self::Gone(_)) {
                    Versions::Kept
                } else {
                    Versions::Lost
                };
                cluster.server()?.start_again(versions)
            }
            Self::Storm => {
                for _ in 0..STORM {
                    cluster.server()?.compact();
                    cluster.server()?.expire_watches();
                    change(cluster)?;
                    thread::sleep(SPELL / STORM);
                }
                Ok(())
            }
            Self::Flaps => {
                cluster.server()?.end_watches_after(Some(LIFE));
                cluster.server()?.cut_watches();
                thread::sleep(SPELL);
                change(cluster)?;
                cluster.server()?.end_watches_after(None);
                Ok(())
            }
        }
    }
}
