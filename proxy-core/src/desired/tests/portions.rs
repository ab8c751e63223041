//! Tests the order in which portions of large Services and others reach the tables.

use std::net::IpAddr;

use proxy_common::addr::Addr;

use super::desired;
use crate::builders::{ServiceBuilder, SliceBuilder, service, slice};
use crate::desired::{Desired, Sync};
use crate::tables::Tables;
use k8s_openapi::api::discovery::v1::EndpointSlice;

/// The rows of a pass.
const ROWS: usize = 100;

/// A Service with so many ports.
fn ports(name: &str, host: u8, ports: u16) -> ServiceBuilder {
    (1..=ports).fold(service(name).cluster_ip(&format!("10.96.0.{host}")), |service, port| service.tcp(port.into()))
}

/// A slice with so many endpoints.
fn endpoints(service: &str, count: u8) -> SliceBuilder {
    let name = format!("{service}-1");
    let (_, of) = service.split_once('/').unwrap();
    (1..=count).fold(slice(&name, of).tcp(8080), |slice, host| slice.ready(&format!("10.244.0.{host}")))
}

/// Carries out a pass, and returns the number of service ports in the tables of each of two addresses.
fn pass(desired: &mut Desired) -> ([usize; 2], Sync) {
    let sync = desired.read_in_turn(ROWS).sync();
    let of = |host| {
        desired.tables().v4.services.keys().filter(|key| key.addr.ip() == IpAddr::from([10, 96, 0, host])).count()
    };
    ([of(1), of(2)], sync)
}

fn has_address(desired: &Desired, host: u8) -> bool {
    desired.service_addresses().contains(&[10, 96, 0, host].into())
}

#[test]
fn new_service_waits_for_one_portion_of_large_service() {
    let mut desired = desired([]);
    desired.sync();
    desired.apply(ports("a/large", 1, 40).into());
    desired.apply(endpoints("a/large", 10).into());
    let (first, _) = pass(&mut desired);
    assert!((1..10).contains(&first[0]), "{first:?}");
    assert!(!has_address(&desired, 1), "clients of the other ports would be refused");
    desired.apply(ports("b/small", 2, 1).into());
    desired.apply(endpoints("b/small", 1).into());
    let (second, _) = pass(&mut desired);
    assert_eq!(second[1], 1);
    assert!(has_address(&desired, 2));
    assert!((first[0] + 1..20).contains(&second[0]), "{first:?}, {second:?}");
    let passes = (0..100).take_while(|_| desired.is_dirty() && pass(&mut desired).0[0] > 0).count();
    assert!((3..20).contains(&passes), "{passes} passes");
    assert!(!desired.is_dirty() && has_address(&desired, 1));
    assert_eq!(desired.tables(), &Tables::of(&desired.store, &desired.options));
}

#[test]
fn small_services_do_not_keep_large_one_from_its_portions() {
    let mut desired = desired([]);
    desired.sync();
    desired.apply(ports("a/large", 1, 40).into());
    desired.apply(endpoints("a/large", 10).into());
    let mut served = 0;
    for round in 0..40 {
        for host in 2..102 {
            let small = ports(&format!("b/small-{host}"), host, 1 + round % 2);
            desired.apply(small.into());
        }
        let (now, _) = pass(&mut desired);
        assert!(now[0] >= served);
        served = now[0];
    }
    assert_eq!(served, 40);
}

#[test]
fn change_is_in_force_once_its_last_portion_is() {
    let mut desired = desired([ports("a/large", 1, 40).into(), endpoints("a/large", 9).into()]);
    desired.sync();
    let annotation = ("endpoints.kubernetes.io/last-change-trigger-time".to_owned(), "2026-01-01T00:00:00Z".to_owned());
    let changed = |slice: &mut EndpointSlice| slice.metadata.annotations = Some([annotation].into());
    desired.apply(endpoints("a/large", 10).edit(changed).into());
    assert_eq!(desired.pending().slices, 1);
    while desired.is_dirty() {
        assert_eq!(desired.pending().slices, 1);
        let (_, sync) = pass(&mut desired);
        assert_eq!(sync.triggers.is_empty(), desired.is_dirty());
    }
    assert_eq!(desired.pending().slices, 0);
}
