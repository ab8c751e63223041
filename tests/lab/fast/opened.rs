//! Open connections that skip the stack although conntrack tracks them, with a NetworkPolicy's
//! chains on forwarded packets.

use std::fmt::Write;
use std::net::SocketAddr;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use testbed::agent::{Agent, DEADLINE, wait_until};
use testbed::cases::Running;
use testbed::echo::{Connection, Protocol, pattern};
use testbed::lab::Family;
use testbed::stranger::{self, Stranger};
use testbed::test_run::let_seconds_pass;

use super::fixture::{Fixture, Path, counter, said};
use super::{exchange, says};

/// The text of `kpx status` while open connections skip the stack.
const OPEN_ONES: &str = "open connections between this node's pods";
/// The pods of the node.
const PODS: [&str; 3] = ["p1a", "p1b", "p1c"];
/// The packets of busy exchanges, most of which skip the stack.
const EXCHANGES: usize = 40;

/// The shapes of policies' chains. Each shape counts and drops packets that are invalid to
/// conntrack.
#[derive(Clone, Copy, Debug)]
pub(super) enum Shape {
    /// A chain for each pod's device, found by the device's name, with packet marks.
    Calico,
    /// A chain for each pod's addresses.
    KubeRouter,
}

impl Shape {
    pub(super) const ALL: [Self; 2] = [Self::Calico, Self::KubeRouter];

    pub(super) fn load(self, fixture: &Fixture) -> Result<()> {
        let chains = match self {
            Self::Calico => calico(),
            Self::KubeRouter => kube_router(fixture),
        };
        let table = "table inet policies";
        fixture.lab.n1.host.ns.nft(&format!(
            "{table}\ndelete {table}\n{table} {{\ncounter invalid {{ }}\n{chains}}}"
        ))
    }
}

const JUDGE: &str =
    "ct state invalid counter name invalid drop\nct state established,related counter accept\n";

fn calico() -> String {
    let mut text = String::new();
    for pod in PODS {
        let _ = writeln!(
            text,
            "chain of-{pod} {{\n{JUDGE}meta mark set meta mark | 0x10000\ncounter return\n}}"
        );
    }
    for (way, device) in [("from", "iifname"), ("to", "oifname")] {
        let _ = writeln!(text, "chain {way}-workload {{");
        for pod in PODS {
            let _ = writeln!(text, "{device} {pod} counter goto of-{pod}");
        }
        text += "counter drop\n}\n";
    }
    text + "chain forward {
            type filter hook forward priority filter; policy accept
            counter meta mark set meta mark & 0xfff1ffff
            iifname \"p1*\" counter jump from-workload
            oifname \"p1*\" counter jump to-workload
            meta mark & 0x10000 == 0x10000 counter accept
        }\n"
}

fn kube_router(fixture: &Fixture) -> String {
    let mut text = String::new();
    for pod in PODS {
        let _ = writeln!(
            text,
            "chain of-{pod} {{\n{JUDGE}counter meta mark set meta mark | 0x20000\n}}"
        );
    }
    text += "chain forward {\ntype filter hook forward priority filter; policy accept\n";
    for (pod, way) in PODS.iter().flat_map(|pod| [(pod, "saddr"), (pod, "daddr")]) {
        let addrs = fixture.lab.host(pod).addrs;
        let _ = writeln!(
            text,
            "ip {way} {} counter jump of-{pod}\nip6 {way} {} counter jump of-{pod}",
            addrs.v4, addrs.v6
        );
    }
    text + "meta mark & 0x20000 == 0x20000 counter accept\n}\n"
}

/// Loads chains, and waits until the fast path knows them.
pub(super) fn load(running: &Running<Fixture>, shape: Shape) -> Result<()> {
    shape.load(running.fixture)?;
    says(
        &running.agent,
        "connections are opened through the stack, because rule",
    )
}

/// Removes the chains of [`load`].
pub(super) fn unload(running: &Running<Fixture>) -> Result<()> {
    let node = &running.fixture.lab.n1.host.ns;
    node.nft("delete table inet policies")?;
    says(&running.agent, "; bypass for connections")
}

/// Fails if the chains have dropped packets as invalid.
pub(super) fn check_that_all_were_valid(fixture: &Fixture) -> Result<()> {
    let invalid = counter(&fixture.lab.n1.host, "policies", "invalid")?;
    ensure!(invalid == 0, "{invalid} packets were invalid to conntrack");
    Ok(())
}

/// Uses connections until packets of each connection skip the stack.
pub(super) fn until_open_ones_skip(
    fixture: &Fixture,
    agent: &Agent,
    connections: &mut [Connection],
) -> Result<()> {
    for connection in connections {
        wait_until(DEADLINE, "an open connection skips the stack", || {
            let before = fixture.stack_saw(agent)?;
            exchange(connection, EXCHANGES, 1_000)?;
            Ok(fixture.stack_saw(agent)? == before)
        })?;
    }
    Ok(())
}

