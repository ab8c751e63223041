//! The next hops of bypass connections to other nodes, and the effect of changed routes, rules and
//! devices.

use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use testbed::agent::{Agent, DEADLINE, wait_until};
use testbed::cases::Running;
use testbed::echo::Protocol;
use testbed::lab::{CLUSTER_PODS, Family, Layout, TunnelKind};
use testbed::netns::NetNs;

use super::fixture::{Fixture, Path, said};
use super::{exchange, says, until_bypass};

const SOON: Duration = Duration::from_millis(900);
const FAR: &str = "bypass for connections of this node's pods to pods";
const NEAR: &str = "those to other nodes take the stack, because rule";

/// Starts kpx with the cluster's networks.
pub(super) fn start<'a>(fixture: &'a Fixture, args: &[&str]) -> Result<Agent<'a>> {
    let networks = Family::ALL
        .map(|family| CLUSTER_PODS.cidr(family))
        .join(",");
    fixture.kpx(&[&["--cluster-cidr", &networks], args].concat())
}

/// Waits until connections to the other node skip the stack.
fn until_far(fixture: &Fixture, agent: &Agent, family: Family) -> Result<()> {
    says(agent, FAR)?;
    wait_until(
        DEADLINE,
        "connections to the other node skip the stack",
        || {
            let before = fixture.passed(agent)?;
            exchange(
                &mut fixture.dial(Path::Remote, Protocol::Udp, family)?,
                5,
                100,
            )?;
            Ok(fixture.passed(agent)?.since(before).1 == 0)
        },
    )
}

fn set(node: &NetNs, devices: &[&str], rp_filter: u8) -> Result<()> {
    devices.iter().try_for_each(|device| {
        let key = format!("ipv4/conf/{device}/rp_filter");
        node.sysctl(&key, &rp_filter.to_string())
    })
}

/// Opens a connection to the other node, and exchanges some bytes.
fn reach(fixture: &Fixture, protocol: Protocol) -> Result<()> {
    exchange(
        &mut fixture.dial_within(SOON, Path::Remote, protocol, Family::V4)?,
        3,
        100,
    )
}

/// Bypass connections between pods of this node are still opened then.
pub(super) fn datagrams_of_bypass_flows_meet_a_rule_about_other_nodes(
    running: &Running<Fixture>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    let mut open = Vec::new();
    for family in Family::ALL {
        until_far(fixture, agent, family)?;
        let mut one = fixture.dial_within(SOON, Path::Remote, Protocol::Udp, family)?;
        exchange(&mut one, 3, 100)?;
        open.push(one);
    }
    fixture.drop_towards("p2a", "")?;
    says(agent, NEAR)?;
    for one in &mut open {
        wait_until(Duration::from_secs(4), "datagrams meet the rule", || {
            Ok(exchange(one, 1, 100).is_err())
        })?;
    }
    let node = &fixture.lab.n1.host.ns;
    node.nft("delete table inet far")?;
    says(agent, FAR)
}

/// A rule against spoofed sources must see the packets that enter by its device.
pub(super) fn rules_by_reply_device_apply(running: &Running<Fixture>) -> Result<()> {
    let Running { fixture, agent } = running;
    let node = &fixture.lab.n1.host.ns;
    node.ip("link add br9 type bridge\nlink set br9 up")?;
    node.nft(
        "table inet spoof {
            chain forward {
                type filter hook forward priority filter; policy accept
                iifname br9 ip saddr 10.244.0.0/16 drop
            }
        }",
    )?;
    says(
        agent,
        "those to other nodes take the stack, because rule 1 of chain forward of table inet spoof",
    )?;
    node.nft("delete table inet spoof")?;
    node.ip("link del br9")?;
    says(agent, FAR)
}

/// Conntrack must see a connection whose replies enter by a device without Ethernet headers,
/// because these replies take the stack.
#[test]
fn answers_by_a_tunnel_pass_a_rule_for_established_connections() -> Result<()> {
    let fixture = Fixture::of(Layout::Tunnel(TunnelKind::Tun))?;
    let node = &fixture.lab.n1.host.ns;
    let route = node.exec(Command::new("ip").args(["-4", "route", "show", "10.244.2.0/24"]))?;
    let device = route
        .split("dev ")
        .nth(1)
        .and_then(|rest| rest.split_whitespace().next())
        .unwrap_or_default();
    for host in [&fixture.lab.n1.host, &fixture.lab.n2.host] {
        set(&host.ns, &["all", "eth0", device], 0)?;
    }
    node.ip("route replace 10.244.2.0/24 via 172.18.0.12 dev eth0")?;
    node.nft(&format!(
        "table inet tunnel {{
            chain forward {{
                type filter hook forward priority filter; policy accept
                iifname {device} ct state established,related accept
                iifname {device} drop
            }}
        }}"
    ))?;
    let agent = start(&fixture, &[])?;
    says(&agent, "bypass for connections")?;
    for _ in 0..2 {
        Protocol::COMMON
            .into_iter()
            .try_for_each(|protocol| reach(&fixture, protocol))?;
    }
    agent.stop()
}

