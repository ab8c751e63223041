//! Tests of the protected addresses, in every field.

use std::sync::Arc;

use super::check;
use super::dumps::{Dump, assert_all_run};
use crate::builders::{ServiceBuilder, listed, node, node_with_pods, service, service_cidr, slice};
use crate::desired::Desired;
use crate::input::{Input, ObjectName, Update};
use crate::model::{Cause, HostRoutes, ModelOptions, not_taken};

#[test]
fn addresses_with_a_fixed_meaning_are_refused() {
    let web = service("web")
        .cluster_ip("10.96.0.1")
        .cluster_ip("fd00:96::1")
        .type_("LoadBalancer")
        .tcp(80);
    let refused = ["127.0.0.1", "224.0.0.1", "::1", "ff02::1"];
    let web = refused.into_iter().fold(web, ServiceBuilder::external_ip);
    let web = ["169.254.169.254", "fe80::1", "255.255.255.255"]
        .into_iter()
        .fold(web, ServiceBuilder::vip);
    check(
        [web.external_ip("192.0.2.1").vip("2001:db8::1").into()],
        Dump::of_rust(file!(), "addresses_with_a_fixed_meaning_are_refused"),
    );
}

/// Only the API server's own ports are protected. Other ports at its address are free.
#[test]
fn no_service_takes_the_api_servers_port() {
    let kubernetes = || slice("kubernetes", "kubernetes").port("https", "TCP", 6443);
    let greedy = service("greedy")
        .cluster_ip("10.96.0.2")
        .type_("LoadBalancer");
    let greedy = greedy
        .port("api", "TCP", 6443)
        .node_port(6443)
        .port("udp", "UDP", 6443)
        .node_port(6443);
    let greedy = greedy
        .port("web", "TCP", 80)
        .external_ip("192.0.2.1")
        .external_ip("192.0.2.2")
        .vip("198.51.100.7");
    let mut desired = desired(ModelOptions::default());
    desired.apply(
        service("kubernetes")
            .cluster_ip("10.96.0.1")
            .port("https", "TCP", 443)
            .into(),
    );
    desired.apply(kubernetes().ready("192.0.2.1").into());
    desired.apply(node("here", None, &[("InternalIP", "192.0.2.1")]));
    desired.apply(Input::ApiServer(
        ["198.51.100.7:6443", "10.96.0.1:443"]
            .map(|at| at.parse().unwrap())
            .into(),
    ));
    desired.apply(greedy.into());
    let refused =
        |desired: &Desired| -> Vec<String> { desired.skipped().map(ToString::to_string).collect() };
    desired.sync();
    assert_eq!(
        refused(&desired),
        [
            "Service default/greedy spec.externalIPs[0]: 192.0.2.1:6443/tcp is the API server's",
            "Service default/greedy spec.ports[0].nodePort: 192.0.2.1:6443/tcp is the API server's",
            "Service default/greedy status.loadBalancer.ingress[0].ip: 198.51.100.7:6443/tcp is the API server's",
        ]
    );
    assert!(
        desired
            .skipped()
            .all(|skipped| skipped.cause == Cause::Refused)
    );
    Dump::of_rust(file!(), "no_service_takes_the_api_servers_port")
        .assert_eq(&desired.tables().to_string());

    // The protection follows the API server to its new address.
    desired.apply(kubernetes().ready("192.0.2.2").into());
    desired.sync();
    assert_eq!(
        refused(&desired),
        [
            "Service default/greedy spec.externalIPs[1]: 192.0.2.2:6443/tcp is the API server's",
            "Service default/greedy status.loadBalancer.ingress[0].ip: 198.51.100.7:6443/tcp is the API server's",
        ]
    );
}

