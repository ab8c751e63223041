//! `--external-forwarding dsr` between two nodes: clients outside reach backends of other nodes with
//! their own address, and get the answers directly. Needs the kernel's modules ipip and ip6_tunnel.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use testbed::agent::{Agent, DEADLINE, SERVICE_PORT, Service, idle, kpx, wait_until};
use testbed::echo::{Answer, Connection, Dial, Protocol, pattern};
use testbed::kernel;
use testbed::lab::{EXTERNAL, Family, Lab, Layout, Node};
use testbed::served_lab::ServedLab;
use testbed::stranger::{Stranger, tcp};

const PORT: u16 = 8080;
const NODE_PORT: u16 = 30_080;
const DSR: [&str; 2] = ["--external-forwarding", "dsr"];
/// The namespace of the Leases.
const LEASES: &str = "kpx-handover";
const TUNNELS: [&str; 2] = ["kpx-ipip", "kpx-ip6ip6"];

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
    with_agents(layout, |base, n1, n2| {
        let result = run(base, &n1, &n2);
        result.with_context(|| format!("n1: {}\nn2: {}", counts(&n1), counts(&n2)))?;
        n1.stop()?;
        n2.stop()
    })
}

fn counts(agent: &Agent) -> String {
    let status = agent.typed_status();
    format!(
        "{:#?}\n{}",
        status.map(|status| (status.events, status.reasons)),
        agent.log()
    )
}

/// Starts kpx with the mode.
fn start<'a>(base: &'a ServedLab, node: &'a Node) -> Result<Agent<'a>> {
    Agent::start_with(
        &base.lab,
        node,
        base.cluster.source(),
        &DSR.map(str::to_owned),
    )
}

