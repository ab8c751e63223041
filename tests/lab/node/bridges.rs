//! The node's own networks outside of the cluster, with addresses of its ServiceCIDR.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, DEADLINE, wait_until};
use testbed::cases::Running;
use testbed::netns::NetNs;

const CIDRS: &str = "--service-cidr 10.96.0.0/16,fd00:96::/112";

/// A node with a bridge that it has no address on, and two namespaces on that bridge.
struct Fixture {
    node: NetNs,
    apart: [NetNs; 2],
}

#[test]
fn neighbours_on_a_bridge_reach_each_other_beside_kpx() -> Result<()> {
    let node = NetNs::machine("bridges")?;
    let apart = neighbours(
        &node,
        "apart",
        ["10.96.200.1/24", "10.96.200.2/24"],
        ["fd00:96::a1/112", "fd00:96::a2/112"],
    )?;
    let fixture = &Fixture { node, apart };
    let agent = Agent::start_alone(&fixture.node, &[("shop", SHOP)], CIDRS)?.healthy()?;
    let running = Running { fixture, agent };
    testbed::cases!(
        &running;
        bridge_that_the_node_is_not_on_is_left_alone,
        neighbours_on_a_bridge_within_the_service_cidr_reach_each_other,
    )?;
    running.agent.stop()
}

fn bridge_that_the_node_is_not_on_is_left_alone(running: &Running<Fixture>) -> Result<()> {
    let [one, other] = &running.fixture.apart;
    // The first two addresses are frontends; the other addresses have no Service.
    for to in [
        "10.96.200.2:80",
        "[fd00:96::a2]:80",
        "10.96.200.2:81",
        "[fd00:96::a2]:81",
    ] {
        talks(one, other, to)?;
    }
    Ok(())
}

/// A Docker network may lie within the ServiceCIDR (172.20.0.0/16 in EKS).
fn neighbours_on_a_bridge_within_the_service_cidr_reach_each_other(
    running: &Running<Fixture>,
) -> Result<()> {
    let node = &running.fixture.node;
    let kpx = &running.agent;
    let [one, other] = neighbours(
        node,
        "docker",
        ["10.96.201.2/24", "10.96.201.3/24"],
        ["fd00:96::b2/112", "fd00:96::b3/112"],
    )?;
    node.ip("addr add 10.96.201.1/24 dev docker\naddr add fd00:96::b1/112 dev docker nodad")?;
    kpx.wait(DEADLINE, "the overlap is a problem", |status| {
        status
            .problems
            .iter()
            .any(|problem| problem.what == "ranges of ClusterIPs")
    })?;
    kpx.wait(DEADLINE, "the bridge has its programs", |status| {
        let has = |name: &str| status.devices.iter().any(|device| device.name == name);
        has("docker") && has("docker0") && has("docker1")
    })?;
    for to in ["10.96.201.3:80", "[fd00:96::b3]:80"] {
        talks(&one, &other, to)?;
    }
    node.ip("link del docker0\nlink del docker1\nlink del docker")?;
    kpx.wait(DEADLINE, "all is well again", |status| status.healthy)
}

/// Makes two namespaces on a bridge of the node.
fn neighbours(node: &NetNs, bridge: &str, v4: [&str; 2], v6: [&str; 2]) -> Result<[NetNs; 2]> {
    node.ip(&format!(
        "link add {bridge} type bridge\nlink set {bridge} up"
    ))?;
    let make = |n: usize| {
        let ns = NetNs::create(format!("{}-{bridge}{n}", node.name()))?;
        node.ip(&format!(
            "link add {bridge}{n} type veth peer name eth0 netns {}
             link set {bridge}{n} master {bridge} up",
            ns.name()
        ))?;
        ns.ip(&format!(
            "link set eth0 up\naddr add {} dev eth0\naddr add {} dev eth0 nodad",
            v4[n], v6[n]
        ))?;
        Ok::<_, anyhow::Error>(ns)
    };
    Ok([make(0)?, make(1)?])
}

/// Checks that a client gets the server's greeting.
fn talks(client: &NetNs, server: &NetNs, to: &str) -> Result<()> {
    let listener = server
        .run(|| TcpListener::bind(to))
        .with_context(|| format!("listen on {to}"))?;
    let greets = thread::spawn(move || {
        listener
            .accept()
            .and_then(|(mut stream, _)| stream.write_all(b"hello"))
    });
    let mut greeting = String::new();
    let to_addr = to.parse()?;
    let dial = || client.run(|| TcpStream::connect_timeout(&to_addr, DEADLINE / 10));
    let mut stream = None;
    wait_until(DEADLINE, &format!("{to} answers"), || {
        stream = dial().ok();
        Ok(stream.is_some())
    })?;
    stream
        .context("a connection")?
        .read_to_string(&mut greeting)?;
    greets.join().map_err(|_| anyhow::anyhow!("panicked"))??;
    ensure!(greeting == "hello", "{to}: {greeting}");
    Ok(())
}

/// The ClusterIPs are addresses of a host on the bridge.
const SHOP: &str = r#"
apiVersion: v1
kind: Service
metadata: {name: shop, namespace: default}
spec:
  clusterIP: 10.96.200.2
  clusterIPs: [10.96.200.2, "fd00:96::a2"]
  ipFamilies: [IPv4, IPv6]
  ports: [{port: 80}]
"#;