#[test]
fn the_operator_may_restrict_external_ips() {
    let web = || {
        let web = service("web")
            .cluster_ip("10.96.0.1")
            .cluster_ip("fd00:96::1")
            .type_("LoadBalancer")
            .tcp(80);
        web.external_ip("192.0.2.1")
            .external_ip("203.0.113.1")
            .external_ip("2001:db8::1")
            .vip("198.51.100.1")
    };
    let externals = |cidrs: Option<&[&str]>| -> Vec<String> {
        let cidrs = cidrs.map(|cidrs| cidrs.iter().map(|cidr| cidr.parse().unwrap()).collect());
        let mut desired = desired(ModelOptions {
            external_ip_cidrs: cidrs,
            ..ModelOptions::default()
        });
        desired.apply(web().into());
        desired.sync();
        desired
            .external_frontends()
            .map(|(addr, ..)| addr.to_string())
            .collect()
    };
    assert_eq!(
        externals(None),
        ["192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1"]
    );
    assert_eq!(
        externals(Some(&["203.0.113.0/24"])),
        ["198.51.100.1", "203.0.113.1"]
    );
    assert_eq!(
        externals(Some(&["2001:db8::/64", "192.0.2.0/31"])),
        ["192.0.2.1", "198.51.100.1", "2001:db8::1"]
    );
    assert_eq!(
        externals(Some(&[])),
        ["198.51.100.1"],
        "a writer of the status is trusted with addresses"
    );
}

/// An ExternalIP may be any internet address, and the host has its own traffic to it.
#[test]
fn machine_outside_takes_external_addresses_in_given_ranges_alone() {
    let web = || {
        let web = service("web")
            .cluster_ip("10.96.0.1")
            .cluster_ip("fd00:96::1")
            .type_("LoadBalancer")
            .tcp(80);
        web.external_ip("192.0.2.1")
            .external_ip("2001:db8::1")
            .vip("198.51.100.1")
    };
    let served = |cidrs: Option<&[&str]>| {
        let external_ip_cidrs =
            cidrs.map(|cidrs| cidrs.iter().map(|cidr| cidr.parse().unwrap()).collect());
        let host_routes = Some(Arc::new(HostRoutes::unknown(false)));
        let mut desired = desired(ModelOptions {
            external_ip_cidrs,
            host_routes,
            ..ModelOptions::default()
        });
        desired.apply(web().into());
        desired.sync();
        assert!(
            desired
                .skipped()
                .all(|skipped| skipped.cause == Cause::NotTaken)
        );
        let left: Vec<_> = not_taken(
            desired
                .store()
                .service(&ObjectName::new("default", "web"))
                .unwrap(),
            desired.node(),
        )
        .collect();
        assert_eq!(
            left.len(),
            desired.skipped().count(),
            "the view says the same"
        );
        let served: Vec<_> = desired
            .external_frontends()
            .map(|(addr, ..)| addr.to_string())
            .collect();
        (
            served,
            left.into_iter()
                .map(|(ip, _)| ip.to_string())
                .collect::<Vec<_>>(),
        )
    };
    let all = ["198.51.100.1", "192.0.2.1", "2001:db8::1"].map(str::to_owned);
    assert_eq!(served(None), (vec![], all.to_vec()));
    assert_eq!(served(Some(&[])), (vec![], all.to_vec()));
    assert_eq!(
        served(Some(&["198.51.100.0/24", "2001:db8::/64"])).1,
        ["192.0.2.1"]
    );
    assert_eq!(served(Some(&["0.0.0.0/0", "::/0"])).1, [""; 0]);
}

/// KEP-5707.
#[test]
fn gate_takes_external_ips_away_and_leaves_load_balancers() {
    let web = service("web")
        .cluster_ip("10.96.0.1")
        .type_("LoadBalancer")
        .tcp(80);
    let mut desired = desired(ModelOptions {
        ignores_external_ips: true,
        ..ModelOptions::default()
    });
    desired.apply(web.external_ip("192.0.2.1").vip("198.51.100.1").into());
    desired.sync();
    let served: Vec<_> = desired
        .external_frontends()
        .map(|(addr, ..)| addr.to_string())
        .collect();
    assert_eq!(served, ["198.51.100.1"]);
    let why = "192.0.2.1 is an ExternalIP, and the feature gate AllowServiceExternalIPs is off";
    let refused: Vec<_> = desired.skipped().map(ToString::to_string).collect();
    assert_eq!(
        refused,
        [format!("Service default/web spec.externalIPs[0]: {why}")]
    );
}

