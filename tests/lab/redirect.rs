//! Local redirects: pods of a node answer for a Service on that node.

use std::net::SocketAddr;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use testbed::agent::{Agent, DEADLINE, Object, Service, binary, wait_until};
use testbed::cgroup::Cgroup;
use testbed::echo::{Connection, Dial, Protocol};
use testbed::lab::{Family, Layout};
use testbed::served_lab::ServedLab;

mod address;

const PORT: u16 = 8080;
const NODE: &str = "n1";
const FLAG: &str = "--local-redirect";

/// Two nodes. The Service's own endpoint is on the second node.
struct Fixture {
    lab: ServedLab,
    // Drops after the agent, which is in the cgroup too.
    cgroup: Cgroup,
}

fn cached() -> Service {
    Service::new("cached", 10, &["p2a"], PORT)
}

impl Fixture {
    fn start(service: &Service) -> Result<Self> {
        let cgroup = Cgroup::enter()?;
        let lab = ServedLab::with_api_server(Layout::Routed)?
            .serve(&["p1b", "p2a", "p2b", NODE], PORT)?;
        lab.put(service)?;
        Ok(Self { lab, cgroup })
    }

    /// Starts kpx with socket load balancing for host and pods.
    fn agent(&self) -> Result<Agent<'_>> {
        let cgroup = self.cgroup.path().display().to_string();
        self.lab.kpx(&[
            FLAG,
            "--socket-lb",
            "all",
            "--socket-lb-udp",
            "--cgroup-root",
            &cgroup,
        ])
    }

    /// Creates or replaces the Pod `p1b` of the node, with the address of `host`.
    fn put_pod(&self, host: &str, is_ready: bool) -> Result<()> {
        let ips =
            Family::ALL.map(|family| json!({ "ip": self.lab.lab.host(host).addrs.ip(family) }));
        let status = if is_ready { "True" } else { "False" };
        self.lab.cluster.put_as_is(&Object(json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": { "namespace": "default", "name": "cache", "uid": "cache", "labels": { "app": "cache" } },
            "spec": { "nodeName": NODE, "hostNetwork": host == NODE, "containers": [{ "name": "main" }] },
            "status": { "phase": "Running", "podIPs": ips, "conditions": [{ "type": "Ready", "status": status }] },
        })))
    }

    fn connect(&self, client: &str, protocol: Protocol, to: SocketAddr) -> Result<Connection> {
        let connection = Dial::new(protocol, to).connect(&self.lab.lab.host(client).ns);
        connection.with_context(|| format!("{client} connects to {to} by {protocol}"))
    }

    /// Returns the answering backend for a client, by each protocol in each family.
    fn answers(&self, client: &str) -> Result<Vec<String>> {
        let mut all = Vec::new();
        for (family, protocol) in Family::ALL
            .into_iter()
            .flat_map(|family| Protocol::COMMON.map(|proto| (family, proto)))
        {
            let mut connection = self.connect(client, protocol, cached().frontend(family))?;
            let answer = connection
                .exchange(b"hello")
                .with_context(|| format!("{client}, {family}, {protocol}"))?;
            all.push(answer.backend);
        }
        Ok(all)
    }

    /// Waits until this backend answers a client by every protocol and family.
    fn reaches(&self, client: &str, backend: &str) -> Result<()> {
        let is_so = || {
            Ok(self
                .answers(client)
                .is_ok_and(|all| all.iter().all(|who| who == backend)))
        };
        wait_until(DEADLINE, &format!("{backend} answers {client}"), is_so)
            .with_context(|| format!("{:?}", self.answers(client)))
    }
}

/// Returns the output of a command of kpx.
fn kpx(fixture: &Fixture, agent: &Agent, args: &[&str]) -> Result<String> {
    let mut command = Command::new(binary()?);
    command
        .arg(args[0])
        .arg("--run-dir")
        .arg(agent.run_dir())
        .args(&args[1..]);
    fixture.lab.lab.host(NODE).ns.exec(&mut command)
}

