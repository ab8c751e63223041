//! The host's path to external frontends, and the health checks of their Services.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, DEADLINE, wait_until};
use testbed::cases::Running;
use testbed::http::{self, Answer};
use testbed::netns::NetNs;

#[test]
fn external_frontends_come_and_go() -> Result<()> {
    let node = &NetNs::machine("way")?;
    node.ip(
        "rule add pref 75 to 203.0.113.9 lookup 99\nrule add pref 100 from 192.0.2.99 lookup 99",
    )?;
    let before = state(node)?;
    let arguments = "--cleanup-on-exit --nodeport-addresses 192.0.2.0/24,2001:db8::/32";
    let agent = Agent::start_alone(node, &[], arguments)?.healthy()?;
    let running = Running {
        fixture: node,
        agent,
    };
    testbed::cases!(
        &running;
        health_check_lives_as_long_as_its_service,
        more_frontends_than_rules_are_said_of_their_service_and_how_many,
        the_hosts_routes_follow_objects_and_addresses,
    )?;
    running.agent.stop()?;
    ensure!(
        state(node)? == before,
        "before\n{before}\nafter\n{}",
        state(node)?
    );
    Ok(())
}

/// Waits until these frontends have rules.
fn are(node: &NetNs, want: &[&str]) -> Result<()> {
    wait_until(DEADLINE, &format!("rules {want:?}"), || {
        Ok(frontends(node)? == want)
    })
}

fn the_hosts_routes_follow_objects_and_addresses(running: &Running<NetNs>) -> Result<()> {
    let Running {
        fixture: node,
        agent: kpx,
    } = running;
    let are = |want: &[&str]| are(node, want);
    kpx.put("shop", SHOP)?;
    are(&SHOP_FRONTENDS)?;
    ensure!(way(node, "203.0.113.7", "tcp", 443)?.contains("dev kpx0 table 7041144 src 192.0.2.1"));
    ensure!(
        way(node, "203.0.113.7", "tcp", 80)?.contains("dev eth0"),
        "everything else goes where it went"
    );
    ensure!(way(node, "2001:db8::7", "tcp", 443)?.contains("dev kpx0 table 7041144"));

    // An address needs no rule while the host has it.
    node.ip("addr add 203.0.113.7/32 dev eth0")?;
    are(&SHOP_FRONTENDS[..2])?;
    node.ip("addr del 203.0.113.7/32 dev eth0")?;
    are(&SHOP_FRONTENDS)?;

    node.ip("addr add 192.0.2.2/32 dev eth0\naddr del 192.0.2.1/24 dev eth0")?;
    wait_until(DEADLINE, "the source follows the node's address", || {
        Ok(way(node, "203.0.113.7", "tcp", 443)?.contains("dev kpx0 table 7041144 src 192.0.2.2"))
    })?;
    node.ip("addr add 192.0.2.1/24 dev eth0\naddr del 192.0.2.2/32 dev eth0\nroute replace default via 192.0.2.254")?;

    kpx.put("shop", &SHOP.replace("port: 443", "port: 444"))?;
    are(&[
        "2001:db8::7 tcp 444",
        "2001:db8::7 udp 53",
        "203.0.113.7 tcp 444",
        "203.0.113.7 udp 53",
    ])?;
    kpx.delete("shop")?;
    are(&[])?;
    kpx.put("shop", SHOP)?;
    are(&SHOP_FRONTENDS)?;
    kpx.delete("shop")?;
    are(&[])
}

#[test]
fn rules_of_a_killed_kpx_are_adopted_and_removed_at_the_end() -> Result<()> {
    let node = NetNs::machine("left")?;
    let before = state(&node)?;
    Agent::start_alone(&node, &[("shop", SHOP)], "")?
        .healthy()?
        .crash()?;
    ensure!(
        frontends(&node)? == SHOP_FRONTENDS,
        "{:?}",
        frontends(&node)?
    );
    let kpx = Agent::start_alone(
        &node,
        &[("shop", &SHOP.replace("port: 53", "port: 54"))],
        "--cleanup-on-exit",
    )?
    .healthy()?;
    let want = SHOP_FRONTENDS.map(|frontend| frontend.replace("udp 53", "udp 54"));
    ensure!(frontends(&node)? == want, "{:?}", frontends(&node)?);
    kpx.stop()?;
    ensure!(
        state(&node)? == before,
        "before\n{before}\nafter\n{}",
        state(&node)?
    );
    Ok(())
}