/// The pod's route goes with the pod, and another route leads to its address then.
pub(super) fn bypass_connection_keeps_its_device(running: &Running<Fixture>) -> Result<()> {
    let Running { fixture, agent } = running;
    let node = &fixture.lab.n1.host.ns;
    until_bypass(fixture, agent, Family::V4)?;
    let mut open = fixture.dial_within(SOON, Path::Local, Protocol::Tcp, Family::V4)?;
    exchange(&mut open, 3, 100)?;
    let remote = || Ok::<_, anyhow::Error>(agent.status()?["events"]["fast_remote"].as_u64());
    let before = remote()?;
    let route = format!("{}/32 dev p1b", fixture.lab.host("p1b").addrs.v4);
    node.ip(&format!("route del {route}"))?;
    // The programs follow within moments.
    wait_until(DEADLINE, "there is no way to the pod", || {
        Ok(exchange(&mut open, 1, 3_000).is_err())
    })?;
    ensure!(
        remote()? == before,
        "packets have left by another device, past the stack"
    );
    node.ip(&format!("route add {route}"))?;
    said(open.reset())
}

/// The rule names a bridge port, by which no routed packet leaves while it is in the bridge.
#[test]
fn bridge_port_is_validated_before_use() -> Result<()> {
    let fixture = Fixture::new()?;
    fixture.watch()?;
    for (host, [own, other]) in [
        (&fixture.lab.n1.host, [11, 12]),
        (&fixture.lab.n2.host, [12, 11]),
    ] {
        let link = format!("local 172.18.0.{own} remote 172.18.0.{other} dev eth0 dstport 4790");
        host.ns.ip(&format!(
            "link add up0 type vxlan id 5 {link}\nlink set up0 up"
        ))?;
        set(&host.ns, &["all", "eth0", "up0"], 0)?;
    }
    let node = &fixture.lab.n1.host.ns;
    let far = &fixture.lab.n2.host.ns;
    far.ip("addr add 192.0.2.2/24 dev up0")?;
    node.ip("link add br9 type bridge\nlink set br9 up\nlink set up0 master br9")?;
    node.nft(
        "table inet up {
            chain forward {
                type filter hook forward priority filter; policy accept
                oifname up0 drop
            }
        }",
    )?;
    let agent = start(&fixture, &["--iptables-sync-period", "10m"])?;
    until_far(&fixture, &agent, Family::V4)?;
    node.ip("link set up0 nomaster\naddr add 192.0.2.1/24 dev up0\nroute replace 10.244.2.0/24 via 192.0.2.2 dev up0")?;
    says(
        &agent,
        "those to other nodes take the stack, because rule 1 of chain forward of table inet up",
    )?;
    ensure!(
        reach(&fixture, Protocol::Tcp).is_err(),
        "the rule was passed by"
    );
    agent.stop()
}

/// The programs cannot compute the kernel's strict rp_filter for a route with several next hops.
#[test]
fn answers_that_a_strict_kernel_drops_do_not_pass_by_it() -> Result<()> {
    strict_kernel_is_obeyed(
        "route add 203.0.113.0/24 nexthop via 172.18.0.1 dev eth0 nexthop via 172.19.0.12 dev eth1",
    )
}

/// The kernel looks up the reverse route with the pod's device, and the programs with the device by
/// which the reply entered.
#[test]
fn answers_that_a_strict_kernel_drops_in_spite_of_a_rule_by_device_do_not_pass_by_it() -> Result<()>
{
    strict_kernel_is_obeyed(
        "rule add pref 100 iif eth1 lookup 101\nroute add 10.244.2.0/24 via 172.19.0.12 dev eth1 table 101",
    )
}

/// Replies enter by another device than the reverse route's, on a node with this routing.
fn strict_kernel_is_obeyed(routing: &str) -> Result<()> {
    let fixture = Fixture::new()?;
    fixture.watch()?;
    let node = &fixture.lab.n1.host.ns;
    let far = &fixture.lab.n2.host.ns;
    set(node, &["all", "eth1"], 1)?;
    node.ip(routing)?;
    let agent = start(&fixture, &[])?;
    says(&agent, FAR)?;
    reach(&fixture, Protocol::Tcp)?;
    set(far, &["all", "eth0"], 0)?;
    far.ip("route replace 10.244.1.0/24 via 172.19.0.11 dev eth1")?;
    for protocol in Protocol::COMMON {
        ensure!(
            reach(&fixture, protocol).is_err(),
            "{protocol}: an answer has passed by the kernel"
        );
    }
    agent.stop()
}
