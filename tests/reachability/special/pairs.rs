//! Two flows that meet in one tuple, and hosts with empty neighbour tables.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testbed::echo::{Answer, Connection, Dial, Protocol, pattern};
use testbed::lab::{Family, Lab};

use crate::case::{Expect, To, same};
use crate::fixture::{Fixture, fresh_ports, from_unused_port};
use crate::services::{PORT, frontend, index, node_port};

pub(super) fn local_neighbour_unknown(
    Fixture { lab, .. }: &Fixture,
    protocol: Protocol,
    family: Family,
) -> Result<()> {
    dial_without_neighbours(lab, "p1b", protocol, family)
}

pub(super) fn remote_neighbour_unknown(
    Fixture { lab, .. }: &Fixture,
    protocol: Protocol,
    family: Family,
) -> Result<()> {
    dial_without_neighbours(lab, "p2a", protocol, family)
}

/// The host's first packet waits for neighbour resolution. UDP does not send it again.
fn dial_without_neighbours(
    lab: &Lab,
    service: &str,
    protocol: Protocol,
    family: Family,
) -> Result<()> {
    let ns = &lab.n1.host.ns;
    ns.ip("neigh flush all")?;
    let dial = from_unused_port(Dial::new(protocol, frontend(service, family)))
        .deadline(Duration::from_millis(900));
    let answer = dial.exchange(ns, b"!")?;
    ensure!(answer.backend == service, "{} answers", answer.backend);
    Ok(())
}

pub(super) fn two_services(
    Fixture { lab, .. }: &Fixture,
    protocol: Protocol,
    family: Family,
) -> Result<()> {
    stay_apart(
        lab,
        protocol,
        [
            ("p1a", frontend("p1b", family)),
            ("p1a", frontend("p1b-too", family)),
        ],
    )
}

pub(super) fn service_and_direct(
    Fixture { lab, .. }: &Fixture,
    protocol: Protocol,
    family: Family,
) -> Result<()> {
    let direct = SocketAddr::new(lab.host("p1b").addrs.ip(family), PORT);
    stay_apart(
        lab,
        protocol,
        [("p1a", frontend("p1b", family)), ("p1a", direct)],
    )
}

pub(super) fn masqueraded_and_host(
    Fixture { lab, .. }: &Fixture,
    protocol: Protocol,
    family: Family,
) -> Result<()> {
    stay_apart(
        lab,
        protocol,
        [
            ("n1", frontend("n2", family)),
            ("p1a", frontend("n2", family)),
        ],
    )
}

/// The nodes cannot distinguish them from two clients behind one NAT.
pub(super) fn two_nodes(fixture: &Fixture, protocol: Protocol, family: Family) -> Result<()> {
    let to = |node| {
        same("N18", "x", To::NodePort(node), "p2a", Expect::Silence).addr(fixture.lab, family)
    };
    stay_apart(fixture.lab, protocol, [("x", to("n1")), ("x", to("n2"))])
}

pub(super) fn two_frontends(fixture: &Fixture, protocol: Protocol, family: Family) -> Result<()> {
    for service in ["p1b", "p2a"] {
        let to = |to| same("N18", "x", to, service, Expect::Silence).addr(fixture.lab, family);
        stay_apart(
            fixture.lab,
            protocol,
            [("x", to(To::NodePort("n1"))), ("x", to(To::LoadBalancer))],
        )?;
    }
    Ok(())
}

/// The answers come to the node at a port that is a Service's, too.
pub(super) fn masqueraded_to_node_port(
    fixture: &Fixture,
    protocol: Protocol,
    family: Family,
) -> Result<()> {
    let to = SocketAddr::new(fixture.lab.ext.addrs.ip(family), PORT);
    let node_port = node_port(index("p1b"));
    let answer = fixture.dial("p1a", Dial::new(protocol, to).source_port(node_port))?;
    let expected = SocketAddr::new(fixture.lab.n1.host.addrs.ip(family), node_port);
    ensure!(
        answer.source == expected,
        "ext sees {}, not {expected}: the CNI did not keep the port",
        answer.source
    );
    Ok(())
}

/// Two simultaneous conversations of one source port with one backend. Each keeps its own bytes and
/// its own source as the backend sees it. The second survives the end of the first.
fn stay_apart(
    lab: &Lab,
    protocol: Protocol,
    [first, second]: [(&str, SocketAddr); 2],
) -> Result<()> {
    let source_port = fresh_ports(1); // Never twice: a closed connection keeps its port.
    let open = |(client, to)| -> Result<(Connection, Answer)> {
        let dial = Dial::new(protocol, to).source_port(source_port);
        let mut connection = dial
            .connect(&lab.host(client).ns)
            .with_context(|| format!("{client} dials {to}"))?;
        let answer = connection
            .exchange(b"first")
            .with_context(|| format!("{client} opens {to}"))?;
        Ok((connection, answer))
    };
    let (mut one, one_answer) = open(first)?;
    let (mut two, two_answer) = open(second)?;
    ensure!(
        one_answer.backend == two_answer.backend,
        "two backends: {one_answer:?} {two_answer:?}"
    );
    ensure!(
        one_answer.source != two_answer.source,
        "the backend sees both as {}",
        one_answer.source
    );
    for size in [1, 1000, 30_000] {
        let answer = one
            .exchange(&pattern(size))
            .context("first, beside the second")?;
        ensure!(
            answer == one_answer,
            "the first was {one_answer:?} and is {answer:?}"
        );
        let answer = two
            .exchange(&pattern(size))
            .context("second, beside the first")?;
        ensure!(
            answer == two_answer,
            "the second was {two_answer:?} and is {answer:?}"
        );
    }
    drop(one);
    let answer = two
        .exchange(&pattern(1000))
        .context("second, after the first")?;
    ensure!(
        answer == two_answer,
        "the second was {two_answer:?} and is {answer:?}"
    );
    Ok(())
}
