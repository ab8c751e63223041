//! `--fast-path`: packets of open connections skip the node's stack without visible effects except
//! speed.

mod bans;
mod conditions;
mod ended;
mod fixture;
mod legacy;
mod opened;
mod outside;
mod random_rules;
mod rules;
mod shapes;
mod ways;

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, DEADLINE, wait_until};
use testbed::cases::Running;
use testbed::echo::{Connection, Protocol, pattern};
use testbed::lab::Family;

use crate::forbid;
use fixture::{Fixture, Path, said};

/// The exchanges of a flow, and the packets that may take the stack: the flow's opening and end,
/// and updates of conntrack.
const EXCHANGES: usize = 50;
const ON_STACK: u64 = 20;

#[test]
fn automatic_fast_path_needs_no_rules() -> Result<()> {
    let fixture = &Fixture::new()?;
    let agent = fixture.start("auto")?;
    let running = Running { fixture, agent };
    testbed::cases!(
        &running;
        automatic_leaves_conntracks_connections_to_the_stack,
        ended::operator_ends_one_of_two_bypass_connections,
        ended::operator_ends_one_of_two_connections_that_conntrack_tolerates,
        bypass_connections_between_pods_skip_the_stack,
        ways::bypass_connection_keeps_its_device,
    )?;
    running.agent.stop()
}

#[test]
fn automatic_fast_path_follows_rules() -> Result<()> {
    let fixture = &Fixture::new()?;
    fixture.put(&rules::closed())?;
    let agent = fixture.start("auto")?;
    let running = Running { fixture, agent };
    testbed::cases!(
        &running;
        a_bypass_connection_outlives_its_neighbours_while_rules_refuse_it,
        automatic_is_off_as_long_as_rules_drop_packets,
        bans::ban_of_a_pod_ends_its_bypass_connections_alone,
        conditions::filters_of_other_programs_meet_bypass_connections,
        conditions::ipsec_policies_for_forwarded_packets_hold_for_bypass_connections,
        conditions::rules_come_and_go_under_load_and_nothing_is_lost,
        legacy::only_legacy_rules_and_policies_prevent_bypass,
        rules::bypass_connections_skip_rules_that_accept_them_and_meet_a_rule_that_drops_them,
        rules::errors_about_connections_miss_a_rule_for_invalid_packets,
        rules_that_may_translate_pods_open_connections_through_the_stack,
    )?;
    running.agent.stop()
}

#[test]
fn automatic_fast_path_reaches_other_nodes() -> Result<()> {
    let fixture = &Fixture::new()?;
    fixture.watch()?;
    let agent = ways::start(fixture, &[])?;
    let running = Running { fixture, agent };
    testbed::cases!(
        &running;
        bans::ban_of_a_pod_ends_its_bypass_connections_to_other_nodes_alone,
        rules::bypass_connections_to_other_nodes_skip_the_stack_until_a_rule_is_about_them,
        ways::datagrams_of_bypass_flows_meet_a_rule_about_other_nodes,
        ways::rules_by_reply_device_apply,
    )?;
    running.agent.stop()
}

#[test]
fn automatic_fast_path_skips_chains_of_policies() -> Result<()> {
    let fixture = &Fixture::new()?;
    fixture.watch()?;
    let agent = fixture.start("auto")?;
    let running = Running { fixture, agent };
    testbed::cases!(
        &running;
        opened::conntrack_sees_the_reset_of_a_connection_that_skipped_the_stack,
        opened::open_connections_meet_a_rule_before_established_within_a_second,
        opened::open_connections_skip_the_chains_of_policies,
        outside::open_exchanges_from_outside_skip_the_chains_of_policies,
    )?;
    running.agent.stop()
}

#[test]
fn fast_path_that_is_on_needs_no_permission_of_rules() -> Result<()> {
    let fixture = &Fixture::new()?;
    fixture.watch()?;
    let agent = fixture.start("on")?;
    let running = Running { fixture, agent };
    testbed::cases!(
        &running;
        conntrack_sees_the_end_of_long_streams,
        hops_are_counted_and_what_is_too_long_is_answered,
        open_connections_skip_the_stack_wherever_their_backend_is,
    )?;
    running.agent.stop()
}

