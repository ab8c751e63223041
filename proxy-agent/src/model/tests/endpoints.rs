//! Tests which endpoints serve.

use expect_test::expect;

use super::check;
use crate::builders::{listed, object_name, service, slice};
use crate::desired::Desired;
use crate::input::{Input, Update};
use crate::model::port::SLOTS_MAX;
use crate::model::{NodeModel, ServiceModel};

#[test]
fn conditions_each_have_their_default() {
    check(
        [
            service("web").cluster_ip("10.96.0.1").tcp(80).into(),
            slice("web-1", "web").tcp(80).endpoint("10.244.0.1").into(),
            slice("web-2", "web")
                .tcp(80)
                .endpoint("10.244.0.2")
                .edit_last(|last| last.conditions.get_or_insert_default().serving = Some(false))
                .endpoint("10.244.0.3")
                .edit_last(|last| last.conditions.get_or_insert_default().terminating = Some(true))
                .endpoint("10.244.0.4")
                .edit_last(|last| last.conditions.get_or_insert_default().ready = Some(false))
                .into(),
        ],
        expect![[r#"
            10.96.0.1 address
            10.96.0.1:80/tcp cluster-ip cluster=3 local=0 has-endpoints
              cluster[0] -> 10.244.0.1:80
              cluster[1] -> 10.244.0.2:80
              cluster[2] -> 10.244.0.3:80
        "#]],
    );
}

#[test]
fn a_named_port_may_differ_from_slice_to_slice() {
    check(
        [
            service("web").cluster_ip("10.96.0.1").port("http", "TCP", 80).port("admin", "TCP", 81).into(),
            slice("web-1", "web").port("http", "TCP", 8080).port("admin", "TCP", 9000).ready("10.244.0.1").into(),
            slice("web-2", "web").port("http", "TCP", 8081).ready("10.244.0.2").into(),
        ],
        expect![[r#"
            10.96.0.1 address
            10.96.0.1:80/tcp cluster-ip cluster=2 local=0 has-endpoints
              cluster[0] -> 10.244.0.1:8080
              cluster[1] -> 10.244.0.2:8081
            10.96.0.1:81/tcp cluster-ip cluster=1 local=0 has-endpoints
              cluster[0] -> 10.244.0.1:9000
        "#]],
    );
}

#[test]
fn terminating_endpoints_serve_when_no_other_remains() {
    let web = || service("web").cluster_ip("10.96.0.1").tcp(80);
    check(
        [web().into(), slice("web-1", "web").tcp(80).ready("10.244.0.1").terminating("10.244.0.2").on("here").into()],
        expect![[r#"
            10.96.0.1 address
            10.96.0.1:80/tcp cluster-ip cluster=1 local=0 has-endpoints
              cluster[0] -> 10.244.0.1:80
        "#]],
    );
    check(
        [
            web().into(),
            slice("web-1", "web")
                .tcp(80)
                .unready("10.244.0.1")
                .terminating("10.244.0.2")
                .conditions("10.244.0.3", false, false, true)
                .into(),
        ],
        expect![[r#"
            10.96.0.1 address
            10.96.0.1:80/tcp cluster-ip cluster=1 local=0 has-endpoints
              cluster[0] -> 10.244.0.2:80
        "#]],
    );
}

#[test]
fn each_set_falls_back_to_terminating_endpoints_on_its_own() {
    let endpoints =
        || slice("web-1", "web").tcp(80).ready("10.244.1.1").on("there").terminating("10.244.0.1").on("here");
    let web = || service("web").cluster_ip("10.96.0.1").tcp(80);
    check(
        [web().into(), endpoints().into()],
        expect![[r#"
        10.96.0.1 address
        10.96.0.1:80/tcp cluster-ip cluster=1 local=0 has-endpoints
          cluster[0] -> 10.244.1.1:80
    "#]],
    );
    check(
        [web().internal_local().into(), endpoints().into()],
        expect![[r#"
        10.96.0.1 address
        10.96.0.1:80/tcp cluster-ip cluster=0 local=1 internal-local has-endpoints
          local[0] -> 10.244.0.1:80 local
    "#]],
    );
}

#[test]
fn internal_traffic_policy_local_selects_local_endpoints() {
    let web = || service("web").cluster_ip("10.96.0.1").tcp(80).internal_local();
    let endpoints = || slice("web-1", "web").tcp(80).ready("10.244.1.1").on("there").ready("10.244.2.1");
    // No endpoint is local: has-endpoints makes the difference between a drop and a reject.
    check(
        [web().into(), endpoints().into()],
        expect![[r#"
        10.96.0.1 address
        10.96.0.1:80/tcp cluster-ip cluster=0 local=0 internal-local has-endpoints
    "#]],
    );
    check(
        [web().into(), slice("web-1", "web").tcp(80).unready("10.244.1.1").on("there").into()],
        expect![[r#"
        10.96.0.1 address
        10.96.0.1:80/tcp cluster-ip cluster=0 local=0 internal-local
    "#]],
    );
    check(
        [web().into(), endpoints().ready("10.244.0.1").on("here").into()],
        expect![[r#"
        10.96.0.1 address
        10.96.0.1:80/tcp cluster-ip cluster=0 local=1 internal-local has-endpoints
          local[0] -> 10.244.0.1:80 local
    "#]],
    );
}

#[test]
fn the_record_that_does_not_terminate_wins() {
    let web = || service("web").cluster_ip("10.96.0.1").tcp(80);
    let old = |name| slice(name, "web").tcp(80).terminating("10.244.0.1").on("there");
    let new = |name| slice(name, "web").tcp(80).ready("10.244.0.1").on("here");
    let expected = expect![[r#"
        10.96.0.1 address
        10.96.0.1:80/tcp cluster-ip cluster=1 local=0 has-endpoints
          cluster[0] -> 10.244.0.1:80 local
    "#]];
    check([web().into(), old("web-1").into(), new("web-2").into()], expected);
    // The order of the records does not matter.
    let expected = expect![[r#"
        10.96.0.1 address
        10.96.0.1:80/tcp cluster-ip cluster=1 local=0 has-endpoints
          cluster[0] -> 10.244.0.1:80 local
    "#]];
    check([web().into(), new("web-1").into(), old("web-2").into()], expected);
    // The record that does not terminate wins even when it is not ready: the address belongs to the new pod.
    let expected = expect![[r#"
        10.96.0.1 address
        10.96.0.1:80/tcp cluster-ip cluster=0 local=0
    "#]];
    check([web().into(), old("web-1").into(), slice("web-2", "web").tcp(80).unready("10.244.0.1").into()], expected);
}

#[test]
fn the_ready_condition_decides_alone() {
    // The slice controller writes such endpoints under `publishNotReadyAddresses`.
    check(
        [
            service("web").cluster_ip("10.96.0.1").tcp(80).into(),
            slice("web-1", "web")
                .tcp(80)
                .conditions("10.244.0.1", true, false, false)
                .conditions("10.244.0.2", true, true, true)
                .conditions("10.244.0.3", true, false, true)
                .into(),
        ],
        expect![[r#"
            10.96.0.1 address
            10.96.0.1:80/tcp cluster-ip cluster=3 local=0 has-endpoints
              cluster[0] -> 10.244.0.1:80
              cluster[1] -> 10.244.0.2:80
              cluster[2] -> 10.244.0.3:80
        "#]],
    );
}

#[test]
fn slices_join_by_namespace_and_label() {
    check(
        [
            service("a/web").cluster_ip("10.96.0.1").tcp(80).into(),
            service("b/web").cluster_ip("10.96.0.2").tcp(80).into(),
            slice("a/web-1", "web").tcp(80).ready("10.244.0.1").into(),
            slice("b/web-1", "web").tcp(80).ready("10.244.0.2").into(),
            slice("b/other", "").tcp(80).ready("10.244.0.3").into(),
            slice("b/none", "web").without_service().tcp(80).ready("10.244.0.4").into(),
        ],
        expect![[r#"
            10.96.0.1 address
            10.96.0.1:80/tcp cluster-ip cluster=1 local=0 has-endpoints
              cluster[0] -> 10.244.0.1:80
            10.96.0.2 address
            10.96.0.2:80/tcp cluster-ip cluster=1 local=0 has-endpoints
              cluster[0] -> 10.244.0.2:80
        "#]],
    );
}

#[test]
fn only_the_first_address_of_an_endpoint_counts() {
    check(
        [
            service("web").cluster_ip("10.96.0.1").tcp(80).into(),
            slice("web-1", "web")
                .tcp(80)
                .ready("010.244.000.001")
                .edit_last(|last| last.addresses.push("10.244.0.2".to_owned()))
                .into(),
        ],
        expect![[r#"
            10.96.0.1 address
            10.96.0.1:80/tcp cluster-ip cluster=1 local=0 has-endpoints
              cluster[0] -> 10.244.0.1:80
        "#]],
    );
}

#[test]
fn a_set_is_cut_to_the_limit_of_a_service() {
    let web = service("web").cluster_ip("10.96.0.1").tcp(80).object();
    let mut many = slice("web-1", "web").tcp(80);
    for index in 0..=SLOTS_MAX {
        many = many.endpoint(&format!("10.{}.{}.{}", index >> 16, index >> 8 & 0xff, index & 0xff));
    }
    let node = NodeModel { name: "here".to_owned(), ..Default::default() };
    let (model, skipped) = ServiceModel::new(&object_name("web"), &web, [&many.object()].into_iter(), &node);
    let port = model.v4.unwrap().ports.into_values().next().unwrap();
    assert_eq!(port.cluster.len(), SLOTS_MAX);
    let [skipped] = &skipped[..] else { panic!("{skipped:?}") };
    let expected = "Service default/web spec.ports[0]: of 65536 backends in the cluster set only the first 65535 serve";
    assert_eq!(skipped.to_string(), expected);

    // The tables can hold them all.
    let mut desired = Desired::new("here");
    for input in listed().into_iter().chain([Input::Service(Update::Put(Box::new(web))), many.into()]) {
        desired.apply(input);
    }
    desired.sync();
    let tables = &desired.tables().v4;
    assert_eq!(tables.slots.len(), SLOTS_MAX);
    assert!(tables.slots.keys().all(|slot| slot.index < u16::MAX));
    assert_eq!(tables.services.len(), 1);
}
