//! External clients that are handed over to the nodes of their backends.

use std::collections::BTreeMap;

use proxy_common::addr::{Addr, Addr4, Port, Proto};
use proxy_common::frontend::{Backend, FrontendKey, Service, Set, SetKey, SlotKey};

use crate::builders::{ServiceBuilder, listed, service, slice};
use crate::desired::Desired;
use crate::diff::Change;
use crate::input::Input;
use crate::model::{AbleNodes, ExternalForwarding, ModelOptions};
use crate::tables::FamilyTables;

const NODE2: &str = "192.0.2.2";

/// The node `n2` is able and `n3` is not.
fn able() -> AbleNodes {
    AbleNodes::new(BTreeMap::from([(
        "n2".to_owned(),
        vec![NODE2.parse().unwrap(), "2001:db8::2".parse().unwrap()],
    )]))
}

fn web() -> ServiceBuilder {
    service("web")
        .cluster_ip("10.96.0.1")
        .tcp(80)
        .vip("198.51.100.1")
}

/// A Service with a ready endpoint on each node, and with endpoints that must not count.
fn objects(web: ServiceBuilder) -> Vec<Input> {
    let slices = slice("web-1", "web")
        .tcp(8080)
        .ready("10.244.3.1")
        .on("n3")
        .ready("10.244.1.1")
        .on("n1")
        .ready("10.244.2.1")
        .on("n2")
        .conditions("10.244.2.2", false, true, true)
        .on("n2")
        .conditions("10.244.2.3", false, false, false)
        .on("n2");
    listed()
        .into_iter()
        .chain([web.into(), slices.into()])
        .collect()
}

fn desired(
    node: &str,
    default: ExternalForwarding,
    able: AbleNodes,
    objects: Vec<Input>,
) -> Desired {
    let mut desired = Desired::with_options(
        node,
        ModelOptions {
            external_forwarding: default,
            ..ModelOptions::default()
        },
    );
    desired.set_able_nodes(able);
    for input in objects {
        desired.apply(input);
    }
    let _sync = desired.sync();
    desired
}

fn dsr(node: &str, objects: Vec<Input>) -> Desired {
    desired(node, ExternalForwarding::Dsr, able(), objects)
}

fn key() -> FrontendKey<Addr4> {
    FrontendKey::new(
        "10.96.0.1".parse::<std::net::Ipv4Addr>().unwrap().into(),
        Port::new(80),
        Proto::TCP,
    )
}

fn slots(tables: &FamilyTables<Addr4>, set: Set) -> Vec<Backend<Addr4>> {
    let key = |index| SlotKey::new(key(), set, index);
    (0..)
        .map_while(|index| tables.slots.get(&key(index)).copied())
        .collect()
}

fn hands_over(desired: &Desired) -> bool {
    let tables = &desired.tables().v4;
    let has = |flag| tables.services.values().any(|service| service.has(flag));
    let hands_over = has(Service::HANDS_OVER);
    assert_eq!(hands_over, !slots(tables, Set::DIRECT).is_empty());
    assert_eq!(
        hands_over,
        tables.maglev.contains_key(&SetKey::new(key(), Set::DIRECT))
    );
    hands_over
}

#[test]
fn the_set_has_ready_endpoints_by_address_with_the_nodes_that_are_able() {
    let desired = dsr("n1", objects(web()));
    let tables = &desired.tables().v4;
    let backends = slots(tables, Set::DIRECT);
    let shown: Vec<_> = backends
        .iter()
        .map(|backend| {
            (
                backend.addr.ip().to_string(),
                backend.is_local(),
                backend.is_tunnelled(),
            )
        })
        .collect();
    assert_eq!(
        shown,
        [
            ("10.244.1.1".to_owned(), true, false),
            ("10.244.2.1".to_owned(), false, true),
            ("10.244.3.1".to_owned(), false, false),
        ]
    );
    let nodes = slots(tables, Set::NODES)
        .into_iter()
        .map(|slot| slot.addr.ip().to_string());
    assert_eq!(Vec::from_iter(nodes), ["0.0.0.0", NODE2, "0.0.0.0"]);
    assert!(hands_over(&desired));
}

