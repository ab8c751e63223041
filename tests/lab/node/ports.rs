//! Source ports that two programs use towards the same backend: kpx for a masqueraded client, and
//! netfilter or a process of the node.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testbed::agent::{DEADLINE, Service, idle, wait_until};
use testbed::echo::{Answer, Dial, Protocol};
use testbed::lab::{CLUSTER_PODS, Family, Host, Layout};
use testbed::served_lab::ServedLab;

const PORT: u16 = 8080;
const NODE_PORT: u16 = 30_080;

/// A flow whose client has been idle for this long counts as silent.
const SILENT: Duration = Duration::from_secs(6);

#[test]
fn two_programs_share_source_ports() -> Result<()> {
    let lab = ServedLab::with_api_server(Layout::Routed)?.serve(&["n2", "p1b"], PORT)?;
    lab.put(&of_n2())?;
    lab.put(&Service::new("web", 1, &["p1b"], PORT).node_port(NODE_PORT))?;
    let kpx = lab.kpx(&[])?;
    testbed::cases!(
        &lab;
        node_that_dials_a_pod_beside_its_flow_through_a_node_port_hears_both,
        foreign_nat_port_is_released,
    )?;
    kpx.stop()
}

/// Netfilter masquerades the pod's connections, and keeps their source ports. kpx starts later, and
/// draws ports at random: without the earlier ports, it would draw about five of each protocol.
#[test]
fn masqueraded_connections_from_before_kpx_keep_their_ports() -> Result<()> {
    const BEFORE: std::ops::Range<u16> = 20_000..20_500;
    const DIALS: u32 = 320;
    let lab = ServedLab::with_api_server(Layout::Routed)?.serve(&["n2"], PORT)?;
    lab.put(&of_n2())?;
    let [x, pod] = ["x", "p1a"].map(|name| lab.lab.host(name));
    let n1 = &lab.lab.n1.host;
    let mut open = Vec::new();
    for family in Family::ALL {
        let to = SocketAddr::new(lab.lab.n2.host.addrs.ip(family), PORT);
        for (protocol, port) in
            BEFORE.flat_map(|port| [(Protocol::Tcp, port), (Protocol::Udp, port)])
        {
            let mut connection = Dial::new(protocol, to).source_port(port).connect(&pod.ns)?;
            let answer = connection.exchange(b"before kpx")?;
            let source = SocketAddr::new(n1.addrs.ip(family), port);
            ensure!(answer.source == source, "n2 sees {}", answer.source);
            open.push(connection);
        }
    }
    let kpx = lab.kpx(&[])?;
    for family in Family::ALL {
        let node_port = SocketAddr::new(n1.addrs.ip(family), NODE_PORT + 1);
        for (protocol, nth) in [Protocol::Tcp, Protocol::Udp]
            .into_iter()
            .flat_map(|protocol| (0..DIALS).map(move |nth| (protocol, nth)))
        {
            let answer = Dial::new(protocol, node_port)
                .exchange(&x.ns, b"by kpx")
                .with_context(|| format!("{protocol} {family}, dial {nth}"))?;
            ensure!(
                !BEFORE.contains(&answer.source.port()),
                "{protocol} {family}: two connections are {}",
                answer.source
            );
        }
    }
    for connection in &mut open {
        connection.exchange(b"beside kpx")?;
    }
    kpx.stop()
}

fn of_n2() -> Service {
    Service::new("n2", 2, &["n2"], PORT).node_port(NODE_PORT + 1)
}

fn foreign_nat_port_is_released(lab: &ServedLab) -> Result<()> {
    let web = of_n2();
    let [x, pod] = ["x", "p1a"].map(|name| lab.lab.host(name));
    for family in Family::ALL {
        let node_port = SocketAddr::new(lab.lab.n1.host.addrs.ip(family), NODE_PORT + 1);
        let masqueraded = dial(x, node_port, 20_000)?;
        idle(SILENT)?;
        // Netfilter masquerades the pod towards n2's own network, and keeps the pod's port.
        let answer = dial(pod, web.frontend(family), masqueraded.source.port())?;
        ensure!(
            answer.source == masqueraded.source,
            "{family}: n2 sees {}, not {}",
            answer.source,
            masqueraded.source
        );
        let again = dial(x, node_port, 20_000)?;
        ensure!(
            again.source != masqueraded.source,
            "{family}: two conversations are {}",
            again.source
        );
        dial(pod, web.frontend(family), masqueraded.source.port()).context("the pod goes on")?;
    }
    Ok(())
}