fn dial_all(fixture: &Fixture) -> Result<Vec<Connection>> {
    let kinds = Family::ALL
        .into_iter()
        .flat_map(|family| Protocol::COMMON.map(|protocol| (family, protocol)));
    kinds
        .map(|(family, protocol)| fixture.dial(Path::Local, protocol, family))
        .collect()
}

pub(super) fn open_connections_skip_the_chains_of_policies(
    running: &Running<Fixture>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    for shape in Shape::ALL {
        let done = || -> Result<()> {
            load(running, shape)?;
            says(agent, OPEN_ONES)?;
            let mut connections = dial_all(fixture)?;
            until_open_ones_skip(fixture, agent, &mut connections)?;
            let liberal = fixture
                .lab
                .n1
                .host
                .ns
                .read("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal")?;
            ensure!(liberal.trim() == "0", "conntrack is liberal as a whole");
            for (nth, family) in Family::ALL.into_iter().enumerate() {
                let mut stream = connections.remove(nth);
                // The first second after a silence takes the stack.
                until_open_ones_skip(fixture, agent, std::slice::from_mut(&mut stream))?;
                // One second of sixteen takes the stack, and may coincide with a transfer.
                wait_until(
                    DEADLINE,
                    &format!("a transfer over {family} skips the stack"),
                    || {
                        let before = fixture.fast(agent)?;
                        exchange(&mut stream, 2, 4 << 20)?;
                        Ok(fixture.fast(agent)? > before + 100)
                    },
                )?;
                // The silence lasts until the transfer is long over.
                let_seconds_pass(4)?;
                exchange(&mut stream, 3, 100)?;
                let before = fixture.tracked("ESTABLISHED")?;
                said(stream.exchange_last(&pattern(1_000)))?;
                wait_until(DEADLINE, "conntrack has seen the end", || {
                    Ok(fixture.tracked("ESTABLISHED")? < before)
                })?;
            }
            connections
                .iter_mut()
                .try_for_each(|one| exchange(one, 3, 100))?;
            check_that_all_were_valid(fixture)?;
            Ok(())
        };
        done().with_context(|| format!("{shape:?}"))?;
    }
    unload(running)
}

/// A reset far ahead of the sequence numbers that conntrack has seen.
pub(super) fn conntrack_sees_the_reset_of_a_connection_that_skipped_the_stack(
    running: &Running<Fixture>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    load(running, Shape::KubeRouter)?;
    says(agent, OPEN_ONES)?;
    for family in Family::ALL {
        let mut connections = vec![fixture.dial(Path::Local, Protocol::Tcp, family)?];
        until_open_ones_skip(fixture, agent, &mut connections)?;
        exchange(&mut connections[0], 1, 4 << 20)?;
        // The agent updates conntrack again once the flow skips the stack.
        let until = Instant::now() + Duration::from_secs(5);
        while Instant::now() < until {
            exchange(&mut connections[0], EXCHANGES, 1_000)?;
        }
        let ends = said(connections[0].ends())?;
        fixture.lab.host("p1a").ns.exec(Command::new("ss").args([
            "-K",
            "dst",
            &ends[1].to_string(),
        ]))?;
        wait_until(DEADLINE, "conntrack has seen the reset", || {
            Ok(fixture.tracked("ESTABLISHED")? == 0)
        })
        .with_context(|| family.to_string())?;
    }
    check_that_all_were_valid(fixture)?;
    unload(running)
}

pub(super) fn open_connections_meet_a_rule_before_established_within_a_second(
    running: &Running<Fixture>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    load(running, Shape::Calico)?;
    says(agent, OPEN_ONES)?;
    let node = &fixture.lab.n1.host.ns;
    for protocol in Protocol::COMMON {
        let mut connections = Family::ALL
            .into_iter()
            .map(|family| fixture.dial(Path::Local, protocol, family))
            .collect::<Result<Vec<_>>>()?;
        until_open_ones_skip(fixture, agent, &mut connections)?;
        node.nft(
            "table inet strict {
                counter met { }
                chain forward {
                    type filter hook forward priority -10; policy accept
                    iifname p1a counter name met drop
                }
            }",
        )?;
        let added = Instant::now();
        let met = || counter(&fixture.lab.n1.host, "strict", "met");
        thread::scope(|scope| -> Result<()> {
            let blocked = connections
                .iter_mut()
                .map(|one| scope.spawn(|| exchange(one, 20_000, 1_000).is_err()));
            let blocked: Vec<_> = blocked.collect();
            wait_until(
                Duration::from_secs(1),
                "the rule meets packets of open connections",
                || Ok(met()? > 1),
            )?;
            wait_until(DEADLINE, "a second has gone by", || {
                Ok(added.elapsed() > Duration::from_millis(1_200))
            })?;
            let before = fixture.fast(agent)?;
            let_seconds_pass(1)?;
            ensure!(
                fixture.fast(agent)? == before,
                "{protocol}: packets skip the rule"
            );
            says(
                agent,
                "rule 1 of chain forward of table inet strict may drop the packet",
            )?;
            node.nft("delete table inet strict")?;
            drop(blocked);
            Ok(())
        })?;
        says(agent, OPEN_ONES)?;
    }
    unload(running)
}

