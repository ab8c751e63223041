//! Tests of the order in which portions of large Services reach the tables.

use std::net::IpAddr;

use k8s_openapi::api::discovery::v1::EndpointSlice;
use proxy_common::addr::Addr;

use super::desired;
use crate::builders::{ServiceBuilder, SliceBuilder, listed, service, slice};
use crate::desired::{Desired, Sync};
use crate::room::Room;
use crate::tables::Tables;

const ROWS: usize = 100;

fn ports(name: &str, host: u8, ports: u16) -> ServiceBuilder {
    (1..=ports).fold(
        service(name).cluster_ip(&format!("10.96.0.{host}")),
        |service, port| service.tcp(port.into()),
    )
}

fn endpoints(service: &str, count: u8) -> SliceBuilder {
    let name = format!("{service}-1");
    let (_, of) = service.split_once('/').unwrap();
    (1..=count).fold(slice(&name, of).tcp(8080), |slice, host| {
        slice.ready(&format!("10.244.0.{host}"))
    })
}

/// A large Service: 40 ports with 10 backends each.
fn large() -> Desired {
    let mut desired = desired([]);
    desired.sync();
    desired.apply(ports("a/large", 1, 40).into());
    desired.apply(endpoints("a/large", 10).into());
    desired
}

/// Runs a pass. Returns the number of programmed service ports at each of two addresses.
fn pass(desired: &mut Desired) -> ([usize; 2], Sync) {
    let sync = desired.read_in_turn(ROWS).sync();
    let of = |host| {
        let keys = desired.tables().v4.services.keys();
        keys.filter(|key| key.addr.ip() == IpAddr::from([10, 96, 0, host]))
            .count()
    };
    ([of(1), of(2)], sync)
}

fn has_address(desired: &Desired, host: u8) -> bool {
    desired
        .service_addresses_apart(&[], &[])
        .contains(&[10, 96, 0, host].into())
}

/// Runs passes until nothing waits, and returns their number.
fn settle(desired: &mut Desired) -> usize {
    let passes = (0..200)
        .take_while(|_| desired.is_dirty() && pass(desired).1.skipped.is_empty())
        .count();
    assert_eq!(
        desired.tables(),
        &Tables::within(desired.options.room, &desired.store, &desired.options)
    );
    passes
}

#[test]
fn new_service_waits_for_one_portion_of_large_service() {
    let mut desired = large();
    let (first, _) = pass(&mut desired);
    assert!((1..10).contains(&first[0]), "{first:?}");
    assert!(
        !has_address(&desired, 1),
        "clients of the other ports would be refused"
    );
    desired.apply(ports("b/small", 2, 1).into());
    desired.apply(endpoints("b/small", 1).into());
    let (second, _) = pass(&mut desired);
    assert_eq!(second[1], 1);
    assert!(has_address(&desired, 2));
    assert!(
        (first[0] + 1..20).contains(&second[0]),
        "{first:?}, {second:?}"
    );
    assert!((3..20).contains(&settle(&mut desired)));
    assert!(has_address(&desired, 1));
}

#[test]
fn new_service_does_not_wait_for_deletion_of_large_service() {
    let mut desired = large();
    desired.sync();
    desired.apply(ports("a/large", 1, 40).deleted());
    desired.apply(ports("b/small", 2, 1).into());
    desired.apply(endpoints("b/small", 1).into());
    let (first, _) = pass(&mut desired);
    assert_eq!(first[1], 1);
    assert!(first[0] > 20, "{first:?}");
    settle(&mut desired);
}

#[test]
fn small_services_do_not_keep_large_one_from_its_portions() {
    let mut desired = large();
    let mut served = 0;
    for round in 0..40 {
        for host in 2..102 {
            desired.apply(ports(&format!("b/small-{host}"), host, 1 + round % 2).into());
        }
        let (now, _) = pass(&mut desired);
        assert!(now[0] >= served);
        served = now[0];
    }
    assert_eq!(served, 40);
}

