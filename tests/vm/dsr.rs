//! `--external-forwarding dsr` between two nodes: clients outside reach backends of other nodes with
//! their own address, and get the answers directly. Needs the kernel's modules ipip and ip6_tunnel.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, DEADLINE, SERVICE_PORT, Service, wait_until};
use testbed::echo::{Answer, Dial, Protocol, pattern};
use testbed::kernel;
use testbed::lab::{EXTERNAL, Family, Lab, Layout};
use testbed::served_lab::ServedLab;
use testbed::stranger::{Stranger, tcp};

const PORT: u16 = 8080;
const NODE_PORT: u16 = 30_080;
const DSR: [&str; 2] = ["--external-forwarding", "dsr"];

/// The first kernel whose IP tunnels show packets without their outer headers.
const HIDES_OUTER_HEADERS: (u32, u32) = (5, 14);

/// A Service whose only backend is a pod of n2. The fabric leads its external address to n1.
fn far() -> Service {
    Service::new("far", 11, &["p2a"], PORT)
        .node_port(NODE_PORT)
        .load_balancer(EXTERNAL.host(11), "VIP")
}

/// The same, with a backend on each node.
fn both() -> Service {
    Service::new("both", 12, &["p1a", "p2a"], PORT).load_balancer(EXTERNAL.host(12), "VIP")
}

/// The same as `far`, for another client than x.
fn ranged(lab: &Lab) -> Service {
    let others = [
        format!("{}/32", lab.ext.addrs.v4),
        format!("{}/128", lab.ext.addrs.v6),
    ];
    Service::new("ranged", 13, &["p2a"], PORT)
        .load_balancer(EXTERNAL.host(13), "VIP")
        .source_ranges(&others)
}

fn vip(nth: u8, family: Family) -> SocketAddr {
    SocketAddr::new(EXTERNAL.host(nth).ip(family), SERVICE_PORT)
}

fn count(agent: &Agent, what: &str, name: &str) -> Result<u64> {
    Ok(agent.status()?[what][name].as_u64().unwrap_or_default())
}

/// Runs a test with kpx on both nodes, once each knows that the other takes clients over.
fn with_nodes(
    layout: Layout,
    run: impl FnOnce(&ServedLab, &Agent, &Agent) -> Result<()>,
) -> Result<()> {
    if kernel::version()? < HIDES_OUTER_HEADERS {
        println!("not run: kpx refuses the mode before Linux 5.14");
        return Ok(());
    }
    let base = ServedLab::with_api_server(layout)?.serve_all(PORT)?;
    base.lab.set_rp_filter(1)?;
    for service in [far(), both(), ranged(&base.lab)] {
        base.put(&service)?;
    }
    let args = DSR.map(str::to_owned);
    let start = |node| Agent::start_with(&base.lab, node, base.cluster.source(), &args);
    let (n1, n2) = (start(&base.lab.n1)?, start(&base.lab.n2)?);
    for family in Family::ALL {
        wait_until(DEADLINE, "n1 hands clients over to n2", || {
            Ok(dial(&base.lab, Protocol::Udp, vip(11, family), b"hello")
                .is_ok_and(|answer| is_x(&base.lab, &answer)))
        })
        .with_context(|| format!("n1: {}\nn2: {}", n1.log(), n2.log()))?;
    }
    let result = run(&base, &n1, &n2);
    result.with_context(|| {
        let of = |agent: &Agent| {
            format!(
                "{:#?}",
                agent
                    .typed_status()
                    .map(|status| (status.events, status.reasons))
            )
        };
        format!("n1: {}\nn2: {}", of(&n1), of(&n2))
    })?;
    n1.stop()?;
    n2.stop()
}

fn dial(lab: &Lab, protocol: Protocol, to: SocketAddr, payload: &[u8]) -> Result<Answer> {
    let dial = Dial::new(protocol, to).deadline(Duration::from_secs(5));
    dial.exchange(&lab.x.ns, payload)
        .map_err(|fault| anyhow::anyhow!("{protocol} to {to}: {fault}"))
}

