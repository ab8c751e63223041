//! kpx's credentials, its server's identity, and its permissions.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use testbed::agent::{DEADLINE, wait_until};
use testbed::apiserver::{History, Login};

use crate::faults::fixture::Run;

pub(crate) fn expire_and_are_refused(run: &Run) -> Result<()> {
    ensure!(
        run.log().contains("the API server refuses Events"),
        "events are forbidden, and the log does not say so"
    );
    partial_permissions(run)?;
    expired_server_certificate(run)?;
    refused_token(run)?;
    expired_client_certificate(run)
}

fn partial_permissions(run: &Run) -> Result<()> {
    for (resource, what) in [
        ("endpointslices", "EndpointSlice watch"),
        ("nodes", "Node watch"),
    ] {
        for verb in ["list", "watch"] {
            run.api().fail(verb, resource, 403);
        }
        run.api().cut_watches();
        run.reports(DEADLINE, what, "403")?;
        let before = run.api().traffic().requests("watch", resource)
            + run.api().traffic().requests("list", resource);
        let since = Instant::now();
        run.change()?;
        run.pass(Duration::from_secs(2), |_| Ok(()))?;
        let asked = run.api().traffic().requests("watch", resource)
            + run.api().traffic().requests("list", resource);
        ensure!(
            asked - before <= 6,
            "{} requests in {:?}",
            asked - before,
            since.elapsed()
        );
        run.api().heal();
        run.recovers(&format!("{resource} forbidden"))?;
        run.is_well()?;
    }
    Ok(())
}

fn expired_server_certificate(run: &Run) -> Result<()> {
    run.api().expire_certificate(true)?;
    run.fixture.api_mut().stop()?;
    run.fixture.api_mut().start_again(History::Kept)?;
    run.reports(DEADLINE, "Service watch", "certificate expired")?;
    run.change()?;
    run.pass(Duration::from_secs(2), |_| Ok(()))?;
    run.api().expire_certificate(false)?;
    run.recovers("expired server certificate")?;
    run.is_well()
}

/// The token becomes invalid; then the file gets a valid one.
fn refused_token(run: &Run) -> Result<()> {
    run.api().refuse_tokens(true);
    run.api().cut_watches();
    run.reports(DEADLINE, "Service watch", "401")?;
    let before = run.api().traffic().total();
    run.change()?;
    run.pass(Duration::from_secs(2), |_| Ok(()))?;
    ensure!(
        run.api().traffic().total() - before <= 40,
        "{} requests",
        run.api().traffic().total() - before
    );
    login(run, Login::ShortClientCertificate(Duration::from_secs(6)))?;
    run.recovers("credentials rotated on disk")?;
    run.is_well()
}

/// Open connections outlive the certificate; the next connection is refused.
fn expired_client_certificate(run: &Run) -> Result<()> {
    wait_until(
        DEADLINE,
        "the certificate has expired and is refused",
        || {
            run.api().cut_watches();
            run.fixture.api_mut().stop()?;
            run.fixture.api_mut().start_again(History::Kept)?;
            run.pass(Duration::from_millis(1500), |_| Ok(()))?;
            Ok(run
                .reports(Duration::ZERO, "Service watch", "xpired")
                .is_ok())
        },
    )?;
    run.change()?;
    login(run, Login::ClientCertificate)?;
    run.recovers("expired client certificate")?;
    run.api().heal();
    run.is_well()
}

fn login(run: &Run, login: Login) -> Result<()> {
    let url = run.api().url();
    run.api()
        .kubeconfig_for(&run.fixture.kubeconfig, &url, login)
}