fn more_frontends_than_rules_are_said_of_their_service_and_how_many(
    running: &Running<NetNs>,
) -> Result<()> {
    let Running {
        fixture: node,
        agent: kpx,
    } = running;
    let addrs: Vec<String> = (0..30).map(|n| format!("198.51.100.{n}")).collect();
    let ports: Vec<String> = (1..=10)
        .map(|n| format!("{{ name: p{n}, port: {n} }}"))
        .collect();
    let many = WITH_EXTERNAL_IPS
        .replace("IPS", &addrs.join(", "))
        .replace("PORTS", &ports.join(", "));
    kpx.put("many", &many)?;
    wait_until(DEADLINE, "kpx says it", || {
        let status = kpx.typed_status()?;
        let is_said = |said: &String| {
            said.contains("default/many") && said.contains("reach 44 external frontends only")
        };
        Ok(status.healthy && status.skipped.iter().any(is_said))
    })?;
    wait_until(DEADLINE, "256 frontends have rules", || {
        Ok(frontends(node)?.len() == 256)
    })
    .with_context(|| format!("{:?}", frontends(node)))?;
    kpx.put(
        "many",
        &WITH_EXTERNAL_IPS
            .replace("IPS", "198.51.100.1")
            .replace("PORTS", "{ port: 80 }"),
    )?;
    wait_until(DEADLINE, "it is over", || {
        let status = kpx.typed_status()?;
        Ok(status.healthy
            && status.skipped.is_empty()
            && frontends(node)? == ["198.51.100.1 tcp 80"])
    })?;
    kpx.delete("many")?;
    are(node, &[])
}

#[test]
fn kpx_works_without_ipv6() -> Result<()> {
    let node = NetNs::create(format!("kpx-{}-no6", std::process::id()))?;
    for device in ["all", "default", "lo"] {
        node.sysctl(&format!("ipv6/conf/{device}/disable_ipv6"), "1")?;
    }
    node.wire()?;
    node.ip("addr add 192.0.2.1/24 dev eth0")?;
    let kpx = Agent::start_alone(&node, &[("shop", SHOP)], "")?.healthy()?;
    ensure!(
        frontends(&node)?.contains(&"203.0.113.7 tcp 443".to_owned()),
        "{:?}",
        frontends(&node)?
    );
    wait_until(DEADLINE, "the health check answers", || {
        Ok(ask(&node, "192.0.2.1:32100").is_ok())
    })?;
    kpx.stop()
}

fn health_check_lives_as_long_as_its_service(running: &Running<NetNs>) -> Result<()> {
    let Running {
        fixture: node,
        agent: kpx,
    } = running;
    kpx.put("shop", SHOP)?;
    wait_until(DEADLINE, "the health check answers", || {
        Ok(ask(node, "192.0.2.1:32100").is_ok())
    })?;
    let answers = |code: u16, want: &str| {
        wait_until(DEADLINE, want, || {
            let answer = ask(node, "192.0.2.1:32100")?;
            Ok(answer.code == code && answer.body.contains(want))
        })
    };
    answers(503, "\"localEndpoints\": 0")?;
    kpx.put("slice", SLICE)?;
    answers(200, "\"localEndpoints\": 1")?;
    ensure!(ask(node, "[fd00::1]:32100").is_err() && ask(node, "127.0.0.1:32100").is_err());

    // The health check listens wherever node ports do, also at later addresses.
    node.ip("addr add 192.0.2.2/24 dev eth0")?;
    wait_until(DEADLINE, "the new address answers", || {
        Ok(ask(node, "192.0.2.2:32100").is_ok())
    })?;
    kpx.put(
        "shop",
        &SHOP.replace(
            "externalTrafficPolicy: Local",
            "externalTrafficPolicy: Cluster",
        ),
    )?;
    wait_until(DEADLINE, "the port is closed", || {
        Ok(ask(node, "192.0.2.1:32100").is_err())
    })?;
    kpx.delete("shop")?;
    kpx.delete("slice")?;
    node.ip("addr del 192.0.2.2/24 dev eth0")?;
    are(node, &[])
}