/// Like [`with_nodes`], for a test that ends the agents itself.
fn with_agents(
    layout: Layout,
    run: impl FnOnce(&ServedLab, Agent, Agent) -> Result<()>,
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
    let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": LEASES}});
    base.cluster.api_server()?.apply(&namespace)?;
    let (n1, n2) = (start(&base, &base.lab.n1)?, start(&base, &base.lab.n2)?);
    for family in Family::ALL {
        wait_until(DEADLINE, "n1 hands clients over to n2", || {
            Ok(dial(&base.lab, Protocol::Udp, vip(11, family), b"hello")
                .is_ok_and(|answer| is_x(&base.lab, &answer)))
        })
        .with_context(|| format!("n1: {}\nn2: {}", n1.log(), n2.log()))?;
    }
    run(&base, n1, n2)
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

/// A router sends "too big" about an answer to the Service's address, so to n1.
#[test]
fn answers_fit_a_narrow_path_whatever_node_hears_of_it() {
    with_nodes(Layout::Routed, |base, _, n2| {
        let lab = &base.lab;
        for family in Family::ALL {
            let node_port = SocketAddr::new(lab.n1.host.addrs.ip(family), NODE_PORT);
            for to in [vip(11, family), node_port] {
                // The hosts forget what the last transfer taught them.
                lab.set_narrow(true)?;
                let answer = dial(lab, Protocol::Tcp, to, &pattern(200_000))?;
                ensure!(answer.backend == "p2a" && is_x(lab, &answer), "{answer:?}");
            }
        }
        ensure!(count(n2, "reasons", "handover_refused")? == 0);
        Ok(())
    })
    .unwrap();
}

/// Firewalls drop the entry's "too big", and then a client repeats long segments without progress.
#[test]
fn uploads_fit_the_tunnel_without_a_report_of_its_mtu() {
    const REPORTS: &str = "
        table inet reports {
            chain input {
                type filter hook input priority 0;
                icmp code frag-needed drop
                icmpv6 type packet-too-big drop
            }
        }
    ";
    with_nodes(Layout::Routed, |base, n1, _| {
        let lab = &base.lab;
        lab.x.ns.nft(REPORTS)?;
        let handed_over = count(n1, "events", "handed_over")?;
        let fragments = fragments(&lab.n1)?;
        for family in Family::ALL {
            let node_port = SocketAddr::new(lab.n1.host.addrs.ip(family), NODE_PORT);
            for to in [vip(11, family), node_port] {
                let answer = dial(lab, Protocol::Tcp, to, &pattern(200_000))?;
                ensure!(answer.backend == "p2a" && is_x(lab, &answer), "{answer:?}");
            }
        }
        ensure!(count(n1, "events", "handed_over")? > handed_over + 20);
        ensure!(
            self::fragments(&lab.n1)? == fragments,
            "the entry has fragmented segments"
        );
        Ok(())
    })
    .unwrap();
}

/// Returns the fragments of both families that a node has made.
fn fragments(node: &Node) -> Result<Vec<String>> {
    let mut nstat = Command::new("nstat");
    nstat.args(["-asz", "IpFragCreates", "Ip6FragCreates"]);
    let text = node.host.ns.exec(&mut nstat)?;
    let counts = text.lines().filter(|line| line.contains("FragCreates"));
    let counts: Vec<_> = counts.map(str::to_owned).collect();
    ensure!(counts.len() == 2, "nstat printed {text}");
    Ok(counts)
}

#[test]
fn traces_follow_a_packet_over_both_nodes() {
    with_nodes(Layout::Routed, |base, n1, n2| {
        let lab = &base.lab;
        for family in Family::ALL {
            let client = SocketAddr::new(lab.x.addrs.ip(family), 40_100);
            let backend = SocketAddr::new(lab.host("p2a").addrs.ip(family), PORT);
            let node_port = SocketAddr::new(lab.n1.host.addrs.ip(family), NODE_PORT);
            for to in [vip(11, family), node_port] {
                for (agent, node, flag, handed_over) in [
                    (n1, &lab.n1, "", true),
                    (n2, &lab.n2, "--handed-over", false),
                ] {
                    let outcome = &trace(
                        agent,
                        node,
                        &format!("--from {client} --to {to} {flag}"),
                    )?["outcome"];
                    let found = [
                        &outcome["verdict"],
                        &outcome["handedOver"],
                        &outcome["backend"]["at"],
                        &outcome["backend"]["local"],
                        &outcome["source"]["at"],
                    ];
                    let expected = [
                        json!("forward"),
                        json!(handed_over),
                        json!(backend.to_string()),
                        json!(!handed_over),
                        json!(client.to_string()),
                    ];
                    ensure!(
                        found.into_iter().eq(&expected),
                        "{to} at {}: {outcome:#}",
                        node.host.name
                    );
                }
            }
        }
        Ok(())
    })
    .unwrap();
}

fn trace(agent: &Agent, node: &Node, arguments: &str) -> Result<Value> {
    let run_dir = agent.run_dir().display();
    let line = format!("trace --run-dir {run_dir} --output json {arguments}");
    let output = kpx(&node.host.ns, &line)?;
    ensure!(output.status.success(), "{line}: {output:?}");
    serde_json::from_slice(&output.stdout).context("parse the trace")
}

/// Opens connections of both families to `both`.
fn hold(lab: &Lab, of_family: usize) -> Result<Vec<Connection>> {
    let mut held = Vec::new();
    for family in Family::ALL {
        for _ in 0..of_family {
            let dial = Dial::new(Protocol::Tcp, vip(12, family)).deadline(Duration::from_secs(10));
            let connection = dial.connect(&lab.x.ns);
            held.push(connection.map_err(|fault| anyhow::anyhow!("{fault}"))?);
        }
    }
    Ok(held)
}

/// Uses each connection. Returns the backends.
fn use_all(lab: &Lab, held: &mut [Connection], when: &str) -> Result<BTreeSet<String>> {
    let backends = held.iter_mut().map(|connection| use_one(lab, connection));
    backends
        .collect::<Result<_>>()
        .with_context(|| when.to_owned())
}

/// Uses a connection. Returns its backend.
fn use_one(lab: &Lab, connection: &mut Connection) -> Result<String> {
    let answer = connection
        .exchange(b"still there?")
        .map_err(|fault| anyhow::anyhow!("{fault}"))?;
    ensure!(is_x(lab, &answer), "{answer:?}");
    Ok(answer.backend)
}

#[test]
fn connections_live_on_when_another_node_gets_their_packets() {
    with_nodes(Layout::Routed, |base, n1, _| {
        let lab = &base.lab;
        let mut held = hold(lab, 40)?;
        for node in [&lab.n1, &lab.n2, &lab.n1] {
            lab.set_external_route(node)?;
            let backends = use_all(lab, &mut held, &node.host.name)?;
            ensure!(backends.len() == 2, "one backend has all: {backends:?}");
        }
        ensure!(count(n1, "events", "handed_over")? > 0);
        Ok(())
    })
    .unwrap();
}

/// New connections have the other backend.
#[test]
fn connections_of_a_terminating_backend_live_on() {
    with_nodes(Layout::Routed, |base, _, _| {
        let lab = &base.lab;
        let mut held = hold(lab, 40)?;
        let backends = use_all(lab, &mut held, "both are ready")?;
        ensure!(backends.len() == 2, "one backend has all: {backends:?}");
        base.put(&both().terminating(&["p2a"]))?;
        wait_until(DEADLINE, "new connections have the other backend", || {
            let fresh = hold(lab, 10).and_then(|mut fresh| use_all(lab, &mut fresh, "fresh"));
            Ok(fresh.is_ok_and(|backends| backends.len() == 1))
        })?;
        let backends = use_all(lab, &mut held, "one terminates")?;
        ensure!(backends.len() == 2, "{backends:?}");
        Ok(())
    })
    .unwrap();
}

/// The router spreads connections over both nodes, withdraws n1, and then n1 dies with its backend.
#[test]
fn connections_to_other_backends_survive_the_loss_of_their_entry_node() {
    with_agents(Layout::Routed, |base, n1, n2| {
        let lab = &base.lab;
        lab.spread_external_routes()?;
        let before = count(&n1, "events", "handed_over")?;
        let mut held = hold(lab, 40)?;
        for (agent, before) in [(&n1, before), (&n2, 0)] {
            ensure!(
                count(agent, "events", "handed_over")? > before,
                "{}",
                counts(agent)
            );
        }
        lab.set_external_route(&lab.n2)?;
        use_all(lab, &mut held, "n1 is withdrawn")?;
        let mut elsewhere = Vec::new();
        for mut connection in held {
            if use_one(lab, &mut connection)? == "p2a" {
                elsewhere.push(connection);
            }
        }
        ensure!(elsewhere.len() > 20, "{} of 80", elsewhere.len());
        lab.n1.host.ns.ip("link set eth0 down")?;
        use_all(lab, &mut elsewhere, "n1 is dead")?;
        base.put(
            &Service::new("both", 12, &["p2a"], PORT).load_balancer(EXTERNAL.host(12), "VIP"),
        )?;
        wait_until(DEADLINE, "new connections have the other backend", || {
            // The SYNs of some reach the dead node until n2 has the change.
            let fresh = hold(lab, 5).and_then(|mut fresh| use_all(lab, &mut fresh, "fresh"));
            Ok(fresh.is_ok_and(|backends| backends.len() == 1))
        })?;
        use_all(lab, &mut elsewhere, "with the backends that are left")?;
        n1.crash()?;
        n2.stop()
    })
    .unwrap();
}

#[test]
fn connections_survive_restarts_of_both_agents() {
    with_agents(Layout::Routed, |base, n1, n2| {
        let lab = &base.lab;
        let server = base.cluster.api_server()?;
        let uid = |node: &str| {
            let lease = server.get("Lease", LEASES, node);
            lease.map(|lease| lease["metadata"]["uid"].clone())
        };
        let leases = [uid("n1"), uid("n2")];
        ensure!(leases.iter().all(Option::is_some), "{leases:?}");
        let mut held = hold(lab, 10)?;
        n1.stop()?;
        use_all(lab, &mut held, "n1 has no agent")?;
        // The connections are used while the agent starts.
        let n1 = used_while(lab, &mut held, || start(base, &lab.n1))?;
        n2.crash()?;
        use_all(lab, &mut held, "n2 has no agent")?;
        let n2 = used_while(lab, &mut held, || start(base, &lab.n2))?;
        idle(Duration::from_secs(3))?;
        use_all(lab, &mut held, "after both restarts")?;
        ensure!(leases == [uid("n1"), uid("n2")], "a Lease was deleted");
        for agent in [&n1, &n2] {
            ensure!(
                count(agent, "reasons", "not_handed_over")? == 0,
                "{}",
                counts(agent)
            );
            ensure!(agent.problem("external forwarding")?.is_none());
        }
        for family in Family::ALL {
            ensure!(is_x(
                lab,
                &dial(lab, Protocol::Tcp, vip(11, family), b"hello")?
            ));
        }
        n1.stop()?;
        n2.stop()
    })
    .unwrap();
}

/// Runs `work`, and uses the connections until it is done.
fn used_while<T: Send>(
    lab: &Lab,
    held: &mut [Connection],
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    let is_done = AtomicBool::new(false);
    thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let done = work();
            is_done.store(true, Ordering::Release);
            done
        });
        while !is_done.load(Ordering::Acquire) {
            use_all(lab, held, "while an agent starts")?;
        }
        worker
            .join()
            .map_err(|_| anyhow::anyhow!("the start has panicked"))?
    })
}

