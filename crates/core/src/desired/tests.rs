use std::net::IpAddr;

use crate::builders::{listed, node, object_name, service, service_cidr, slice};
use crate::desired::{Counts, Desired, FamilyCounts, Snapshot, Sync};
use crate::input::{Input, Update};
use crate::model::ModelOptions;
use crate::model::tests::dumps::{Dump, assert_all_run};
use crate::tables::Tables;

mod external;
mod greedy;
mod portions;
mod properties;

fn desired(inputs: impl IntoIterator<Item = Input>) -> Desired {
    let mut desired = Desired::new("here");
    for input in listed().into_iter().chain(inputs) {
        desired.apply(input);
    }
    desired
}

#[test]
fn the_desired_state_is_empty_before_everything_is_listed() {
    let mut desired = Desired::new("here");
    let leftover = Tables::of(
        &{
            let mut store = crate::store::Store::new("here");
            let _ = store.apply(service("old").cluster_ip("10.96.0.9").tcp(80).into());
            store
        },
        &ModelOptions::default(),
    );
    let inputs = listed();
    desired.apply(service("early").cluster_ip("10.96.0.1").tcp(80).into());
    for input in inputs {
        assert!(!desired.is_complete());
        assert_eq!(desired.sync().changes, []);
        assert_eq!(desired.sync_from(&leftover).changes, []);
        assert_eq!(desired.tables(), &Tables::default());
        desired.apply(input);
        // The empty first list deletes earlier objects; this Service follows it.
        desired.apply(service("web").cluster_ip("10.96.0.2").tcp(80).into());
    }
    assert!(desired.is_complete());
    Dump::of_rust(
        file!(),
        "the_desired_state_is_empty_before_everything_is_listed",
    )
    .assert_eq(&text(&desired.sync_from(&leftover)));
}

fn text(sync: &Sync) -> String {
    let changes = sync.changes.iter().map(|change| format!("{change}\n"));
    changes
        .chain(
            sync.skipped
                .iter()
                .map(|skipped| format!("skipped {skipped}\n")),
        )
        .collect()
}

#[test]
fn a_change_touches_one_service() {
    let others = (2..250).map(|host| {
        service(&format!("other-{host}"))
            .cluster_ip(&format!("10.96.0.{host}"))
            .tcp(80)
    });
    let mut desired = desired(others.map(Input::from));
    desired.apply(service("web").cluster_ip("10.96.0.1").tcp(80).into());
    desired.sync();
    desired.apply(slice("web-1", "web").tcp(8080).ready("10.244.0.1").into());
    Dump::of_rust(file!(), "a_change_touches_one_service").assert_eq(&text(&desired.sync()));
    assert_eq!(text(&desired.sync()), "");
}

#[test]
fn a_service_may_come_after_its_slices_and_come_back() {
    let web = || service("web").cluster_ip("10.96.0.1").tcp(80);
    let mut desired = desired([slice("web-1", "web").tcp(80).ready("10.244.0.1").into()]);
    assert_eq!(text(&desired.sync()), "");
    desired.apply(web().into());
    desired.sync();
    let with_service = desired.tables().clone();
    Dump::of_rust(
        file!(),
        "a_service_may_come_after_its_slices_and_come_back/1",
    )
    .assert_eq(&with_service.to_string());
    desired.apply(web().deleted());
    desired.sync();
    assert_eq!(desired.tables(), &Tables::default());
    // The endpoints were never deleted.
    desired.apply(web().created(5).into());
    desired.sync();
    assert_eq!(desired.tables(), &with_service);
    // The Service is recreated with another address between two syncs.
    desired.apply(web().deleted());
    desired.apply(service("web").cluster_ip("10.96.0.2").tcp(80).into());
    Dump::of_rust(
        file!(),
        "a_service_may_come_after_its_slices_and_come_back/2",
    )
    .assert_eq(&text(&desired.sync()));
    // A type without a ClusterIP removes the Service, and so does the label of another proxy.
    for gone in [
        service("web").type_("ExternalName"),
        web().label("service.kubernetes.io/service-proxy-name"),
    ] {
        desired.apply(gone.into());
        desired.sync();
        assert_eq!(desired.tables(), &Tables::default());
        desired.apply(web().into());
        desired.sync();
        assert_eq!(desired.tables(), &with_service);
    }
}

