//! Tests of contested frontends, as Services are added and deleted.

use std::net::IpAddr;

use proxy_common::addr::Proto;

use super::{desired, text};
use crate::builders::{ServiceBuilder, object_name, service, slice};
use crate::desired::Desired;
use crate::input::Input;
use crate::model::tests::dumps::{Dump, assert_all_run};
use crate::tables::Tables;

fn expect_sync(desired: &mut Desired, input: impl Into<Input>, expected: &Dump) {
    desired.apply(input.into());
    expected.assert_eq(&text(&desired.sync()));
    assert_eq!(
        desired.tables(),
        &Tables::of(&desired.store, &desired.options)
    );
}

fn web(name: &str, last: u8) -> ServiceBuilder {
    service(name)
        .cluster_ip(&format!("10.96.0.{last}"))
        .tcp(80)
        .created(i64::from(last))
}

#[test]
fn an_external_frontend_belongs_to_the_oldest_service() {
    let mut desired = desired([]);
    let young = web("young", 2)
        .type_("NodePort")
        .node_port(30_080)
        .external_ip("192.0.2.1");
    expect_sync(
        &mut desired,
        young,
        &Dump::of_rust(
            file!(),
            "an_external_frontend_belongs_to_the_oldest_service/1",
        ),
    );
    let old = || {
        web("old", 1)
            .type_("LoadBalancer")
            .node_port(30_080)
            .vip("192.0.2.1")
    };
    expect_sync(
        &mut desired,
        old(),
        &Dump::of_rust(
            file!(),
            "an_external_frontend_belongs_to_the_oldest_service/2",
        ),
    );
    expect_sync(
        &mut desired,
        old().deleted(),
        &Dump::of_rust(
            file!(),
            "an_external_frontend_belongs_to_the_oldest_service/3",
        ),
    );
}

/// Services of the same age are ordered by name: on every node, in any order of arrival.
#[test]
fn the_first_by_name_wins_among_services_of_one_age() {
    let of = |name: &str, last| {
        web(name, last)
            .type_("LoadBalancer")
            .created(7)
            .node_port(30_080)
            .vip("192.0.2.1")
    };
    let holders = |order: [&str; 3]| {
        let all = [("b/a", 1), ("a/z", 2), ("a/y", 3)];
        let services = order.map(|name| {
            of(
                name,
                all.iter().find(|(known, _)| *known == name).unwrap().1,
            )
        });
        let mut desired = desired(services.map(Input::from));
        desired.sync();
        let holder = |desired: &Desired| {
            let said = desired.claimant("192.0.2.1".parse().unwrap(), Proto::TCP, 80);
            said.map(|(service, field)| format!("{service} {field}"))
        };
        let first = holder(&desired);
        desired.apply(of("a/y", 3).deleted());
        desired.sync();
        (first, holder(&desired), desired.skipped().count())
    };
    let field = "status.loadBalancer.ingress[0].ip";
    let expected = |name: &str| Some(format!("Service {name} {field}"));
    for order in [["b/a", "a/z", "a/y"], ["a/y", "a/z", "b/a"]] {
        assert_eq!(
            holders(order),
            (expected("a/y"), expected("a/z"), 2),
            "one loses its node port and its address"
        );
    }
}

/// A ClusterIP wins over other kinds of frontend, even of an older Service.
#[test]
fn an_external_frontend_gives_way_to_a_cluster_ip() {
    let mut desired = desired([]);
    expect_sync(
        &mut desired,
        web("old", 1).external_ip("10.96.0.9"),
        &Dump::of_rust(file!(), "an_external_frontend_gives_way_to_a_cluster_ip/1"),
    );
    // A ClusterIP with another port wins as well.
    let young = || service("young").cluster_ip("10.96.0.9").port("", "TCP", 81);
    expect_sync(
        &mut desired,
        young(),
        &Dump::of_rust(file!(), "an_external_frontend_gives_way_to_a_cluster_ip/2"),
    );
    expect_sync(
        &mut desired,
        young().deleted(),
        &Dump::of_rust(file!(), "an_external_frontend_gives_way_to_a_cluster_ip/3"),
    );
}