#[test]
fn a_pod_of_the_node_answers_while_it_is_ready() -> Result<()> {
    let service = cached().annotation("kpx.dev/local-redirect", "app=cache");
    let fixture = Fixture::start(&service)?;
    let agent = fixture.agent()?;
    fixture.reaches("p1a", "p2a").context("no pod yet")?;
    fixture.put_pod("p1b", true)?;
    fixture.reaches("p1a", "p1b")?;
    fixture
        .reaches(NODE, "p1b")
        .context("the node's own sockets")?;
    fixture
        .reaches("p1b", "p2a")
        .context("the pod itself, which would loop")?;
    reported(&fixture, &agent)?;

    // Datagrams of an open flow move at once; a connection stays until it ends.
    let to = cached().frontend(Family::V4);
    let [mut tcp, mut udp] =
        [Protocol::Tcp, Protocol::Udp].map(|protocol| fixture.connect("p1a", protocol, to));
    let [tcp, udp] =
        [&mut tcp, &mut udp].map(|connection| connection.as_mut().expect("both connect"));
    for connection in [&mut *tcp, &mut *udp] {
        ensure!(connection.exchange(b"before")?.backend == "p1b");
    }
    fixture.put_pod("p1b", false)?;
    fixture
        .reaches("p1a", "p2a")
        .context("the pod is not ready")?;
    ensure!(tcp.exchange(b"still there?")?.backend == "p1b");
    ensure!(udp.exchange(b"still there?")?.backend == "p2a");
    fixture.put_pod("p1b", true)?;
    fixture.reaches("p1a", "p1b").context("ready again")?;

    // Without the Service's own endpoints the pod answers all clients but itself, also after a
    // restart of the agent.
    fixture.lab.put(&service.backed_by(&[]))?;
    drop(agent);
    let agent = fixture.agent()?;
    fixture.reaches("p1a", "p1b").context("after a restart")?;
    ensure!(fixture.answers("p1b").is_err(), "the pod answers itself");
    ensure!(agent.typed_status()?.skipped.is_empty());
    Ok(())
}

/// Checks that commands show the answering pod.
fn reported(fixture: &Fixture, agent: &Agent) -> Result<()> {
    let backends: Value = serde_json::from_str(&kpx(fixture, agent, &["backends", "-o", "json"])?)?;
    let backends = backends.as_array().context("a list")?;
    let of_pods = backends
        .iter()
        .filter(|backend| backend["inRedirectSet"] == true);
    ensure!(
        of_pods.clone().count() == 6,
        "three protocols in two families: {backends:?}"
    );
    ensure!(
        of_pods
            .clone()
            .all(|backend| backend["pod"] == "default/cache" && backend["local"] == true)
    );
    let services = kpx(fixture, agent, &["services", "-o", "wide"])?;
    ensure!(
        services.contains("Cluster/Cluster, redirected"),
        "{services}"
    );
    let from = fixture.lab.lab.host("p1a").addrs.v4.to_string();
    let to = cached().frontend(Family::V4).to_string();
    let trace = kpx(fixture, agent, &["trace", "--from", &from, "--to", &to])?;
    ensure!(
        trace.contains("1 in the redirect set")
            && trace.contains("by the Service's local redirect"),
        "{trace}"
    );
    let own = fixture.lab.lab.host("p1b").addrs.v4.to_string();
    let trace = kpx(fixture, agent, &["trace", "--from", &own, "--to", &to])?;
    ensure!(trace.contains("1 in the cluster set"), "{trace}");
    Ok(())
}