#[test]
fn a_node_that_is_not_able_gets_masqueraded_clients() {
    with_agents(Layout::Routed, |base, n1, n2| {
        let lab = &base.lab;
        // Its programs continue, and would take clients over.
        n2.stop()?;
        ensure!(is_up(&lab.n2, TUNNELS[0])? == Some(true));
        base.cluster.api_server()?.delete("Lease", LEASES, "n2")?;
        masquerades(lab)?;
        ensure!(n1.problem("external forwarding")?.is_none());
        n1.stop()
    })
    .unwrap();
}

fn masquerades(lab: &Lab) -> Result<()> {
    for family in Family::ALL {
        wait_until(DEADLINE, "n1 masquerades", || {
            let answer = dial(lab, Protocol::Tcp, vip(11, family), b"hello");
            Ok(answer.is_ok_and(|answer| !is_x(lab, &answer)))
        })?;
    }
    Ok(())
}

/// Returns whether a device is up; `None` if it does not exist.
fn is_up(node: &Node, device: &str) -> Result<Option<bool>> {
    let links = node
        .host
        .ns
        .exec(Command::new("ip").args(["-o", "link", "show"]))?;
    let mut links = links.lines();
    let link = links.find(|line| {
        line.contains(&format!(" {device}@")) || line.contains(&format!(" {device}:"))
    });
    let flags = link.and_then(|line| line.split_once('<')?.1.split_once('>'));
    Ok(flags.map(|(flags, _)| flags.split(',').any(|flag| flag == "UP")))
}

