//! The set of a Service's backends that may answer.

use anyhow::Result;
use testbed::agent::{Hint, Service};
use testbed::echo::{Dial, Protocol};
use testbed::lab::Family;

use crate::case::{To, same};
use crate::fixture::{Fixture, combinations};
use crate::services::{PORT, frontend};

/// So many that chance misses none of two or three backends.
const OFTEN: usize = 40;

pub(super) fn policy_local(fixture: &Fixture, protocol: Protocol, family: Family) -> Result<()> {
    fixture.only(
        "p1a",
        Dial::new(protocol, frontend("local", family)),
        200,
        &["p1b"],
    )
}

pub(super) fn policy_cluster(fixture: &Fixture, protocol: Protocol, family: Family) -> Result<()> {
    fixture.only(
        "p1a",
        Dial::new(protocol, frontend("everywhere", family)),
        OFTEN,
        &["p1b", "p2a"],
    )
}

pub(super) fn external_policy(fixture: &Fixture, protocol: Protocol, family: Family) -> Result<()> {
    for to in [To::NodePort("n1"), To::LoadBalancer, To::ExternalIp] {
        for (client, backends) in [
            ("x", &["p1b"][..]),
            ("p1a", &["p1b", "p2a"]),
            ("n1", &["p1b", "p2a"]),
        ] {
            let case = same(
                "N05",
                client,
                to,
                "both-local",
                crate::case::Expect::Silence,
            );
            fixture.only(
                client,
                Dial::new(protocol, case.addr(fixture.lab, family)),
                OFTEN,
                backends,
            )?;
        }
    }
    Ok(())
}

pub(super) fn terminating(fixture: &Fixture) -> Result<()> {
    let service = Service::new("terminating", 60, &["p1b"], PORT).terminating(&["p1b"]);
    fixture.start(&service)?;
    all_answer(fixture, &service, "p1a", &["p1b"])?;
    let service = service.backends(&["p1b", "p2a"]);
    fixture.settle(|| fixture.put(&service))?;
    all_answer(fixture, &service, "p1a", &["p2a"])?;
    fixture.end(&service)
}

pub(super) fn hints(fixture: &Fixture) -> Result<()> {
    let service = Service::new("hinted", 61, &["p1b", "p2a"], PORT);
    fixture.start(&service)?;
    let zones = [
        ("p1b", Hint::Zone("zone-n1")),
        ("p2a", Hint::Zone("zone-n2")),
    ];
    let nodes = [("p1b", Hint::Node("n1")), ("p2a", Hint::Node("n2"))];
    let crossed = [
        ("p1b", Hint::Zone("zone-n2")),
        ("p2a", Hint::Zone("zone-n1")),
    ];
    for (hints, from_n1, from_n2) in [
        (zones, "p1b", "p2a"),
        (crossed, "p2a", "p1b"),
        (nodes, "p1b", "p2a"),
    ] {
        fixture.settle(|| fixture.put(&service.clone().hints(&hints)))?;
        all_answer(fixture, &service, "p1a", &[from_n1])?;
        all_answer(fixture, &service, "n1", &[from_n1])?;
        all_answer(fixture, &service, "p2b", &[from_n2])?;
    }
    // An endpoint has no hint, or no endpoint has a hint for this zone: all serve every client.
    for unusable in [
        &zones[..1],
        &[("p1b", Hint::Zone("far")), ("p2a", Hint::Zone("farther"))],
    ] {
        fixture.settle(|| fixture.put(&service.clone().hints(unusable)))?;
        all_answer(fixture, &service, "p1a", &["p1b", "p2a"])?;
        fixture.settle(|| fixture.put(&service.clone().hints(&zones)))?;
    }
    fixture.end(&service)
}

fn all_answer(fixture: &Fixture, service: &Service, client: &str, backends: &[&str]) -> Result<()> {
    combinations().try_for_each(|(protocol, family)| {
        fixture.only(
            client,
            Dial::new(protocol, service.frontend(family)),
            20,
            backends,
        )
    })
}
