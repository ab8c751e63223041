//! Tests of a tenant with maximal objects.

use proxy_common::addr::Addr;
use proxy_common::frontend::Service;

use crate::builders::{ServiceBuilder, listed, service, slice};
use crate::desired::Desired;
use crate::diff::{Change, FamilyChange};
use crate::model::Cause;

/// The rows of an agent's pass.
const PASS: usize = 1 << 16;

/// A Service with 60,000 ExternalIPs, the maximum of one object.
fn greedy(nth: u8) -> ServiceBuilder {
    let web = service(&format!("greedy/web-{nth}"))
        .cluster_ip(&format!("10.96.1.{nth}"))
        .tcp(80)
        .tcp(81);
    (0..60_000_u16).fold(web, |web, at| {
        web.external_ip(&format!("20.{nth}.{}.{}", at >> 8, at & 255))
    })
}

fn complete() -> Desired {
    let mut desired = Desired::new("here");
    listed().into_iter().for_each(|input| desired.apply(input));
    desired.sync();
    desired
}

#[test]
fn service_has_no_more_external_frontends_than_a_pass_has_time_for() {
    let mut desired = complete();
    desired.apply(greedy(1).into());
    desired.sync();
    assert_eq!(desired.external_frontends().count(), 8_192);
    let skipped: Vec<_> = desired
        .skipped()
        .map(|skipped| (skipped.to_string(), skipped.cause))
        .collect();
    let why = "of 60000 external addresses only the first 4096 are served: with 2 ports a Service has no more";
    assert_eq!(
        skipped,
        [(
            format!("Service greedy/web-1 spec.externalIPs: {why}"),
            Cause::NoRoom
        )]
    );
    desired.apply(greedy(1).deleted());
    desired.sync();
    assert_eq!(
        (
            desired.external_frontends().count(),
            desired.skipped().count()
        ),
        (0, 0)
    );
}

#[test]
fn neighbour_of_services_with_many_external_ips_waits_for_one_bounded_pass() {
    let mut desired = complete();
    (1..=6).for_each(|nth| desired.apply(greedy(nth).into()));
    desired.apply(service("other/web").cluster_ip("10.96.0.1").tcp(80).into());
    let mut passes = Vec::new();
    let mut served = None;
    while desired.is_dirty() {
        let changes = desired.read_in_turn(PASS).sync().changes;
        let frontends = changes
            .iter()
            .filter(|change| matches!(change, Change::V4(FamilyChange::PutFrontend(..))))
            .count();
        let is_there = desired
            .tables()
            .v4
            .frontends
            .keys()
            .any(|key| key.addr.ip().to_string() == "10.96.0.1");
        served = served.or(is_there.then_some(passes.len()));
        passes.push(frontends);
    }
    // At the latest in the pass after the current one.
    assert!(
        served.is_some_and(|pass| pass <= 1),
        "{served:?}: {passes:?}"
    );
    assert!(
        passes.iter().all(|frontends| *frontends <= 8_192 + 16),
        "{passes:?}"
    );
    assert_eq!(desired.external_frontends().count(), 6 * 8_192);
}

#[test]
fn service_has_no_more_tables_of_places_than_its_part() {
    let ports = 3_000_u16;
    let web = service("greedy/web")
        .cluster_ip("10.96.0.1")
        .weights("10.244.0.1=3");
    let web = (1..=ports).fold(web, |web, port| web.tcp(port.into()));
    let of = slice("greedy/web-1", "web").tcp(8080);
    let mut desired = complete();
    desired.apply(web.into());
    desired.apply(of.ready("10.244.0.1").ready("10.244.0.2").into());
    desired.sync();
    let tables = &desired.tables().v4;
    assert_eq!(
        (tables.services.len(), tables.slots.len()),
        (ports.into(), 2 * usize::from(ports))
    );
    let with = tables.maglev.len();
    assert!(with <= 2_048 && with > 2_000, "{with}");
    let weighted = tables
        .services
        .values()
        .filter(|service| service.has(Service::WEIGHTED))
        .count();
    assert_eq!(weighted, with, "a port without a table asks for none");
    let skipped: Vec<_> = desired.skipped().map(|skipped| skipped.cause).collect();
    assert_eq!(skipped, [Cause::NoRoom]);
}
