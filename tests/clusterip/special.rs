//! Cells that are more than one conversation.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kpx_tests::echo::{Answer, Connection, Dial, Protocol, pattern};
use kpx_tests::lab::{Family, Lab};

use crate::tally::Tally;
use crate::{PORT, frontend};

type Check = fn(&Lab, Protocol, Family) -> Result<()>;

pub(crate) fn run(lab: &Lab, tally: &mut Tally) {
    let cells: [(&str, &str, Check); 7] = [
        ("C05", "masqueraded to the port with which the host dials the same backend", masqueraded_and_host),
        ("C07", "the backend's neighbour entry is gone", local_neighbour_unknown),
        ("C08", "the next hop's neighbour entry is gone", remote_neighbour_unknown),
        ("C15", "internalTrafficPolicy Local: only the local backend answers", policy_local),
        ("C15", "internalTrafficPolicy Cluster: both backends answer", policy_cluster),
        ("C21", "one source port, one backend, two services", two_services),
        ("C22", "one source port, a service and its backend dialled directly", service_and_direct),
    ];
    for (id, what, check) in cells {
        for protocol in Protocol::ALL {
            for family in Family::ALL {
                tally.add(
                    id,
                    &format!("{id}: {what}, {protocol} {family}, {:?}", lab.layout),
                    check(lab, protocol, family),
                );
            }
        }
    }
}

fn local_neighbour_unknown(lab: &Lab, protocol: Protocol, family: Family) -> Result<()> {
    dial_without_neighbours(lab, "p1b", protocol, family)
}

fn remote_neighbour_unknown(lab: &Lab, protocol: Protocol, family: Family) -> Result<()> {
    dial_without_neighbours(lab, "p2a", protocol, family)
}

/// The host's first packet waits until the kernel has asked for a MAC address. UDP does not send it a second time.
fn dial_without_neighbours(lab: &Lab, service: &str, protocol: Protocol, family: Family) -> Result<()> {
    let ns = &lab.n1.host.ns;
    ns.ip("neigh flush all")?;
    let dial = Dial::new(protocol, frontend(service, family)).deadline(Duration::from_millis(900));
    let answer = dial.exchange(ns, b"!")?;
    ensure!(answer.backend == service, "{} answers", answer.backend);
    Ok(())
}

fn policy_local(lab: &Lab, protocol: Protocol, family: Family) -> Result<()> {
    let answered = dial_often(lab, "local", protocol, family)?;
    ensure!(answered.keys().eq(["p1b"]), "{answered:?}");
    Ok(())
}

fn policy_cluster(lab: &Lab, protocol: Protocol, family: Family) -> Result<()> {
    let answered = dial_often(lab, "everywhere", protocol, family)?;
    ensure!(answered.keys().eq(["p1b", "p2a"]), "{answered:?}");
    Ok(())
}

/// How often which backend answered.
fn dial_often(lab: &Lab, service: &str, protocol: Protocol, family: Family) -> Result<BTreeMap<String, u32>> {
    let mut answered = BTreeMap::new();
    for nth in 0..200 {
        let dial = Dial::new(protocol, frontend(service, family));
        let answer = dial.exchange(&lab.host("p1a").ns, b"!").with_context(|| format!("connection {nth}"))?;
        *answered.entry(answer.backend).or_default() += 1;
    }
    Ok(answered)
}

fn two_services(lab: &Lab, protocol: Protocol, family: Family) -> Result<()> {
    stay_apart(lab, protocol, [("p1a", frontend("p1b", family)), ("p1a", frontend("p1b-too", family))])
}

fn service_and_direct(lab: &Lab, protocol: Protocol, family: Family) -> Result<()> {
    let direct = SocketAddr::new(lab.host("p1b").addrs.ip(family), PORT);
    stay_apart(lab, protocol, [("p1a", frontend("p1b", family)), ("p1a", direct)])
}

fn masqueraded_and_host(lab: &Lab, protocol: Protocol, family: Family) -> Result<()> {
    stay_apart(lab, protocol, [("n1", frontend("n2", family)), ("p1a", frontend("n2", family))])
}

/// Two conversations of one source port with one backend, open at the same time: each keeps its own bytes and its own
/// source as the backend sees it, and the second survives the end of the first.
fn stay_apart(lab: &Lab, protocol: Protocol, [first, second]: [(&str, SocketAddr); 2]) -> Result<()> {
    // Below the range from which the kernel chooses by itself, and never twice: a closed connection keeps its port.
    static NEXT_PORT: AtomicU16 = AtomicU16::new(20_000);
    let source_port = NEXT_PORT.fetch_add(1, Ordering::Relaxed);
    let open = |(client, to)| -> Result<(Connection, Answer)> {
        let dial = Dial::new(protocol, to).source_port(source_port);
        let mut connection = dial.connect(&lab.host(client).ns).with_context(|| format!("{client} dials {to}"))?;
        let answer = connection.exchange(b"first").with_context(|| format!("{client} opens {to}"))?;
        Ok((connection, answer))
    };
    let (mut one, one_answer) = open(first)?;
    let (mut two, two_answer) = open(second)?;
    ensure!(one_answer.backend == two_answer.backend, "two backends: {one_answer:?} {two_answer:?}");
    ensure!(one_answer.source != two_answer.source, "the backend sees both as {}", one_answer.source);
    for size in [1, 1000, 30_000] {
        let answer = one.exchange(&pattern(size)).context("first, beside the second")?;
        ensure!(answer == one_answer, "the first was {one_answer:?} and is {answer:?}");
        let answer = two.exchange(&pattern(size)).context("second, beside the first")?;
        ensure!(answer == two_answer, "the second was {two_answer:?} and is {answer:?}");
    }
    drop(one);
    let answer = two.exchange(&pattern(1000)).context("second, after the first")?;
    ensure!(answer == two_answer, "the second was {two_answer:?} and is {answer:?}");
    Ok(())
}