#[test]
fn a_frontend_passes_to_the_next_service_in_line() {
    let claim = |name, created| {
        service(name)
            .cluster_ip("10.96.0.1")
            .tcp(80)
            .created(created)
    };
    let mut desired = desired([
        claim("young", 2).port("own", "TCP", 81).into(),
        slice("young-1", "young").tcp(80).ready("10.244.0.2").into(),
    ]);
    desired.sync();
    desired.apply(slice("old-1", "old").tcp(80).ready("10.244.0.1").into());
    desired.apply(claim("old", 1).into());
    Dump::of_rust(file!(), "a_frontend_passes_to_the_next_service_in_line/1")
        .assert_eq(&text(&desired.sync()));
    // A continuing conflict is reported once.
    desired.apply(slice("young-1", "young").tcp(80).ready("10.244.0.3").into());
    assert_eq!(text(&desired.sync()), "");
    assert_eq!(desired.skipped().count(), 1);
    desired.apply(claim("old", 1).deleted());
    Dump::of_rust(file!(), "a_frontend_passes_to_the_next_service_in_line/2")
        .assert_eq(&text(&desired.sync()));
    assert_eq!(desired.skipped().count(), 0);
}

#[test]
fn an_address_stays_while_any_service_has_it() {
    let mut desired = desired([
        service("a").cluster_ip("10.96.0.1").tcp(80).into(),
        service("b").cluster_ip("10.96.0.1").tcp(81).into(),
    ]);
    let addresses = |desired: &mut Desired| {
        desired.sync();
        desired
            .service_addresses_apart(&[], &[])
            .into_iter()
            .collect::<Vec<_>>()
    };
    let ip: IpAddr = [10, 96, 0, 1].into();
    assert_eq!(addresses(&mut desired), [ip]);
    desired.apply(service("a").deleted());
    assert_eq!(addresses(&mut desired), [ip]);
    desired.apply(service("b").deleted());
    assert!(addresses(&mut desired).is_empty());
}

#[test]
fn only_this_node_and_its_zone_matter() {
    let mut desired = desired([service("web").cluster_ip("10.96.0.1").tcp(80).into()]);
    desired.sync();
    desired.apply(node("there", Some("west"), &[("InternalIP", "192.0.2.9")]));
    assert!(desired.dirty.is_empty() && desired.node_addresses().is_empty());
    desired.apply(node("here", Some("east"), &[]));
    assert_eq!(desired.dirty.iter().count(), 1, "a new zone");
    desired.sync();
    let addresses = [
        ("Hostname", "here"),
        ("ExternalIP", "198.51.100.1"),
        ("InternalIP", "192.0.2.1"),
        ("InternalIP", "2001:db8::1"),
        ("InternalIP", "nonsense"),
    ];
    desired.apply(node("here", Some("east"), &addresses));
    assert_eq!(desired.dirty.iter().count(), 1, "new primary addresses");
    desired.sync();
    desired.apply(node("here", Some("east"), &addresses[1..4]));
    assert!(
        desired.dirty.is_empty(),
        "the same zone and primary addresses"
    );
    let addresses: Vec<_> = desired
        .node_addresses()
        .iter()
        .map(IpAddr::to_string)
        .collect();
    assert_eq!(addresses, ["192.0.2.1", "2001:db8::1", "198.51.100.1"]);
}

#[test]
fn service_cidrs_are_those_of_all_objects() {
    let mut desired = desired([
        service_cidr("kubernetes", &["10.96.0.0/16", "fd00:96::/112"]),
        service_cidr("more", &["10.98.0.0/24", "10.96.0.0/16", "10.99.0.0"]),
    ]);
    let cidrs: Vec<_> = desired
        .service_cidrs()
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(cidrs, ["10.96.0.0/16", "10.98.0.0/24", "fd00:96::/112"]);
    Dump::of_rust(file!(), "service_cidrs_are_those_of_all_objects")
        .assert_eq(&text(&desired.sync()));
    desired.apply(Input::ServiceCidr(Update::All(Vec::new())));
    assert_eq!(desired.service_cidrs(), []);
    assert_eq!(desired.skipped().count(), 0);
}