/// Without its service port, the frontend would reach the other Service's backends.
#[test]
fn an_external_frontend_goes_with_its_service_port() {
    let mut desired = desired([]);
    let young = || {
        service("young")
            .cluster_ip("10.96.0.1")
            .tcp(80)
            .port("more", "TCP", 81)
            .external_ip("192.0.2.1")
    };
    expect_sync(
        &mut desired,
        young(),
        &Dump::of_rust(file!(), "an_external_frontend_goes_with_its_service_port/1"),
    );
    expect_sync(
        &mut desired,
        web("old", 1),
        &Dump::of_rust(file!(), "an_external_frontend_goes_with_its_service_port/2"),
    );
    expect_sync(
        &mut desired,
        web("old", 1).deleted(),
        &Dump::of_rust(file!(), "an_external_frontend_goes_with_its_service_port/3"),
    );
}

/// A Service without its service port frees its other frontends.
#[test]
fn a_claim_without_a_service_port_holds_no_frontend() {
    let mut desired = desired([
        web("oldest", 1).into(),
        web("old", 1).created(2).external_ip("192.0.2.1").into(),
        web("young", 3).external_ip("192.0.2.1").into(),
    ]);
    desired.sync();
    Dump::of_rust(
        file!(),
        "a_claim_without_a_service_port_holds_no_frontend/1",
    )
    .assert_eq(&desired.tables().to_string());
    expect_sync(
        &mut desired,
        web("oldest", 1).deleted(),
        &Dump::of_rust(
            file!(),
            "a_claim_without_a_service_port_holds_no_frontend/2",
        ),
    );
}

#[test]
fn labels_remove_a_service_and_its_slices_and_bring_them_back() {
    let labelled = |on: bool, built: ServiceBuilder| {
        if on {
            built.label("service.kubernetes.io/service-proxy-name")
        } else {
            built
        }
    };
    let endpoints = |on: bool| {
        let slice = slice("web-1", "web").tcp(80).ready("10.244.0.1").on("here");
        if on {
            slice.label("service.kubernetes.io/headless", "")
        } else {
            slice
        }
    };
    let full = |on: bool| {
        let full = web("web", 1)
            .type_("LoadBalancer")
            .node_port(30_080)
            .vip("192.0.2.1")
            .external_local();
        labelled(
            on,
            full.edit(|spec| spec.health_check_node_port = Some(32_000)),
        )
    };
    let mut desired = desired([full(false).into(), endpoints(false).into()]);
    let state = |desired: &mut Desired, input: Input| {
        desired.apply(input);
        desired.sync();
        let local = desired
            .health_checks()
            .get(&object_name("web"))
            .map(|check| check.local_endpoints);
        (
            desired.tables().v4.frontends.len(),
            desired.tables().v4.slots.len(),
            local,
        )
    };
    for _ in 0..2 {
        assert_eq!(state(&mut desired, full(false).into()), (4, 2, Some(1)));
        assert_eq!(state(&mut desired, endpoints(true).into()), (4, 0, Some(0)));
        assert_eq!(
            state(&mut desired, endpoints(false).into()),
            (4, 2, Some(1))
        );
        assert_eq!(state(&mut desired, full(true).into()), (0, 0, None));
        assert_eq!(desired.tables(), &Tables::default());
    }
}

#[test]
fn external_frontends_exclude_node_ports() {
    let mut desired = desired([
        web("web", 1)
            .type_("LoadBalancer")
            .node_port(30_080)
            .external_ip("192.0.2.1")
            .vip("203.0.113.1")
            .into(),
        web("other", 2)
            .cluster_ip("fd00:96::2")
            .external_ip("2001:db8::1")
            .external_ip("10.96.0.1")
            .into(),
    ]);
    desired.sync();
    let externals: Vec<_> = desired.external_frontends().collect();
    let ip = |text: &str| text.parse::<IpAddr>().unwrap();
    let wanted = ["192.0.2.1", "203.0.113.1", "2001:db8::1"].map(|addr| (ip(addr), Proto::TCP, 80));
    assert_eq!(externals, wanted);
    let addresses: Vec<_> = desired
        .service_addresses_apart(&[], &[])
        .into_iter()
        .collect();
    assert_eq!(addresses, ["10.96.0.1", "10.96.0.2", "fd00:96::2"].map(ip));
}

#[test]
fn every_section_has_a_test() {
    assert_all_run(file!(), include_str!("external.rs"));
}