#[test]
fn the_tunnel_devices_go_with_the_mode_and_its_preconditions() {
    with_agents(Layout::Routed, |base, n1, n2| {
        let lab = &base.lab;
        let server = base.cluster.api_server()?;
        for device in TUNNELS {
            ensure!(is_up(&lab.n2, device)? == Some(true), "{device}");
        }
        // Another program's tunnels.
        lab.n2.host.ns.ip("link set tunl0 up")?;
        wait_until(DEADLINE, "n2 removes its devices", || {
            Ok(is_up(&lab.n2, TUNNELS[0])?.is_none() && is_up(&lab.n2, TUNNELS[1])?.is_none())
        })?;
        ensure!(
            n2.problem("external forwarding")?
                .is_some_and(|why| why.contains("tunl0"))
        );
        masquerades(lab)?;
        lab.n2.host.ns.ip("link set tunl0 down")?;
        wait_until(DEADLINE, "n2 takes clients over again", || {
            let answer = dial(lab, Protocol::Tcp, vip(11, Family::V4), b"hello");
            Ok(answer.is_ok_and(|answer| is_x(lab, &answer)))
        })?;
        // The mode ends at n2.
        n2.stop()?;
        let n2 = Agent::start(lab, &lab.n2, base.cluster.source())?;
        for device in TUNNELS {
            ensure!(is_up(&lab.n2, device)? != Some(true), "{device}");
        }
        wait_until(DEADLINE, "n2 withdraws its Lease", || {
            Ok(server.get("Lease", LEASES, "n2").is_none())
        })?;
        wait_until(DEADLINE, "n2 removes its devices", || {
            Ok(is_up(&lab.n2, TUNNELS[0])?.is_none() && is_up(&lab.n2, TUNNELS[1])?.is_none())
        })?;
        masquerades(lab)?;
        n2.stop()?;
        n1.stop()?;
        let cleaned = kpx(&lab.n1.host.ns, "cleanup")?;
        ensure!(cleaned.status.success(), "{cleaned:?}");
        for device in TUNNELS {
            ensure!(is_up(&lab.n1, device)?.is_none(), "{device}");
        }
        Ok(())
    })
    .unwrap();
}

