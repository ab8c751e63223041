//! Failures of every kind, and the command that names the cause of each. docs/troubleshooting.md
//! has the table.

use std::net::{SocketAddr, UdpSocket};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use testbed::agent::{Agent, DEADLINE, Service, kpx, wait_until};
use testbed::apiserver::History;
use testbed::echo::{Dial, Protocol};
use testbed::lab::{EXTERNAL, Family, Lab};
use testbed::netns::NetNs;
use testbed::watched_lab::WatchedLab;

const PORT: u16 = 8080;
const NODE_PORT: u16 = 30_090;
/// The port of a UDP server that does not answer.
const MUTE_PORT: u16 = 9_999;
/// The timeout of an answer that may not come.
const ANSWER: Duration = Duration::from_millis(300);
/// The time in which one command must name a cause.
const PROMPT: Duration = Duration::from_secs(60);
/// The smallest flow table.
const FLOW_ENTRIES: &str = "1024";

/// The node n1 with kpx, where the commands run.
struct Node<'a> {
    lab: &'a Lab,
    agent: &'a Agent<'a>,
}

impl Node<'_> {
    /// Runs one command, whose output must name the cause in all of these words.
    fn names(&self, failure: &str, command: &str, words: &[&str]) -> Result<()> {
        let started = Instant::now();
        let run_dir = format!(" --run-dir {}", self.agent.run_dir().display());
        let line = if command.starts_with("check") {
            command.to_owned()
        } else {
            command.to_owned() + &run_dir
        };
        wait_until(DEADLINE, &format!("{failure} is named"), || {
            let output = kpx(&self.lab.n1.host.ns, &line)?;
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let is_named = words.iter().all(|word| text.contains(word));
            if is_named {
                println!("--- {failure}\n# kpx {command}\n{text}");
            }
            Ok(is_named)
        })
        .with_context(|| {
            let output =
                kpx(&self.lab.n1.host.ns, &line).map(|output| (output.stdout, output.stderr));
            let text = output.map(|(out, err)| {
                [out, err].map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            });
            format!("{command}: {text:#?}")
        })?;
        ensure!(
            started.elapsed() < PROMPT,
            "{failure}: {command} took {:?}",
            started.elapsed()
        );
        Ok(())
    }

    /// Checks that a dial fails.
    fn fails(&self, client: &str, to: SocketAddr) -> Result<()> {
        self.fails_over(Protocol::Tcp, client, to)
    }

    fn fails_over(&self, protocol: Protocol, client: &str, to: SocketAddr) -> Result<()> {
        let result = Dial::new(protocol, to)
            .deadline(ANSWER)
            .exchange(&self.lab.host(client).ns, b"hello");
        ensure!(result.is_err(), "{client} reaches {to}");
        Ok(())
    }
}

#[test]
fn one_command_names_the_cause_of_each_failure() -> Result<()> {
    let base = WatchedLab::start(PORT)?;
    let lab = &base.lab;
    let balancer = EXTERNAL.host(20);
    let services = [
        Service::new("none", 11, &[], PORT),
        Service::new("wrong", 12, &["p1b"], 1),
        Service::new("filtered", 13, &["p2a"], PORT),
        Service::new("ranged", 14, &["p1b"], PORT)
            .load_balancer(balancer, "VIP")
            .source_ranges(&["192.0.2.128/25".to_owned()]),
        Service::new("local", 15, &["p2a"], PORT)
            .node_port(NODE_PORT)
            .external_local(),
        Service::new("dead", 16, &["p1c"], PORT),
        Service::new("gone", 17, &["p1b"], PORT),
        Service::new("web", 18, &["p1b"], PORT),
        Service::new("mute", 19, &["p1b"], MUTE_PORT),
        Service::new("elsewhere", 20, &["p2b"], PORT),
        Service::new("client", 21, &["p1a"], PORT),
    ];
    let unready = Service::new("unready", 22, &["p1b"], PORT);
    services
        .iter()
        .try_for_each(|service| base.put_service(service))?;
    for mut object in unready.objects(lab) {
        if let Some(endpoint) = object.0.get_mut("endpoints") {
            endpoint[0]["conditions"] = json!({ "ready": false, "serving": false });
        }
        base.put(&object)?;
    }
    let arguments = ["--socket-lb", "off", "--flow-table-size", FLOW_ENTRIES].map(str::to_owned);
    let agent = Agent::start_with(lab, &lab.n1, base.source(), &arguments)?;
    let node = Node { lab, agent: &agent };
    in_the_objects(&node, &base, &services, &unready)?;
    behind_kpx(&node, &services)?;
    of_datagrams(&node, &services)?;
    without_a_route(&node, &services[7])?;
    in_the_node(&node, &services[7])?;

    base.api_mut().stop()?;
    node.names(
        "the API server is away",
        "status",
        &["PROBLEMS", "Service watch", "Connection refused"],
    )?;
    base.api_mut().start_again(History::Kept)?;
    agent.wait(DEADLINE, "it is well again", |status| status.healthy)?;
    orphaned(&lab.n1.host.ns, agent)
}

