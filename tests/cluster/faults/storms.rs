//! The API server answers, but its answers do not last.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use testbed::agent::DEADLINE;
use testbed::apiserver::Traffic;

use crate::faults::fixture::Run;

const KINDS: [&str; 4] = ["services", "endpointslices", "nodes", "servicecidrs"];

pub(crate) fn pass(run: &Run) -> Result<()> {
    cut_every_second(run)?;
    gone_all_the_time(run)?;
    disorder(run)?;
    slow_lists(run)
}

fn cut_every_second(run: &Run) -> Result<()> {
    let before = watches(run);
    let since = Instant::now();
    let mut cuts = 0;
    run.pass(Duration::from_secs(6), |passed| {
        if passed.as_secs() >= cuts {
            run.api().cut_watches();
            run.change()?;
            cuts += 1;
        }
        Ok(())
    })?;
    let rate = (watches(run) - before) as f64 / since.elapsed().as_secs_f64();
    println!("watches cut every second: {rate:.1} watches a second");
    ensure!(rate < 7.0, "{rate} watches a second");
    run.recovers("watches cut every second")?;
    run.is_well()
}

fn gone_all_the_time(run: &Run) -> Result<()> {
    let before = lists(run);
    let mut storms = 0;
    run.pass(Duration::from_secs(5), |passed| {
        if passed.as_millis() / 200 >= storms {
            run.api().expire_watches();
            storms += 1;
        }
        Ok(())
    })?;
    run.reports(DEADLINE, "Service watch", "no watch lasts")?;
    let lists = lists(run) - before;
    println!("410 storm of 5 s: {lists} lists of four kinds");
    ensure!((4..=64).contains(&lists), "{lists} lists");
    run.change()?;
    run.recovers("410 storm")?;
    run.is_well()
}

/// Every event twice, and old events after new ones.
fn disorder(run: &Run) -> Result<()> {
    let before = lists(run);
    run.api().disorder();
    run.api().cut_watches();
    for _ in 0..4 {
        run.change()?;
        run.recovers("events in disorder")?;
    }
    ensure!(lists(run) - before <= 40, "{} lists", lists(run) - before);
    run.api().heal();
    run.api().cut_watches();
    run.change()?;
    run.recovers("order again")?;
    run.is_well()
}

/// A list counts only when it is complete.
fn slow_lists(run: &Run) -> Result<()> {
    const TIME: Duration = Duration::from_secs(3);
    let tables = run.tables()?;
    let before = lists(run);
    run.api().trickle_lists(TIME);
    run.api().compact();
    run.api().cut_watches();
    run.change()?;
    run.pass(TIME / 2, |_| Ok(()))?;
    ensure!(lists(run) > before, "nothing was listed");
    ensure!(
        run.tables()? == tables,
        "half a list has changed the tables"
    );
    run.recovers("slow lists")?;
    run.api().heal();
    run.is_well()
}

pub(crate) fn lists(run: &Run) -> usize {
    of_all_kinds(run, Traffic::lists)
}

fn watches(run: &Run) -> usize {
    of_all_kinds(run, |traffic, kind| traffic.requests("watch", kind))
}

fn of_all_kinds(run: &Run, count: impl Fn(&Traffic, &str) -> usize) -> usize {
    let traffic = run.api().traffic();
    KINDS.iter().map(|kind| count(&traffic, kind)).sum()
}
