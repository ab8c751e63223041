//! Rules that arrive against one pod. They end its bypass connections; other pods' connections go
//! on.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use testbed::agent::{Agent, DEADLINE, Service, wait_until};
use testbed::cases::Running;
use testbed::echo::{Connection, Dial, Protocol};
use testbed::lab::{Family, Host};
use testbed::netns::NetNs;

use super::fixture::{Fixture, Path, said};
use super::{exchange, says, until_bypass};

/// The banned pod, and another pod.
const BANNED: &str = "p1a";
const OTHER: &str = "p1c";
/// The timeout of one exchange.
const SOON: Duration = Duration::from_millis(300);
/// The time for which the other pod's connections are used during a ban. It exceeds the time until
/// netfilter's rules would see all of their packets.
const BESIDE: Duration = Duration::from_secs(2);

/// The forms of a ban.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ban {
    /// Before any rule that accepts established connections. Later rules drop all packets that
    /// conntrack has not seen from the start.
    Forward,
    /// Before conntrack.
    Raw,
    Legacy,
}

impl Ban {
    const ALL: [Self; 3] = [Self::Forward, Self::Raw, Self::Legacy];

    /// Returns the time until the ban applies. The kernel announces no change of legacy tables.
    fn deadline(self) -> Duration {
        Duration::from_secs(if self == Self::Legacy { 2 } else { 1 })
    }

    fn come(self, node: &NetNs, pod: &Host) -> Result<()> {
        let ends = Family::ALL.map(|family| {
            let words = if family == Family::V4 { "ip" } else { "ip6" };
            let addr = pod.addrs.ip(family);
            format!("{words} saddr {addr} drop\n{words} daddr {addr} drop\n")
        });
        let stateful = "ct state established,related accept\nct state invalid drop\n\
                        tcp flags & (syn | ack) == ack ct state new drop";
        let table = |hook: &str, rules: &str| {
            node.nft(&format!(
                "table inet ban {{ chain ban {{ type filter hook {hook}; policy accept;\n{rules}\n}}\n}}"
            ))
        };
        match self {
            Self::Forward => table(
                "forward priority filter",
                &format!("{}{stateful}", ends.concat()),
            ),
            Self::Raw => table("prerouting priority -300", &ends.concat()),
            Self::Legacy => legacy(node, "-I", pod),
        }
    }

    fn go(self, node: &NetNs, pod: &Host) -> Result<()> {
        match self {
            Self::Forward | Self::Raw => node.nft("delete table inet ban"),
            Self::Legacy => legacy(node, "-D", pod),
        }
    }
}

fn legacy(node: &NetNs, verb: &str, pod: &Host) -> Result<()> {
    for (family, tool) in [
        (Family::V4, "iptables-legacy"),
        (Family::V6, "ip6tables-legacy"),
    ] {
        for end in ["-s", "-d"] {
            let addr = pod.addrs.ip(family).to_string();
            node.exec(Command::new(tool).args(["-w", verb, "FORWARD", end, &addr, "-j", "DROP"]))?;
        }
    }
    Ok(())
}

/// Opens a connection of a pod to the Service with this number.
fn dial(fixture: &Fixture, client: &str, service: u8, family: Family) -> Result<Connection> {
    let to = Service::new("", service, &[], fixture.port()).frontend(family);
    said(
        Dial::new(Protocol::Tcp, to)
            .deadline(SOON)
            .connect(&fixture.lab.host(client).ns),
    )
}

/// Uses all connections until each has failed. Returns the start of the last exchange without an
/// answer.
fn until_met(connections: &mut [Connection]) -> Result<Instant> {
    let last = |one: &mut Connection| -> Result<Instant> {
        let mut began = Instant::now();
        wait_until(DEADLINE, "an open connection meets the ban", || {
            began = Instant::now();
            Ok(exchange(one, 1, 100).is_err())
        })?;
        Ok(began)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = connections
            .iter_mut()
            .map(|one| scope.spawn(|| last(one)))
            .collect();
        let met = threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow!("a thread panicked"))?);
        met.collect::<Result<Vec<_>>>()?
            .into_iter()
            .max()
            .context("no connection")
    })
}

