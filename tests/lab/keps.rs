//! Changes that Kubernetes has announced to Service proxies, as packets and objects show them: see
//! `docs/compatibility.md`.

use std::fs;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use testbed::agent::{DEADLINE, Object, Service, Source, idle, kpx, wait_until};
use testbed::echo::{Dial, Protocol};
use testbed::http::scrape;
use testbed::lab::{Family, Layout};
use testbed::served_lab::ServedLab;

const PORT: u16 = 8080;
/// The time in which an agent would have written to an object of which it was told.
const STILL: std::time::Duration = std::time::Duration::from_secs(2);

/// KEP-5311.
#[test]
fn service_with_leading_digit_is_served_and_shown() -> Result<()> {
    let base = ServedLab::with_api_server(Layout::Routed)?.serve(&["p1b"], PORT)?;
    let second = Service::new("2nd", 10, &["p1b"], PORT);
    base.put(&second)?;
    let agent = base.kpx(&["--service-metrics"])?;
    let client = &base.lab.host("p1a").ns;
    for (family, protocol) in Family::ALL
        .into_iter()
        .flat_map(|family| Protocol::COMMON.map(|proto| (family, proto)))
    {
        let answer = Dial::new(protocol, second.frontend(family)).exchange(client, b"hello")?;
        ensure!(answer.backend == "p1b", "{family}, {protocol}: {answer:?}");
    }
    let shown = |command: &str| -> Result<Value> {
        let output = kpx(
            agent.ns(),
            &format!(
                "{command} 2nd -o json --run-dir {}",
                agent.run_dir().display()
            ),
        )?;
        serde_json::from_slice(&output.stdout).with_context(|| format!("{command}: {output:?}"))
    };
    for (command, field) in [("services", "name"), ("backends", "service")] {
        let rows = shown(command)?;
        let is_it = |row: &Value| {
            row[field]
                .as_str()
                .is_some_and(|name| name.ends_with("2nd"))
        };
        ensure!(
            rows.as_array()
                .is_some_and(|rows| !rows.is_empty() && rows.iter().all(is_it)),
            "{command}: {rows}"
        );
    }
    wait_until(DEADLINE, "a series has the name", || {
        let metrics = scrape(agent.ns())?;
        let mut samples = metrics.values().flat_map(|metric| &metric.samples);
        Ok(samples.any(|sample| {
            sample.labels.values().any(|label| label.ends_with("2nd")) && sample.value > 0.0
        }))
    })?;
    agent.stop()
}

/// KEP-4974.
#[test]
fn endpoints_objects_without_slices_have_no_effect() -> Result<()> {
    let base = ServedLab::with_api_server(Layout::Routed)?.serve(&["p1b"], PORT)?;
    let old = Service::new("old", 10, &[], PORT);
    let new = Service::new("new", 11, &["p1b"], PORT);
    let ip = base.lab.host("p1b").addrs.v4;
    base.cluster.put(&Object(json!({
        "apiVersion": "v1",
        "kind": "Endpoints",
        "metadata": { "namespace": "default", "name": "old" },
        "subsets": [{ "addresses": [{ "ip": ip }], "ports": [{ "name": "tcp", "protocol": "TCP", "port": PORT }] }],
    })))?;
    [&old, &new]
        .into_iter()
        .try_for_each(|service| base.put(service))?;
    let agent = base.kpx(&[])?;
    let dial = |service: &Service| {
        Dial::new(Protocol::Tcp, service.frontend(Family::V4))
            .exchange(&base.lab.host("p1a").ns, b"hello")
    };
    ensure!(dial(&new)?.backend == "p1b");
    ensure!(dial(&old).is_err(), "the Endpoints object has an effect");
    agent.stop()
}

/// KEP-4004: no field of the Node tells of kpx.
#[test]
fn agent_writes_nothing_into_node_objects() -> Result<()> {
    let base = ServedLab::with_api_server(Layout::Routed)?;
    let nodes = || Ok::<_, anyhow::Error>(base.cluster.api_server()?.list("nodes"));
    let before = nodes()?;
    ensure!(!before.is_empty(), "the cluster has no Node");
    let agent = base.kpx(&[])?;
    idle(STILL)?;
    ensure!(nodes()? == before, "before {before:?}, now {:?}", nodes()?);
    agent.stop()
}

/// KEP-5343.
#[test]
fn log_tells_of_the_default_mode_that_will_come() -> Result<()> {
    let base = ServedLab::with_api_server(Layout::Routed)?;
    let (Source::Kubeconfig(kubeconfig) | Source::Manifests(kubeconfig)) = base.cluster.source();
    let path = base.lab.dir().join("config.conf");
    let config = format!("--config={}", path.display());
    // Only kube-proxy's own file can go without a mode for long: kpx needs none.
    let cases = [
        (None, false),
        (Some("mode: iptables"), false),
        (Some("mode: ''"), true),
    ];
    for (mode, is_told) in cases {
        if let Some(mode) = mode {
            let file =
                "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n";
            let client = format!(
                "clientConnection: {{kubeconfig: {}}}\n",
                kubeconfig.display()
            );
            fs::write(&path, format!("{file}{client}{mode}\n"))?;
        }
        let agent = base.kpx(&mode.map(|_| &*config).into_iter().collect::<Vec<_>>())?;
        let log = agent.log();
        ensure!(
            log.contains("nftables from Kubernetes 1.40 on: give one") == is_told,
            "{mode:?}\n{log}"
        );
        ensure!(
            !log.lines()
                .next()
                .is_some_and(|line| line.contains("mode, and")),
            "{mode:?}\n{log}"
        );
        agent.stop()?;
    }
    Ok(())
}
