//! Tests of a host's backends in host mode, by its routes.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{NodeCondition, NodeSpec, ObjectReference};

use super::dumps::Dump;
use super::objects::{dump_tests, objects};
use crate::builders::{ServiceBuilder, SliceBuilder, listed, node, service, slice};
use crate::desired::Desired;
use crate::input::{Input, Update};
use crate::model::{ClusterRoute, HostRoutes, ModelOptions};

use crate::tables::Tables;

/// The host's routes. Both nodes are ready and behind the default route. n1's pods are routed, n2's
/// are not.
const ROUTES: [(&str, ClusterRoute); 8] = [
    ("192.0.2.11", ClusterRoute::Default),
    ("192.0.2.12", ClusterRoute::Default),
    ("10.244.1.5", ClusterRoute::Routed),
    ("10.244.1.6", ClusterRoute::Routed),
    ("10.244.2.5", ClusterRoute::Default),
    ("10.244.2.6", ClusterRoute::Default),
    ("198.51.100.9", ClusterRoute::Default),
    ("198.51.100.1", ClusterRoute::Own),
];

fn host_mode(default_leads_to_pods: bool) -> Desired {
    // An empty name, so that no node can have the host's name.
    let mut desired = Desired::with_options(
        "",
        ModelOptions {
            host_routes: Some(Arc::new(HostRoutes::unknown(default_leads_to_pods))),
            ..ModelOptions::default()
        },
    );
    let inputs = [
        remote_node("n1", "192.0.2.11", "10.244.1.0/24", true),
        remote_node("n2", "192.0.2.12", "10.244.2.0/24", true),
    ];
    listed()
        .into_iter()
        .chain(inputs)
        .for_each(|input| desired.apply(input));
    desired
}

fn remote_node(name: &str, ip: &str, pod_cidr: &str, ready: bool) -> Input {
    let Input::Node(Update::Put(mut node)) = node(name, None, &[("InternalIP", ip)]) else {
        unreachable!()
    };
    node.spec = Some(NodeSpec {
        pod_cidrs: Some(vec![pod_cidr.to_owned()]),
        ..NodeSpec::default()
    });
    let status = if ready { "True" } else { "False" }.to_owned();
    let condition = NodeCondition {
        type_: "Ready".to_owned(),
        status,
        ..NodeCondition::default()
    };
    node.status.get_or_insert_default().conditions = Some(vec![condition]);
    Input::Node(Update::Put(node))
}

/// Acts as the agent: queries unknown routes, then syncs.
fn settle(desired: &mut Desired, routes: &[(&str, ClusterRoute)]) -> String {
    let known: BTreeMap<IpAddr, _> = routes
        .iter()
        .map(|(ip, route)| (ip.parse().unwrap(), route.clone()))
        .collect();
    let asked = desired.addresses_to_ask_for();
    let answers = asked
        .into_iter()
        .filter_map(|ip| Some((ip, known.get(&ip)?.clone())))
        .collect();
    desired.update_routes(answers, false);
    desired.sync();
    shown(desired)
}

fn shown(desired: &Desired) -> String {
    let mut text = desired.tables().to_string();
    for (service, all) in desired.unreachable() {
        all.iter()
            .for_each(|one| text += &format!("unreachable {service} {}: {one}\n", one.backend));
    }
    let cut_off = desired.cut_off();
    cut_off
        .keys()
        .for_each(|service| text += &format!("cut off {service}\n"));
    text += &cut_off_ports(desired);
    text
}

fn cut_off_ports(desired: &Desired) -> String {
    let lines = desired.cut_off_ports().into_iter().map(|(service, all)| {
        let backends: Vec<_> = all.iter().map(|one| one.backend.to_string()).collect();
        format!(
            "cut off {service} {}/{} {}\n",
            all[0].port,
            all[0].proto,
            backends.join(" ")
        )
    });
    lines.collect()
}

fn tables(default_leads_to_pods: bool, objects: impl IntoIterator<Item = Input>) -> String {
    let mut desired = host_mode(default_leads_to_pods);
    objects.into_iter().for_each(|input| desired.apply(input));
    settle(&mut desired, &ROUTES)
}

fn dump(lines: &[String]) -> String {
    match lines.split_first() {
        Some((first, lines)) if first == "pod-routes default" => tables(true, objects(lines)),
        _ => tables(false, objects(lines)),
    }
}

fn web() -> ServiceBuilder {
    service("web").cluster_ip("10.96.0.1").tcp(80)
}

fn both() -> SliceBuilder {
    slice("web-1", "web")
        .tcp(80)
        .ready("10.244.1.5")
        .on("n1")
        .ready("10.244.2.5")
        .on("n2")
}

