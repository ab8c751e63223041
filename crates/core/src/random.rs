//! Random clusters, small enough that their parts collide.

use std::net::SocketAddr;

use k8s_openapi::api::core::v1::{ObjectReference, ServicePort};
use k8s_openapi::api::discovery::v1::{
    Endpoint, EndpointConditions, EndpointHints, EndpointPort, ForNode, ForZone,
};
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use proptest::strategy::Union;

use crate::builders::{ServiceBuilder, SliceBuilder, node, service, service_cidr, slice};
use crate::compact::{Compact, LOCAL_REDIRECT};
use crate::input::{Input, ObjectName, Update};
use crate::store::Store;
use crate::tables::Tables;

mod redirects;

pub(crate) use redirects::options;

const SERVICES: [&str; 4] = ["default/a", "default/b", "default/c", "other/a"];
const SLICES: [&str; 4] = ["default/1", "default/2", "default/3", "other/1"];

/// Generates the tables of a random cluster before and after some inputs.
pub(crate) fn old_and_new() -> impl Strategy<Value = (Tables, Tables)> {
    (inputs(0..24), inputs(1..24)).prop_map(|(before, between)| {
        let options = options();
        let mut store = Store::new("here")
            .with_redirects(options.has_redirects, options.redirect_addresses.clone());
        let mut tables_after = |inputs: Vec<Input>| {
            for input in inputs {
                let _ = store.apply(input);
            }
            Tables::of(&store, &options)
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

pub(crate) fn input_but_lists() -> impl Strategy<Value = Input> {
    prop_oneof![
        8 => some_service().prop_map(Input::from),
        12 => some_slice().prop_map(Input::from),
        2 => some_service().prop_map(|service| service.deleted()),
        3 => some_slice().prop_map(|slice| slice.deleted()),
        1 => some_node(),
        1 => some_api_server(),
        1 => some_service_cidr(),
        6 => redirects::input(),
    ]
}

/// Generates an input about a Service with ExternalIPs that pods have too, or about such pods.
pub(crate) fn input_at_pods() -> impl Strategy<Value = Input> {
    let ips = ["10.244.0.1", "fd00:244::1"];
    let at_pods = move |service| ips.into_iter().fold(service, ServiceBuilder::external_ip);
    prop_oneof![
        3 => some_service().prop_map(move |service| at_pods(service).into()),
        1 => some_service().prop_map(|service| service.deleted()),
        3 => some_slice().prop_map(Input::from),
        1 => some_slice().prop_map(|slice| slice.deleted()),
    ]
}

pub(crate) fn object(input: &Input) -> (&'static str, ObjectName) {
    fn name<K: Compact>(update: &Update<K>) -> ObjectName {
        match update {
            Update::All(_) | Update::AllBut(..) | Update::Refused => panic!("a list is about many"),
            Update::Put(object) => object.name(),
            Update::Del(name) => name.clone(),
        }
    }
    match input {
        Input::Service(update) => ("Service", name(update)),
        Input::EndpointSlice(update) => ("EndpointSlice", name(update)),
        Input::Node(update) => ("Node", name(update)),
        Input::ServiceCidr(update) => ("ServiceCIDR", name(update)),
        Input::Pod(update) => ("Pod", name(update)),
        Input::LocalRedirect(update) => ("LocalRedirect", name(update)),
        Input::ApiServer(_) => ("the API server", ObjectName::default()),
    }
}

fn some_node() -> impl Strategy<Value = Input> {
    let ip = option::of(select(vec!["198.51.100.1", "10.0.0.1"]));
    (option::of(select(vec!["east", "west"])), ip).prop_map(|(zone, ip)| {
        let addresses: Vec<_> = ip.map(|ip| ("InternalIP", ip)).into_iter().collect();
        node("here", zone, &addresses)
    })
}

/// Generates API server addresses, some of which collide with Services.
fn some_api_server() -> impl Strategy<Value = Input> {
    let places = ["192.0.2.1:80", "[2001:db8::1]:80", "198.51.100.1:30000"]
        .map(|at| at.parse::<SocketAddr>().unwrap());
    subsequence(places.to_vec(), 0..=3)
        .prop_map(|places| Input::ApiServer(places.into_iter().collect()))
}

/// Generates ServiceCIDRs that also contain some endpoints.
fn some_service_cidr() -> impl Strategy<Value = Input> {
    let nets = [
        "10.96.0.0/16",
        "10.244.0.2/31",
        "10.244.0.0/29",
        "fd00:244::4/126",
    ];
    subsequence(nets.to_vec(), 0..=3).prop_map(|cidrs| service_cidr("kubernetes", &cidrs))
}

fn some_service() -> impl Strategy<Value = ServiceBuilder> {
    Union::new(SERVICES.map(service_called))
}

fn service_called(name: &'static str) -> impl Strategy<Value = ServiceBuilder> {
    let v4 = option::weighted(0.8, select(vec!["10.96.0.1", "10.96.0.2", "10.96.0.3"]));
    let v6 = option::weighted(0.3, select(vec!["fd00:96::1", "fd00:96::2"]));
    let plain = (v4, v6, vec(service_port(), 0..4), option::of(1..3_i64)).prop_map(
        move |(v4, v6, ports, created)| {
            let mut built = service(name).edit(|spec| spec.ports = Some(ports));
            for ip in v4.into_iter().chain(v6) {
                built = built.cluster_ip(ip);
            }
            if let Some(second) = created {
                built.created(second)
            } else {
                built
            }
        },
    );
    (balanced(dialled(plain)), 0..12).prop_map(|(built, odd)| match odd {
        0 => built.type_("ExternalName"),
        1 => built.edit(|spec| spec.cluster_ip = Some("None".to_owned())),
        2 => built.label("service.kubernetes.io/service-proxy-name"),
        _ => built,
    })
}

/// Adds external frontends, some at ClusterIPs or endpoint addresses.
fn dialled(plain: impl Strategy<Value = ServiceBuilder>) -> impl Strategy<Value = ServiceBuilder> {
    let type_ = select(vec![
        "ClusterIP",
        "NodePort",
        "LoadBalancer",
        "LoadBalancer",
    ]);
    let ip = || {
        select(vec![
            "192.0.2.1",
            "192.0.2.2",
            "2001:db8::1",
            "10.96.0.1",
            "10.244.0.1",
            "fd00:244::1",
        ])
    };
    let range = select(vec![
        "0.0.0.0/0",
        "198.51.100.0/24",
        "198.51.100.0/28",
        "10.0.0.0/8",
        "2001:db8:1::/48",
    ]);
    (
        plain,
        type_,
        any::<bool>(),
        vec(ip(), 0..2),
        vec(ip(), 0..3),
        vec(range, 0..3),
    )
        .prop_map(|(plain, type_, local, ips, vips, ranges)| {
            let mut built = plain.type_(type_);
            built = if local { built.external_local() } else { built };
            built = ips.into_iter().fold(built, ServiceBuilder::external_ip);
            built = vips.into_iter().fold(built, ServiceBuilder::vip);
            ranges.into_iter().fold(built, ServiceBuilder::source_range)
        })
}

fn balanced(plain: impl Strategy<Value = ServiceBuilder>) -> impl Strategy<Value = ServiceBuilder> {
    let algorithm = option::weighted(0.2, select(vec!["maglev", "round-robin", "none such"]));
    let lists = vec![
        "10.244.0.1=3",
        "10.244.0.1=0,10.244.0.2=9",
        "fd00:244::1=2,fd00:244::2=x",
        "",
    ];
    let weights = option::weighted(0.3, select(lists));
    let redirect = option::weighted(0.2, select(vec!["app=cache", "app=", "none such ="]));
    (
        plain,
        any::<bool>(),
        option::weighted(0.3, 0..3),
        algorithm,
        weights,
        redirect,
    )
        .prop_map(|(plain, local, affinity, algorithm, weights, redirect)| {
            let plain = if let Some(pods) = redirect {
                plain.annotation(LOCAL_REDIRECT, pods)
            } else {
                plain
            };
            let built = if local { plain.internal_local() } else { plain };
            let built = if let Some(secs) = affinity {
                built.affinity(Some(secs))
            } else {
                built
            };
            let built = if let Some(name) = algorithm {
                built.algorithm(name)
            } else {
                built
            };
            if let Some(list) = weights {
                built.weights(list)
            } else {
                built
            }
        })
}

fn service_port() -> impl Strategy<Value = ServicePort> {
    let node_port = option::of(select(vec![0, 30_000, 30_001]));
    (
        port_name(),
        protocol(),
        select(vec![53, 80, 80, 0]),
        node_port,
    )
        .prop_map(|(name, protocol, port, node_port)| ServicePort {
            name: Some(name),
            protocol: Some(protocol),
            port,
            node_port,
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
    let port = (port_name(), protocol(), select(vec![80, 8080, 8081])).prop_map(
        |(name, protocol, port)| EndpointPort {
            name: Some(name),
            protocol: Some(protocol),
            port: Some(port),
            ..Default::default()
        },
    );
    let owner = select(vec!["a", "b", "c", "none"]);
    let weight = option::weighted(0.2, select(vec!["0", "2", "5", "many"]));
    (
        owner,
        any::<bool>(),
        vec(port, 0..4),
        vec((1..6, endpoint()), 0..6),
        weight,
    )
        .prop_map(move |(owner, six, ports, endpoints, weight)| {
            let endpoints = endpoints.into_iter().map(|(host, mut endpoint)| {
                endpoint.addresses = vec![if six {
                    format!("fd00:244::{host}")
                } else {
                    format!("10.244.0.{host}")
                }];
                endpoint
            });
            let built = slice(name, owner)
                .address_type(if six { "IPv6" } else { "IPv4" })
                .edit(|slice| {
                    slice.ports = Some(ports);
                    slice.endpoints = Some(endpoints.collect());
                });
            if let Some(weight) = weight {
                built.weight(weight)
            } else {
                built
            }
        })
}

/// Generates an endpoint without an address.
fn endpoint() -> impl Strategy<Value = Endpoint> {
    let condition = || option::of(any::<bool>());
    let conditions =
        (condition(), condition(), condition()).prop_map(|(ready, serving, terminating)| {
            EndpointConditions {
                ready,
                serving,
                terminating,
            }
        });
    let zones = option::of(vec(select(vec!["east", "west"]), 0..2));
    let nodes = option::weighted(0.3, vec(select(vec!["here", "there"]), 0..2));
    let pod = option::of(Just(ObjectReference {
        kind: Some("Pod".to_owned()),
        ..Default::default()
    }));
    (
        conditions,
        option::of(select(vec!["here", "there"])),
        zones,
        nodes,
        pod,
    )
        .prop_map(|(conditions, node, zones, nodes, pod)| Endpoint {
            conditions: Some(conditions),
            target_ref: pod,
            node_name: node.map(str::to_owned),
            hints: Some(EndpointHints {
                for_zones: zones.map(|zones| {
                    zones
                        .into_iter()
                        .map(|name| ForZone {
                            name: name.to_owned(),
                        })
                        .collect()
                }),
                for_nodes: nodes.map(|nodes| {
                    nodes
                        .into_iter()
                        .map(|name| ForNode {
                            name: name.to_owned(),
                        })
                        .collect()
                }),
            }),
            ..Default::default()
        })
}