/// Waits until the fast path knows the firewall.
fn set_firewall(running: &Running<Fixture>) -> Result<()> {
    running.fixture.lab.set_firewall(true)?;
    says(
        &running.agent,
        "connections are opened through the stack, because chain forward of table inet firewall",
    )
}

fn open_connections_skip_the_stack_wherever_their_backend_is(
    running: &Running<Fixture>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    set_firewall(running)?;
    for family in Family::ALL {
        for protocol in Protocol::ALL {
            for path in Path::ALL {
                let what = format!("{protocol:?} over {family}, {path:?}");
                let mut connection = fixture
                    .dial(path, protocol, family)
                    .with_context(|| what.clone())?;
                exchange(&mut connection, 3, 100).with_context(|| what.clone())?;
                let before = fixture.passed(agent)?;
                exchange(&mut connection, EXCHANGES, 1_000).with_context(|| what.clone())?;
                let (fast, on_stack) = fixture.passed(agent)?.since(before);
                let least = 2 * EXCHANGES as u64 - ON_STACK;
                if path.is_fast() {
                    ensure!(
                        fast >= least && on_stack <= ON_STACK,
                        "{what}: {fast} fast, {on_stack} by the stack"
                    );
                } else {
                    ensure!(
                        fast == 0 && on_stack >= least,
                        "{what}: {fast} fast, {on_stack} by the stack"
                    );
                }
            }
        }
    }
    let invalid = fixture.lab.invalid_packets()?;
    ensure!(invalid.is_empty(), "conntrack: {invalid:?}");
    let status = agent.status()?;
    let said = status["options"]["fastPath"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    // The firewall's rules drop packets that are invalid to conntrack, and new connections by
    // default.
    let opens = "on; connections are opened through the stack, because chain forward of table inet firewall drops packets that its rules do not accept";
    ensure!(said.starts_with(opens), "{said}");
    fixture.lab.n1.host.ns.nft(
        "table inet refuses {
            chain forward {
                type filter hook forward priority filter; policy accept
                tcp dport 9 drop
            }
        }",
    )?;
    says(
        agent,
        "on, past rule 1 of chain forward of table inet refuses may drop the packet",
    )?;
    ensure!(
        agent
            .log()
            .contains("packets of open connections skip the stack, and these rules"),
        "{}",
        agent.log()
    );
    fixture.lab.n1.host.ns.nft("delete table inet refuses")?;
    fixture.lab.set_firewall(false)
}

fn conntrack_sees_the_end_of_long_streams(running: &Running<Fixture>) -> Result<()> {
    let Running { fixture, .. } = running;
    set_firewall(running)?;
    for (family, path) in [
        (Family::V4, Path::Local),
        (Family::V6, Path::Remote),
        (Family::V4, Path::NodePortRemote),
    ] {
        let mut connection = fixture.dial(path, Protocol::Tcp, family)?;
        exchange(&mut connection, 2, 4 << 20).with_context(|| format!("{path:?}"))?;
        ensure!(
            fixture.tracked("ESTABLISHED")? > 0,
            "{path:?}: conntrack has not seen the opening"
        );
        said(connection.exchange_last(&pattern(1 << 20)))?;
        wait_until(DEADLINE, "conntrack has seen the end", || {
            Ok(fixture.tracked("ESTABLISHED")? == 0)
        })?;
    }
    let invalid = fixture.lab.invalid_packets()?;
    ensure!(invalid.is_empty(), "conntrack: {invalid:?}");
    fixture.lab.set_firewall(false)
}