/// An endpoint at a ClusterIP would bypass the NetworkPolicy of that Service's pods.
#[test]
fn endpoints_at_cluster_ips_are_refused() {
    let web = || {
        service("web")
            .cluster_ip("10.96.0.1")
            .cluster_ip("fd00:96::1")
            .tcp(80)
    };
    let v4 = slice("web-4", "web")
        .tcp(80)
        .ready("10.96.0.50")
        .ready("10.244.0.1")
        .ready("010.97.0.1");
    let v6 = slice("web-6", "web")
        .tcp(80)
        .address_type("IPv6")
        .ready("fd00:96::50")
        .ready("fd00:244::1");
    let state = |desired: &mut Desired| {
        desired.sync();
        let slots = desired.tables().v4.slots.len() + desired.tables().v6.slots.len();
        (
            slots,
            desired
                .skipped()
                .map(ToString::to_string)
                .collect::<Vec<_>>(),
        )
    };
    let refused = |index: u8, slice: &str, ip: &str, cidr: &str| {
        let why =
            format!("{ip} is in {cidr}, from which ClusterIPs are taken: no endpoint is there");
        format!("EndpointSlice default/{slice} endpoints[{index}].addresses[0]: {why}")
    };
    let mut desired = desired(ModelOptions::default());
    [web().into(), v4.clone().into(), v6.clone().into()]
        .into_iter()
        .for_each(|input| desired.apply(input));
    assert_eq!(
        state(&mut desired),
        (5, Vec::new()),
        "the ranges of ClusterIPs are unknown"
    );
    desired.apply(service_cidr(
        "kubernetes",
        &["10.96.0.0/16", "fd00:96::/112"],
    ));
    let both = vec![
        refused(0, "web-4", "10.96.0.50", "10.96.0.0/16"),
        refused(0, "web-6", "fd00:96::50", "fd00:96::/112"),
    ];
    assert_eq!(state(&mut desired), (3, both));
    let reported = desired
        .skipped()
        .find_map(|skipped| desired.service_refused(skipped));
    assert_eq!(
        reported.map(|service| service.to_string()).as_deref(),
        Some("Service default/web")
    );
    desired.apply(service_cidr("kubernetes", &["10.97.0.0/16"]));
    assert_eq!(
        state(&mut desired),
        (4, vec![refused(2, "web-4", "10.97.0.1", "10.97.0.0/16")])
    );
    desired.apply(Input::ServiceCidr(Update::All(Vec::new())));
    assert_eq!(state(&mut desired), (5, Vec::new()));
    // The operator's ranges apply. Another proxy's ClusterIP is protected everywhere.
    desired = self::desired(ModelOptions {
        service_cidrs: vec!["10.97.0.0/24".parse().unwrap()],
        ..Default::default()
    });
    let other = service("other")
        .cluster_ip("fd00:96::50")
        .tcp(80)
        .label("service.kubernetes.io/service-proxy-name");
    [
        web().into(),
        v4.into(),
        v6.into(),
        other.into(),
        service_cidr("kubernetes", &["10.244.0.0/16"]),
    ]
    .into_iter()
    .for_each(|input| desired.apply(input));
    let other = "EndpointSlice default/web-6 endpoints[0].addresses[0]: \
        fd00:96::50 is the ClusterIP of another proxy's Service";
    let refused = vec![
        refused(2, "web-4", "10.97.0.1", "10.97.0.0/24"),
        other.to_owned(),
    ];
    assert_eq!(state(&mut desired), (3, refused));
}

