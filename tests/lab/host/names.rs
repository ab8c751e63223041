//! Programs on a host outside the cluster resolve names of the cluster.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use testbed::agent::{Agent, DEADLINE, Object, Service, wait_until};
use testbed::cases::Running;
use testbed::lab::{Family, Host, Layout};

use crate::host::fixture::{Fixture, PORT, is_as_before, route, state};

const DOMAIN: &str = "svc.cluster.local";
const ROUTE_LOCALNET: &str = "ipv4/conf/all/route_localnet";

/// Resolves a name through the C library, with kpx as the name server of `/etc/resolv.conf`.
/// Returns no address for an unknown name.
fn lookup(fixture: &Fixture, host: &Host, name: &str) -> Result<Vec<IpAddr>> {
    lookup_at(fixture, host, "127.0.0.153", name)
}

pub(super) fn lookup_at(
    fixture: &Fixture,
    host: &Host,
    server: &str,
    name: &str,
) -> Result<Vec<IpAddr>> {
    let file = fixture.lab.dir().join("resolv.conf");
    fs::write(
        &file,
        format!("nameserver {server}\noptions timeout:1 attempts:2\n"),
    )?;
    let script = format!(
        "mount --bind {} /etc/resolv.conf && getent ahosts {name} || [ $? = 2 ]",
        file.display()
    );
    let output = host
        .ns
        .exec(Command::new("unshare").args(["--mount", "sh", "-c", &script]))?;
    let first = |line: &str| line.split_whitespace().next().map(str::to_owned);
    let addresses: Result<Vec<IpAddr>, _> = output
        .lines()
        .filter_map(first)
        .map(|text| text.parse())
        .collect();
    let mut addresses = addresses.with_context(|| output.clone())?;
    addresses.sort();
    addresses.dedup();
    Ok(addresses)
}

/// Waits until a name has exactly these addresses.
fn leads_to(fixture: &Fixture, host: &Host, name: &str, addresses: &[IpAddr]) -> Result<()> {
    let mut want = addresses.to_vec();
    want.sort();
    let mut last = Vec::new();
    let what = format!("{name} leads to {want:?}");
    let found = wait_until(DEADLINE, &what, || {
        last = lookup(fixture, host, name)?;
        Ok(last == want)
    });
    found.with_context(|| format!("it leads to {last:?}"))
}

/// Returns a headless Service with one endpoint, which has a hostname.
pub(super) fn headless(name: &str, hostname: &str, ip: IpAddr) -> [Object; 2] {
    let labels =
        json!({ "kubernetes.io/service-name": name, "service.kubernetes.io/headless": "" });
    let metadata = |name: &str| json!({ "name": name, "namespace": "default" });
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": metadata(name),
        "spec": { "clusterIP": "None", "clusterIPs": ["None"], "ports": [{ "name": "sql", "port": 5432 }] },
    });
    let mut slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": metadata(&format!("{name}-1")),
        "addressType": "IPv4", "ports": [{ "name": "sql", "port": 5432 }],
        "endpoints": [{ "addresses": [ip], "hostname": hostname, "conditions": { "ready": true } }],
    });
    slice["metadata"]["labels"] = labels;
    [Object(service), Object(slice)]
}

#[test]
fn names_are_resolved_for_the_host_alone() -> Result<()> {
    let fixture = &Fixture::start(Layout::Routed)?;
    let c = &fixture.lab.xl;
    fixture
        .lab
        .nodes()
        .into_iter()
        .try_for_each(|node| route(c, "add", node))?;
    fixture.put(&web())?;
    headless("db", "db-0", fixture.lab.host("p1b").addrs.v4.into())
        .iter()
        .try_for_each(|object| fixture.cluster.put(object))?;
    // Where kube-proxy has set this, packets for loopback addresses enter by any device.
    c.ns.sysctl(ROUTE_LOCALNET, "1")?;
    let before = state(c)?;
    let agent = fixture.outside(c, &[])?;
    let running = Running { fixture, agent };
    testbed::cases!(
        &running;
        host_resolves_names_of_the_cluster,
        strangers_resolve_no_names,
    )?;
    running.agent.stop()?;
    is_as_before(c, &before)
}

fn web() -> Service {
    Service::new("web", 10, &["p1b", "p2a"], PORT)
}