#[test]
fn open_connections_come_and_go_past_the_stack_under_load_and_lose_nothing() -> Result<()> {
    const ROUNDS: usize = 3;
    let fixture = Fixture::new()?;
    Shape::Calico.load(&fixture)?;
    let agent = fixture.start("auto")?;
    says(&agent, OPEN_ONES)?;
    let mut connections = dial_all(&fixture)?;
    until_open_ones_skip(&fixture, &agent, &mut connections)?;
    let done = AtomicBool::new(false);
    let exchanged = AtomicU64::new(0);
    let node = &fixture.lab.n1.host.ns;
    thread::scope(|scope| {
        let exchanges = scope.spawn(|| -> Result<()> {
            while !done.load(Ordering::Relaxed) {
                connections
                    .iter_mut()
                    .try_for_each(|one| exchange(one, 5, 10_000))?;
                exchanged.fetch_add(1, Ordering::Relaxed);
            }
            Ok(())
        });
        let goes = |is_fast: bool| {
            wait_until(DEADLINE, "connections go on as the rules ask", || {
                let before = (fixture.fast(&agent)?, exchanged.load(Ordering::Relaxed));
                let_seconds_pass(1)?;
                let is_done =
                    exchanges.is_finished() || exchanged.load(Ordering::Relaxed) > before.1;
                Ok(is_done
                    && (exchanges.is_finished()
                        || (fixture.fast(&agent)? > before.0 + 20) == is_fast))
            })
        };
        let come_and_go = || {
            for _ in 0..ROUNDS {
                // The rule has no effect, but kpx cannot see that.
                node.nft(
                    "table inet other {
                        chain forward {
                            type filter hook forward priority -10; policy accept
                            ct mark set 0
                        }
                    }",
                )?;
                goes(false)?;
                node.nft("delete table inet other")?;
                goes(true)?;
            }
            anyhow::Ok(())
        };
        let came_and_went = come_and_go();
        done.store(true, Ordering::Relaxed);
        exchanges
            .join()
            .map_err(|_| anyhow!("the load panicked"))?
            .context("connections that stay")?;
        came_and_went
    })?;
    check_that_all_were_valid(&fixture)?;
    // Without an agent, connections take the stack, and conntrack accepts all of their packets.
    let mut connections = dial_all(&fixture)?;
    until_open_ones_skip(&fixture, &agent, &mut connections)?;
    agent.stop()?;
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until {
        connections
            .iter_mut()
            .try_for_each(|one| exchange(one, 20, 10_000))?;
    }
    check_that_all_were_valid(&fixture)?;
    let agent = fixture.start("auto")?;
    until_open_ones_skip(&fixture, &agent, &mut connections)?;
    agent.stop()
}

/// A spoofing host on the node's own network sends packets of both pods, with the addresses and
/// ports on each side of the hooks. No router lies between, because a router may lack routes to
/// pods.
#[test]
fn no_stranger_ends_a_silent_connection_that_conntrack_is_liberal_with() -> Result<()> {
    let fixture = Fixture::new()?;
    fixture.lab.set_rp_filter(0)?;
    Shape::Calico.load(&fixture)?;
    let agent = fixture.start("auto")?;
    says(&agent, OPEN_ONES)?;
    let mut connections = Vec::new();
    for family in Family::ALL {
        connections.push(fixture.dial(Path::Local, Protocol::Tcp, family)?);
    }
    until_open_ones_skip(&fixture, &agent, &mut connections)?;
    let_seconds_pass(4)?;
    let established = fixture.tracked("ESTABLISHED")?;
    let stranger = Stranger::on(&fixture.lab.n2.host)?;
    let until = Instant::now() + Duration::from_secs(3);
    let ends = connections
        .iter_mut()
        .map(|one| said(one.ends()))
        .collect::<Result<Vec<_>>>()?;
    while Instant::now() < until {
        for [client, frontend] in &ends {
            let family = if client.is_ipv4() {
                Family::V4
            } else {
                Family::V6
            };
            let backend = SocketAddr::new(fixture.lab.host("p1b").addrs.ip(family), fixture.port());
            for (from, to) in [
                (*client, *frontend),
                (*client, backend),
                (backend, *client),
                (*frontend, *client),
            ] {
                stranger.send(stranger::end(from, to), to.ip())?;
                // Conntrack finds the connection of these packets too.
                stranger.send_hidden(stranger::end(from, to), to.ip())?;
            }
        }
    }
    let now = fixture.tracked("ESTABLISHED")?;
    ensure!(
        now == established,
        "of {established} connections conntrack knows {now}"
    );
    connections
        .iter_mut()
        .try_for_each(|one| exchange(one, 3, 100))
        .context("after the flood")?;
    let spoofed = agent.status()?["reasons"]["spoofed"].as_u64().unwrap_or(0);
    ensure!(spoofed > 0, "the stranger's packets did not arrive");
    agent.stop()
}
