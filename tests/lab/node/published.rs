//! Backends at the node's own address that netfilter translates to a container, like Docker without
//! its userland proxy, and the CNI plugin portmap.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, DEADLINE, Service, wait_until};
use testbed::cases::Running;
use testbed::echo::{Dial, Protocol};
use testbed::lab::{Family, Layout};
use testbed::served_lab::ServedLab;
use testbed::stranger::{self, Stranger};

/// The container's port, and the node's published port.
const PORT: u16 = 8080;
const PUBLISHED: u16 = 8085;
const NODE_PORT: u16 = 30_085;
const ACCEPT_LOCAL: &str = "ipv4/conf/all/accept_local";

#[test]
fn backends_are_at_nodes_address() -> Result<()> {
    for layout in [Layout::Ptp, Layout::Bridge] {
        let fixture = &started(layout)?;
        let agent = fixture.kpx(&[])?;
        let running = Running { fixture, agent };
        testbed::cases!(
            &running;
            container_behind_published_port_is_a_backend,
            nobody_speaks_for_backend_at_nodes_address,
        )
        .with_context(|| format!("{layout:?}"))?;
        running.agent.stop()?;
        if layout == Layout::Bridge {
            let agent = fixture.kpx(&["--fast-path", "off"])?;
            let running = Running { fixture, agent };
            container_behind_published_port_is_a_backend(&running)
                .context("without the fast path")?;
            running.agent.stop()?;
        }
    }
    Ok(())
}

/// Builds a lab with both Services.
fn started(layout: Layout) -> Result<ServedLab> {
    let lab = ServedLab::with_manifests(layout)?.serve_all(PORT)?;
    lab.put(&published())?;
    lab.put(&own())?;
    Ok(lab)
}

fn published() -> Service {
    Service::new("published", 10, &["n1"], PUBLISHED).node_port(NODE_PORT)
}

fn own() -> Service {
    Service::new("own", 11, &["n1"], PORT)
}

fn container_behind_published_port_is_a_backend(running: &Running<ServedLab>) -> Result<()> {
    let lab = &running.fixture.lab;
    let service = published();
    let node = &lab.n1.host;
    let container = lab.host("p1b");
    node.ns.nft(&format!(
        "table inet published {{ chain lead {{ type nat hook prerouting priority dstnat
            ip daddr {} meta l4proto {{ tcp, udp }} th dport {PUBLISHED} dnat ip to {}:{PORT}
            ip6 daddr {} meta l4proto {{ tcp, udp }} th dport {PUBLISHED} dnat ip6 to [{}]:{PORT}
        }}; }}",
        node.addrs.v4, container.addrs.v4, node.addrs.v6, container.addrs.v6
    ))?;
    for (family, protocol) in Family::ALL
        .into_iter()
        .flat_map(|family| Protocol::COMMON.map(|protocol| (family, protocol)))
    {
        let node_port = SocketAddr::new(node.addrs.ip(family), NODE_PORT);
        for (client, to) in [
            ("p1a", service.frontend(family)),
            ("p1a", node_port),
            ("x", node_port),
        ] {
            let what = || format!("{client} to {to} by {protocol:?}");
            let mut connection = Dial::new(protocol, to)
                .connect(&lab.host(client).ns)
                .with_context(what)?;
            for _ in 0..3 {
                let answer = connection.exchange(b"published").with_context(what)?;
                ensure!(answer.backend == container.name, "{}: {answer:?}", what());
            }
        }
    }
    node.ns.nft("delete table inet published")
}

fn nobody_speaks_for_backend_at_nodes_address(running: &Running<ServedLab>) -> Result<()> {
    let Running {
        fixture,
        agent: kpx,
    } = running;
    let lab = &fixture.lab;
    let service = own();
    let node = &lab.n1.host;
    let client = lab.host("p1a");
    let before = node.ns.read(&format!("/proc/sys/net/{ACCEPT_LOCAL}"))?;
    // With and without `accept_local`, by which the kernel accepts its own addresses as sources.
    for accept_local in ["0", "1"] {
        node.ns.sysctl(ACCEPT_LOCAL, accept_local)?;
        for family in Family::ALL {
            let [from, to] = [(node, PORT), (client, 45_002)]
                .map(|(host, port)| SocketAddr::new(host.addrs.ip(family), port));
            let dial = Dial::new(Protocol::Tcp, service.frontend(family)).source_port(to.port());
            let mut connection = dial.connect(&client.ns)?;
            connection.exchange(b"before")?;
            for name in ["p1b", "n2"] {
                let what = || format!("accept_local {accept_local}: {name} in the name of {from}");
                let spoofed = spoofed(kpx)?;
                let stranger = Stranger::on(lab.host(name))?;
                for packet in [
                    stranger::tcp(from, to).rst(),
                    stranger::tcp(from, to).syn().ack(1),
                    stranger::tcp(from, to).ack(1),
                ] {
                    stranger.send(packet, to.ip())?;
                }
                wait_until(DEADLINE, "all three are dropped", || {
                    Ok(self::spoofed(kpx)? >= spoofed + 3)
                })
                .with_context(what)?;
                connection.exchange(b"after").with_context(what)?;
            }
            connection.reset()?;
        }
    }
    node.ns.sysctl(ACCEPT_LOCAL, before.trim())
}

/// Returns the number of packets that the programs have dropped as spoofed.
fn spoofed(kpx: &Agent) -> Result<u64> {
    kpx.typed_status()?
        .reasons
        .get("spoofed")
        .copied()
        .context("no such reason")
}
