//! Local redirects of addresses outside all Services.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use testbed::agent::{Agent, DEADLINE, Object, wait_until};
use testbed::echo::Protocol;
use testbed::lab::Family;

use super::{FLAG, Fixture, NODE, PORT, cached, kpx};

const METADATA: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);

/// Returns an object that redirects an address to the pods with the label `app=cache`, except the
/// packets of these pods.
fn of_address(name: &str, ip: IpAddr) -> Object {
    let ports = ["tcp", "udp"]
        .map(|name| json!({ "name": name, "port": "8080", "protocol": name.to_uppercase() }));
    Object(json!({
        "apiVersion": "kpx.dev/v1alpha1",
        "kind": "LocalRedirect",
        "metadata": { "namespace": "default", "name": name },
        "spec": {
            "redirectFrontend": { "addressMatcher": { "ip": ip.to_string(), "toPorts": ports } },
            "redirectBackend": {
                "localEndpointSelector": { "matchLabels": { "app": "cache" } },
                "toPorts": ports,
            },
            "skipRedirectFromBackend": true,
        },
    }))
}

impl Fixture {
    /// Starts kpx with socket load balancing for host and pods, and with permission to redirect
    /// these addresses.
    fn agent_of_addresses(&self, addresses: &[IpAddr]) -> Result<Agent<'_>> {
        let cgroup = self.cgroup.path().display().to_string();
        let addresses: Vec<_> = addresses
            .iter()
            .map(|ip| format!("{ip}/{}", if ip.is_ipv4() { 32 } else { 128 }))
            .collect();
        let addresses = format!("--local-redirect-addresses={}", addresses.join(","));
        self.lab.kpx(&[
            FLAG,
            &addresses,
            "--socket-lb",
            "all",
            "--socket-lb-udp",
            "--cgroup-root",
            &cgroup,
        ])
    }

    /// Waits until this backend answers a client at all these addresses, by TCP and UDP.
    fn reaches_at(&self, client: &str, addresses: &[IpAddr], backend: &str) -> Result<()> {
        let answers = || -> Result<Vec<String>> {
            let ways = addresses
                .iter()
                .flat_map(|ip| [Protocol::Tcp, Protocol::Udp].map(|protocol| (*ip, protocol)));
            ways.map(|(ip, protocol)| {
                let mut connection = self.connect(client, protocol, SocketAddr::new(ip, PORT))?;
                Ok(connection
                    .exchange(b"hello")
                    .with_context(|| format!("{client}, {ip}, {protocol}"))?
                    .backend)
            })
            .collect()
        };
        let is_so = || Ok(answers().is_ok_and(|all| all.iter().all(|who| who == backend)));
        wait_until(DEADLINE, &format!("{backend} answers {client}"), is_so)
            .with_context(|| format!("{:?}", answers()))
    }
}

