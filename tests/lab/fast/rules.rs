//! Rules for forwarded packets that leave connections between pods alone, and other rules.

use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, UdpSocket};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use testbed::agent::{DEADLINE, Service, wait_until};
use testbed::cases::Running;
use testbed::echo::Protocol;
use testbed::lab::{CLUSTER_PODS, Family};

use super::fixture::{Fixture, Path};
use super::{EXCHANGES, exchange, says, until_bypass};

/// Loads flannel's rules, on a node that drops forwarded packets by default.
fn add_flannel(fixture: &Fixture) -> Result<()> {
    for (family, tool) in [
        (Family::V4, "iptables-nft-restore"),
        (Family::V6, "ip6tables-nft-restore"),
    ] {
        let pods = CLUSTER_PODS.cidr(family);
        let rules = format!(
            "*filter\n:FORWARD DROP\n:FLANNEL-FWD -\n\
             -A FORWARD -m comment --comment \"flanneld forward\" -j FLANNEL-FWD\n\
             -A FLANNEL-FWD -s {pods} -m comment --comment \"flanneld forward\" -j ACCEPT\n\
             -A FLANNEL-FWD -d {pods} -m comment --comment \"flanneld forward\" -j ACCEPT\nCOMMIT\n"
        );
        let mut command = Command::new(tool);
        command.stdin(Stdio::piped()).stderr(Stdio::piped());
        let mut child = fixture
            .lab
            .n1
            .host
            .ns
            .spawn(&mut command)
            .with_context(|| format!("run {tool}"))?;
        child
            .stdin
            .take()
            .context("open standard input")?
            .write_all(rules.as_bytes())?;
        let output = child.wait_with_output()?;
        ensure!(
            output.status.success(),
            "{tool}: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}

pub(super) fn bypass_connections_skip_rules_that_accept_them_and_meet_a_rule_that_drops_them(
    running: &Running<Fixture>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    add_flannel(fixture)?;
    says(
        agent,
        "bypass for connections between this node's pods with addresses of its podCIDRs",
    )?;
    says(
        agent,
        "chain FORWARD of table ip filter, chain FORWARD of table ip6 filter",
    )?;
    for (family, tool) in [(Family::V4, "iptables-nft"), (Family::V6, "ip6tables-nft")] {
        until_bypass(fixture, agent, family)?;
        let rule = |verb: &str| {
            let client = fixture.lab.host("p1a").addrs.ip(family).to_string();
            let place = if verb == "-I" { &["1"][..] } else { &[] };
            let match_ = ["-s", &client, "-p", "tcp", "-j", "DROP"];
            fixture
                .lab
                .n1
                .host
                .ns
                .exec(
                    Command::new(tool)
                        .args([verb, "FORWARD"])
                        .args(place)
                        .args(match_),
                )
                .map(drop)
        };
        rule("-I")?;
        let soon = Duration::from_millis(300);
        wait_until(
            Duration::from_secs(1),
            "new connections meet the rule",
            || {
                Ok(fixture
                    .dial_within(soon, Path::Local, Protocol::Tcp, family)
                    .is_err())
            },
        )
        .with_context(|| family.to_string())?;
        says(agent, "because rule 1 of chain FORWARD of table ip")?;
        rule("-D")?;
        says(
            agent,
            "bypass for connections between this node's pods with addresses of its podCIDRs",
        )?;
    }
    let node = &fixture.lab.n1.host.ns;
    node.nft("delete table ip filter\ndelete table ip6 filter")
}

/// The CNI's masquerading excludes packets between pods.
pub(super) fn bypass_connections_to_other_nodes_skip_the_stack_until_a_rule_is_about_them(
    running: &Running<Fixture>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    says(
        agent,
        "bypass for connections of this node's pods to pods with addresses of the cluster's networks",
    )?;
    for (family, protocol) in Family::ALL
        .into_iter()
        .flat_map(|family| Protocol::COMMON.map(|one| (family, one)))
    {
        let reach = || {
            exchange(
                &mut fixture.dial(Path::Remote, protocol, family)?,
                EXCHANGES,
                1_000,
            )
        };
        wait_until(
            DEADLINE,
            "the link address of the other node is known",
            || {
                let before = fixture.passed(agent)?;
                reach()?;
                Ok(fixture.passed(agent)?.since(before).1 == 0)
            },
        )
        .with_context(|| format!("{protocol} by {family}"))?;
        let before = fixture.passed(agent)?;
        reach().with_context(|| format!("{protocol} by {family}"))?;
        let (fast, forwarded) = fixture.passed(agent)?.since(before);
        ensure!(
            forwarded == 0,
            "{protocol} by {family}: the stack has forwarded {forwarded} packets"
        );
        ensure!(
            fast >= 2 * EXCHANGES as u64,
            "{protocol} by {family}: {fast} packets have skipped the stack"
        );
    }

    fixture.drop_towards("p2a", "tcp dport 8080")?;
    let soon = Duration::from_millis(300);
    for family in Family::ALL {
        wait_until(
            Duration::from_secs(1),
            "new connections meet the rule",
            || {
                Ok(fixture
                    .dial_within(soon, Path::Remote, Protocol::Tcp, family)
                    .is_err())
            },
        )?;
        until_bypass(fixture, agent, family)?;
    }
    says(
        agent,
        "bypass for connections between this node's pods with addresses of its podCIDRs",
    )?;
    says(
        agent,
        "those to other nodes take the stack, because rule 1 of chain forward of table inet far",
    )?;
    let node = &fixture.lab.n1.host.ns;
    node.nft("delete table inet far")
}

/// kpx disregards a rule for a bridge only while the bridge exists. The sync period exceeds this
/// test, so no full list of devices arrives.
#[test]
fn a_rule_for_a_bridge_counts_once_the_bridge_has_gone() -> Result<()> {
    let fixture = Fixture::new()?;
    let node = &fixture.lab.n1.host.ns;
    node.ip("link add docker0 type bridge")?;
    node.nft(
        "table inet docker {
            chain forward {
                type filter hook forward priority filter; policy accept
                iifname docker0 drop
            }
        }",
    )?;
    let agent = fixture.kpx(&["--fast-path", "auto", "--iptables-sync-period", "10m"])?;
    says(&agent, "chain forward of table inet docker")?;
    until_bypass(&fixture, &agent, Family::V4)?;
    node.ip("link del docker0")?;
    says(
        &agent,
        "because rule 1 of chain forward of table inet docker may drop the packet",
    )?;
    agent.stop()
}

/// A Service of a pod without a server.
pub(super) fn closed() -> Service {
    Service::new("closed", 13, &["p1b"], 9)
}

/// Conntrack lacks the connection of the error, and would call the error invalid.
pub(super) fn errors_about_connections_miss_a_rule_for_invalid_packets(
    running: &Running<Fixture>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    for family in Family::ALL {
        until_bypass(fixture, agent, family)?;
        ensure!(
            is_refused(fixture, family)?,
            "{family}: an error does not pass without the rule"
        );
    }
    // The rules that kube-proxy leaves behind.
    fixture.lab.n1.host.ns.nft(
        "table inet invalid {
            chain forward {
                type filter hook forward priority filter; policy accept
                ct state invalid counter drop
            }
        }",
    )?;
    says(
        agent,
        "chain forward of table inet invalid; those to other nodes",
    )?;
    for family in Family::ALL {
        until_bypass(fixture, agent, family)?;
        ensure!(
            is_refused(fixture, family)?,
            "{family}: the rule drops an error"
        );
    }
    let node = &fixture.lab.n1.host.ns;
    node.nft("delete table inet invalid")
}

/// Returns true if the pod's port refuses a client.
fn is_refused(fixture: &Fixture, family: Family) -> Result<bool> {
    let client = fixture.lab.host("p1a");
    let socket = client
        .ns
        .run(|| UdpSocket::bind(SocketAddr::new(client.addrs.ip(family), 0)))?;
    socket.set_read_timeout(Some(Duration::from_secs(2)))?;
    socket.connect(closed().frontend(family))?;
    socket.send(b"hello")?;
    match socket.recv(&mut [0; 16]) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(true),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
        other => bail!("unexpected answer: {other:?}"),
    }
}
