//! The node's own networks outside of the cluster, with addresses of its ServiceCIDR.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, DEADLINE, wait_until};
use testbed::netns::NetNs;

const CIDRS: &str = "--service-cidr 10.96.0.0/16,fd00:96::/112";

#[test]
fn bridge_that_the_node_is_not_on_is_left_alone() -> Result<()> {
    let node = NetNs::machine("apart")?;
    let [one, other] = neighbours(
        &node,
        ["10.96.200.1/24", "10.96.200.2/24"],
        ["fd00:96::a1/112", "fd00:96::a2/112"],
    )?;
    let kpx = Agent::start_alone(&node, &[("shop", SHOP)], CIDRS)?.healthy()?;
    // The first two addresses are frontends; the other addresses have no Service.
    for to in [
        "10.96.200.2:80",
        "[fd00:96::a2]:80",
        "10.96.200.2:81",
        "[fd00:96::a2]:81",
    ] {
        talks(&one, &other, to)?;
    }
    kpx.stop()
}

/// A Docker network may lie within the ServiceCIDR (172.20.0.0/16 in EKS).
#[test]
fn neighbours_on_a_bridge_within_the_service_cidr_reach_each_other() -> Result<()> {
    let node = NetNs::machine("docker")?;
    let [one, other] = neighbours(
        &node,
        ["10.96.201.2/24", "10.96.201.3/24"],
        ["fd00:96::b2/112", "fd00:96::b3/112"],
    )?;
    node.ip("addr add 10.96.201.1/24 dev br0\naddr add fd00:96::b1/112 dev br0 nodad")?;
    let kpx = Agent::start_alone(&node, &[("shop", SHOP)], CIDRS)?;
    kpx.wait(DEADLINE, "the overlap is a problem", |status| {
        status
            .problems
            .iter()
            .any(|problem| problem.what == "ranges of ClusterIPs")
    })?;
    for to in ["10.96.201.3:80", "[fd00:96::b3]:80"] {
        talks(&one, &other, to)?;
    }
    kpx.stop()
}

/// Makes two namespaces on a bridge of the node.
fn neighbours(node: &NetNs, v4: [&str; 2], v6: [&str; 2]) -> Result<[NetNs; 2]> {
    node.ip("link add br0 type bridge\nlink set br0 up")?;
    let make = |n: usize| {
        let ns = NetNs::create(format!("{}-{n}", node.name()))?;
        node.ip(&format!(
            "link add port{n} type veth peer name eth0 netns {}\nlink set port{n} master br0 up",
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
