//! Open connections of clients outside to pods of this node, beside conntrack and chains of a network policy.

use std::net::SocketAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, DEADLINE, wait_until};
use testbed::echo::{Connection, Protocol, pattern};
use testbed::lab::Family;
use testbed::stranger::{self, Stranger};
use testbed::test_run::let_seconds_pass;

use super::fixture::{Fixture, Path, counter, said};
use super::opened::{Shape, invalid};
use super::{exchange, says};

/// The text of `kpx status` while they skip the stack.
const OUTSIDE: &str = "and those of clients outside to them";
/// The text of it while they do not.
const NOT_OUTSIDE: &str = "those of clients outside take the stack, because";
/// The kinds of connections that do. An end of TCP over IPv6 may hide behind extension headers.
const KINDS: [(Protocol, Family); 3] =
    [(Protocol::Tcp, Family::V4), (Protocol::Udp, Family::V4), (Protocol::Udp, Family::V6)];
/// Packets of busy exchanges, most of which skip the stack.
const EXCHANGES: usize = 40;

/// Returns true if the chains of forwarded packets have not met a single packet of some exchanges.
fn skips(fixture: &Fixture, agent: &Agent, connection: &mut Connection) -> Result<bool> {
    let before = fixture.passed(agent)?;
    exchange(connection, EXCHANGES, 1_000)?;
    let (fast, forwarded) = fixture.passed(agent)?.since(before);
    Ok(forwarded == 0 && fast >= 2 * EXCHANGES as u64)
}

fn until_skips(fixture: &Fixture, agent: &Agent, connection: &mut Connection) -> Result<()> {
    wait_until(DEADLINE, "an open connection from outside skips the stack", || skips(fixture, agent, connection))
}

fn dial(fixture: &Fixture, (protocol, family): (Protocol, Family)) -> Result<Connection> {
    fixture.dial(Path::NodePortLocal, protocol, family)
}

#[test]
fn open_connections_from_outside_skip_the_chains_of_policies() -> Result<()> {
    let fixture = Fixture::new()?;
    fixture.watch()?;
    let agent = fixture.start("auto")?;
    for shape in Shape::ALL {
        shape.load(&fixture)?;
        says(&agent, OUTSIDE).with_context(|| format!("{shape:?}"))?;
        let mut connections = KINDS.into_iter().map(|kind| dial(&fixture, kind)).collect::<Result<Vec<_>>>()?;
        // All of them ask at the same time.
        wait_until(DEADLINE, &format!("open connections from outside skip the stack: {shape:?}"), || {
            let skipping = connections.iter_mut().map(|one| skips(&fixture, &agent, one));
            Ok(skipping.collect::<Result<Vec<_>>>()?.into_iter().all(|skips| skips))
        })?;
        let mut stream = connections.remove(0);
        exchange(&mut stream, 2, 2 << 20)?;
        let established = fixture.tracked("ESTABLISHED")?;
        let answer = said(stream.exchange_last(&pattern(1_000)))?;
        ensure!(answer.source.ip() == fixture.lab.host("x").addrs.v4, "the server sees {}", answer.source);
        wait_until(DEADLINE, "conntrack has seen the end", || Ok(fixture.tracked("ESTABLISHED")? < established))?;
    }
    // These have no leave to ask.
    let others = [(Path::NodePortLocal, Family::V6), (Path::NodePortRemote, Family::V4)];
    let dial = |(path, family)| fixture.dial(path, Protocol::Tcp, family);
    let mut others = others.into_iter().map(dial).collect::<Result<Vec<_>>>()?;
    let before = fixture.fast(&agent)?;
    for _ in 0..4 {
        others.iter_mut().try_for_each(|one| exchange(one, EXCHANGES, 1_000))?;
        let_seconds_pass(1)?;
    }
    ensure!(fixture.fast(&agent)? == before, "others have skipped the stack");
    ensure!(invalid(&fixture)? == 0, "{} packets were invalid to conntrack", invalid(&fixture)?);
    agent.stop()
}

/// Puts a filter of another program at a hook, and takes it away once it has seen the packets of a connection.
fn is_seen_by_filter(
    fixture: &Fixture,
    agent: &Agent,
    connection: &mut Connection,
    [device, side]: [&str; 2],
) -> Result<()> {
    let node = &fixture.lab.n1.host.ns;
    let tc = |words: &[&str]| node.exec(Command::new("tc").args(words)).map(drop);
    // It leaves every packet to the next one, in the words of classic BPF.
    let program = ["bpf", "da", "bytecode", "1,6 0 0 4294967295"];
    // Where kpx attaches by TCX, the device has no such qdisc.
    let _there = tc(&["qdisc", "add", "dev", device, "clsact"]);
    tc(&[&["filter", "add", "dev", device, side, "prio", "5"], &program[..]].concat())?;
    wait_until(DEADLINE, &format!("a filter at {side} of {device} sees the packets"), || {
        let before = fixture.passed(agent)?;
        exchange(connection, EXCHANGES, 1_000)?;
        Ok(fixture.passed(agent)?.since(before).1 >= 2 * EXCHANGES as u64)
    })?;
    tc(&["filter", "del", "dev", device, side, "prio", "5"])
}

