//! Tests of load balancing: the spread of clients, and the state kept for returning clients.

use proxy_common::addr::Addr4;
use proxy_common::frontend::{Algorithm, Backend, MAGLEV_PLACES, Set};

use super::dump;
use super::dumps::Dump;
use super::objects::dump_tests;
use crate::builders::{listed, object_name, service, slice};
use crate::desired::Desired;
use crate::model::{ModelOptions, NodeModel, ServiceModel, Surroundings};

dump_tests! {
    "balancing.rs", dump:
    an_annotation_asks_for_an_algorithm,
    each_set_has_its_table,
    endpoints_have_weights_by_address_name_or_slice,
    an_endpoint_of_weight_zero_keeps_its_flows_alone,
    bad_weights_cost_only_themselves,
    affinity_has_a_default_and_limits,
    endpoints_are_kept_for_udp_and_affinity,
}

#[test]
fn a_list_of_bad_weights_is_named_in_part() {
    let skipped = |list: &str| {
        let node = NodeModel::default();
        let web = service("web").cluster_ip("10.96.0.1").tcp(80).weights(list);
        let (_, skipped) = ServiceModel::new(
            &object_name("web"),
            &web.object(),
            std::iter::empty(),
            None,
            &Surroundings::default(),
            &node,
        );
        skipped
            .into_iter()
            .map(|skipped| skipped.why)
            .collect::<Vec<_>>()
    };
    let many = skipped(
        &(0..1_000)
            .map(|number| format!("bad{number} "))
            .collect::<String>(),
    );
    assert_eq!(
        (
            many.len(),
            many.contains(&"992 more elements mean nothing".to_owned())
        ),
        (9, true),
        "{many:?}"
    );
    assert_eq!(
        skipped(&"10.244.0.1=3,".repeat(3_000)),
        ["longer than 32768 bytes, ignored"]
    );
}

#[test]
fn the_node_has_a_default_algorithm() {
    let mut desired = Desired::with_options(
        "here",
        ModelOptions {
            algorithm: Algorithm::ROUND_ROBIN,
            ..Default::default()
        },
    );
    let web = |name: &str, last: u8| service(name).cluster_ip(&format!("10.96.0.{last}")).tcp(80);
    let objects = [
        web("none", 1),
        web("own", 2).algorithm("random"),
        web("odd", 3).algorithm(""),
    ];
    for input in listed().into_iter().chain(objects.map(Into::into)) {
        desired.apply(input);
    }
    desired.sync();
    Dump::of_rust(file!(), "the_node_has_a_default_algorithm")
        .assert_eq(&desired.tables().to_string());
}

#[test]
fn more_backends_than_places_are_cut_and_reported() {
    let backends = (0..=MAGLEV_PLACES).fold(slice("web-1", "web").tcp(80), |slice, index| {
        slice.ready(&format!("10.244.{}.{}", index / 256, index % 256))
    });
    let model = |web: crate::builders::ServiceBuilder| {
        let node = NodeModel {
            name: "here".to_owned(),
            ..Default::default()
        };
        ServiceModel::new(
            &object_name("web"),
            &web.object(),
            [&backends.object()].into_iter(),
            None,
            &Surroundings::default(),
            &node,
        )
    };
    let web = || {
        service("web")
            .cluster_ip("10.96.0.1")
            .tcp(80)
            .affinity(None)
    };
    let (cut, skipped) = model(web().algorithm("maglev"));
    let port = cut.v4.unwrap().ports.into_values().next().unwrap();
    assert_eq!(port.cluster.len(), MAGLEV_PLACES);
    assert_eq!(port.maglev.len(), 1);
    let in_set = port
        .endpoints
        .iter()
        .filter(|(_, endpoint)| endpoint.is_in(Set::CLUSTER))
        .count();
    assert_eq!(
        (port.endpoints.len(), in_set),
        (MAGLEV_PLACES + 1, MAGLEV_PLACES)
    );
    let skipped: Vec<_> = skipped.iter().map(ToString::to_string).collect();
    assert_eq!(
        skipped,
        [
            "Service default/web spec.ports[0]: of 4094 backends in the cluster set only the first 4093 serve"
        ]
    );
    let (whole, skipped) = model(web());
    let port = whole.v4.unwrap().ports.into_values().next().unwrap();
    assert_eq!((port.cluster.len(), skipped.len()), (MAGLEV_PLACES + 1, 0));
    assert!(
        port.cluster
            .is_sorted_by_key(|backend: &Backend<Addr4>| backend.addr)
    );
}