dump_tests! {
    "host_mode.rs", dump:
    a_backend_without_a_route_is_left_out,
    the_default_route_counts_if_the_operator_allows_it,
    an_endpoint_that_is_no_pod_is_reached_by_any_route,
    any_ready_node_stands_in_unless_it_forwards_only_to_its_own_pods,
    a_node_ranks_like_its_best_endpoint,
    no_endpoint_is_local,
}

#[test]
fn a_node_replaces_its_unreachable_pods() {
    let web = web()
        .type_("LoadBalancer")
        .node_port(30_080)
        .vip("203.0.113.7")
        .edit(|spec| {
            spec.health_check_node_port = Some(32_000);
        });
    Dump::of_rust(file!(), "a_node_replaces_its_unreachable_pods")
        .assert_eq(&tables(false, [web.clone().into(), both().into()]));
    let mut desired = host_mode(false);
    [web.external_local().into(), both().into()]
        .into_iter()
        .for_each(|input| desired.apply(input));
    settle(&mut desired, &ROUTES);
    assert!(desired.health_checks().is_empty(), "nothing listens");
}

#[test]
fn a_change_of_routes_or_nodes_recomputes_the_affected_services() {
    let mut desired = host_mode(false);
    let web = || web().type_("NodePort").node_port(30_080).external_local();
    let other = service("other").cluster_ip("10.96.0.9").tcp(80);
    let others = slice("other-1", "other")
        .tcp(80)
        .ready("10.244.1.6")
        .on("n1");
    for input in [web().into(), both().into(), other.into(), others.into()] {
        desired.apply(input);
    }
    let before = settle(&mut desired, &ROUTES);

    // A repeated query of all routes changes nothing.
    let routes = |routes: &[(&str, ClusterRoute)]| {
        routes
            .iter()
            .map(|(ip, route)| (ip.parse().unwrap(), route.clone()))
            .collect()
    };
    desired.update_routes(routes(&ROUTES), true);
    assert!(desired.sync().changes.is_empty());

    // n1's pods lose their routes, so only the node port remains.
    let mut fewer = ROUTES;
    fewer[2].1 = ClusterRoute::Nowhere("Network is unreachable".to_owned());
    desired.update_routes(routes(&fewer), true);
    assert!(!desired.sync().changes.is_empty());
    assert!(
        shown(&desired).contains("cluster[0] -> 192.0.2.11:30080"),
        "{}",
        shown(&desired)
    );

    // A node becomes unready, then the routes return.
    desired.apply(remote_node("n2", "192.0.2.12", "10.244.2.0/24", false));
    desired.sync();
    assert!(
        !shown(&desired).contains("192.0.2.12:30080"),
        "{}",
        shown(&desired)
    );
    desired.apply(remote_node("n2", "192.0.2.12", "10.244.2.0/24", true));
    desired.update_routes(routes(&ROUTES), true);
    desired.sync();
    assert_eq!(shown(&desired), before);
    assert_ne!(*desired.tables(), Tables::default());
}

#[test]
fn port_or_family_out_of_reach_is_named_apart_from_its_service() {
    let shown = |service: ServiceBuilder, slices: &[SliceBuilder]| {
        let mut desired = host_mode(false);
        desired.apply(service.into());
        slices
            .iter()
            .for_each(|slice| desired.apply(slice.clone().into()));
        settle(&mut desired, &ROUTES);
        (cut_off_ports(&desired), desired.cut_off().len())
    };
    let udp = || {
        slice("web-2", "web")
            .port("dns", "UDP", 53)
            .ready("10.244.2.5")
            .on("n2")
    };
    let two_ports = || {
        service("web")
            .cluster_ip("10.96.0.1")
            .port("", "TCP", 80)
            .port("dns", "UDP", 53)
    };
    let far = || slice("web-1", "web").tcp(80).ready("10.244.2.6").on("n2");
    let near = || slice("web-1", "web").tcp(80).ready("10.244.1.5").on("n1");
    assert_eq!(
        shown(two_ports(), &[near(), udp()]),
        ("cut off default/web 53/udp 10.244.2.5:53\n".to_owned(), 0)
    );
    assert_eq!(
        shown(two_ports(), &[far(), udp()]),
        (String::new(), 1),
        "the Service is named as a whole"
    );
    assert_eq!(
        shown(web(), &[both()]),
        (String::new(), 0),
        "another backend serves the port"
    );
    let two_families = web().cluster_ip("fd00:96::1");
    let v6 = || {
        slice("web-6", "web")
            .address_type("IPv6")
            .tcp(80)
            .ready("fd00:244:2::5")
            .on("n2")
    };
    let expected = "cut off default/web 80/tcp [fd00:244:2::5]:80\n".to_owned();
    assert_eq!(shown(two_families, &[near(), v6()]), (expected, 0));
}