/// An address that moves to another Service follows that Service's ports.
#[test]
fn address_comes_after_its_ports() {
    let mut desired = large();
    desired.apply(ports("a/large", 1, 40).external_ip("192.0.2.9").into());
    desired.sync();
    desired.apply(ports("a/large", 1, 40).into());
    desired.apply(endpoints("a/large", 9).into());
    pass(&mut desired);
    desired.apply(ports("b/new", 2, 30).external_ip("192.0.2.9").into());
    while desired.is_dirty() {
        let ([_, served], _) = pass(&mut desired);
        assert!(!has_address(&desired, 2) || served == 30, "{served}");
    }
}

/// One Service changes in place, its neighbour in the namespace is deleted, and other Services take
/// the free rows.
#[test]
fn tables_never_hold_more_than_the_room() {
    let room = Room::of_rows(500);
    let mut desired = Desired::new("here").within(room);
    listed().into_iter().for_each(|input| desired.apply(input));
    desired.apply(ports("a/large", 1, 20).into());
    desired.apply(endpoints("a/large", 11).into());
    desired.apply(ports("a/other", 2, 20).into());
    desired.apply(endpoints("a/other", 11).into());
    desired.sync();
    desired.apply(endpoints("a/large", 1).into());
    desired.apply(endpoints("a/other", 10).into());
    for host in 3..10 {
        desired.apply(ports(&format!("a/new-{host}"), host, 2).into());
        desired.apply(endpoints(&format!("a/new-{host}"), 13).into());
    }
    desired.apply(ports("b/late", 99, 2).into());
    desired.apply(endpoints("b/late", 2).into());
    while desired.is_dirty() {
        pass(&mut desired);
        assert!(
            room.holds(&desired.tables().v4.rows()),
            "{:?}",
            desired.tables().v4.rows()
        );
    }
    settle(&mut desired);
}

#[test]
fn change_is_in_force_once_its_last_portion_is() {
    let mut desired = large();
    desired.sync();
    let annotation = (
        "endpoints.kubernetes.io/last-change-trigger-time".to_owned(),
        "2026-01-01T00:00:00Z".to_owned(),
    );
    let changed =
        |slice: &mut EndpointSlice| slice.metadata.annotations = Some([annotation.clone()].into());
    desired.apply(endpoints("a/large", 9).edit(changed).into());
    while desired.is_dirty() {
        let (_, sync) = pass(&mut desired);
        assert_eq!(sync.triggers.is_empty(), desired.is_dirty());
    }
    // The Service changes in each pass, so it always waits.
    let mut due = 0;
    for round in 0..100 {
        desired.apply(endpoints("a/large", 5 + round % 3).edit(changed).into());
        due += pass(&mut desired).1.triggers.len();
    }
    assert!((80..100).contains(&due), "{due}");
}

/// A load balancer sends clients as soon as the health check reports endpoints.
#[test]
fn health_check_follows_the_tables() {
    let local = || {
        ports("a/large", 1, 40)
            .type_("LoadBalancer")
            .external_local()
    };
    let local = || local().edit(|spec| spec.health_check_node_port = Some(30_001));
    let mut desired = desired([local().into()]);
    desired.sync();
    let reported = |desired: &Desired| {
        desired
            .health_checks()
            .values()
            .map(|check| check.local_endpoints)
            .sum::<usize>()
    };
    let slots = |desired: &Desired| desired.tables().v4.slots.len();
    assert_eq!((desired.health_checks().len(), reported(&desired)), (1, 0));
    desired.apply(
        endpoints("a/large", 10)
            .edit(|slice| on(slice, "here"))
            .into(),
    );
    while desired.is_dirty() {
        pass(&mut desired);
        assert_eq!(
            reported(&desired) > 0,
            slots(&desired) == 400,
            "{} {}",
            reported(&desired),
            slots(&desired)
        );
    }
    assert_eq!(reported(&desired), 10);
    desired.apply(local().deleted());
    pass(&mut desired);
    assert!(desired.health_checks().is_empty());
}

fn on(slice: &mut EndpointSlice, node: &str) {
    slice
        .endpoints
        .iter_mut()
        .flatten()
        .for_each(|endpoint| endpoint.node_name = Some(node.to_owned()));
}
