//! The cluster changes while flows are open.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use testbed::agent::{SERVICE_PORT, Service};
use testbed::echo::{Connection, Dial, Protocol, pattern};
use testbed::lab::Family;

use crate::fixture::{Fixture, combinations, from_unused_port};
use crate::services::{PORT, vip};

const NTH: u8 = 64;

/// One socket with a fixed port, of a pod, of the node and of an outside client.
pub(super) fn datagrams_move(fixture: &Fixture) -> Result<()> {
    let service = start(fixture, Service::new("moving", NTH, &["p1b"], PORT))?;
    let open = |(client, to, family): (&'static str, SocketAddr, Family)| {
        let connection =
            from_unused_port(Dial::new(Protocol::Udp, to)).connect(&fixture.lab.host(client).ns)?;
        anyhow::Ok((client, family, connection))
    };
    let mut flows = Family::ALL
        .into_iter()
        .flat_map(|family| clients(&service, family))
        .map(open)
        .collect::<Result<Vec<_>>>()?;
    for (nth, backend) in ["p1b", "p2a", "p1c", "p1b"].into_iter().enumerate() {
        if nth > 0 {
            fixture.settle(|| fixture.put(&service.clone().backends(&[backend])))?;
        }
        for (client, family, connection) in &mut flows {
            let answer = connection
                .exchange(b"!")
                .with_context(|| format!("{client} {family}, to {backend}"))?;
            ensure!(
                answer.backend == backend,
                "{client} {family}: {} answers, not {backend}",
                answer.backend
            );
        }
    }
    fixture.end(&service)
}

pub(super) fn outlive_backend(fixture: &Fixture) -> Result<()> {
    outlive(
        fixture,
        Service::new("shrinking", NTH + 1, &["p1b"], PORT),
        |service| {
            fixture.settle(|| fixture.put(&service.clone().backends(&["p2a"])))?;
            fixture.settle(|| fixture.put(&service.clone().backends(&[])))
        },
    )
}

pub(super) fn outlive_policy(fixture: &Fixture) -> Result<()> {
    outlive(
        fixture,
        Service::new("strict", NTH + 2, &["p2a"], PORT),
        |service| {
            fixture.settle(|| {
                fixture.put(
                    &service
                        .clone()
                        .local()
                        .external_local()
                        .health_check_node_port(30_500),
                )
            })
        },
    )
}

pub(super) fn outlive_service(fixture: &Fixture) -> Result<()> {
    outlive(
        fixture,
        Service::new("gone", NTH + 3, &["p2a"], PORT),
        |service| {
            fixture.end(service)?;
            fixture.settle(|| fixture.put(service)) // So that there is something to end.
        },
    )
}

/// Checks that connections outlive a change.
fn outlive(
    fixture: &Fixture,
    service: Service,
    change: impl FnOnce(&Service) -> Result<()>,
) -> Result<()> {
    let service = start(fixture, service)?;
    let mut flows: Vec<(String, Connection)> = Vec::new();
    for (protocol, family) in combinations().filter(|(protocol, _)| *protocol != Protocol::Udp) {
        for (client, to, _) in clients(&service, family) {
            let name = format!("{client} {to} {protocol}");
            let mut connection = Dial::new(protocol, to)
                .connect(&fixture.lab.host(client).ns)
                .with_context(|| name.clone())?;
            connection
                .exchange(b"before")
                .with_context(|| name.clone())?;
            flows.push((name, connection));
        }
    }
    change(&service)?;
    for (name, connection) in &mut flows {
        let answer = connection
            .exchange(&pattern(5000))
            .with_context(|| format!("{name}, after the change"))?;
        ensure!(
            service.backends.contains(&answer.backend.as_str()),
            "{name}: {} answers",
            answer.backend
        );
    }
    fixture.end(&service)
}

/// Gives a Service a load balancer's address, and waits until the node's own sockets reach it too.
/// Their rules follow the tables, seconds later while another program holds RTNL.
fn start(fixture: &Fixture, service: Service) -> Result<Service> {
    let nth = service.nth;
    let service = service.load_balancer(vip(nth), "VIP").without_node_ports();
    fixture.start(&service)?;
    fixture.eventually_at(
        "the node's rules lead there",
        "n1",
        |family| balanced(nth, family),
        true,
    )?;
    Ok(service)
}

fn balanced(nth: u8, family: Family) -> SocketAddr {
    (vip(nth).ip(family), SERVICE_PORT).into()
}

/// Returns the clients of a Service, with its addresses. A pod and the node dial its ClusterIP;
/// both and an outside client dial its load balancer.
fn clients(
    service: &Service,
    family: Family,
) -> impl Iterator<Item = (&'static str, SocketAddr, Family)> {
    let internal = service.frontend(family);
    let external = balanced(service.nth, family);
    let clients = [
        ("p1a", internal),
        ("n1", internal),
        ("p1a", external),
        ("n1", external),
        ("x", external),
    ];
    clients
        .into_iter()
        .map(move |(client, to)| (client, to, family))
}

pub(super) fn labels(fixture: &Fixture) -> Result<()> {
    let service = Service::new("labelled", NTH + 4, &["p1b"], PORT);
    fixture.start(&service)?;
    for (key, value) in [
        ("service.kubernetes.io/service-proxy-name", "other"),
        ("service.kubernetes.io/headless", ""),
    ] {
        fixture.settle(|| fixture.put(&service.clone().label(key, value)))?;
        fixture.eventually(&format!("{key} takes it down"), "p1a", &service, false)?;
        fixture.settle(|| fixture.put(&service))?;
        fixture.eventually(&format!("without {key} it is back"), "p1a", &service, true)?;
    }
    fixture.end(&service)
}