#[test]
fn models_built_without_routes_are_built_again() {
    let mut desired = host_mode(false);
    let objects: [Input; 2] = [web().into(), both().into()];
    objects.into_iter().for_each(|input| desired.apply(input));
    desired.sync(); // The query has failed.
    let routes = ROUTES
        .iter()
        .map(|(ip, route)| (ip.parse().unwrap(), route.clone()))
        .collect();
    desired.update_routes(routes, true);
    desired.sync();
    Dump::of_rust(file!(), "models_built_without_routes_are_built_again")
        .assert_eq(&shown(&desired));
}

fn of_pod(slice: SliceBuilder, name: &str) -> SliceBuilder {
    let kind = Some("Pod".to_owned());
    let name = Some(name.to_owned());
    slice.edit_last(|endpoint| {
        endpoint.target_ref = Some(ObjectReference {
            kind,
            name,
            ..ObjectReference::default()
        })
    })
}

#[test]
fn the_tunnel_stands_in_for_pods_that_nothing_else_reaches() {
    let tunnelled = |service: ServiceBuilder, slice: SliceBuilder| {
        let mut routes = HostRoutes::unknown(false);
        routes.tunnel = vec!["192.0.0.8:4000".parse().unwrap()];
        let options = ModelOptions {
            host_routes: Some(Arc::new(routes)),
            ..ModelOptions::default()
        };
        let mut desired = Desired::with_options("", options);
        let inputs = [
            remote_node("n2", "192.0.2.12", "10.244.2.0/24", true),
            service.into(),
            slice.into(),
        ];
        listed()
            .into_iter()
            .chain(inputs)
            .for_each(|input| desired.apply(input));
        settle(&mut desired, &ROUTES);
        let pods = desired.tunnelled("10.96.0.1:80".parse().unwrap());
        let pods = pods.map(|(_, pods)| {
            pods.iter()
                .map(|pod| format!("{} {}", pod.name, pod.at))
                .collect::<Vec<_>>()
        });
        let is_by_tunnel = desired.tables().to_string().contains("192.0.0.8:4000");
        assert_eq!(is_by_tunnel, pods.is_some(), "{}", shown(&desired));
        assert!(desired.has_own_backend(), "lo needs a program");
        pods.unwrap_or_default()
    };
    let far = || {
        of_pod(
            slice("web-1", "web").tcp(80).ready("10.244.2.5").on("n2"),
            "far",
        )
    };
    assert_eq!(tunnelled(web(), far()), ["far 10.244.2.5:80"]);
    let two = of_pod(far().terminating("10.244.2.6").on("n2"), "ends");
    assert_eq!(
        tunnelled(web(), two),
        ["far 10.244.2.5:80"],
        "a terminating pod is the last resort"
    );
    let ends = of_pod(
        slice("web-1", "web")
            .tcp(80)
            .terminating("10.244.2.6")
            .on("n2"),
        "ends",
    );
    assert_eq!(tunnelled(web(), ends), ["ends 10.244.2.6:80"]);
    let near = of_pod(far().ready("10.244.1.5"), "near");
    assert!(tunnelled(web(), near).is_empty(), "one is reached");
    assert!(
        tunnelled(web().weights("far=0"), far()).is_empty(),
        "it is drained"
    );
    let both = || of_pod(far().ready("10.244.2.6").on("n2"), "other");
    assert_eq!(
        tunnelled(web().weights("far=0"), both()),
        ["other 10.244.2.6:80"],
        "one of two is drained"
    );
    let near = of_pod(far().ready("10.244.1.5"), "near");
    assert_eq!(
        tunnelled(web().weights("near=0"), near),
        ["far 10.244.2.5:80"],
        "the one that is reached is drained"
    );
    assert!(
        tunnelled(web().type_("NodePort").node_port(30_080), far()).is_empty(),
        "a node port comes first"
    );
    assert!(
        tunnelled(web().internal_local(), far()).is_empty(),
        "no endpoint is local"
    );
    let no_pod = slice("web-1", "web").tcp(80).ready("10.244.2.5").on("n2");
    assert!(
        tunnelled(web(), no_pod).is_empty(),
        "only pods have the way"
    );
    let others = far().edit_last(|endpoint| {
        endpoint.target_ref.as_mut().expect("a pod").namespace = Some("kube-system".to_owned());
    });
    assert!(
        tunnelled(web(), others).is_empty(),
        "a slice may name a pod of its own namespace alone"
    );
    let udp = service("web").cluster_ip("10.96.0.1").port("", "UDP", 80);
    let far_udp = of_pod(
        slice("web-1", "web")
            .port("", "UDP", 80)
            .ready("10.244.2.5")
            .on("n2"),
        "far",
    );
    assert!(
        tunnelled(udp, far_udp).is_empty(),
        "the API server forwards TCP alone"
    );
}