/// Kills the agent; its programs serve on.
fn orphaned(ns: &NetNs, mut agent: Agent) -> Result<()> {
    let serve =
        "kpx's programs serve here without an agent: Services stay in their last known state";
    let status = format!("status --run-dir {}", agent.run_dir().display());
    let says = |command: &str, words: &[&str]| -> Result<bool> {
        let output = kpx(ns, command)?;
        let text = String::from_utf8([output.stdout, output.stderr].concat())?;
        Ok(words.iter().all(|word| text.contains(word)))
    };
    ensure!(!says("check", &["without an agent"])?, "an agent runs");
    agent.kill()?;
    let commands = [
        (status.as_str(), "Start kpx, or wait if it restarts"),
        ("check", "start kpx, or wait if it restarts"),
    ];
    for (command, advice) in commands {
        wait_until(DEADLINE, &format!("{command} names the dead agent"), || {
            says(command, &[serve, advice])
        })?;
    }
    Ok(())
}

/// The cluster's objects cause the failure.
fn in_the_objects(
    node: &Node,
    base: &WatchedLab,
    services: &[Service],
    unready: &Service,
) -> Result<()> {
    let client = node.lab.host("p1a").addrs.v4;
    let (none, gone) = (&services[0], &services[6]);
    node.fails("p1a", none.frontend(Family::V4))?;
    let command = format!("trace --from {client} --to svc/default/none:tcp");
    node.names(
        "no endpoints",
        &command,
        &["reject (no_endpoints)", "compare the Service's selector"],
    )?;

    node.fails("p1a", unready.frontend(Family::V4))?;
    let command = format!("trace --from {client} --to svc/default/unready:tcp");
    node.names(
        "no ready endpoint",
        &command,
        &["reject (no_endpoints)", "check the pods' readiness probes"],
    )?;

    let outside = node.lab.host("x").addrs.v4;
    let balancer = SocketAddr::new(EXTERNAL.host(20).v4.into(), 80);
    node.fails("x", balancer)?;
    let command = format!("trace --from {outside} --to {balancer}");
    node.names(
        "loadBalancerSourceRanges",
        &command,
        &[
            "default/ranged",
            "drop (source_range)",
            "spec.loadBalancerSourceRanges",
        ],
    )?;

    let at = SocketAddr::new(node.lab.n1.host.addrs.v4.into(), NODE_PORT);
    node.fails("x", at)?;
    let command = format!("trace --from {outside} --to {at}");
    let words = [
        "default/local",
        "drop (no_local_endpoints)",
        "traffic policy is Local",
    ];
    node.names("a traffic policy Local without endpoints", &command, &words)?;

    // The client keeps the address of a deleted Service.
    let kept = gone.frontend(Family::V4);
    for slice in ["gone-ipv4", "gone-ipv6"] {
        base.api().delete("EndpointSlice", "default", slice)?;
    }
    base.api().delete("Service", "default", "gone")?;
    wait_until(DEADLINE, "the Service has gone", || {
        Ok(node.fails("p1a", kept).is_ok())
    })?;
    let command = format!("trace --from {client} --to {kept}");
    node.names(
        "a stale DNS answer",
        &command,
        &["drop (unallocated)", "a DNS answer that a client keeps"],
    )
}