/// A client gets the same backend at every entry node.
#[test]
fn all_nodes_have_the_same_table() {
    let [here, there] = ["n1", "n3"].map(|node| dsr(node, objects(web())));
    let table =
        |desired: &Desired| desired.tables().v4.maglev[&SetKey::new(key(), Set::DIRECT)].slots;
    assert!(table(&here) == table(&there));
}

#[test]
fn hints_and_silence_do_not_change_the_set() {
    let hinted = slice("web-1", "web")
        .tcp(8080)
        .ready("10.244.1.1")
        .on("n1")
        .ready("10.244.2.1")
        .on("n2")
        .edit(|slice| {
            for (endpoint, node) in slice.endpoints.iter_mut().flatten().zip(["n1", "n2"]) {
                endpoint.hints = Some(
                    serde_json::from_value(serde_json::json!({ "forNodes": [{ "name": node }] }))
                        .unwrap(),
                );
            }
        });
    let objects = listed().into_iter().chain([web().into(), hinted.into()]);
    let desired = dsr("n1", objects.collect());
    let tables = &desired.tables().v4;
    assert_eq!(
        slots(tables, Set::CLUSTER).len(),
        1,
        "the hint counts for other clients"
    );
    assert_eq!(slots(tables, Set::DIRECT).len(), 2);
}

#[test]
fn the_annotation_overrides_the_nodes_mode() {
    let annotated = |value: &str| objects(web().annotation("kpx.dev/external-forwarding", value));
    let with = |default, value: &str| desired("n1", default, able(), annotated(value));
    assert!(hands_over(&with(ExternalForwarding::Masquerade, "dsr")));
    assert!(!hands_over(&with(ExternalForwarding::Dsr, "masquerade")));
    let bad = with(ExternalForwarding::Dsr, "direct");
    assert!(hands_over(&bad), "the node's mode counts");
    assert_eq!(
        bad.skipped().map(ToString::to_string).collect::<Vec<_>>(),
        [
            "Service default/web metadata.annotations[kpx.dev/external-forwarding]: \"direct\" is not one of masquerade, dsr"
        ]
    );
}

#[test]
fn services_that_cannot_be_handed_over_are_served_as_before() {
    let sctp = service("web")
        .cluster_ip("10.96.0.1")
        .port("", "SCTP", 80)
        .vip("198.51.100.1");
    let inside = service("web").cluster_ip("10.96.0.1").tcp(80);
    let local = web().edit(|spec| {
        spec.type_ = Some("LoadBalancer".to_owned());
        spec.external_traffic_policy = Some("Local".to_owned());
    });
    for service in [sctp, inside, local] {
        assert!(!hands_over(&dsr("n1", objects(service))));
    }
    let none_ready = slice("web-1", "web")
        .tcp(8080)
        .conditions("10.244.2.2", false, true, true)
        .on("n2");
    let terminating = listed()
        .into_iter()
        .chain([web().into(), none_ready.into()])
        .collect();
    assert!(!hands_over(&dsr("n1", terminating)));
    assert!(!hands_over(&desired(
        "n1",
        ExternalForwarding::Dsr,
        AbleNodes::NONE,
        objects(web())
    )));
    assert!(!hands_over(&desired(
        "n1",
        ExternalForwarding::Masquerade,
        able(),
        objects(web())
    )));
}

/// A program that reads the flag finds the table and its slots after every write.
#[test]
fn every_prefix_of_a_change_of_the_mode_is_safe() {
    let mut desired = desired(
        "n1",
        ExternalForwarding::Dsr,
        AbleNodes::NONE,
        objects(web()),
    );
    for able in [able(), AbleNodes::NONE] {
        let mut now = desired.tables().clone();
        desired.set_able_nodes(able);
        let changes: Vec<Change> = desired.sync().changes;
        assert!(!changes.is_empty());
        for change in changes {
            now.apply(&change);
            let tables = &now.v4;
            if tables.services[&key()].has(Service::HANDS_OVER) {
                let table = &tables.maglev[&SetKey::new(key(), Set::DIRECT)];
                let backends = slots(tables, Set::DIRECT);
                let nodes = slots(tables, Set::NODES);
                assert!(
                    table
                        .slots
                        .iter()
                        .all(|slot| usize::from(*slot) < backends.len())
                );
                assert_eq!(backends.len(), nodes.len(), "{change}");
            }
        }
        assert_eq!(now, *desired.tables());
    }
}
