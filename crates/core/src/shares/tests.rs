use proxy_common::frontend::Algorithm;

use super::*;
use crate::builders::{ServiceBuilder, listed, service, slice};
use crate::desired::Desired;
use crate::input::Input;
use crate::model::ModelOptions;
use crate::tables::Tables;

/// The capacity for `count` frontends, and for unlimited other rows.
fn frontends(count: usize) -> Room {
    let Room(mut rows) = Room::default();
    rows[0] = count;
    Room(rows)
}

fn desired(room: Room) -> Desired {
    let mut desired = Desired::new("here").within(room);
    listed().into_iter().for_each(|input| desired.apply(input));
    desired
}

/// A Service with `ports` ports. Its ClusterIP takes one more frontend.
fn wide(name: &str, host: u8, ports: u16) -> ServiceBuilder {
    (1..=ports).fold(
        service(name).cluster_ip(&format!("10.96.0.{host}")),
        |service, port| service.tcp(port.into()),
    )
}

/// Syncs and returns the number of frontends at each address. Checks the tables against a build
/// from scratch.
fn served(desired: &mut Desired, room: Room) -> BTreeMap<String, usize> {
    desired.sync();
    assert_eq!(
        desired.tables(),
        &Tables::within(room, desired.store(), &ModelOptions::default())
    );
    let mut served = BTreeMap::new();
    for key in desired.tables().v4.frontends.keys() {
        *served.entry(key.addr.ip().to_string()).or_default() += 1;
    }
    served
}

fn skipped(desired: &Desired) -> Vec<String> {
    desired.skipped().map(ToString::to_string).collect()
}

#[test]
fn level_uses_up_the_room() {
    let level = |demands: &[usize], room| level(demands.iter().copied(), room);
    assert_eq!(level(&[5, 5], 10), None);
    assert_eq!(level(&[5, 6], 10), Some(5));
    assert_eq!(level(&[1, 100], 10), Some(9));
    assert_eq!(level(&[1, 50, 100], 11), Some(5));
    assert_eq!(level(&[], 0), None);
}

#[test]
fn namespace_takes_what_others_leave() {
    let room = frontends(20);
    let mut desired = desired(room);
    desired.apply(wide("greedy/big", 1, 19).into());
    assert_eq!(
        served(&mut desired, room),
        [("10.96.0.1".to_owned(), 20)].into()
    );
    assert_eq!(skipped(&desired), [""; 0]);
    // The other namespace gets its share at once, and the first namespace keeps the rest.
    desired.apply(wide("other/web", 2, 1).into());
    assert_eq!(
        served(&mut desired, room),
        [("10.96.0.1".to_owned(), 18), ("10.96.0.2".to_owned(), 2)].into()
    );
    assert_eq!(
        skipped(&desired),
        [
            "Service greedy/big spec.ports: 2 of 19 ports are not served: the Services of namespace greedy have their \
          share of this node's room, 18 frontends (--service-table-size)"
        ]
    );
    desired.apply(wide("other/web", 2, 1).deleted());
    assert_eq!(
        served(&mut desired, room),
        [("10.96.0.1".to_owned(), 20)].into()
    );
    assert_eq!(skipped(&desired), [""; 0]);
}

#[test]
fn replaced_endpoints_leave_shares_as_they_are() {
    let (web, of) = (wide("web", 1, 1), |ip: &str| {
        slice("web-1", "web").tcp(8080).ready(ip)
    });
    let mut desired = desired(Room::default());
    let mut model = |input: Input| {
        desired.apply(input);
        desired.sync();
        desired.snapshot().services[0].v4.clone().unwrap()
    };
    let first = model(web.clone().into());
    let one = model(of("10.244.0.1").into());
    let replaced = model(of("10.244.0.2").into());
    let two = model(of("10.244.0.1").ready("10.244.0.2").into());
    let more_ports = model(web.tcp(81).into());
    assert!(take_same(&one, &replaced) && one != replaced);
    assert!(!take_same(&first, &one) && !take_same(&one, &two) && !take_same(&two, &more_ports));
    let older = model(wide("web", 1, 1).tcp(81).created(2).into());
    assert!(!take_same(&more_ports, &older));
}

#[test]
fn oldest_service_of_namespace_keeps_its_ports() {
    let room = frontends(15);
    let mut desired = desired(room);
    desired.apply(wide("greedy/new", 1, 10).created(2).into());
    desired.apply(wide("greedy/old", 2, 10).created(1).into());
    assert_eq!(
        served(&mut desired, room),
        [("10.96.0.1".to_owned(), 4), ("10.96.0.2".to_owned(), 11)].into()
    );
}