#[test]
fn a_connection_lives_on_when_the_fast_path_comes_and_goes() -> Result<()> {
    let fixture = Fixture::new()?;
    fixture.lab.set_firewall(true)?;
    fixture.watch()?;
    let agent = fixture.start("off")?;
    let mut connections = Vec::new();
    for (path, protocol) in [
        (Path::Local, Protocol::Tcp),
        (Path::Remote, Protocol::Tcp),
        (Path::Local, Protocol::Udp),
    ] {
        connections.push(fixture.dial(path, protocol, Family::V4)?);
    }
    exchange_all(&mut connections)?;
    ensure!(fixture.passed(&agent)?.fast == 0, "fast, though it is off");
    agent.stop()?;
    for (setting, is_fast) in [("on", true), ("off", false), ("on", true)] {
        let agent = fixture.start(setting)?;
        wait_until(DEADLINE, "the fast path is as it was asked for", || {
            exchange_all(&mut connections)?;
            let before = fixture.passed(&agent)?;
            exchange_all(&mut connections)?;
            let (fast, on_stack) = fixture.passed(&agent)?.since(before);
            Ok(if is_fast { fast > on_stack } else { fast == 0 })
        })?;
        fixture.move_services()?;
        exchange_all(&mut connections[..2])?;
        agent.stop()?;
        // Without an agent, packets go on as before.
        exchange_all(&mut connections[..2])?;
    }
    let invalid = fixture.lab.invalid_packets()?;
    ensure!(invalid.is_empty(), "conntrack: {invalid:?}");
    Ok(())
}

/// Only a locked route MTU (`mtu lock`) applies, because the kernel's FIB look-up reads no other.
fn hops_are_counted_and_what_is_too_long_is_answered(running: &Running<Fixture>) -> Result<()> {
    let Running { fixture, agent } = running;
    fixture.count_hops()?;
    for family in Family::ALL {
        let mut connection = fixture.dial(Path::Local, Protocol::Tcp, family)?;
        exchange(&mut connection, EXCHANGES, 1_000)?;
        let (one, other) = fixture.hops()?;
        ensure!(
            one >= EXCHANGES as u64 && other == 0,
            "{family}: {one} packets had one hop behind them, {other} not"
        );

        let before = fixture.passed(agent)?.fast;
        fixture.narrow(family, 1_300)?;
        // The flow may keep its path until the agent has processed the route's change.
        wait_until(
            DEADLINE,
            "a client learns that packets are too long",
            || {
                exchange(&mut connection, 3, 200_000)?;
                Ok(fixture.too_long()? > 0)
            },
        )?;
        ensure!(
            fixture.passed(agent)?.fast > before + 20,
            "{family}: what is short enough is slow"
        );
        fixture.widen(family)?;
        fixture.expire(family)?;
    }
    fixture.count_no_hops()
}

fn automatic_is_off_as_long_as_rules_drop_packets(running: &Running<Fixture>) -> Result<()> {
    let Running { fixture, agent } = running;
    let is = |what: &str| says(agent, what);
    let fast = || -> Result<u64> {
        let before = fixture.fast(agent)?;
        exchange(
            &mut fixture.dial(Path::Local, Protocol::Tcp, Family::V4)?,
            EXCHANGES,
            100,
        )?;
        Ok(fixture.fast(agent)? - before)
    };
    is("auto: on; bypass for connections")?;
    wait_until(DEADLINE, "connections skip the stack", || {
        Ok(fast()? >= 2 * EXCHANGES as u64)
    })?;
    fixture.lab.set_firewall(true)?;
    is("because chain forward of table inet firewall drops packets that its rules do not accept")?;
    ensure!(fast()? == 0, "fast, though there are rules");
    fixture.lab.set_firewall(false)?;
    is("auto: on; bypass for connections")?;
    wait_until(DEADLINE, "connections skip the stack again", || {
        Ok(fast()? >= 2 * EXCHANGES as u64)
    })
}

/// Conntrack must see all packets of connections that it tracks; otherwise spoofed packets could
/// end them.
fn automatic_leaves_conntracks_connections_to_the_stack(running: &Running<Fixture>) -> Result<()> {
    let Running { fixture, agent } = running;
    says(
        agent,
        "other connections take the stack, because conntrack tracks them",
    )?;
    let before = fixture.fast(agent)?;
    for path in [
        Path::Remote,
        Path::Hairpin,
        Path::NodePortLocal,
        Path::NodePortRemote,
    ] {
        exchange(
            &mut fixture.dial(path, Protocol::Tcp, Family::V4)?,
            EXCHANGES,
            1_000,
        )?;
    }
    ensure!(
        fixture.fast(agent)? == before,
        "packets that conntrack misses"
    );
    let liberal = fixture
        .lab
        .n1
        .host
        .ns
        .read("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal")?;
    ensure!(
        liberal.trim() == "0",
        "conntrack does not judge numbers any more: {liberal}"
    );
    Ok(())
}

