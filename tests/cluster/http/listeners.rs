//! Addresses that cannot be bound.

use std::net::TcpListener;

use anyhow::{Context, Result, ensure};
use testbed::agent::{DEADLINE, wait_until};
use testbed::http::{HEALTH, METRICS};

use crate::http::fixture::Fixture;

#[test]
fn an_address_that_is_taken_is_a_problem_until_it_is_free() -> Result<()> {
    let cluster = Fixture::start("taken")?;
    let taken = cluster
        .ns
        .run(|| ["127.0.0.1:10256", METRICS].map(TcpListener::bind));
    let kpx = cluster.kpx("--healthz-bind-address 127.0.0.1:10256")?;
    for (what, at) in [("health server", HEALTH), ("metrics server", METRICS)] {
        wait_until(DEADLINE, &format!("the {what} is a problem"), || {
            Ok(kpx.problem(what)?.is_some())
        })?;
        let why = kpx.problem(what)?.context("no problem")?;
        ensure!(
            why.starts_with(&format!("listen on {at}: Address already in use")),
            "{why}"
        );
    }
    drop(taken);
    wait_until(DEADLINE, "both answer", || {
        Ok([HEALTH, METRICS].iter().all(|at| {
            cluster
                .get(at, "/healthz")
                .is_ok_and(|answer| answer.code == 200)
        }))
    })?;
    ensure!(
        kpx.typed_status()?.problems.is_empty(),
        "{:?}",
        kpx.typed_status()?.problems
    );
    kpx.stop()
}

#[test]
fn a_required_address_that_is_taken_ends_kpx() -> Result<()> {
    let cluster = Fixture::start("hard")?;
    for (at, what) in [
        ("0.0.0.0:10256", "health server"),
        (METRICS, "metrics server"),
    ] {
        let taken = cluster.ns.run(|| TcpListener::bind(at))?;
        let mut kpx = cluster.spawn("--bind-address-hard-fail --cleanup-on-exit")?;
        let end = kpx.ended(DEADLINE)?;
        ensure!(end.code() == Some(1), "{end}: {}", cluster.log());
        let message = format!("kpx: {what}: listen on {at}: Address already in use");
        ensure!(
            cluster.log().contains(&message),
            "no {message:?} in {}",
            cluster.log()
        );
        ensure!(
            !cluster
                .ns
                .exec(std::process::Command::new("ip").args(["link", "show"]))?
                .contains("kpx"),
            "left over"
        );
        drop(taken);
    }
    Ok(())
}

#[test]
fn servers_listen_only_at_the_configured_address() -> Result<()> {
    let cluster = Fixture::start("own")?;
    let kpx = cluster
        .healthy_kpx("--healthz-bind-address [::1]:10256 --metrics-bind-address [::]:10249")?;
    ensure!(
        cluster.get("[::1]:10256", "/livez")?.code == 200 && cluster.get(HEALTH, "/livez").is_err()
    );
    ensure!(
        cluster.get("[::1]:10249", "/proxyMode")?.code == 200
            && cluster.get(METRICS, "/proxyMode")?.code == 200
    );
    kpx.stop()
}
