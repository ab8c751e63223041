//! The distribution of a Service's connections.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use testbed::agent::{Object, SERVICE_PORT, Service};
use testbed::echo::{Connection, Dial};

use crate::fixture::{Fixture, each, fresh_ports, from_unused_port};
use crate::services::{PORT, vip};

const ALGORITHM: &str = "kpx.dev/lb-algorithm";
const WEIGHTS: &str = "kpx.dev/weights";
const NTH: u8 = 70;

/// Both nodes choose the same backend for a client, because its packets may arrive at either node.
pub(super) fn maglev(fixture: &Fixture) -> Result<()> {
    let service = Service::new("maglev", NTH, &["p1b", "p1c", "p2a", "p2b"], PORT)
        .annotation(ALGORITHM, "maglev");
    let service = service.load_balancer(vip(NTH), "VIP").without_node_ports();
    fixture.start(&service)?;
    each(|protocol, family| {
        let to = SocketAddr::new(vip(NTH).ip(family), SERVICE_PORT);
        let ports = fresh_ports(24);
        let chosen = [&fixture.lab.n1, &fixture.lab.n2].map(|node| {
            fixture.lab.set_external_route(node)?;
            let dial = |port| {
                let dial = Dial::new(protocol, to).source_port(port);
                let mut connection = dial.connect(&fixture.lab.x.ns)?;
                let answer = connection.exchange(b"!")?;
                connection.reset()?;
                anyhow::Ok(answer.backend)
            };
            (ports..ports + 24)
                .map(dial)
                .collect::<Result<Vec<_>>>()
                .with_context(|| format!("by {}", node.host.name))
        });
        fixture.lab.set_external_route(&fixture.lab.n1)?;
        let [by_n1, by_n2] = chosen;
        let by_n1 = by_n1?;
        let by_n2 = by_n2?;
        ensure!(by_n1 == by_n2, "by n1 {by_n1:?}, by n2 {by_n2:?}");
        ensure!(
            by_n1.iter().any(|backend| *backend != by_n1[0]),
            "24 clients, and only {} answers",
            by_n1[0]
        );
        Ok(())
    })?;
    fixture.end(&service)
}

pub(super) fn round_robin(fixture: &Fixture) -> Result<()> {
    let service = Service::new("turns", NTH + 1, &["p1b", "p1c", "p2a"], PORT)
        .annotation(ALGORITHM, "round-robin");
    fixture.start(&service)?;
    each(|protocol, family| {
        let mut counts = BTreeMap::new();
        for _ in 0..30 {
            let answer = fixture.dial("p1a", Dial::new(protocol, service.frontend(family)))?;
            *counts.entry(answer.backend).or_insert(0) += 1;
        }
        ensure!(counts.values().eq(&[10, 10, 10]), "{counts:?}");
        Ok(())
    })?;
    fixture.end(&service)
}

pub(super) fn least_connections(fixture: &Fixture) -> Result<()> {
    let service =
        Service::new("least", NTH + 2, &["p1b"], PORT).annotation(ALGORITHM, "least-connections");
    fixture.start(&service)?;
    let open = |protocol, family| -> Result<(Connection, String)> {
        let dial = from_unused_port(Dial::new(protocol, service.frontend(family)));
        let mut connection = dial.connect(&fixture.lab.host("p1a").ns)?;
        let backend = connection.exchange(b"!")?.backend;
        Ok((connection, backend))
    };
    let mut loaded = Vec::new();
    each(|protocol, family| {
        (0..6).try_for_each(|_| open(protocol, family).map(|connection| loaded.push(connection)))
    })?;
    fixture.settle(|| fixture.put(&service.clone().backends(&["p1b", "p1c"])))?;
    each(|protocol, family| {
        let later: Vec<_> = (0..4)
            .map(|_| open(protocol, family))
            .collect::<Result<_>>()?;
        let backends: Vec<_> = later.iter().map(|(_, backend)| backend.as_str()).collect();
        ensure!(
            backends == ["p1c"; 4],
            "6 are open to p1b, and {backends:?} answer"
        );
        Ok(())
    })?;
    fixture.end(&service)
}