/// Neither rules nor conntrack would affect a bypass connection, so the stack sees none of its
/// packets.
fn bypass_connections_between_pods_skip_the_stack(running: &Running<Fixture>) -> Result<()> {
    let Running { fixture, agent } = running;
    // The CNI masquerades only packets that leave the pods' network.
    says(
        agent,
        "bypass for connections between this node's pods with addresses of its podCIDRs",
    )?;
    for family in Family::ALL {
        for path in [
            Path::Local,
            Path::Remote,
            Path::Hairpin,
            Path::NodePortLocal,
        ] {
            until_bypass(fixture, agent, family)?;
            // The stack resolves link addresses that the node does not have yet.
            exchange(&mut fixture.dial(path, Protocol::Tcp, family)?, 1, 100)?;
            let before = fixture.stack_saw(agent)?;
            let mut connection = fixture.dial(path, Protocol::Tcp, family)?;
            exchange(&mut connection, EXCHANGES, 1_000)?;
            said(connection.exchange_last(&pattern(1_000)))?;
            let on_stack = fixture.stack_saw(agent)? - before;
            let is_whole = path == Path::Local;
            ensure!(
                (on_stack == 0) == is_whole,
                "{family}, {path:?}: {on_stack} packets by the stack"
            );
        }
    }
    Ok(())
}

#[test]
fn a_bypass_connection_lives_on_when_rules_come_and_new_ones_meet_them() -> Result<()> {
    let fixture = Fixture::new()?;
    let agent = fixture.start("auto")?;
    says(&agent, "bypass for connections")?;
    let mut connections = Vec::new();
    for family in Family::ALL {
        connections.push(until_bypass(&fixture, &agent, family)?);
    }
    exchange_all(&mut connections)?;
    let addrs = &fixture.lab.host("p1a").addrs;
    let pod4 = addrs.ip(Family::V4);
    let pod6 = addrs.ip(Family::V6);
    // A rule for new connections alone: it refuses packets that conntrack has not seen from the
    // start.
    let ends = [
        format!("ip saddr {pod4}"),
        format!("ip daddr {pod4}"),
        format!("ip6 saddr {pod6}"),
        format!("ip6 daddr {pod6}"),
    ];
    let rules = ends
        .map(|end| format!("\n{end} ct state new drop"))
        .concat();
    forbid(
        &fixture.lab.n1.host.ns,
        &format!("ct state invalid drop{rules}"),
    )?;
    wait_until(
        Duration::from_secs(2),
        "new connections meet the rule",
        || {
            Ok(Family::ALL
                .into_iter()
                .all(|family| fixture.is_blocked(family)))
        },
    )?;
    says(
        &agent,
        "because rule 2 of chain forward of table inet netpol may drop the packet",
    )?;
    let before = fixture.fast(&agent)?;
    exchange_all(&mut connections)?;
    ensure!(
        fixture.fast(&agent)? >= before + 80,
        "an open connection takes the stack"
    );
    // The next agent takes over, and the connections go on.
    agent.stop()?;
    exchange_all(&mut connections)?;
    let agent = fixture.start("auto")?;
    says(&agent, "connections are opened through the stack, because")?;
    exchange_all(&mut connections)?;
    fixture.lab.n1.host.ns.nft("delete table inet netpol")?;
    says(&agent, "bypass for connections")?;
    exchange_all(&mut connections)?;
    for family in Family::ALL {
        connections.push(fixture.dial(Path::Local, Protocol::Tcp, family)?);
    }
    exchange_all(&mut connections)?;
    agent.stop()
}

/// Rules that arrive while no agent runs count too.
#[test]
fn new_connections_meet_rules_soon_after_the_agent_has_ended() -> Result<()> {
    let fixture = Fixture::new()?;
    let agent = fixture.start("auto")?;
    for family in Family::ALL {
        until_bypass(&fixture, &agent, family)?;
    }
    agent.stop()?;
    let addrs = &fixture.lab.host("p1a").addrs;
    let pod4 = addrs.ip(Family::V4);
    let pod6 = addrs.ip(Family::V6);
    forbid(
        &fixture.lab.n1.host.ns,
        &format!("ip saddr {pod4} drop\nip6 saddr {pod6} drop"),
    )?;
    Family::ALL.into_iter().try_for_each(|family| {
        wait_until(
            Duration::from_secs(10),
            "new connections meet the rule",
            || Ok(fixture.is_blocked(family)),
        )
    })
}

