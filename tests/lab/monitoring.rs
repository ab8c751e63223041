//! Dashboard and alerts: well-formed, and based on series that a running kpx has.

mod files;
mod query;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpStream;

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, Cluster, DEADLINE, Service, wait_until};
use testbed::exposition::{Exposition, parse};
use testbed::lab::{Lab, Layout};
use testbed::netns::NetNs;

/// Requests that create series which are otherwise absent.
const ASKED: [(&str, &str); 2] = [
    ("127.0.0.1:10256", "/healthz"),
    ("127.0.0.1:10256", "/livez"),
];

#[test]
fn every_query_is_about_series_that_kpx_has() -> Result<()> {
    let lab = Lab::start(Layout::Routed)?;
    let cluster = Cluster::with_api_server(&lab)?;
    let agent = Agent::start_with(
        &lab,
        &lab.n1,
        cluster.source(),
        &["--bpf-stats", "--service-metrics"].map(str::to_owned),
    )?;
    for object in Service::new("web", 11, &["p1a", "p2a"], 8080).objects(&lab) {
        cluster.put(&object)?;
    }
    let ns = &lab.n1.host.ns;
    for (address, path) in ASKED {
        get(ns, address, path)?;
    }
    wait_until(
        DEADLINE,
        "a sync of what has changed, a sweep, and a sample of Services",
        || {
            let metrics = scrape(ns)?;
            let names = [
                "kubeproxy_sync_partial_proxy_rules_duration_seconds",
                "kpx_flows",
                "kpx_service_connections_total",
            ];
            Ok(names.iter().all(|name| has(&metrics, name)))
        },
    )?;
    let metrics = scrape(ns)?;
    let mut asked = BTreeSet::new();
    for (place, text) in files::queries()? {
        for selector in query::selectors(&text).with_context(|| format!("{place}: {text}"))? {
            query::check(&selector, &metrics).with_context(|| format!("{place}: {text}"))?;
            asked.insert(selector.name);
        }
    }
    // The dashboard shows each of kpx's own metrics, except a deprecated name that lasts for one
    // release.
    let own = metrics
        .iter()
        .filter(|(name, _)| name.starts_with("kpx_") && name.as_str() != "kpx_mended_total");
    let shown = |name: &str| asked.iter().any(|asked| asked.starts_with(name));
    let hidden: Vec<_> = own
        .map(|(name, _)| name)
        .filter(|name| !shown(name))
        .collect();
    ensure!(
        hidden.is_empty(),
        "no panel and no alert asks for {hidden:?}"
    );
    agent.stop()
}

fn has(metrics: &Exposition, name: &str) -> bool {
    metrics
        .get(name)
        .is_some_and(|metric| !metric.samples.is_empty())
}

fn scrape(ns: &NetNs) -> Result<Exposition> {
    parse(&get(ns, "127.0.0.1:10249", "/metrics")?)
}

/// Returns the body of an answer.
fn get(ns: &NetNs, address: &str, path: &str) -> Result<String> {
    let ask = || -> Result<String> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(DEADLINE))?;
        write!(stream, "GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("no answer by HTTP")?;
        ensure!(head.contains(" 200 "), "{head}");
        Ok(body.to_owned())
    };
    ns.run(ask)
        .with_context(|| format!("get {path} of {address}"))
}
