//! Tests of endpoint selection.

use super::dump;
use super::objects::dump_tests;
use crate::builders::{listed, object_name, service, slice};
use crate::desired::Desired;
use crate::input::{Input, Update};
use crate::model::port::SLOTS_MAX;
use crate::model::{NodeModel, ServiceModel, Surroundings};

dump_tests! {
    "endpoints.rs", dump:
    conditions_each_have_their_default,
    a_named_port_may_differ_from_slice_to_slice,
    terminating_endpoints_serve_when_no_other_remains,
    each_set_falls_back_to_terminating_endpoints_on_its_own,
    internal_traffic_policy_local_selects_local_endpoints,
    the_record_that_does_not_terminate_wins,
    the_ready_condition_decides_alone,
    slices_join_by_namespace_and_label,
    only_the_first_address_of_an_endpoint_counts,
}

#[test]
fn a_set_is_cut_to_the_limit_of_a_service() {
    let web = service("web").cluster_ip("10.96.0.1").tcp(80).object();
    let mut many = slice("web-1", "web").tcp(80);
    for index in 0..=SLOTS_MAX {
        many = many.endpoint(&format!(
            "10.{}.{}.{}",
            index >> 16,
            index >> 8 & 0xff,
            index & 0xff
        ));
    }
    let node = NodeModel {
        name: "here".to_owned(),
        ..Default::default()
    };
    let (model, skipped) = ServiceModel::new(
        &object_name("web"),
        &web,
        [&many.object()].into_iter(),
        None,
        &Surroundings::default(),
        &node,
    );
    let port = model.v4.unwrap().ports.into_values().next().unwrap();
    assert_eq!(port.cluster.len(), SLOTS_MAX);
    let [skipped] = &skipped[..] else {
        panic!("{skipped:?}")
    };
    let expected = "Service default/web spec.ports[0]: of 65536 backends in the cluster set only the first 65535 serve";
    assert_eq!(skipped.to_string(), expected);

    // The tables have space for all of them.
    let mut desired = Desired::new("here");
    for input in listed()
        .into_iter()
        .chain([Input::Service(Update::Put(Box::new(web))), many.into()])
    {
        desired.apply(input);
    }
    desired.sync();
    let tables = &desired.tables().v4;
    assert_eq!(tables.slots.len(), SLOTS_MAX);
    assert!(tables.slots.keys().all(|slot| slot.index < u16::MAX));
    assert_eq!(tables.services.len(), 1);
}