fn host_resolves_names_of_the_cluster(running: &Running<Fixture>) -> Result<()> {
    let Running {
        fixture,
        agent: kpx,
    } = running;
    let c = &fixture.lab.xl;
    let web = web();
    let pod = fixture.lab.host("p1b").addrs.v4.into();
    let ips = Family::ALL.map(|family| web.frontend(family).ip());
    leads_to(fixture, c, &format!("web.default.{DOMAIN}"), &ips)?;
    fixture.served(c, |family| web.frontend(family), &["p1b", "p2a"])?;
    leads_to(fixture, c, &format!("db.default.{DOMAIN}"), &[pod])?;
    leads_to(fixture, c, &format!("db-0.db.default.{DOMAIN}"), &[pod])?;
    leads_to(fixture, c, &format!("nothing.default.{DOMAIN}"), &[])?;
    leads_to(fixture, c, "example.com", &[])?;
    // The records contain the name server's name, which resolves too.
    leads_to(
        fixture,
        c,
        "ns.dns.cluster.local",
        &[[127, 0, 0, 153].into()],
    )?;

    // Names follow the endpoints.
    let moved = fixture.lab.host("p2a").addrs.v4.into();
    fixture.cluster.put(&headless("db", "db-1", moved)[1])?;
    leads_to(fixture, c, &format!("db.default.{DOMAIN}"), &[moved])?;
    leads_to(fixture, c, &format!("db-0.db.default.{DOMAIN}"), &[])?;

    let names = &kpx.status()?["names"];
    ensure!(
        names["address"] == "127.0.0.153:53" && names["domain"] == "cluster.local",
        "{names}"
    );
    fixture.cluster.put(&headless("db", "db-0", pod)[1])
}

#[test]
fn host_has_another_domain_or_serves_no_names() -> Result<()> {
    let fixture = Fixture::start(Layout::Routed)?;
    let c = &fixture.lab.xl;
    let web = Service::new("web", 10, &["p1b"], PORT);
    fixture.put(&web)?;
    let kpx = fixture.outside(c, &["--cluster-domain", "prod.example"])?;
    let ips = Family::ALL.map(|family| web.frontend(family).ip());
    leads_to(&fixture, c, "web.default.svc.prod.example", &ips)?;
    leads_to(&fixture, c, &format!("web.default.{DOMAIN}"), &[])?;
    kpx.stop()?;
    // A program may have an IPv6 resolver.
    let kpx = fixture.outside(c, &["--dns-address", "[::1]:53"])?;
    wait_until(DEADLINE, "names are answered by IPv6", || {
        let mut found = lookup_at(&fixture, c, "::1", &format!("web.default.{DOMAIN}"))?;
        found.sort();
        let mut all = ips.to_vec();
        all.sort();
        Ok(found == all)
    })?;
    ensure!(
        lookup(&fixture, c, &format!("web.default.{DOMAIN}"))?.is_empty(),
        "nothing answers at 127.0.0.153"
    );
    kpx.stop()?;
    let kpx = fixture.outside(c, &["--dns-address", "none"])?;
    ensure!(
        kpx.status()?["names"] == Value::Null,
        "{}",
        kpx.status()?["names"]
    );
    let script = "ss -Hlntu src 127.0.0.153";
    ensure!(
        c.ns.exec(Command::new("sh").args(["-c", script]))?
            .is_empty(),
        "something listens"
    );
    kpx.stop()
}

#[test]
fn taken_address_costs_the_names_alone() -> Result<()> {
    let fixture = Fixture::start(Layout::Routed)?;
    let c = &fixture.lab.xl;
    fixture
        .lab
        .nodes()
        .into_iter()
        .try_for_each(|node| route(c, "add", node))?;
    let web = Service::new("web", 10, &["p1b"], PORT);
    fixture.put(&web)?;
    let taken = c.ns.run(|| std::net::UdpSocket::bind("127.0.0.153:53"))?;
    let kpx = fixture.outside(c, &[])?;
    fixture.served(c, |family| web.frontend(family), &["p1b"])?;
    let mut status = Value::Null;
    wait_until(DEADLINE, "the status says why", || {
        status = kpx.status()?;
        let why = status["names"]["whyNot"].as_str().unwrap_or_default();
        Ok(why.contains("127.0.0.153:53") && why.contains("in use"))
    })
    .with_context(|| status["names"].to_string())?;
    ensure!(
        status["healthy"] == true && status["names"]["address"] == Value::Null,
        "{status}"
    );
    drop(taken);
    let ips = Family::ALL.map(|family| web.frontend(family).ip());
    leads_to(&fixture, c, &format!("web.default.{DOMAIN}"), &ips)?;
    kpx.stop()
}