fn is_x(lab: &Lab, answer: &Answer) -> bool {
    let family = Family::of(answer.source.ip());
    answer.source.ip() == lab.x.addrs.ip(family)
}

#[test]
fn clients_outside_keep_their_address_at_backends_of_other_nodes() {
    for layout in [Layout::Routed, Layout::Bridge, Layout::Vxlan] {
        with_nodes(layout, |base, n1, n2| keeps_address(base, n1, n2))
            .with_context(|| format!("{layout:?}"))
            .unwrap();
    }
}

fn keeps_address(base: &ServedLab, n1: &Agent, n2: &Agent) -> Result<()> {
    let lab = &base.lab;
    let opened = count(n1, "events", "flow_opened")?;
    let handed_over = count(n1, "events", "handed_over")?;
    for family in Family::ALL {
        let node_port = SocketAddr::new(lab.n1.host.addrs.ip(family), NODE_PORT);
        for to in [vip(11, family), node_port] {
            for (protocol, lengths) in [
                (Protocol::Tcp, [10, 1_400, 200_000]),
                (Protocol::Udp, [10, 1_400, 4_000]),
            ] {
                for length in lengths {
                    let payload = pattern(length);
                    let answer = dial(lab, protocol, to, &payload)
                        .with_context(|| format!("{length} bytes"))?;
                    ensure!(
                        answer.backend == "p2a" && is_x(lab, &answer),
                        "{protocol} to {to}: {answer:?}"
                    );
                }
            }
        }
    }
    ensure!(
        count(n1, "events", "flow_opened")? == opened,
        "the entry has opened flows"
    );
    ensure!(count(n1, "events", "handed_over")? > handed_over + 100);
    ensure!(count(n2, "reasons", "handover_refused")? == 0);
    Ok(())
}