/// Applies each ban while both pods have connections to the Service, and watches the connections.
fn bans_end_connections_of_their_pod_alone(
    fixture: &Fixture,
    agent: &Agent,
    path: Path,
) -> Result<()> {
    let service = if path == Path::Local { 10 } else { 11 };
    let node = &fixture.lab.n1.host.ns;
    for ban in Ban::ALL {
        let mut banned = Vec::new();
        let mut others = Vec::new();
        for family in Family::ALL {
            for (client, connections) in [(BANNED, &mut banned), (OTHER, &mut others)] {
                // The stack resolves link addresses that the node does not have yet.
                wait_until(
                    DEADLINE,
                    "a connection skips the stack from its opening on",
                    || {
                        let before = fixture.passed(agent)?.forwarded;
                        let mut one = dial(fixture, client, service, family)?;
                        exchange(&mut one, 5, 100)?;
                        let is_whole = fixture.passed(agent)?.forwarded == before;
                        connections.extend(is_whole.then_some(one));
                        Ok(is_whole)
                    },
                )?;
            }
        }
        ban.come(node, fixture.lab.host(BANNED))?;
        let came = Instant::now();
        let met = until_met(&mut banned)?.duration_since(came);
        ensure!(
            met <= ban.deadline(),
            "{ban:?}, {path:?}: met after {met:?}: {}",
            agent.log()
        );
        println!("{ban:?}, {path:?}: met after {met:?}");
        let since = Instant::now();
        while since.elapsed() < BESIDE {
            for one in &mut others {
                exchange(one, 5, 1_000).with_context(|| {
                    format!("another pod's connection beside {ban:?}, {path:?}")
                })?;
            }
        }
        for one in &mut banned {
            let end = exchange(one, 1, 300)
                .err()
                .with_context(|| format!("{ban:?}, {path:?}: the banned pod goes on"))?;
            ensure!(
                format!("{end:#}").contains("timed out"),
                "{ban:?}, {path:?}: {end:#}"
            );
        }
        says(agent, "because ")?;
        ban.go(node, fixture.lab.host(BANNED))?;
        says(agent, "; bypass for connections")?;
        banned.into_iter().try_for_each(|one| said(one.reset()))?;
        for one in &mut others {
            exchange(one, 5, 1_000)
                .with_context(|| format!("another pod's connection after {ban:?}, {path:?}"))?;
        }
    }
    Ok(())
}

pub(super) fn ban_of_a_pod_ends_its_bypass_connections_alone(
    running: &Running<Fixture>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    fixture.watch()?;
    for family in Family::ALL {
        until_bypass(fixture, agent, family)?;
    }
    bans_end_connections_of_their_pod_alone(fixture, agent, Path::Local)?;
    fixture.unwatch()
}

pub(super) fn ban_of_a_pod_ends_its_bypass_connections_to_other_nodes_alone(
    running: &Running<Fixture>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    says(
        agent,
        "bypass for connections of this node's pods to pods with addresses of the cluster's networks",
    )?;
    bans_end_connections_of_their_pod_alone(fixture, agent, Path::Remote)
}

/// A rule that arrives without an agent counts once the next agent has its lists.
#[test]
fn ban_that_came_without_an_agent_ends_connections_once_one_runs() -> Result<()> {
    let fixture = Fixture::new()?;
    fixture.watch()?;
    let agent = fixture.start("auto")?;
    let mut open = Vec::new();
    for family in Family::ALL {
        until_bypass(&fixture, &agent, family)?;
        open.push([BANNED, OTHER].map(|client| dial(&fixture, client, 10, family)));
    }
    agent.stop()?;
    Ban::Forward.come(&fixture.lab.n1.host.ns, fixture.lab.host(BANNED))?;
    let agent = fixture.start("auto")?;
    for [banned, other] in open {
        let mut banned = banned?;
        let mut other = other?;
        wait_until(DEADLINE, "the open connection meets the ban", || {
            Ok(exchange(&mut banned, 1, 100).is_err())
        })?;
        exchange(&mut other, 5, 1_000)?;
    }
    ensure!(
        agent.log().contains("opened past the stack take it now"),
        "{}",
        agent.log()
    );
    agent.stop()
}