/// Checks a cache in the host's network, like NodeLocal DNSCache: kpx cannot distinguish its
/// packets from the node's.
#[test]
fn a_pod_in_the_hosts_network_answers_pods_alone() -> Result<()> {
    let fixture = Fixture::start(&cached().annotation("kpx.dev/local-redirect", "app=cache"))?;
    let _agent = fixture.agent()?;
    fixture.put_pod(NODE, true)?;
    fixture.reaches("p1a", NODE)?;
    fixture.reaches(NODE, "p2a").context("the node itself")?;
    fixture.put_pod(NODE, false)?;
    fixture.reaches("p1a", "p2a")
}

fn local_redirect(namespace: &str, skips: bool) -> Object {
    named_redirect(namespace, "cache", skips)
}

fn named_redirect(namespace: &str, name: &str, skips: bool) -> Object {
    let ports = ["tcp", "udp"]
        .map(|name| json!({ "name": name, "port": "8080", "protocol": name.to_uppercase() }));
    Object(json!({
        "apiVersion": "kpx.dev/v1alpha1",
        "kind": "LocalRedirect",
        "metadata": { "namespace": namespace, "name": name },
        "spec": {
            "redirectFrontend": { "serviceMatcher": { "serviceName": "cached", "namespace": "default" } },
            "redirectBackend": {
                "localEndpointSelector": { "matchLabels": { "app": "cache" } },
                "toPorts": ports,
            },
            "skipRedirectFromBackend": skips,
        },
    }))
}

#[test]
fn an_object_redirects_the_services_of_its_namespace_alone() -> Result<()> {
    let fixture = Fixture::start(&cached())?;
    let agent = fixture.agent()?;
    fixture.put_pod("p1b", true)?;
    let cluster = &fixture.lab.cluster;
    cluster.put(&Object(
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "tenant" } }),
    ))?;
    cluster.put(&local_redirect("tenant", false))?;
    let skipped = "LocalRedirect tenant/cache spec.redirectFrontend.serviceMatcher.namespace: \"default\" is not";
    agent.wait(DEADLINE, "the refusal is reported", |status| {
        status.skipped.iter().any(|one| one.contains(skipped))
    })?;
    let api = cluster.api_server()?;
    let is_reported = |event: &Value| {
        let regarding = &event["regarding"];
        let note = event["note"].as_str().unwrap_or_default();
        regarding["kind"] == "LocalRedirect"
            && regarding["namespace"] == "tenant"
            && note.contains("serviceMatcher.namespace")
    };
    wait_until(DEADLINE, "an Event reports it", || {
        Ok(api.list("events.events.k8s.io").iter().any(is_reported))
    })
    .with_context(|| format!("{:?}", api.list("events.events.k8s.io")))?;
    fixture
        .reaches("p1a", "p2a")
        .context("another namespace's object")?;

    cluster.put(&local_redirect("default", false))?;
    fixture.reaches("p1a", "p1b")?;
    fixture
        .reaches("p1b", "p1b")
        .context("without skipRedirectFromBackend")?;
    cluster.put(&local_redirect("default", true))?;
    fixture
        .reaches("p1b", "p2a")
        .context("with skipRedirectFromBackend")?;
    fixture.reaches("p1a", "p1b")?;
    // The Service's Events concern objects of its own namespace only.
    cluster.put(&named_redirect("default", "later", true))?;
    let events = || -> Result<Vec<Value>> {
        Ok(serde_json::from_str(&kpx(
            &fixture,
            &agent,
            &["events", "default/cached", "-o", "json"],
        )?)?)
    };
    let is_later = |event: &Value| event["kind"] == "LocalRedirect" && event["name"] == "later";
    wait_until(DEADLINE, "kpx events shows the second object", || {
        Ok(events()?.iter().any(is_later))
    })?;
    ensure!(
        events()?
            .iter()
            .all(|event| event["namespace"] == "default"),
        "{:?}",
        events()?
    );
    cluster.delete(&named_redirect("default", "later", true))?;
    cluster.delete(&local_redirect("default", true))?;
    fixture.reaches("p1a", "p2a").context("the object is gone")
}