#[test]
fn connections_live_on_when_another_node_gets_their_packets() {
    with_nodes(Layout::Routed, |base, n1, _| {
        let lab = &base.lab;
        for family in Family::ALL {
            let mut held: Vec<_> = (0..40)
                .map(|_| {
                    Dial::new(Protocol::Tcp, vip(12, family))
                        .deadline(Duration::from_secs(10))
                        .connect(&lab.x.ns)
                        .map_err(|fault| anyhow::anyhow!("{fault}"))
                })
                .collect::<Result<_>>()?;
            let mut backends = std::collections::BTreeSet::new();
            for node in [&lab.n1, &lab.n2, &lab.n1] {
                lab.set_external_route(node)?;
                for connection in &mut held {
                    let answer = connection
                        .exchange(b"still there?")
                        .map_err(|fault| anyhow::anyhow!("by {}: {fault}", node.host.name))?;
                    ensure!(is_x(lab, &answer), "{answer:?}");
                    backends.insert(answer.backend);
                }
            }
            ensure!(backends.len() == 2, "one backend has all: {backends:?}");
        }
        ensure!(count(n1, "events", "handed_over")? > 0);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_node_that_is_not_able_gets_masqueraded_clients() {
    with_nodes(Layout::Routed, |base, n1, _| {
        let lab = &base.lab;
        let leases = base.cluster.api_server()?;
        leases.delete("Lease", "default", "kpx-handover-n2")?;
        for family in Family::ALL {
            wait_until(DEADLINE, "n1 masquerades", || {
                Ok(!is_x(
                    lab,
                    &dial(lab, Protocol::Tcp, vip(11, family), b"hello")?,
                ))
            })?;
        }
        ensure!(n1.problem("external forwarding")?.is_none());
        Ok(())
    })
    .unwrap();
}

#[test]
fn rules_at_the_entry_masquerade_until_they_are_gone() {
    with_nodes(Layout::Routed, |base, n1, _| {
        let lab = &base.lab;
        let is_handed_over = || {
            dial(lab, Protocol::Tcp, vip(11, Family::V4), b"hello").map(|answer| is_x(lab, &answer))
        };
        lab.n1.host.ns.nft("add table inet ban\nadd chain inet ban forward { type filter hook forward priority 0; }\nadd rule inet ban forward ip saddr 203.0.113.200 drop")?;
        wait_until(DEADLINE, "n1 masquerades", || Ok(!is_handed_over()?))?;
        ensure!(
            n1.problem("external forwarding")?
                .is_some_and(|why| why.contains("ban")),
            "{:?}",
            n1.problem("external forwarding")
        );
        lab.n1.host.ns.nft("delete table inet ban")?;
        wait_until(DEADLINE, "n1 hands clients over", is_handed_over)
    })
    .unwrap();
}

#[test]
fn nobody_but_a_node_hands_packets_in() {
    with_nodes(Layout::Routed, |base, n1, n2| {
        for family in Family::ALL {
            attack(base, n1, n2, family).with_context(|| family.to_string())?;
        }
        Ok(())
    })
    .unwrap();
}

/// Sends SYNs in outer headers of every kind that n2 must refuse, and one that it accepts.
fn attack(base: &ServedLab, _n1: &Agent, n2: &Agent, family: Family) -> Result<()> {
    let lab = &base.lab;
    let ip = |host: &str| lab.host(host).addrs.ip(family);
    let at = |ip: IpAddr, port| SocketAddr::new(ip, port);
    let client = |port| at(ip("x"), port);
    // The sender's host, the outer source, the inner source and destination, and what n2 counts.
    let cases = [
        (
            "a machine that is no node",
            "xl",
            ip("xl"),
            client(40_001),
            vip(11, family),
            "handover_refused",
        ),
        (
            "a pod in a node's name",
            "p2b",
            ip("n1"),
            client(40_002),
            vip(11, family),
            "spoofed",
        ),
        (
            "a pod in its own name",
            "p2b",
            ip("p2b"),
            client(40_003),
            vip(11, family),
            "handover_refused",
        ),
        (
            "a node, to a pod past every policy",
            "n1",
            ip("n1"),
            client(40_004),
            at(ip("p2a"), PORT),
            "handover_refused",
        ),
        (
            "a node, to another machine",
            "n1",
            ip("n1"),
            client(40_005),
            at(ip("ext"), PORT),
            "handover_refused",
        ),
        (
            "a node, to a node port of the receiver",
            "n1",
            ip("n1"),
            client(40_006),
            at(ip("n2"), NODE_PORT),
            "handover_refused",
        ),
        (
            "a node, to a ClusterIP",
            "n1",
            ip("n1"),
            client(40_007),
            far().frontend(family),
            "handover_refused",
        ),
        (
            "a node, from a pod of the receiver",
            "n1",
            ip("n1"),
            at(ip("p2b"), 40_008),
            vip(11, family),
            "spoofed",
        ),
        (
            "a node, from an address of the receiver",
            "n1",
            ip("n1"),
            at(ip("n2"), 40_009),
            vip(11, family),
            "spoofed",
        ),
        (
            "a node, from outside the source ranges",
            "n1",
            ip("n1"),
            client(40_010),
            vip(13, family),
            "source_range",
        ),
    ];
    for (what, host, outer, from, to, reason) in cases {
        let opened = count(n2, "events", "flow_opened")?;
        let before = count(n2, "reasons", reason)?;
        let stranger = Stranger::on(lab.host(host))?;
        stranger.send_tunnelled(outer, ip("n2"), tcp(from, to).syn())?;
        wait_until(DEADLINE, "n2 counts the packet", || {
            Ok(count(n2, "reasons", reason)? > before)
        })
        .with_context(|| format!("{what}: {reason}"))?;
        ensure!(
            count(n2, "events", "flow_opened")? == opened,
            "{what} opened a flow"
        );
    }
    // The same packet from where it may come opens a flow.
    let opened = count(n2, "events", "flow_opened")?;
    Stranger::on(lab.host("n1"))?.send_tunnelled(
        ip("n1"),
        ip("n2"),
        tcp(client(40_011), vip(11, family)).syn(),
    )?;
    wait_until(DEADLINE, "n2 opens a flow", || {
        Ok(count(n2, "events", "flow_opened")? > opened)
    })
}
