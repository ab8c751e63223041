//! A node that serves before its Node object, or the object's addresses, exist: an external cloud
//! controller sets the addresses, and is itself a pod that dials the API's ClusterIP.

use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use testbed::agent::{Agent, DEADLINE, Service, node, wait_until};
use testbed::echo::{Dial, Protocol};
use testbed::lab::{Dual, Family};
use testbed::watched_lab::WatchedLab;

/// The port of all servers of the lab.
const PORT: u16 = 8080;
const NODE_PORT: u16 = 30_080;
/// The name of the problem in the status.
const NODE_OBJECT: &str = "Node object";

/// The Service's endpoint is a node, as an API server's. The object then comes with other addresses
/// than the machine's first ones.
#[test]
fn node_without_object_or_addresses_serves_and_takes_them_over() -> Result<()> {
    let fixture = WatchedLab::start(PORT)?;
    let lab = &fixture.lab;
    let api = Service::new("kubernetes", 1, &["n2"], PORT).node_port(NODE_PORT);
    fixture.put_service(&api)?;
    let n1 = &lab.n1.host;
    let mut empty = node(&lab.n1);
    empty.0["status"]["addresses"] = json!([]);
    for (lack, object) in [
        ("no Node is named n1", None),
        ("n1 has no addresses", Some(empty)),
    ] {
        fixture.api().delete("Node", "", "n1")?;
        object.iter().try_for_each(|object| fixture.put(object))?;
        let kpx = Agent::start_with(
            lab,
            &lab.n1,
            fixture.source(),
            &["--node-timeout=1s".to_owned()],
        )?;
        let reported = kpx
            .problem(NODE_OBJECT)?
            .context("the status names the lack")?;
        ensure!(
            reported == format!("{lack}: this machine's own addresses count"),
            "{reported}"
        );
        has_addresses(&kpx, n1.addrs)?;
        serves(&fixture, &api, n1.addrs).with_context(|| kpx.log())?;

        let outside = Family::ALL
            .map(|family| Dial::new(Protocol::Tcp, at(n1.addrs, family)).connect(&lab.x.ns));
        let mut held = outside.into_iter().collect::<Result<Vec<_>, _>>()?;
        held.iter_mut()
            .try_for_each(|connection| connection.exchange(b"before").map(drop))?;
        let mut whole = node(&lab.n1);
        whole.0["status"]["addresses"] = json!(
            Family::ALL
                .map(|family| json!({ "type": "InternalIP", "address": lab.n1.second.ip(family) }))
        );
        fixture.put(&whole)?;
        let objects = fixture.api().list("nodes");
        has_addresses(&kpx, lab.n1.second)?;
        wait_until(DEADLINE, "the problem is over", || {
            Ok(kpx.problem(NODE_OBJECT)?.is_none())
        })?;
        held.iter_mut()
            .try_for_each(|connection| connection.exchange(b"after").map(drop))
            .context("held")?;
        serves(&fixture, &api, n1.addrs).with_context(|| kpx.log())?;
        // KEP-4004: kpx writes nothing into Node objects.
        ensure!(fixture.api().list("nodes") == objects);
        kpx.stop()?;
    }
    Ok(())
}

fn has_addresses(kpx: &Agent, addrs: Dual) -> Result<()> {
    let wanted = Family::ALL.map(|family| addrs.ip(family));
    kpx.wait(DEADLINE, "the addresses are in force", |status| {
        status.node_addresses == wanted
    })
}

/// Checks that pods, the node itself and outside clients reach the Service.
fn serves(fixture: &WatchedLab, api: &Service, addrs: Dual) -> Result<()> {
    for family in Family::ALL {
        for (client, to) in [
            ("p1a", api.frontend(family)),
            ("n1", api.frontend(family)),
            ("x", at(addrs, family)),
        ] {
            for protocol in Protocol::COMMON {
                let answer =
                    Dial::new(protocol, to).exchange(&fixture.lab.host(client).ns, b"hello");
                let answer = answer.with_context(|| format!("{client} to {to} by {protocol}"))?;
                ensure!(answer.backend == "n2", "{answer:?}");
            }
        }
    }
    Ok(())
}

fn at(addrs: Dual, family: Family) -> SocketAddr {
    (addrs.ip(family), NODE_PORT).into()
}
