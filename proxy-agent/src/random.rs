//! Random clusters, small enough that everything in them collides.

use k8s_openapi::api::core::v1::ServicePort;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::strategy::Union;

use crate::builders::{ServiceBuilder, SliceBuilder, node, service, slice};
use crate::input::{Input, ObjectName, Update};
use crate::store::Store;
use crate::tables::Tables;

const SERVICES: [&str; 4] = ["default/a", "default/b", "default/c", "other/a"];
const SLICES: [&str; 4] = ["default/1", "default/2", "default/3", "other/1"];

/// The tables of a random cluster, and of the same some time later.
pub(crate) fn old_and_new() -> impl Strategy<Value = (Tables, Tables)> {
    (inputs(0..24), inputs(1..24)).prop_map(|(before, between)| {
        let mut store = Store::new("here");
        let mut tables_after = |inputs: Vec<Input>| {
            for input in inputs {
                let _ = store.apply(input);
            }
            Tables::of(&store)
        };
        (tables_after(before), tables_after(between))
    })
}

pub(crate) fn inputs(count: std::ops::Range<usize>) -> impl Strategy<Value = Vec<Input>> {
    vec(input(), count)
}

fn input() -> impl Strategy<Value = Input> {
    prop_oneof![
        26 => input_but_lists(),
        1 => vec(some_service(), 0..4)
            .prop_map(|list| Input::Service(Update::All(list.iter().map(ServiceBuilder::object).collect()))),
        1 => vec(some_slice(), 0..4)
            .prop_map(|list| Input::EndpointSlice(Update::All(list.iter().map(SliceBuilder::object).collect()))),
    ]
}

/// About one object.
pub(crate) fn input_but_lists() -> impl Strategy<Value = Input> {
    prop_oneof![
        8 => some_service().prop_map(Input::from),
        12 => some_slice().prop_map(Input::from),
        2 => some_service().prop_map(|service| service.deleted()),
        3 => some_slice().prop_map(|slice| slice.deleted()),
        1 => some_node(),
    ]
}

/// Kind and name of the object that an input is about.
pub(crate) fn object(input: &Input) -> (&'static str, ObjectName) {
    fn name<K: kube::Resource>(update: &Update<K>) -> ObjectName {
        match update {
            Update::All(_) => panic!("a list is about many"),
            Update::Put(object) => ObjectName::from(&**object),
            Update::Del(name) => name.clone(),
        }
    }
    match input {
        Input::Service(update) => ("Service", name(update)),
        Input::EndpointSlice(update) => ("EndpointSlice", name(update)),
        Input::Node(update) => ("Node", name(update)),
        Input::ServiceCidr(update) => ("ServiceCIDR", name(update)),
    }
}

fn some_node() -> impl Strategy<Value = Input> {
    option::of(select(vec!["east", "west"])).prop_map(|zone| node("here", zone, &[]))
}

fn some_service() -> impl Strategy<Value = ServiceBuilder> {
    Union::new(SERVICES.map(service_called))
}

/// One version of this object.
fn service_called(name: &'static str) -> impl Strategy<Value = ServiceBuilder> {
    let v4 = option::weighted(0.8, select(vec!["10.96.0.1", "10.96.0.2", "10.96.0.3"]));
    let v6 = option::weighted(0.3, select(vec!["fd00:96::1", "fd00:96::2"]));
    (v4, v6, vec(service_port(), 0..4), any::<bool>(), option::of(1..3_i64), 0..12).prop_map(
        move |(v4, v6, ports, internal_local, created, odd)| {
            let mut built = service(name);
            for ip in v4.into_iter().chain(v6) {
                built = built.cluster_ip(ip);
            }
            built = built.edit(|spec| spec.ports = Some(ports));
            built = if internal_local { built.internal_local() } else { built };
            built = if let Some(second) = created { built.created(second) } else { built };
            match odd {
                0 => built.type_("ExternalName"),
                1 => built.edit(|spec| spec.cluster_ip = Some("None".to_owned())),
                2 => built.label("service.kubernetes.io/service-proxy-name"),
                _ => built,
            }
        },
    )
}

fn service_port() -> impl Strategy<Value = ServicePort> {
    (port_name(), protocol(), select(vec![53, 80, 80, 0])).prop_map(|(name, protocol, port)| ServicePort {
        name: Some(name),
        protocol: Some(protocol),
        port,
        ..Default::default()
    })
}

fn port_name() -> impl Strategy<Value = String> {
    select(vec!["", "", "", "http"]).prop_map(str::to_owned)
}

fn protocol() -> impl Strategy<Value = String> {
    select(vec!["TCP", "TCP", "TCP", "UDP"]).prop_map(str::to_owned)
}

fn some_slice() -> impl Strategy<Value = SliceBuilder> {
    Union::new(SLICES.map(slice_called))
}

fn slice_called(name: &'static str) -> impl Strategy<Value = SliceBuilder> {
    let port = (port_name(), protocol(), 8080..8082).prop_map(|(name, protocol, port)| EndpointPort {
        name: Some(name),
        protocol: Some(protocol),
        port: Some(port),
        ..Default::default()
    });
    let owner = select(vec!["a", "b", "c", "none"]);
    (owner, any::<bool>(), vec(port, 0..4), vec((1..6, endpoint()), 0..6)).prop_map(
        move |(owner, six, ports, endpoints)| {
            let endpoints = endpoints.into_iter().map(|(host, mut endpoint)| {
                endpoint.addresses = vec![if six { format!("fd00:244::{host}") } else { format!("10.244.0.{host}") }];
                endpoint
            });
            slice(name, owner).address_type(if six { "IPv6" } else { "IPv4" }).edit(|slice| {
                slice.ports = Some(ports);
                slice.endpoints = Some(endpoints.collect());
            })
        },
    )
}

/// Without an address yet.
fn endpoint() -> impl Strategy<Value = Endpoint> {
    let condition = || option::of(any::<bool>());
    let conditions = (condition(), condition(), condition())
        .prop_map(|(ready, serving, terminating)| EndpointConditions { ready, serving, terminating });
    (conditions, option::of(select(vec!["here", "there"]))).prop_map(|(conditions, node)| Endpoint {
        conditions: Some(conditions),
        node_name: node.map(str::to_owned),
        ..Default::default()
    })
}