/// Sockets connected to the other Service have the pod as peer, so a Service at the pod's address
/// would capture their packets.
#[test]
fn no_external_ip_is_a_pod_of_another_namespace() {
    let web = |port| {
        slice("web-1", "web")
            .tcp(port)
            .ready("10.244.1.11")
            .pod("web-0")
            .ready("10.244.1.12")
    };
    let web6 = || {
        slice("web-2", "web")
            .address_type("IPv6")
            .tcp(8080)
            .ready("fd00:244::11")
            .pod("web-0")
    };
    let evil = || {
        let evil = service("tenant/evil")
            .cluster_ip("10.96.0.2")
            .cluster_ip("fd00:96::2")
            .type_("LoadBalancer");
        let ips = ["10.244.1.11", "10.244.1.12", "fd00:244::11"];
        ips.into_iter()
            .fold(evil.tcp(8080).tcp(9090), ServiceBuilder::external_ip)
            .vip("10.244.1.11")
    };
    let refused = |index, at| {
        format!(
            "Service tenant/evil spec.externalIPs[{index}]: {at}:8080/tcp is an endpoint of default/web"
        )
    };
    let both = vec![refused(0, "10.244.1.11"), refused(2, "[fd00:244::11]")];
    let skipped = |desired: &mut Desired| -> Vec<String> {
        desired.sync();
        desired.skipped().map(ToString::to_string).collect()
    };
    for comes_first in [true, false] {
        let mut inputs: [Input; 3] = [evil().into(), web(8080).into(), web6().into()];
        if !comes_first {
            inputs.reverse();
        }
        let mut desired = desired(ModelOptions::default());
        for input in inputs {
            desired.apply(input);
            desired.sync();
        }
        assert_eq!(
            skipped(&mut desired),
            both,
            "the tenant's Service comes first: {comes_first}"
        );
        let served: Vec<_> = desired
            .external_frontends()
            .map(|(addr, _, port)| format!("{addr} {port}"))
            .collect();
        let others = [
            "10.244.1.11 8080",
            "10.244.1.11 9090",
            "10.244.1.12 8080",
            "10.244.1.12 9090",
            "fd00:244::11 9090",
        ];
        assert_eq!(
            served, others,
            "a load balancer's address, an endpoint that is no pod, and other ports"
        );

        // Another port of the pod, then no pod.
        desired.apply(web(8081).into());
        assert_eq!(skipped(&mut desired), both[1..]);
        desired.apply(web6().deleted());
        assert!(skipped(&mut desired).is_empty());
    }
    // Within a namespace there is only one tenant.
    let mut desired = desired(ModelOptions::default());
    desired.apply(web(8080).into());
    desired.apply(
        service("own")
            .cluster_ip("10.96.0.2")
            .tcp(8080)
            .external_ip("10.244.1.11")
            .into(),
    );
    assert!(skipped(&mut desired).is_empty());
}

#[test]
fn external_ips_leave_pods_of_the_node_alone() {
    let mut desired = desired(ModelOptions::default());
    desired.apply(node_with_pods(
        "here",
        &["10.244.1.0/24", "fd00:244:1::/64"],
    ));
    let web = service("web")
        .cluster_ip("10.96.0.2")
        .cluster_ip("fd00:96::2")
        .type_("LoadBalancer")
        .tcp(80);
    let web = ["10.244.1.7", "fd00:244:1::7", "10.244.2.7"]
        .into_iter()
        .fold(web, ServiceBuilder::external_ip);
    desired.apply(web.vip("10.244.1.8").into());
    desired.sync();
    let served: Vec<_> = desired
        .external_frontends()
        .map(|(addr, ..)| addr.to_string())
        .collect();
    assert_eq!(served, ["10.244.1.8", "10.244.2.7"]);
    let refused: Vec<_> = desired.skipped().map(ToString::to_string).collect();
    let why =
        |ip, cidr| format!("{ip} is in {cidr}, from which pods of this node have their addresses");
    let why = [
        why("10.244.1.7", "10.244.1.0/24"),
        why("fd00:244:1::7", "fd00:244:1::/64"),
    ];
    assert_eq!(
        refused,
        [0, 1].map(|nth| format!("Service default/web spec.externalIPs[{nth}]: {}", why[nth]))
    );
}

fn desired(options: ModelOptions) -> Desired {
    let mut desired = Desired::with_options("here", options);
    listed().into_iter().for_each(|input| desired.apply(input));
    desired
}

#[test]
fn every_section_has_a_test() {
    assert_all_run(file!(), include_str!("guard.rs"));
}