/// Backends get connections by weight, and a backend of weight 0 keeps its open connections and
/// gets no new ones.
pub(super) fn weights(fixture: &Fixture) -> Result<()> {
    let service = Service::new("weights", NTH + 3, &["p1b", "p1c", "p2a"], PORT)
        .annotation(WEIGHTS, "p1b=3,p1c=1");
    fixture.start(&service.clone().annotation(ALGORITHM, "round-robin"))?;
    let open = |protocol, family| -> Result<(Connection, String)> {
        let dial = from_unused_port(Dial::new(protocol, service.frontend(family)));
        let mut connection = dial.connect(&fixture.lab.host("p1a").ns)?;
        let backend = connection.exchange(b"!")?.backend;
        Ok((connection, backend))
    };
    let mut drained = Vec::new();
    each(|protocol, family| {
        let first: Vec<_> = (0..8)
            .map(|_| open(protocol, family))
            .collect::<Result<_>>()?;
        let to_p2a = first
            .into_iter()
            .find(|(_, backend)| backend == "p2a")
            .context("no turn of p2a among eight")?;
        drained.push(to_p2a.0);
        Ok(())
    })?;
    // Without weights half of them would go to p1b. Chance exceeds the tolerance in less than one
    // run in 1,000.
    for (algorithm, of_p1b, count, to_p1b) in [
        ("round-robin", 3, 16, 11..=13),
        ("random", 15, 48, 36..=48),
        ("least-connections", 3, 64, 42..=56),
        ("maglev", 15, 48, 36..=48),
    ] {
        let drains = service
            .clone()
            .annotation(WEIGHTS, &format!("p1b={of_p1b},p1c=1,p2a=0"));
        fixture.settle(|| fixture.put(&drains.annotation(ALGORITHM, algorithm)))?;
        each(|protocol, family| {
            let opened: Vec<_> = (0..count)
                .map(|_| open(protocol, family))
                .collect::<Result<_>>()?;
            let to = |name| opened.iter().filter(|(_, backend)| backend == name).count();
            ensure!(
                to_p1b.contains(&to("p1b")) && to("p2a") == 0,
                "{algorithm}: {} of {count} to p1b",
                to("p1b")
            );
            Ok(())
        })?;
    }
    for mut connection in drained {
        ensure!(
            connection.exchange(b"?")?.backend == "p2a",
            "an open connection is not answered by p2a"
        );
    }
    fixture.end(&service)
}

/// The weight of a slice applies to each of its endpoints.
pub(super) fn slice_weight(fixture: &Fixture) -> Result<()> {
    let service =
        Service::new("sliced", NTH + 4, &["p1b"], PORT).annotation(ALGORITHM, "round-robin");
    fixture.start(&service)?;
    let heavy = |mut slice: Object| {
        slice.0["metadata"]["name"] =
            format!("{}-heavy", slice.0["metadata"]["name"].as_str()?).into();
        slice.0["metadata"]["annotations"] = json!({ "kpx.dev/weight": "3" });
        Some(slice)
    };
    let slices: Vec<_> = service
        .backed_by(&["p1c"])
        .objects(fixture.lab)
        .into_iter()
        .skip(1)
        .filter_map(heavy)
        .collect();
    fixture.settle(|| {
        slices
            .iter()
            .try_for_each(|slice| fixture.cluster.put(slice))
    })?;
    each(|protocol, family| {
        let dial = |_| {
            Ok(fixture
                .dial("p1a", Dial::new(protocol, service.frontend(family)))?
                .backend)
        };
        let backends: Vec<_> = (0..16).map(dial).collect::<Result<_>>()?;
        let to_p1c = backends.iter().filter(|backend| *backend == "p1c").count();
        ensure!((11..=13).contains(&to_p1c), "{to_p1c} of 16 to p1c");
        Ok(())
    })?;
    slices
        .iter()
        .try_for_each(|slice| fixture.cluster.delete(slice))?;
    fixture.end(&service)
}
