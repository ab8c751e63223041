//! The API server sends invalid events, or almost nothing, and closes connections in good order.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use proxy_common::addr::Addr as _;
use testbed::agent::{DEADLINE, Service, wait_until};
use testbed::apiserver::Garbage;
use testbed::lab::Family;

use crate::faults::fixture::{PORT, Run};
use crate::faults::storms::lists;

/// A line of the maximum length, its text, and the allocator's rounding.
const LINE_KIB: u64 = 80 << 10;

pub(crate) fn is_sent(run: &Run) -> Result<()> {
    connections_retire(run)?;
    line_never_ends(run)?;
    bytes_trickle(run)
}

/// An HTTP/2 server announces this by GOAWAY. kpx speaks HTTP/1.1, with a connection per watch.
fn connections_retire(run: &Run) -> Result<()> {
    run.change()?;
    run.recovers("a change")?;
    let before = lists(run);
    for _ in 0..3 {
        run.api().retire_connections()?;
        run.change()?;
        run.recovers("connections that end with their answer")?;
    }
    run.api()
        .end_watches_after(Some(Duration::from_millis(300)));
    run.api().cut_watches();
    run.pass(Duration::from_secs(2), |_| {
        run.api().retire_connections()?;
        run.change()
    })?;
    run.api().heal();
    run.recovers("watches and connections that end in good order")?;
    ensure!(lists(run) == before, "a connection's end cost a list");
    ensure!(
        run.api().traffic().by_http2() == 0,
        "kpx spoke HTTP/2: test GOAWAY"
    );
    run.is_well()
}

/// The line costs at most its maximum memory, and no other watch.
fn line_never_ends(run: &Run) -> Result<()> {
    let before = peak_memory(run)?;
    run.api()
        .garble_watches("endpointslices", Garbage::EndlessLine);
    run.api().cut_watches();
    run.reports(DEADLINE, "EndpointSlice watch", "an event of more than")?;
    is_learned(run, &Service::new("beside-endless", 40, &[], PORT))?;
    run.pass(Duration::from_secs(2), |_| Ok(()))?;
    let after = peak_memory(run)?;
    println!(
        "a line without end: {} MiB more at the peak",
        (after - before) >> 10
    );
    ensure!(
        after - before < LINE_KIB,
        "memory grew from {before} to {after} KiB"
    );
    run.api().heal();
    run.change()?;
    run.recovers("a line without end")?;
    run.is_well()
}

fn bytes_trickle(run: &Run) -> Result<()> {
    let moved = Service::new("moved", 41, &["p1b"], PORT);
    run.fixture.put_service(&moved)?;
    run.recovers("a Service")?;
    run.api().garble_watches("services", Garbage::Trickle);
    run.api().cut_watches();
    run.pass(Duration::from_secs(1), |_| Ok(()))?;
    // Only its slices differ.
    run.fixture.put_service(&moved.backed_by(&["p2a"]))?;
    run.recovers("a slice beside a watch that trickles")?;
    run.change()?;
    run.pass(Duration::from_secs(1), |_| Ok(()))?;
    run.api().heal();
    run.recovers("a watch that trickles")?;
    run.is_well()
}

/// Checks that the watch of Services continues.
fn is_learned(run: &Run, service: &Service) -> Result<()> {
    run.fixture.put_service(service)?;
    let ip = service.frontend(Family::V4).ip();
    let is_there = || {
        Ok(run
            .tables()?
            .v4
            .services
            .keys()
            .any(|key| ip == key.addr.ip()))
    };
    wait_until(DEADLINE, "the Service is learned", is_there)
}

/// Returns the agent's peak memory in KiB.
fn peak_memory(run: &Run) -> Result<u64> {
    let path = format!("/proc/{}/status", run.pid());
    let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))
        .context("no VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").parse()?)
}