#[test]
fn pods_of_node_answer_at_address_that_is_no_services() -> Result<()> {
    let fixture = Fixture::start(&cached())?;
    let far = Family::ALL.map(|family| fixture.lab.lab.host("p2b").addrs.ip(family));
    let agent = fixture.agent_of_addresses(&far)?;
    fixture.put_pod("p1b", true)?;
    let names = ["four", "six"];
    for (name, ip) in names.into_iter().zip(far) {
        fixture.lab.cluster.put(&of_address(name, ip))?;
    }
    fixture.reaches_at("p1a", &far, "p1b")?;
    fixture
        .reaches_at("p1b", &far, "p2b")
        .context("the pod itself")?;
    fixture
        .reaches_at(NODE, &far, "p2b")
        .context("the node's own sockets")?;
    fixture
        .reaches_at("p2a", &far, "p2b")
        .context("a pod of another node")?;
    let services = kpx(&fixture, &agent, &["services", "-o", "wide"])?;
    ensure!(
        services.contains("localredirect.four") && services.contains("redirected"),
        "{services}"
    );

    let traced = |client: &str| {
        let from = fixture.lab.lab.host(client).addrs.v4.to_string();
        kpx(
            &fixture,
            &agent,
            &[
                "trace",
                "--from",
                &from,
                "--to",
                &format!("{}:{PORT}", far[0]),
            ],
        )
    };
    let trace = traced("p1a")?;
    ensure!(
        trace.contains("an address of a local redirect") && trace.contains("localredirect.four"),
        "{trace}"
    );
    ensure!(
        trace.contains("1 in the redirect set")
            && trace.contains("by a local redirect of this address"),
        "{trace}"
    );
    let trace = traced("p1b")?;
    ensure!(
        trace.contains("localredirect.four") && trace.contains("not from those that it spares"),
        "{trace}"
    );

    // Datagrams of an open flow move to the address at once; a connection stays until it ends.
    let to = SocketAddr::new(far[0], PORT);
    let mut tcp = fixture.connect("p1a", Protocol::Tcp, to)?;
    let mut udp = fixture.connect("p1a", Protocol::Udp, to)?;
    ensure!(tcp.exchange(b"before")?.backend == "p1b" && udp.exchange(b"before")?.backend == "p1b");
    fixture.put_pod("p1b", false)?;
    fixture
        .reaches_at("p1a", &far, "p2b")
        .context("the pod is not ready")?;
    let trace = traced("p1a")?;
    ensure!(
        trace.contains("no pod of this node serves it now"),
        "{trace}"
    );
    ensure!(tcp.exchange(b"still there?")?.backend == "p1b");
    ensure!(udp.exchange(b"still there?")?.backend == "p2b");
    fixture.put_pod("p1b", true)?;
    fixture
        .reaches_at("p1a", &far, "p1b")
        .context("ready again")?;
    for (name, ip) in names.into_iter().zip(far) {
        fixture.lab.cluster.delete(&of_address(name, ip))?;
    }
    fixture
        .reaches_at("p1a", &far, "p2b")
        .context("the objects are gone")?;
    ensure!(agent.typed_status()?.skipped.is_empty());
    agent.stop()
}

#[test]
fn pods_of_node_answer_at_clouds_metadata_address() -> Result<()> {
    let fixture = Fixture::start(&cached())?;
    let hosts = &fixture.lab.lab;
    let ip = |node: &str, args: &str| {
        hosts
            .host(node)
            .ns
            .exec(Command::new("ip").args(args.split(' ')))
    };
    ip("n2", &format!("addr add {METADATA}/32 dev lo"))?;
    ip(
        NODE,
        &format!("route add {METADATA} via {}", hosts.host("n2").addrs.v4),
    )?;
    fixture.lab.servers.serve_at(
        hosts.host("n2"),
        "cloud",
        SocketAddr::new(METADATA.into(), PORT),
    )?;
    let metadata = [IpAddr::V4(METADATA)];

    // Without the operator's permission an object has no effect, and the address serves on.
    let agent = fixture.agent()?;
    fixture.put_pod("p1b", true)?;
    fixture
        .lab
        .cluster
        .put(&of_address("metadata", metadata[0]))?;
    let why = "169.254.169.254 is not among the operator's local-redirect-addresses";
    agent.wait(DEADLINE, "the refusal is reported", |status| {
        status.skipped.iter().any(|one| one.contains(why))
    })?;
    fixture.reaches_at("p1a", &metadata, "cloud")?;
    agent.stop()?;

    let agent = fixture.agent_of_addresses(&metadata)?;
    fixture.reaches_at("p1a", &metadata, "p1b")?;
    fixture
        .reaches_at("p1b", &metadata, "cloud")
        .context("the pod itself, which asks for the others")?;
    fixture.put_pod("p1b", false)?;
    fixture
        .reaches_at("p1a", &metadata, "cloud")
        .context("the pod is not ready")?;
    agent.stop()
}
