//! Connect times and failed connections: from real connections through the programs' maps to the
//! agent's answers.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use proxy_view::{ConnectView, HistoryView, ServiceView, socket};
use testbed::agent::{Agent, DEADLINE, Service, kpx, wait_until};
use testbed::echo::{Dial, Protocol};
use testbed::exposition::{Sample, parse};
use testbed::lab::{Family, Layout};
use testbed::served_lab::ServedLab;

const PORT: u16 = 8080;
/// No server listens here.
const CLOSED: u16 = 8081;
/// The backend drops the first SYN of each family, and answers the second, which TCP sends after a
/// second.
const SLOW: &str = "table inet slow {
    chain four { type filter hook input priority 0; tcp dport 8080 meta nfproto ipv4 tcp flags & (syn | ack) == syn quota until 90 bytes drop; }
    chain six { type filter hook input priority 0; tcp dport 8080 meta nfproto ipv6 tcp flags & (syn | ack) == syn quota until 110 bytes drop; }
}";

#[test]
#[expect(
    clippy::too_many_lines,
    reason = "every view shows the same connections"
)]
fn connect_times_and_failures_are_told_by_service_and_backend() -> Result<()> {
    let base = ServedLab::with_manifests(Layout::Routed)?.serve(&["p1b", "p2a"], PORT)?;
    let services = [
        Service::new("slow", 10, &["p1b"], PORT),
        Service::new("quick", 11, &["p2a"], PORT),
        Service::new("closed", 12, &["p2a"], CLOSED),
    ];
    services.iter().try_for_each(|service| base.put(service))?;
    base.lab.host("p1b").ns.nft(SLOW)?;
    // Each Service has a port of each protocol, so the limit admits two Services.
    let agent = base.kpx(&["--service-metrics=6"])?;
    // The sum of other Services contains only traffic after the agent's first sample.
    wait_until(DEADLINE, "the first sample", || {
        Ok(!service_series(&agent)?.is_empty())
    })?;
    let client = base.lab.host("p1a");
    for (service, family) in services
        .iter()
        .flat_map(|service| Family::ALL.map(|family| (service, family)))
    {
        let dial =
            Dial::new(Protocol::Tcp, service.frontend(family)).deadline(Duration::from_secs(5));
        let answer = dial.exchange(&client.ns, &[1]);
        ensure!(
            answer.is_ok() == (service.name != "closed"),
            "{} {family:?}: {answer:?}",
            service.name
        );
    }
    let views = views(&agent)?;
    let slow = connect(&views, "slow")?;
    ensure!(
        (slow.connects, slow.failed, slow.retransmitted) == (2, 0, 2),
        "{slow:?}"
    );
    ensure!(
        (2.0..6.0).contains(&slow.connect_secs),
        "each waited for the second SYN: {slow:?}"
    );
    ensure!(
        slow.connect_p50 > Some(0.5) && slow.connect_p99 > Some(0.5),
        "{slow:?}"
    );
    let quick = connect(&views, "quick")?;
    ensure!(
        (quick.connects, quick.failed, quick.retransmitted) == (2, 0, 0),
        "{quick:?}"
    );
    ensure!(
        quick.connect_secs > 0.0 && quick.connect_p99 < Some(0.5),
        "{quick:?}"
    );
    let closed = connect(&views, "closed")?;
    ensure!(
        (closed.connects, closed.failed, closed.connect_p50) == (0, 2, None),
        "{closed:?}"
    );

    let mut history = HistoryView::default();
    wait_until(DEADLINE, "the connections are history", || {
        history = self::history(&agent)?;
        Ok(history.total.connects.iter().flatten().sum::<f64>() > 0.0)
    })?;
    let of = |name: &str| {
        history
            .services
            .iter()
            .find(|service| service.name == name)
            .map(|service| &service.series)
    };
    let slow = of("slow").context("slow")?;
    ensure!(
        slow.connect_p99.iter().flatten().any(|secs| *secs > 0.5),
        "{slow:?}"
    );
    ensure!(
        slow.retransmitted.iter().flatten().sum::<f64>() > 0.0,
        "{slow:?}"
    );
    ensure!(
        of("closed")
            .context("closed")?
            .failed
            .iter()
            .flatten()
            .sum::<f64>()
            > 0.0,
        "{history:?}"
    );
    // Two Services have their own series, and the third is in the sum of other Services.
    let sum = |series: &[Sample], name: &str| -> f64 {
        series
            .iter()
            .filter(|sample| sample.name == name)
            .map(|sample| sample.value)
            .sum()
    };
    wait_until(DEADLINE, "the connections are in the metrics", || {
        let series = service_series(&agent)?;
        let named: BTreeSet<_> = series
            .iter()
            .map(|sample| &sample.labels["service"])
            .collect();
        let connects = sum(&series, "kpx_service_connect_duration_seconds_count");
        let failures = sum(&series, "kpx_service_connect_failures_total");
        Ok(named.len() == 3
            && named.contains(&"other".to_owned())
            && (connects, failures) == (4.0, 2.0))
    })
    .with_context(|| format!("{:?}", service_series(&agent)))?;
    agent.stop()
}

pub(crate) fn views(agent: &Agent) -> Result<Vec<ServiceView>> {
    let output = kpx(
        agent.ns(),
        &format!(
            "services -A -o json --run-dir {}",
            agent.run_dir().display()
        ),
    )?;
    serde_json::from_slice(&output.stdout).with_context(|| format!("{output:?}"))
}

/// Returns the connections of a Service's only port, which equal those of its backends.
pub(crate) fn connect(views: &[ServiceView], name: &str) -> Result<ConnectView> {
    let port = views
        .iter()
        .find(|view| view.name == name)
        .and_then(|view| view.ports.first())
        .context("a port")?;
    let of_backends = |count: fn(&ConnectView) -> u64| {
        port.backends
            .iter()
            .map(|at| count(&at.connect))
            .sum::<u64>()
    };
    let sums = (
        of_backends(|connect| connect.connects),
        of_backends(|connect| connect.failed),
    );
    ensure!(
        sums == (port.connect.connects, port.connect.failed),
        "{port:?}"
    );
    Ok(port.connect.clone())
}

fn history(agent: &Agent) -> Result<HistoryView> {
    let body = ask(agent, "/history")?;
    serde_json::from_str(&body).context(body)
}

fn service_series(agent: &Agent) -> Result<Vec<Sample>> {
    let metrics = parse(&ask(agent, "/metrics")?)?;
    let of_services = metrics
        .into_iter()
        .filter(|(name, _)| name.starts_with("kpx_service_"));
    Ok(of_services.flat_map(|(_, metric)| metric.samples).collect())
}

/// Queries the agent like another program of the node.
fn ask(agent: &Agent, path: &str) -> Result<String> {
    let mut stream = UnixStream::connect(socket(agent.run_dir()))?;
    write!(stream, "GET {path} HTTP/1.0\r\nhost: kpx\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (_, body) = answer
        .split_once("\r\n\r\n")
        .with_context(|| answer.clone())?;
    Ok(body.to_owned())
}