/// The full product of ports and endpoints would exhaust the agent's memory.
#[test]
fn service_is_modelled_only_as_far_as_there_is_room() {
    let room = Room::of_rows(25);
    let mut desired = desired(room);
    let pods = (1..=10).fold(slice("greedy/big-1", "big").tcp(8080), |slice, host| {
        slice.ready(&format!("10.244.0.{host}"))
    });
    desired.apply(wide("greedy/big", 1, 20).into());
    desired.apply(pods.into());
    assert_eq!(
        served(&mut desired, room),
        [("10.96.0.1".to_owned(), 3)].into()
    );
    assert!(
        skipped(&desired)[0].contains("18 of 20 ports are not served"),
        "{:?}",
        skipped(&desired)
    );
    let services = desired.snapshot().services;
    let ports = services
        .iter()
        .filter_map(|service| service.v4.as_ref())
        .flat_map(|v4| v4.ports.values());
    assert_eq!(
        ports.map(|port| port.cluster.len()).sum::<usize>(),
        30,
        "the third port shows that there is no room"
    );
}

/// A tenant that fills the maps does not get another tenant's address.
#[test]
fn frontend_without_room_passes_to_no_other_service() {
    let room = frontends(8);
    let mut desired = desired(room);
    desired.apply(wide("a/old", 1, 3).created(1).into());
    desired.apply(
        wide("a/new", 2, 1)
            .external_ip("203.0.113.9")
            .created(2)
            .into(),
    );
    desired.apply(
        wide("b/late", 3, 1)
            .external_ip("203.0.113.9")
            .created(3)
            .into(),
    );
    assert_eq!(
        served(&mut desired, room),
        [("10.96.0.1", 4), ("10.96.0.2", 1), ("10.96.0.3", 2)]
            .map(|(addr, n)| (addr.to_owned(), n))
            .into()
    );
}

#[test]
fn external_frontends_have_their_turn_by_namespace() {
    let mut desired = desired(Room::default());
    let service = |name, host, ip: &str, age| wide(name, host, 2).external_ip(ip).created(age);
    desired.apply(service("a/new", 1, "1.1.1.1", 3).into());
    desired.apply(service("a/old", 2, "2.2.2.2", 2).into());
    desired.apply(service("b/web", 3, "203.0.113.9", 9).into());
    desired.sync();
    let turns = desired.external_frontends_in_turn();
    let turns: Vec<_> = turns
        .iter()
        .map(|(service, (addr, _, port))| format!("{service} {addr}:{port}"))
        .collect();
    assert_eq!(
        turns,
        [
            "a/old 2.2.2.2:1",
            "b/web 203.0.113.9:1",
            "a/old 2.2.2.2:2",
            "b/web 203.0.113.9:2",
            "a/new 1.1.1.1:1",
            "a/new 1.1.1.1:2"
        ]
    );
}

/// The capacity for `count` look-up tables, and for unlimited other rows.
fn tables(count: usize) -> Room {
    let Room(mut rows) = Room::default();
    rows[4] = count;
    Room(rows)
}

#[test]
fn service_without_room_for_its_table_is_served_without_it() {
    let room = tables(4);
    let mut desired = desired(room);
    let mut put = |name: &str, host: u8| {
        desired.apply(wide(name, host, 1).algorithm("maglev").into());
        let of = name.split_once('/').unwrap().1;
        desired.apply(
            slice(&format!("{name}-1"), of)
                .tcp(8080)
                .ready(&format!("10.244.0.{host}"))
                .into(),
        );
    };
    (1..=6).for_each(|nth| put(&format!("greedy/web-{nth}"), nth));
    put("other/web", 7);
    assert_eq!(served(&mut desired, room).len(), 7, "none is left out");
    let tables = &desired.tables().v4;
    let with: Vec<_> = tables
        .maglev
        .keys()
        .map(|key| key.service.addr.ip().to_string())
        .collect();
    assert_eq!(with, ["10.96.0.1", "10.96.0.2", "10.96.0.3", "10.96.0.7"]);
    let at_random: Vec<_> = tables
        .services
        .iter()
        .filter(|(_, service)| service.algorithm == Algorithm::RANDOM)
        .map(|(key, _)| key.addr.ip().to_string())
        .collect();
    assert_eq!(at_random, ["10.96.0.4", "10.96.0.5", "10.96.0.6"]);
    let reported = skipped(&desired);
    assert_eq!(reported.len(), 3, "{reported:?}");
    let why = "1 of 1 ports are served without weights and Maglev tables: the Services of namespace greedy have their share of this node's room, 3 Maglev tables (8 KiB each)";
    assert_eq!(
        reported[0],
        format!("Service greedy/web-4 spec.ports: {why}")
    );
    desired.apply(wide("greedy/web-1", 1, 1).deleted());
    served(&mut desired, room);
    assert_eq!(skipped(&desired).len(), 2);
}
