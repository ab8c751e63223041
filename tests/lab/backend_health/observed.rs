//! Silent backends under the default settings: the node reports them and keeps using them.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed::agent::{Agent, DEADLINE, Service, wait_until};
use testbed::http::scrape;
use testbed::lab::Layout;
use testbed::served_lab::ServedLab;

use super::{CUT, HEAL, Lab, PORT};

#[test]
fn node_reports_silent_backends_and_keeps_them_by_default() -> Result<()> {
    let (base, [web, asks]) = served()?;
    let agent = base.kpx(&[])?;
    let lab = Lab {
        base: &base,
        agent: &agent,
    };
    let silent = || counted(&agent);
    ensure!(silent()? == [0.0, 0.0]);

    base.lab.host("p2a").ns.nft(CUT)?;
    lab.until_ejected(&asks, &["p2a"])
        .context("a Service that asks for it")?;
    lab.is_silent(&web, "p2a")?;
    ensure!(lab.ejected(&web)?.is_empty(), "{:?}", lab.ejected(&web)?);
    wait_until(
        DEADLINE,
        "the metric has two backends in use and two ejected",
        || Ok(silent()? == [2.0, 2.0]),
    )
    .with_context(|| format!("{:?}", silent()))?;
    let times = lab.dial(&web, 24, Duration::from_millis(2_500));
    ensure!(
        times.is_err() || times?.iter().any(|time| *time > Duration::from_millis(900)),
        "new ones go there as before"
    );
    let api = base.cluster.api_server()?;
    let is_reported = |reason: &str, service: &Service| {
        let is_it =
            |event: &Value| event["reason"] == reason && event["regarding"]["name"] == service.name;
        api.list("events.events.k8s.io").iter().any(is_it)
    };
    for service in [&web, &asks] {
        wait_until(DEADLINE, "an Event reports the silent backend", || {
            Ok(is_reported("BackendsSilent", service))
        })
        .with_context(|| format!("{:?}", api.list("events.events.k8s.io")))?;
    }
    ensure!(!is_reported("BackendsAnswer", &web));

    base.lab.host("p2a").ns.nft(HEAL)?;
    wait_until(DEADLINE, "no backend is silent", || {
        for service in [&web, &asks] {
            lab.dial(service, 12, Duration::from_secs(3))?;
        }
        Ok(silent()? == [0.0, 0.0])
    })?;
    wait_until(DEADLINE, "an Event reports the answer", || {
        Ok(is_reported("BackendsAnswer", &web))
    })?;
    agent.stop()
}

/// Serves a Service without an annotation, and a Service with the mode `on`.
fn served() -> Result<(ServedLab, [Service; 2])> {
    let backends = ["p1b", "p2a", "p2b"];
    let base = ServedLab::with_api_server(Layout::Routed)?.serve(&backends, PORT)?;
    let web = Service::new("web", 10, &backends, PORT);
    let asks = Service::new("asks", 11, &backends, PORT).annotation("kpx.dev/backend-health", "on");
    [&web, &asks]
        .into_iter()
        .try_for_each(|service| base.put(service))?;
    Ok((base, [web, asks]))
}

/// Returns the silent backends of the metric: those still in use, and those ejected.
fn counted(agent: &Agent<'_>) -> Result<[f64; 2]> {
    let metrics = scrape(agent.ns())?;
    let samples = &metrics
        .get("kpx_silent_backends")
        .context("no kpx_silent_backends")?
        .samples;
    let of = |state: &str| {
        samples
            .iter()
            .find(|sample| sample.labels.get("state").is_some_and(|is| is == state))
    };
    let value = |state| {
        of(state)
            .map(|sample| sample.value)
            .with_context(|| format!("no state {state}"))
    };
    let ejected = value("ejected")?;
    ensure!(
        value("set_aside")? == ejected,
        "the name in the previous release"
    );
    Ok([value("serving")?, ejected])
}

#[test]
fn node_in_mode_off_judges_backends_of_services_that_ask_alone() -> Result<()> {
    let (base, [web, asks]) = served()?;
    let agent = base.kpx(&["--backend-health=off"])?;
    let lab = Lab {
        base: &base,
        agent: &agent,
    };
    base.lab.host("p2a").ns.nft(CUT)?;
    for _ in 0..3 {
        let _some_fail = lab.dial(&web, 24, Duration::from_millis(2_500));
    }
    lab.until_ejected(&asks, &["p2a"])
        .context("a Service that asks for it")?;
    wait_until(DEADLINE, "the metric has those of one Service", || {
        Ok(counted(&agent)? == [0.0, 2.0])
    })
    .with_context(|| format!("{:?}", counted(&agent)))?;
    let silent = agent.typed_status()?.silent_backends;
    ensure!(
        silent.len() == 2 && silent.iter().all(|silent| silent.service == "default/asks"),
        "{silent:?}"
    );
    base.lab.host("p2a").ns.nft(HEAL)?;
    let api = base.cluster.api_server()?;
    let reported = |reason: &'static str| {
        let events = api.list("events.events.k8s.io").into_iter();
        events
            .filter(move |event| event["reason"] == reason)
            .collect::<Vec<_>>()
    };
    wait_until(
        DEADLINE,
        "an Event reports that the backend answers",
        || {
            lab.dial(&asks, 12, Duration::from_secs(3))?;
            Ok(!reported("BackendsAnswer").is_empty())
        },
    )?;
    let reported = reported("BackendsSilent");
    ensure!(
        !reported.is_empty()
            && reported
                .iter()
                .all(|event| event["regarding"]["name"] == "asks"),
        "{reported:?}"
    );
    agent.stop()
}