/// The backend's node cannot tell an address that its Node object lacks from a stranger's.
#[test]
fn only_node_ports_at_addresses_of_the_node_object_are_handed_over() {
    with_nodes(Layout::Routed, |base, _, _| {
        let lab = &base.lab;
        let other: IpAddr = "192.0.2.77".parse()?;
        lab.n1
            .host
            .ns
            .ip(&format!("address add {other}/32 dev lo"))?;
        lab.fabric.ns.ip(&format!(
            "route add {other}/32 via {}",
            lab.n1.host.addrs.v4
        ))?;
        wait_until(DEADLINE, "n1 serves the address", || {
            let to = SocketAddr::new(other, NODE_PORT);
            Ok(dial(lab, Protocol::Tcp, to, b"hello").is_ok_and(|answer| !is_x(lab, &answer)))
        })?;
        let to = SocketAddr::new(lab.n1.host.addrs.ip(Family::V4), NODE_PORT);
        ensure!(is_x(lab, &dial(lab, Protocol::Tcp, to, b"hello")?));
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_route_with_another_source_masquerades() {
    with_nodes(Layout::Routed, |base, n1, _| {
        let lab = &base.lab;
        let [n1_ip, n2_ip] = [&lab.n1, &lab.n2].map(|node| node.host.addrs.v4);
        let ns = &lab.n1.host.ns;
        ns.ip("address add 198.51.100.78/32 dev lo")?;
        let route = ns.exec(Command::new("ip").args(["route", "get", &n2_ip.to_string()]))?;
        let words: Vec<_> = route.split_whitespace().collect();
        let after = |word: &str| {
            let at = words.iter().position(|known| *known == word);
            at.and_then(|at| words.get(at + 1)).copied()
        };
        let device = after("dev").context("the route has a device")?;
        let via = after("via")
            .map(|via| format!("via {via}"))
            .unwrap_or_default();
        ns.ip(&format!(
            "route replace {n2_ip}/32 {via} dev {device} src 198.51.100.78"
        ))?;
        wait_until(Duration::from_secs(60), "n1 masquerades", || {
            let answer = dial(lab, Protocol::Tcp, vip(11, Family::V4), b"hello");
            Ok(answer.is_ok_and(|answer| !is_x(lab, &answer)))
        })?;
        let why = n1.problem("external forwarding")?;
        ensure!(
            why.as_ref()
                .is_some_and(|why| why.contains("198.51.100.78")),
            "{why:?}"
        );
        ensure!(
            is_x(
                lab,
                &dial(lab, Protocol::Tcp, vip(11, Family::V6), b"hello")?
            ),
            "{n1_ip}"
        );
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
    with_nodes(Layout::Routed, |base, _, n2| {
        for family in Family::ALL {
            attack(base, n2, family).with_context(|| family.to_string())?;
        }
        Ok(())
    })
    .unwrap();
}

/// Sends SYNs in outer headers of every kind that n2 must refuse, and one that it accepts.
fn attack(base: &ServedLab, n2: &Agent, family: Family) -> Result<()> {
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
            "a pod with a node's address",
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