fn strangers_resolve_no_names(running: &Running<Fixture>) -> Result<()> {
    let fixture = running.fixture;
    let c = &fixture.lab.xl;
    let stranger = &fixture.lab.n1.host;
    leads_to(
        fixture,
        c,
        &format!("web.default.{DOMAIN}"),
        &Family::ALL.map(|family| web().frontend(family).ip()),
    )?;
    stranger.ns.sysctl(ROUTE_LOCALNET, "1")?;
    stranger
        .ns
        .ip(&format!("route add 127.0.0.153/32 via {}", c.addrs.v4))?;
    // The packets arrive: a server of this machine would answer them.
    let own =
        c.ns.run(|| std::net::TcpListener::bind("127.0.0.153:5353"))?;
    let reached = stranger
        .ns
        .run(|| std::net::TcpStream::connect("127.0.0.153:5353"));
    ensure!(reached.is_ok(), "{reached:?}");
    drop(own);
    ensure!(
        lookup(fixture, stranger, &format!("web.default.{DOMAIN}"))
            .map_or(true, |found| found.is_empty()),
        "a stranger resolves a name"
    );
    stranger.ns.ip("route del 127.0.0.153/32")?;
    stranger.ns.sysctl(ROUTE_LOCALNET, "0")
}

/// A script in the place of `resolvectl` records its arguments. The effect on systemd-resolved is
/// outside of this test.
#[test]
fn kpx_configures_systemd_resolved() -> Result<()> {
    let fixture = Fixture::start(Layout::Routed)?;
    let c = &fixture.lab.xl;
    let tools = fixture.lab.dir().join("tools");
    let reported = fixture.lab.dir().join("resolved-calls");
    fs::create_dir(&tools)?;
    let tool = tools.join("resolvectl");
    fs::write(
        &tool,
        format!("#!/bin/sh\necho \"$@\" >> {}\n", reported.display()),
    )?;
    fs::set_permissions(&tool, fs::Permissions::from_mode(0o755))?;

    // In a foreign network namespace, systemd-resolved would apply the device's index to one of its
    // own devices.
    let path = format!("{}:{}", tools.display(), std::env::var("PATH")?);
    let mut by = Command::new("env");
    by.env("PATH", &path);
    let kpx = Agent::launch_by(
        Some(by),
        &fixture.lab,
        c,
        fixture.cluster.source(),
        &["--mode", "host"],
    )?;
    let kpx = kpx.having("complete")?;
    let why = |status: &Value| {
        status["names"]["whyNot"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    };
    wait_until(DEADLINE, "the status says why", || {
        Ok(why(&kpx.status()?).contains("this network namespace is not the machine's own"))
    })?;
    ensure!(!reported.exists(), "{}", fs::read_to_string(&reported)?);
    kpx.stop()?;

    // In a container with its own init, kpx and systemd-resolved share the devices.
    let mut by = Command::new("unshare");
    by.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"])
        .env("PATH", &path);
    let kpx = Agent::launch_by(
        Some(by),
        &fixture.lab,
        c,
        fixture.cluster.source(),
        &["--mode", "host"],
    )?;
    let kpx = kpx.having("complete")?;
    wait_until(DEADLINE, "systemd-resolved has the name server", || {
        Ok(kpx.status()?["names"]["askedByResolved"] == true)
    })?;
    let said = fs::read_to_string(&reported)?;
    let settings = [
        "domain kpx1 ~cluster.local",
        "llmnr kpx1 no",
        "mdns kpx1 no",
        "dnssec kpx1 no",
        "dnsovertls kpx1 no",
    ];
    ensure!(
        said == format!("{}\ndns kpx1 127.0.0.153:53\n", settings.join("\n")),
        "{said}"
    );
    // systemd-resolved uses no device without an address.
    let addresses =
        c.ns.exec(Command::new("ip").args(["-4", "-br", "address", "show", "dev", "kpx1"]))?;
    ensure!(addresses.contains("169.254.153.53/32"), "{addresses}");
    Ok(())
}
