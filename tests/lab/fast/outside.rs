//! UDP exchanges of outside clients with pods of this node that skip the stack, with conntrack and
//! a NetworkPolicy's chains.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, DEADLINE, wait_until};
use testbed::cases::Running;
use testbed::echo::{Connection, Protocol, pattern};
use testbed::lab::Family;
use testbed::test_run::let_seconds_pass;

use super::fixture::{Fixture, Path, counter, said};
use super::opened::{Shape, check_that_all_were_valid, load, unload};
use super::{exchange, says};

/// The text of `kpx status` while these exchanges skip the stack.
const OUTSIDE: &str = "and UDP exchanges of clients outside with them";
/// The text of `kpx status` while they take the stack.
const NOT_OUTSIDE: &str = "UDP exchanges of clients outside take the stack, because";
/// The packets of busy exchanges, most of which skip the stack.
const EXCHANGES: usize = 40;

/// Returns true if the chains for forwarded packets have seen no packet of some exchanges.
fn skips(fixture: &Fixture, agent: &Agent, connection: &mut Connection) -> Result<bool> {
    let before = fixture.passed(agent)?;
    exchange(connection, EXCHANGES, 1_000)?;
    let (fast, forwarded) = fixture.passed(agent)?.since(before);
    Ok(forwarded == 0 && fast >= 2 * EXCHANGES as u64)
}

fn until_skips(fixture: &Fixture, agent: &Agent, connection: &mut Connection) -> Result<()> {
    wait_until(DEADLINE, "an exchange from outside skips the stack", || {
        skips(fixture, agent, connection)
    })
}

fn dial(fixture: &Fixture, family: Family) -> Result<Connection> {
    fixture.dial(Path::NodePortLocal, Protocol::Udp, family)
}

pub(super) fn open_exchanges_from_outside_skip_the_chains_of_policies(
    running: &Running<Fixture>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    for shape in Shape::ALL {
        load(running, shape)?;
        says(agent, OUTSIDE).with_context(|| format!("{shape:?}"))?;
        let mut connections = Family::ALL
            .into_iter()
            .map(|family| dial(fixture, family))
            .collect::<Result<Vec<_>>>()?;
        // All exchanges request to skip the stack at the same time.
        wait_until(
            DEADLINE,
            &format!("open exchanges from outside skip the stack: {shape:?}"),
            || {
                let skipping = connections.iter_mut().map(|one| skips(fixture, agent, one));
                Ok(skipping
                    .collect::<Result<Vec<_>>>()?
                    .into_iter()
                    .all(|skips| skips))
            },
        )?;
        let answer = said(connections[0].exchange(&pattern(1_000)))?;
        ensure!(
            answer.source.ip() == fixture.lab.host("x").addrs.v4,
            "the server sees {}",
            answer.source
        );
    }
    // These flows must not request to skip the stack: spoofed packets could end a client's TCP
    // connection, and other nodes see the node's address.
    let others = [
        (Path::NodePortLocal, Protocol::Tcp),
        (Path::NodePortRemote, Protocol::Udp),
    ];
    let families = others
        .into_iter()
        .flat_map(|other| Family::ALL.map(|family| (other, family)));
    let dial = |((path, protocol), family)| fixture.dial(path, protocol, family);
    let mut others = families.map(dial).collect::<Result<Vec<_>>>()?;
    let before = fixture.fast(agent)?;
    for _ in 0..4 {
        others
            .iter_mut()
            .try_for_each(|one| exchange(one, EXCHANGES, 1_000))?;
        let_seconds_pass(1)?;
    }
    ensure!(
        fixture.fast(agent)? == before,
        "others have skipped the stack"
    );
    check_that_all_were_valid(fixture)?;
    unload(running)
}

/// Attaches a foreign filter at a hook, and detaches it once it has seen the packets of a
/// connection.
fn is_seen_by_filter(
    fixture: &Fixture,
    agent: &Agent,
    connection: &mut Connection,
    [device, side]: [&str; 2],
) -> Result<()> {
    let node = &fixture.lab.n1.host.ns;
    let tc = |words: &[&str]| node.exec(Command::new("tc").args(words)).map(drop);
    // A classic BPF program that passes every packet to the next filter.
    let program = ["bpf", "da", "bytecode", "1,6 0 0 4294967295"];
    // Where kpx attaches by TCX, the device lacks this qdisc.
    let _there = tc(&["qdisc", "add", "dev", device, "clsact"]);
    tc(&[
        &["filter", "add", "dev", device, side, "prio", "5"],
        &program[..],
    ]
    .concat())?;
    wait_until(
        DEADLINE,
        &format!("a filter at {side} of {device} sees the packets"),
        || {
            let before = fixture.passed(agent)?;
            exchange(connection, EXCHANGES, 1_000)?;
            Ok(fixture.passed(agent)?.since(before).1 >= 2 * EXCHANGES as u64)
        },
    )?;
    tc(&["filter", "del", "dev", device, side, "prio", "5"])
}

/// Conntrack matches each datagram to its exchange when the exchange returns to the stack, so every
/// answer keeps its source.
#[test]
fn open_outside_exchange_survives_on_the_stack() -> Result<()> {
    let fixture = Fixture::new()?;
    fixture.watch()?;
    Shape::KubeRouter.load(&fixture)?;
    let agent = fixture.start("auto")?;
    says(&agent, OUTSIDE)?;
    let mut connection = dial(&fixture, Family::V4)?;
    let node = &fixture.lab.n1.host.ns;
    for (device, side) in [("eth0", "ingress"), ("eth0", "egress"), ("p1b", "ingress")] {
        until_skips(&fixture, &agent, &mut connection)?;
        is_seen_by_filter(&fixture, &agent, &mut connection, [device, side])?;
    }
    let client = fixture.lab.host("x").addrs.v4;
    // A rule for new exchanges leaves open exchanges alone. A rule before `established` sees them.
    until_skips(&fixture, &agent, &mut connection)?;
    node.nft(&format!(
        "table inet strict {{
            counter met {{ }}
            chain forward {{
                type filter hook forward priority -10; policy accept
                ip saddr {client} counter name met
                ip saddr {client} ct state new log
            }}
        }}"
    ))?;
    let met = || counter(&fixture.lab.n1.host, "strict", "met");
    let_seconds_pass(1)?;
    says(&agent, OUTSIDE)?;
    until_skips(&fixture, &agent, &mut connection)?;
    node.nft(&format!(
        "add rule inet strict forward ip saddr {client} log prefix lab"
    ))?;
    let added = Instant::now();
    wait_until(
        DEADLINE,
        "a rule meets packets of the open exchange",
        || {
            let before = met()?;
            exchange(&mut connection, EXCHANGES, 1_000)?;
            Ok(met()? >= before + EXCHANGES as u64)
        },
    )?;
    ensure!(
        added.elapsed() < Duration::from_secs(3),
        "it took {:?}",
        added.elapsed()
    );
    says(&agent, NOT_OUTSIDE)?;
    node.nft("delete table inet strict")?;
    // Without an agent, rules are unwatched.
    until_skips(&fixture, &agent, &mut connection)?;
    agent.stop()?;
    let_seconds_pass(4)?;
    let before = counter(&fixture.lab.n1.host, "fast", "forwarded")?;
    exchange(&mut connection, EXCHANGES, 1_000)?;
    let forwarded = counter(&fixture.lab.n1.host, "fast", "forwarded")? - before;
    ensure!(
        forwarded >= 2 * EXCHANGES as u64,
        "{forwarded} packets by the stack without an agent"
    );
    check_that_all_were_valid(&fixture)?;
    Ok(())
}