fn node_that_dials_a_pod_beside_its_flow_through_a_node_port_hears_both(
    lab: &ServedLab,
) -> Result<()> {
    let n2 = &lab.lab.n2.host;
    for family in Family::ALL {
        let node_port = SocketAddr::new(lab.lab.n1.host.addrs.ip(family), NODE_PORT);
        let pod = SocketAddr::new(lab.lab.host("p1b").addrs.ip(family), PORT);
        for (protocol, port) in [(Protocol::Udp, 20_001), (Protocol::Tcp, 20_002)] {
            let dial = |to| Dial::new(protocol, to).source_port(port);
            let mut through = dial(node_port).connect(&n2.ns)?;
            let by_node_port = through.exchange(b"through")?;
            ensure!(
                by_node_port.source.port() == port,
                "{protocol} {family}: {by_node_port:?}"
            );
            let mut direct = dial(pod)
                .connect(&n2.ns)
                .with_context(|| format!("dial {pod} by {protocol}"))?;
            let moved = direct
                .exchange(b"direct")
                .with_context(|| format!("{pod} by {protocol}"))?;
            ensure!(
                moved.source != by_node_port.source,
                "{protocol} {family}: two conversations are {}",
                moved.source
            );
            through
                .exchange(b"through again")
                .context("the first conversation")?;
            direct
                .exchange(b"direct again")
                .context("the second conversation")?;
        }
    }
    Ok(())
}

/// A pod of another node has a connection through its own node to the backend, and dials this node
/// from the same port.
#[test]
fn connection_of_a_pod_elsewhere_outlives_its_dial_of_a_node_port() -> Result<()> {
    for layout in [Layout::Routed, Layout::Bridge] {
        let lab = ServedLab::with_api_server(layout)?.serve(&["p1b"], PORT)?;
        let web = Service::new("web", 1, &["p1b"], PORT).node_port(NODE_PORT);
        lab.put(&web)?;
        let kpx = lab.kpx(&["--cluster-cidr", &cidrs()])?;
        // The client's node does not masquerade packets to other nodes.
        lab.lab.n2.host.ns.nft("delete table inet cni")?;
        let local = web.clone().external_local();
        for (nth, policy) in [(0, &web), (1, &local)] {
            lab.put(policy)?;
            for family in Family::ALL {
                let port = 20_010 + nth;
                held_and_new(&lab, "p2a", family, port)
                    .with_context(|| format!("{layout:?} {family} {nth}"))?;
            }
        }
        kpx.stop()?;
    }
    Ok(())
}

fn cidrs() -> String {
    Family::ALL
        .map(|family| CLUSTER_PODS.cidr(family))
        .join(",")
}

/// Dials the node port from the source port of a connection to its backend, and uses both
/// connections.
fn held_and_new(lab: &ServedLab, client: &str, family: Family, port: u16) -> Result<()> {
    let client = lab.lab.host(client);
    let node_port = SocketAddr::new(lab.lab.n1.host.addrs.ip(family), NODE_PORT);
    let pod = SocketAddr::new(lab.lab.host("p1b").addrs.ip(family), PORT);
    let dial = |to| {
        Dial::new(Protocol::Tcp, to)
            .source_port(port)
            .deadline(DEADLINE)
    };
    let mut held = dial(pod).connect(&client.ns).context("dial the backend")?;
    held.exchange(b"held")?;
    let mut new = dial(node_port)
        .connect(&client.ns)
        .context("dial the node port")?;
    let seen = new.exchange(b"new").context("by the node port")?.source;
    ensure!(
        seen.ip() == client.addrs.ip(family) && seen.port() != port,
        "the backend sees {seen}"
    );
    held.exchange(b"still held")
        .context("the connection that was there before")?;
    new.exchange(b"still new").context("the new connection")?;
    held.reset()?;
    Ok(new.reset()?)
}

/// Repeats a UDP request from this port until an answer comes.
fn dial(client: &Host, to: SocketAddr, port: u16) -> Result<Answer> {
    let dial = Dial::new(Protocol::Udp, to)
        .source_port(port)
        .deadline(Duration::from_millis(500));
    let mut answer = None;
    wait_until(DEADLINE, &format!("{to} answers {}", client.name), || {
        answer = dial.exchange(&client.ns, b"hello").ok();
        Ok(answer.is_some())
    })?;
    answer.context("an answer")
}