/// The stack takes each packet for one of the connection, whatever brings it back there: no answer gets another source.
#[test]
fn open_connection_from_outside_goes_on_through_the_stack() -> Result<()> {
    let fixture = Fixture::new()?;
    fixture.watch()?;
    Shape::KubeRouter.load(&fixture)?;
    let agent = fixture.start("auto")?;
    says(&agent, OUTSIDE)?;
    let mut connection = dial(&fixture, KINDS[0])?;
    let node = &fixture.lab.n1.host.ns;
    for (device, side) in [("eth0", "ingress"), ("eth0", "egress"), ("p1b", "ingress")] {
        until_skips(&fixture, &agent, &mut connection)?;
        is_seen_by_filter(&fixture, &agent, &mut connection, [device, side])?;
    }
    // A router has told the node that answers are too long.
    until_skips(&fixture, &agent, &mut connection)?;
    let client = fixture.lab.host("x").addrs.v4;
    let route = node.exec(Command::new("ip").args(["route", "get", &client.to_string()]))?;
    let gateway = route.split_whitespace().skip_while(|word| *word != "via").nth(1).context("no gateway")?;
    node.ip(&format!("route add {client}/32 via {gateway} dev eth0 mtu lock 1200"))?;
    exchange(&mut connection, 3, 200_000).context("answers that are too long")?;
    node.ip(&format!("route del {client}/32 via {gateway} dev eth0"))?;
    // A rule for new connections lets open ones live on. One before `established` meets them.
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
    node.nft(&format!("add rule inet strict forward ip saddr {client} log prefix lab"))?;
    let added = Instant::now();
    wait_until(DEADLINE, "a rule meets packets of the open connection", || {
        let before = met()?;
        exchange(&mut connection, EXCHANGES, 1_000)?;
        Ok(met()? >= before + EXCHANGES as u64)
    })?;
    ensure!(added.elapsed() < Duration::from_secs(3), "it took {:?}", added.elapsed());
    says(&agent, NOT_OUTSIDE)?;
    node.nft("delete table inet strict")?;
    // No agent looks for rules any more.
    until_skips(&fixture, &agent, &mut connection)?;
    agent.stop()?;
    let_seconds_pass(4)?;
    let before = counter(&fixture.lab.n1.host, "fast", "forwarded")?;
    exchange(&mut connection, EXCHANGES, 1_000)?;
    let forwarded = counter(&fixture.lab.n1.host, "fast", "forwarded")? - before;
    ensure!(forwarded >= 2 * EXCHANGES as u64, "{forwarded} packets by the stack without an agent");
    ensure!(invalid(&fixture)? == 0, "{} packets were invalid to conntrack", invalid(&fixture)?);
    Ok(())
}

/// A stranger beside the client's router, which sends in the client's name by the same uplink, to either side of the hooks.
#[test]
fn no_stranger_ends_an_open_connection_from_outside_that_conntrack_is_liberal_with() -> Result<()> {
    let fixture = Fixture::new()?;
    fixture.watch()?;
    fixture.lab.set_rp_filter(0)?;
    Shape::Calico.load(&fixture)?;
    let agent = fixture.start("auto")?;
    says(&agent, OUTSIDE)?;
    let mut connection = dial(&fixture, KINDS[0])?;
    until_skips(&fixture, &agent, &mut connection)?;
    let [client, frontend] = said(connection.ends())?;
    let backend = SocketAddr::new(fixture.lab.host("p1b").addrs.ip(Family::V4), fixture.port());
    let stranger = Stranger::on(&fixture.lab.n2.host)?;
    let established = fixture.tracked("ESTABLISHED")?;
    // While the connection is busy, and while it is silent. Few packets, because one FIN in 2^15 has a number that conntrack takes.
    for is_busy in [true, false] {
        for nth in 0..16 {
            for (from, to) in [(client, frontend), (client, backend), (backend, client)] {
                let packet = || match nth % 4 {
                    0 => stranger::tcp(from, to).rst(),
                    1 => stranger::tcp(from, to).rst().ack(1),
                    2 if !is_busy => stranger::tcp(from, to).fin().ack(1),
                    _ => stranger::tcp(from, to).syn(),
                };
                stranger.send(packet(), to.ip())?;
                // Conntrack finds the ends of these as well.
                stranger.send_hidden(packet(), to.ip())?;
            }
            if is_busy {
                exchange(&mut connection, 1, 1_000)?;
            }
        }
        let now = fixture.tracked("ESTABLISHED")?;
        ensure!(now == established, "busy: {is_busy}: of {established} connections conntrack knows {now}");
        let_seconds_pass(4)?;
    }
    exchange(&mut connection, 3, 100).context("after the flood")?;
    until_skips(&fixture, &agent, &mut connection)?;
    let forged = agent.status()?["reasons"]["forged"].as_u64().unwrap_or(0);
    ensure!(forged > 50, "the stranger's packets did not arrive");
    agent.stop()
}