fn ask(node: &NetNs, to: &str) -> Result<Answer> {
    http::ask(node, to, "GET", "/healthz")
}

/// Returns the frontends with rules, as address, protocol and port, sorted.
fn frontends(node: &NetNs) -> Result<Vec<String>> {
    let mut frontends = Vec::new();
    let rules = rules(node)?;
    let ours = rules
        .lines()
        .filter(|line| line.ends_with("lookup 7041144 proto 75"));
    for line in ours.filter(|line| !line.contains("fwmark")) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let after = |word| {
            words
                .iter()
                .position(|w| *w == word)
                .and_then(|at| words.get(at + 1))
                .copied()
        };
        let parts = [after("to"), after("ipproto"), after("dport")];
        frontends.push(parts.map(|part| part.unwrap_or("-")).join(" "));
    }
    frontends.sort();
    Ok(frontends)
}

fn rules(node: &NetNs) -> Result<String> {
    let show = |family| node.exec(Command::new("ip").args([family, "rule", "show"]));
    Ok(show("-4")? + &show("-6")?)
}

/// Returns all state that kpx changes for the host's own packets: rules, and routes without those
/// that the kernel makes for addresses.
fn state(node: &NetNs) -> Result<String> {
    let mut state = rules(node)?;
    for family in ["-4", "-6"] {
        let routes =
            node.exec(Command::new("ip").args([family, "route", "show", "table", "all"]))?;
        let made = routes
            .lines()
            .filter(|line| !line.contains("table local") && !line.contains("proto kernel"));
        state.extend(made.map(|line| format!("{line}\n")));
    }
    Ok(state)
}

/// Returns the path of the host's own packet.
fn way(node: &NetNs, to: &str, proto: &str, port: u16) -> Result<String> {
    let port = port.to_string();
    node.exec(Command::new("ip").args(["route", "get", to, "ipproto", proto, "dport", &port]))
}

const SHOP: &str = "
apiVersion: v1
kind: Service
metadata: { name: shop, namespace: default }
spec:
  type: LoadBalancer
  ipFamilies: [IPv4, IPv6]
  clusterIP: 10.96.0.20
  clusterIPs: [10.96.0.20, \"fd00:10::20\"]
  externalTrafficPolicy: Local
  healthCheckNodePort: 32100
  ports:
  - { name: https, port: 443, nodePort: 30443 }
  - { name: dns, port: 53, protocol: UDP, nodePort: 30053 }
status: { loadBalancer: { ingress: [{ ip: 203.0.113.7 }, { ip: \"2001:db8::7\" }] } }
";

const SHOP_FRONTENDS: [&str; 4] = [
    "2001:db8::7 tcp 443",
    "2001:db8::7 udp 53",
    "203.0.113.7 tcp 443",
    "203.0.113.7 udp 53",
];

const SLICE: &str = "
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: { name: shop-1, namespace: default, labels: { kubernetes.io/service-name: shop } }
addressType: IPv4
ports: [{ name: https, port: 8443 }]
endpoints: [{ addresses: [10.244.1.5], nodeName: n1, conditions: { ready: true } }]
";

const WITH_EXTERNAL_IPS: &str = "
apiVersion: v1
kind: Service
metadata: { name: many, namespace: default }
spec:
  clusterIP: 10.96.0.30
  externalIPs: [IPS]
  ports: [PORTS]
";