/// kpx forwards, and a later step fails.
fn behind_kpx(node: &Node, services: &[Service]) -> Result<()> {
    let client = node.lab.host("p1a").addrs.v4;
    let trace = |name: &str| format!("trace --from {client} --to svc/default/{name}:tcp");
    node.fails("p1a", services[1].frontend(Family::V4))?;
    node.names(
        "a wrong targetPort",
        &trace("wrong"),
        &[
            "forward to",
            "were reset",
            "compare the Service's targetPort",
        ],
    )?;

    // The flows end, and their counter stays.
    let end = format!(
        "flows --service default/wrong --end --run-dir {}",
        node.agent.run_dir().display()
    );
    ensure!(kpx(&node.lab.n1.host.ns, &end)?.status.success(), "{end}");
    let words = [
        "forward to",
        "reset since its last answer, the latest",
        "compare the Service's targetPort",
    ];
    node.names("a wrong targetPort, later", &trace("wrong"), &words)?;

    let backend = node.lab.host("p2a").addrs.v4;
    let n1 = &node.lab.n1.host.ns;
    n1.nft(&format!(
        "table ip netpol {{
            chain forward {{
                type filter hook forward priority filter
                ip daddr {backend} tcp dport {PORT} ct state new drop
            }}
        }}"
    ))?;
    node.fails("p1a", services[2].frontend(Family::V4))?;
    let words = [
        "forward to",
        "have no answer",
        "rule 1 of chain forward of table ip netpol may drop the packet",
    ];
    node.names("a filter of another program", &trace("filtered"), &words)?;
    n1.nft("delete table ip netpol")?;

    n1.nft(
        "table ip closed {
            chain FORWARD { type filter hook forward priority filter; policy drop
            }
        }",
    )?;
    node.fails("p1a", services[2].frontend(Family::V4))?;
    let words = [
        "have no answer",
        "chain FORWARD of table ip closed drops packets that its rules do not accept",
    ];
    node.names("a policy drop", &trace("filtered"), &words)?;
    n1.nft("delete table ip closed")?;

    let elsewhere = node.lab.host("p2b").addrs.v4;
    crate::forbid(
        &node.lab.n2.host.ns,
        &format!("ip daddr {elsewhere} tcp dport {PORT} drop"),
    )?;
    node.fails("p1a", services[9].frontend(Family::V4))?;
    let words = [
        "have no answer",
        "something behind this node drops them; no rule of netfilter here does",
    ];
    node.names(
        "a filter of the backend's node",
        &trace("elsewhere"),
        &words,
    )?;

    node.lab.host("p1c").ns.ip("link set eth0 down")?;
    node.fails("p1a", services[5].frontend(Family::V4))?;
    let words = [
        "forward to",
        "have no answer",
        "the backend or its node is down",
        "no rule of netfilter here does",
    ];
    node.names("a dead backend", &trace("dead"), &words)
}