/// The other proxy owns the frontends and addresses of its Services, so kpx's Services may not have
/// them.
#[test]
fn another_proxys_services_contribute_only_their_cluster_ips() {
    let other = || {
        service("other")
            .cluster_ip("010.96.0.009")
            .cluster_ip("fd00:96::9")
            .type_("LoadBalancer")
            .tcp(80)
    };
    let labelled = || {
        other()
            .external_ip("192.0.2.9")
            .label("service.kubernetes.io/service-proxy-name")
    };
    let web = service("web")
        .cluster_ip("10.96.0.1")
        .tcp(80)
        .external_ip("10.96.0.9")
        .external_ip("192.0.2.9");
    let mut desired = desired([
        web.into(),
        slice("other-1", "other").tcp(80).ready("10.244.0.1").into(),
    ]);
    let known = |desired: &Desired| {
        desired
            .of_other_proxies()
            .iter()
            .map(IpAddr::to_string)
            .collect::<Vec<_>>()
    };
    desired.sync();
    let without = desired.tables().clone();
    desired.apply(labelled().into());
    assert_eq!(
        known(&desired),
        ["10.96.0.9", "fd00:96::9"],
        "known before a sync, since packets to them must pass then"
    );
    let is_kept = |service: &crate::compact::Service| {
        service.ports.is_empty() && service.external_ips.is_empty()
    };
    assert!(is_kept(&labelled().object()), "an unneeded field is kept");
    Dump::of_rust(
        file!(),
        "another_proxys_services_contribute_only_their_cluster_ips",
    )
    .assert_eq(&text(&desired.sync()));
    assert_eq!(desired.counts().v4.services, 1);
    // The label is removed and added again.
    desired.apply(other().into());
    assert!(known(&desired).is_empty());
    desired.sync();
    assert!(
        desired
            .service_addresses_apart(&[], &[])
            .contains(&"10.96.0.9".parse().unwrap())
    );
    desired.apply(labelled().into());
    desired.sync();
    assert_eq!(known(&desired).len(), 2);
    desired.apply(labelled().deleted());
    desired.sync();
    assert!(known(&desired).is_empty());
    assert_eq!(desired.tables(), &without);
    for none in [
        labelled().type_("ExternalName"),
        labelled().edit(|spec| spec.cluster_ip = Some("None".to_owned())),
    ] {
        desired.apply(none.edit(|spec| spec.cluster_ips = None).into());
        assert!(known(&desired).is_empty());
    }
}

#[test]
fn counts_cover_the_state_in_force() {
    let mut desired = desired([
        service("web")
            .cluster_ip("10.96.0.1")
            .cluster_ip("fd00:96::1")
            .tcp(80)
            .tcp(81)
            .into(),
        service("none").cluster_ip("10.96.0.2").tcp(80).into(),
        service("headless").tcp(80).into(),
        slice("web-1", "web")
            .tcp(8080)
            .ready("10.244.0.1")
            .ready("10.244.0.2")
            .into(),
    ]);
    desired.sync();
    let v4 = FamilyCounts {
        services: 2,
        service_ports: 3,
        frontends: 3,
        backends: 4,
    };
    let v6 = FamilyCounts {
        services: 1,
        service_ports: 2,
        frontends: 2,
        backends: 0,
    };
    assert_eq!(desired.counts(), Counts { v4, v6 });
}

#[test]
fn replaced_endpoints_divide_no_room() {
    let of = |ip: &str| slice("web-1", "web").tcp(8080).ready(ip);
    let mut desired = desired([
        service("web").cluster_ip("10.96.0.1").tcp(80).into(),
        of("10.244.0.1").into(),
    ]);
    desired.sync();
    let divided = [of("10.244.0.2"), of("10.244.0.2").ready("10.244.0.3")].map(|slice| {
        desired.apply(slice.into());
        let _models = desired.read();
        let is_stale = desired.v4.shares.is_stale;
        desired.sync();
        is_stale
    });
    assert_eq!(divided, [false, true]);
}

/// A part begins after its name even if that Service was deleted.
#[test]
fn changes_come_between_parts_of_a_snapshot() {
    let of = |name: &str, last: u8| service(name).cluster_ip(&format!("10.96.0.{last}")).tcp(80);
    let mut desired = desired([
        of("a/x", 1).into(),
        of("b/v", 2).into(),
        of("b/w", 3).into(),
        of("c/y", 4).into(),
    ]);
    assert!(
        Snapshot::default()
            .take(desired.snapshot_part(None, 1))
            .is_none(),
        "no part has Services before the first sync"
    );
    desired.sync();
    let mut snapshot = Snapshot::default();
    let first = snapshot
        .take(desired.snapshot_part(None, 2))
        .expect("two more");
    assert_eq!(first, object_name("b/v"));
    for change in [
        of("b/v", 2).deleted(),
        of("b/vv", 5).into(),
        of("a/late", 6).into(),
    ] {
        desired.apply(change);
    }
    desired.sync();
    let second = snapshot
        .take(desired.snapshot_part(Some(&first), 2))
        .expect("one more");
    assert!(
        snapshot
            .take(desired.snapshot_part(Some(&second), 2))
            .is_none(),
        "the last part"
    );
    let names: Vec<_> = snapshot
        .services
        .iter()
        .map(|service| service.object.name.to_string())
        .collect();
    assert_eq!(names, ["a/x", "b/v", "b/vv", "b/w", "c/y"]);
}

#[test]
fn every_section_has_a_test() {
    assert_all_run(file!(), include_str!("tests.rs"));
}