/// The kernel forgets link addresses of pods to which the stack sends nothing.
fn a_bypass_connection_outlives_its_neighbours_while_rules_refuse_it(
    running: &Running<Fixture>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    let mut connections = Vec::new();
    for family in Family::ALL {
        connections.push(until_bypass(fixture, agent, family)?);
    }
    exchange_all(&mut connections)?;
    forbid(
        &fixture.lab.n1.host.ns,
        "ct state invalid drop\nct state new drop",
    )?;
    says(
        agent,
        "connections that were opened past the stack go on past it",
    )?;
    for pod in ["p1a", "p1b"] {
        let addrs = fixture.lab.host(pod).addrs;
        let lines = Family::ALL.map(|family| format!("neigh del {} dev {pod}\n", addrs.ip(family)));
        fixture.lab.n1.host.ns.ip(&lines.concat())?;
        exchange_all(&mut connections)?;
    }
    fixture.lab.n1.host.ns.nft("delete table inet netpol")?;
    says(agent, "; bypass for connections")
}

fn rules_that_may_translate_pods_open_connections_through_the_stack(
    running: &Running<Fixture>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    says(agent, "bypass for connections")?;
    let pod = fixture.lab.host("p1a").addrs.v4;
    fixture.lab.n1.host.ns.nft(&format!(
        "table ip hairpin {{
            chain post {{
                type nat hook postrouting priority srcnat
                ip saddr {pod} masquerade
            }}
        }}"
    ))?;
    says(
        agent,
        "because rule 1 of chain post of table ip hairpin may masquerade",
    )?;
    let before = fixture.stack_saw(agent)?;
    let mut connection = fixture.dial(Path::Local, Protocol::Tcp, Family::V4)?;
    exchange(&mut connection, EXCHANGES, 1_000)?;
    ensure!(
        fixture.stack_saw(agent)? > before,
        "the stack has seen nothing"
    );
    let peers = fixture.lab.host("p1b").ns.exec(Command::new("ss").args([
        "-Htn",
        "state",
        "established",
    ]))?;
    ensure!(
        peers.contains(&fixture.lab.n1.host.addrs.v4.to_string())
            || !peers.contains(&pod.to_string()),
        "{peers}"
    );
    fixture.lab.n1.host.ns.nft("delete table ip hairpin")?;
    says(agent, "; bypass for connections")
}

/// Waits until a connection between two pods skips the stack, and returns it. The stack resolves
/// link addresses that the node does not have yet, so that the connection after this one may take
/// it again.
fn until_bypass(fixture: &Fixture, agent: &Agent, family: Family) -> Result<Connection> {
    let mut bypassing = None;
    wait_until(DEADLINE, "a connection bypasses the stack", || {
        let before = fixture.stack_saw(agent)?;
        let mut connection = fixture.dial(Path::Local, Protocol::Tcp, family)?;
        exchange(&mut connection, EXCHANGES, 1_000)?;
        let skipped = fixture.stack_saw(agent)? == before;
        bypassing = skipped.then_some(connection);
        Ok(skipped)
    })?;
    bypassing.context("a connection bypasses the stack")
}

/// Waits until `kpx status` shows this text about the fast path.
fn says(agent: &Agent, what: &str) -> Result<()> {
    let mut said = String::new();
    wait_until(DEADLINE, what, || {
        said = agent.status()?["options"]["fastPath"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        Ok(said.contains(what))
    })
    .with_context(|| said.clone())
}

fn exchange(connection: &mut Connection, times: usize, len: usize) -> Result<()> {
    (0..times).try_for_each(|_| said(connection.exchange(&pattern(len))).map(drop))
}

fn exchange_all(connections: &mut [Connection]) -> Result<()> {
    connections
        .iter_mut()
        .try_for_each(|connection| exchange(connection, 20, 1_000))
}