/// The same for UDP, where only the missing answer shows the failure.
fn of_datagrams(node: &Node, services: &[Service]) -> Result<()> {
    let client = node.lab.host("p1a").addrs.v4;
    let trace = |name: &str| format!("trace --from {client} --to svc/default/{name}:udp");
    let fails =
        |nth: usize| node.fails_over(Protocol::Udp, "p1a", services[nth].frontend(Family::V4));
    fails(1)?;
    let words = [
        "forward to",
        "datagrams were refused (ICMP port unreachable)",
        "no process listens there (compare the Service's targetPort)",
    ];
    node.names("a UDP server that does not listen", &trace("wrong"), &words)?;

    let pod = node.lab.host("p1b");
    let mute = pod
        .ns
        .run(|| UdpSocket::bind((pod.addrs.v4, MUTE_PORT)))
        .context("listen, and never read")?;
    fails(8)?;
    let words = [
        "forward to",
        "1 of 1 UDP flows to",
        "are unanswered: the backend or its node is down",
        "no rule of netfilter here does",
    ];
    node.names("a silent UDP server", &trace("mute"), &words)?;
    drop(mute);

    let backend = node.lab.host("p2a").addrs.v4;
    node.lab.n1.host.ns.nft(&format!(
        "table ip dnspol {{
            chain forward {{
                type filter hook forward priority filter
                ip daddr {backend} udp dport {PORT} drop
            }}
        }}"
    ))?;
    fails(2)?;
    let words = [
        "forward to",
        "are unanswered",
        "rule 1 of chain forward of table ip dnspol may drop the packet",
    ];
    node.names("a filter of UDP", &trace("filtered"), &words)?;
    node.lab.n1.host.ns.nft("delete table ip dnspol")
}

/// The node has no route to the client's pod.
fn without_a_route(node: &Node, web: &Service) -> Result<()> {
    let client = node.lab.host("p1a").addrs.v4;
    let n1 = &node.lab.n1.host.ns;
    let routes = n1.exec(Command::new("ip").args(["route", "show", &client.to_string()]))?;
    let route = routes.lines().next().context("a pod's route")?;
    n1.ip(&format!("route del {route}"))?;
    node.fails("p1a", web.frontend(Family::V4))?;
    let command = format!("trace --from {client} --to svc/default/web:tcp");
    let words = [
        "guessed from the route",
        "the node has no route to that pod",
        "drops its packets as spoofed",
    ];
    node.names("a pod without a route", &command, &words)?;
    let explained = kpx(n1, "explain spoofed")?.stdout;
    ensure!(
        String::from_utf8_lossy(&explained).contains("restore the CNI plugin's route"),
        "{explained:?}"
    );
    n1.ip(&format!("route add {route}"))
}

/// The node has too little room.
fn in_the_node(node: &Node, web: &Service) -> Result<()> {
    let uplink = &node.lab.n1.host.ns;
    uplink.ip("link set eth0 mtu 1400")?;
    node.names(
        "an MTU hole",
        "check",
        &["pods have up to 1500, the narrowest way out has 1400"],
    )?;
    uplink.ip("link set eth0 mtu 1500")?;

    let to = web.frontend(Family::V4);
    let full = || -> Result<bool> {
        let status = node.agent.status()?;
        Ok(["client_share", "flows_full"].iter().any(|reason| {
            status["reasons"][reason]
                .as_u64()
                .is_some_and(|count| count > 0)
        }))
    };
    node.lab.host("p1a").ns.run(|| -> Result<()> {
        let flows = FLOW_ENTRIES.parse::<usize>()? / 2;
        for _ in 0..flows {
            let socket = UdpSocket::bind("0.0.0.0:0")?;
            socket.set_read_timeout(Some(ANSWER))?;
            // A flow whose client has sent again after the answer stays.
            socket.send_to(b"hello", to)?;
            if socket.recv(&mut [0; 2_048]).is_err() {
                break;
            }
            socket.send_to(b"hello", to)?;
        }
        Ok(())
    })?;
    wait_until(DEADLINE, "the flow table is full", full)?;
    let words = [
        "client_share",
        "dropped",
        "the client, or the Service's namespace, holds its share of the flow table",
    ];
    node.names("a full connection table", "status", &words)?;
    let client = node.lab.host("p1a").addrs.v4;
    let words = ["drop (client_share)", "of the flow table's 1024 entries"];
    let command = format!("trace --from {client} --to svc/default/web:tcp");
    node.names("a client at its share", &command, &words)
}
