//! The API server, or the proxy in front of it, is unavailable.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testbed::agent::{DEADLINE, wait_until};
use testbed::apiserver::History;

use crate::faults::fixture::Run;

/// Watches of Services, EndpointSlices, ServiceCIDRs, Nodes and Pods.
const WATCHES: f64 = 5.0;
/// The time until kpx has compared its objects with a server that came back.
const COMPARED: Duration = Duration::from_secs(5);

/// A crash with and without loss of history, data restored from a backup, and a load balancer
/// without servers.
pub(crate) fn come_and_go(run: &Run) -> Result<()> {
    let asked = |run: &Run| run.metric("rest_client_requests_total", "");
    let stop = |run: &Run| run.fixture.api_mut().stop();
    let start = |run: &Run, history| run.fixture.api_mut().start_again(history);
    run.change()?;
    run.recovers("a change")?;

    stop(run)?;
    run.reports(DEADLINE, "Service watch", "refused")?;
    ensure!(
        run.metric("kpx_watch_up", "Service")? == 0.0,
        "a watch is up without a server"
    );
    let status = run.status()?;
    ensure!(
        status.starts_with("Health:") && status.contains("healthy; no changes of "),
        "{status}"
    );
    let before = asked(run)?;
    let since = Instant::now();
    run.change()?;
    run.pass(Duration::from_secs(6), |_| Ok(()))?;
    let rate = (asked(run)? - before) / since.elapsed().as_secs_f64();
    println!("server gone: {rate:.1} requests a second");
    ensure!(
        rate < WATCHES * 1.25,
        "{rate} requests a second to a server that is gone"
    );
    start(run, History::Kept)?;
    run.recovers("server gone")?;
    run.is_well()?;
    ensure!(
        run.metric("kpx_watch_up", "Service")? == 1.0,
        "no watch is up"
    );
    ensure!(
        run.metric("kpx_watch_failures_total", "Service")? >= 1.0,
        "no failure was counted"
    );

    (0..6).try_for_each(|_| run.change())?;
    run.recovers("changes")?;
    stop(run)?;
    run.reports(DEADLINE, "Service watch", "refused")?;
    for nth in 0..6 {
        run.api().delete("Service", "default", &format!("s{nth}"))?;
        for family in ["ipv4", "ipv6"] {
            run.api()
                .delete("EndpointSlice", "default", &format!("s{nth}-{family}"))?;
        }
    }
    start(run, History::Lost)?;
    run.recovers("mass deletion, and another history")?;
    is_restored(run)?;
    lets_nobody_in_at_first(run)?;
    hides_behind_a_load_balancer(run)
}

fn is_restored(run: &Run) -> Result<()> {
    let lists = |run: &Run| {
        ["services", "endpointslices"].map(|resource| run.api().traffic().lists(resource))
    };
    let backup = run.api().backup();
    (0..6).try_for_each(|_| run.change())?;
    run.recovers("changes")?;
    run.fixture.api_mut().stop()?;
    for kind in ["Service", "EndpointSlice"] {
        run.reports(DEADLINE, &format!("{kind} watch"), "refused")?;
    }
    let before = lists(run);
    run.api().restore(backup);
    run.fixture.api_mut().start_again(History::Kept)?;
    run.recovers_within(COMPARED, "data restored from a backup")?;
    // Each watch detects by its own check that versions went back, and receives no change before
    // that.
    let relisted = || Ok(std::iter::zip(lists(run), before).all(|(now, before)| now > before));
    wait_until(
        DEADLINE,
        "Services and EndpointSlices are listed again",
        relisted,
    )?;
    run.change()?;
    run.recovers("a change after that")?;
    run.is_well()
}

/// An API server authorizes by objects that it reads after its start; until then it denies
/// everything.
fn lets_nobody_in_at_first(run: &Run) -> Result<()> {
    /// After this time the back-off has grown to at least 8 s.
    const AWAY: Duration = Duration::from_secs(14);
    const COLD: Duration = Duration::from_secs(3);
    let resources = ["services", "endpointslices", "nodes", "servicecidrs"];
    run.fixture.api_mut().stop()?;
    run.reports(DEADLINE, "Service watch", "refused")?;
    run.change()?;
    run.pass(AWAY, |_| Ok(()))?;
    for (verb, resource) in ["list", "watch"]
        .into_iter()
        .flat_map(|verb| resources.map(|resource| (verb, resource)))
    {
        run.api().fail(verb, resource, 403);
    }
    run.fixture.api_mut().start_again(History::Kept)?;
    run.reports(DEADLINE, "Service watch", "403")?;
    run.pass(COLD, |_| Ok(()))?;
    run.api().heal();
    // The rest of that back-off would take longer.
    run.recovers_within(Duration::from_secs(5), "everything denied at first")?;
    run.is_well()
}

/// The load balancer answers with its own Retry-After.
fn hides_behind_a_load_balancer(run: &Run) -> Result<()> {
    for (code, retry_after) in [(503, None), (429, Some(1))] {
        run.api().fail_all(code, retry_after);
        run.api().cut_watches();
        run.reports(DEADLINE, "Service watch", &code.to_string())?;
        run.change()?;
        let before = run.api().traffic().total();
        let since = Instant::now();
        run.pass(Duration::from_secs(3), |_| Ok(()))?;
        let rate = (run.api().traffic().total() - before) as f64 / since.elapsed().as_secs_f64();
        println!("{code}: {rate:.1} requests a second");
        ensure!(
            rate < WATCHES * 1.25,
            "{rate} requests a second to a server that answers {code}"
        );
        run.api().heal();
        run.recovers(&format!("every answer {code}"))?;
        run.is_well()?;
    }
    Ok(())
}

/// No FIN, RST or ICMP, as after a power failure of its host or a loss of a firewall's state.
pub(crate) fn the_server_vanishes_without_a_word(run: &Run) -> Result<()> {
    /// 20 s of TCP keepalive, then one attempt to connect.
    const NOTICED: Duration = Duration::from_secs(33);
    let fabric = &run.fixture.lab.fabric.ns;
    run.change()?;
    run.recovers("a change")?;
    fabric.nft(
        "table inet silence {
            chain input { type filter hook input priority 0; tcp dport 6443 drop; }
            chain output { type filter hook output priority 0; tcp sport 6443 drop; }
        }",
    )?;
    run.change()?;
    let since = Instant::now();
    run.reports(NOTICED, "Service watch", "")?;
    println!(
        "half-open connection noticed after {:.1} s",
        since.elapsed().as_secs_f64()
    );
    run.pass(Duration::from_secs(1), |_| Ok(()))?;
    fabric.nft("delete table inet silence")?;
    run.recovers("silence").context("the server speaks again")?;
    run.is_well()
}
