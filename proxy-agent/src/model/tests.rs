use expect_test::{Expect, expect};

use crate::builders::{listed, service, slice};
use crate::desired::Desired;
use crate::input::Input;

mod balancing;
mod endpoints;
mod external;
mod guard;
mod outside;
mod selection;

/// The tables that a node called `here` gets from these objects, and below them what was skipped.
fn check<const N: usize>(objects: [Input; N], expected: Expect) {
    let mut desired = Desired::new("here");
    for input in listed().into_iter().chain(objects) {
        desired.apply(input);
    }
    let skipped = desired.sync().skipped;
    let skipped: String = skipped.iter().map(|skipped| format!("skipped {skipped}\n")).collect();
    expected.assert_eq(&format!("{}{skipped}", desired.tables()));
}

#[test]
fn a_service_port_has_the_ready_endpoints_of_its_slices() {
    check(
        [
            service("dns").cluster_ip("10.96.0.10").port("dns", "UDP", 53).into(),
            slice("dns-b", "dns").port("dns", "UDP", 5353).ready("10.244.1.7").on("there").into(),
            slice("dns-a", "dns").port("dns", "UDP", 5353).ready("10.244.0.10").ready("10.244.0.2").on("here").into(),
        ],
        expect![[r#"
            10.96.0.10 address
            10.96.0.10:53/udp cluster-ip cluster=3 local=0 has-endpoints
              cluster[0] -> 10.244.0.2:5353 local
              cluster[1] -> 10.244.0.10:5353
              cluster[2] -> 10.244.1.7:5353
              endpoint 10.244.0.2:5353 in-cluster local
              endpoint 10.244.0.10:5353 in-cluster
              endpoint 10.244.1.7:5353 in-cluster
        "#]],
    );
}

#[test]
fn a_service_without_endpoints_is_still_in_the_tables() {
    check(
        [
            service("none").cluster_ip("10.96.0.1").tcp(80).into(),
            service("unready").cluster_ip("10.96.0.2").tcp(80).into(),
            slice("unready-1", "unready").tcp(80).unready("10.244.0.1").into(),
            service("serving-only").cluster_ip("10.96.0.3").tcp(80).into(),
            slice("serving-only-1", "serving-only").tcp(80).conditions("10.244.0.1", false, true, false).into(),
            service("other-name").cluster_ip("10.96.0.4").port("http", "TCP", 80).into(),
            slice("other-name-1", "other-name").tcp(80).ready("10.244.0.1").into(),
            service("no-ports").cluster_ip("10.96.0.5").into(),
        ],
        expect![[r#"
            10.96.0.1 address
            10.96.0.1:80/tcp cluster-ip cluster=0 local=0
            10.96.0.2 address
            10.96.0.2:80/tcp cluster-ip cluster=0 local=0
            10.96.0.3 address
            10.96.0.3:80/tcp cluster-ip cluster=0 local=0
            10.96.0.4 address
            10.96.0.4:80/tcp cluster-ip cluster=0 local=0
            10.96.0.5 address
        "#]],
    );
}

#[test]
fn a_port_may_be_tcp_and_udp_and_sctp() {
    check(
        [
            service("dns")
                .cluster_ip("10.96.0.10")
                .port("dns", "UDP", 53)
                .port("dns-tcp", "TCP", 53)
                .port("dns", "SCTP", 53)
                .into(),
            slice("dns-1", "dns")
                .port("dns", "UDP", 5353)
                .port("dns-tcp", "TCP", 5354)
                .port("dns", "SCTP", 5355)
                .ready("10.244.0.1")
                .into(),
        ],
        expect![[r#"
            10.96.0.10 address
            10.96.0.10:53/tcp cluster-ip cluster=1 local=0 has-endpoints
              cluster[0] -> 10.244.0.1:5354
            10.96.0.10:53/udp cluster-ip cluster=1 local=0 has-endpoints
              cluster[0] -> 10.244.0.1:5353
              endpoint 10.244.0.1:5353 in-cluster
            10.96.0.10:53/sctp cluster-ip cluster=1 local=0 has-endpoints
              cluster[0] -> 10.244.0.1:5355
        "#]],
    );
}

#[test]
fn families_stand_alone() {
    check(
        [
            service("web").cluster_ip("fd00:96::1").cluster_ip("10.96.0.1").tcp(80).into(),
            slice("web-4", "web").tcp(80).ready("10.244.0.1").into(),
            slice("web-6", "web").address_type("IPv6").tcp(80).ready("fd00:244::1").on("here").into(),
            slice("web-fqdn", "web").address_type("FQDN").tcp(80).ready("web.example.com").into(),
            service("six").cluster_ip("fd00:96::2").tcp(80).into(),
            slice("six-4", "six").tcp(80).ready("10.244.0.2").into(),
        ],
        expect![[r#"
            10.96.0.1 address
            10.96.0.1:80/tcp cluster-ip cluster=1 local=0 has-endpoints
              cluster[0] -> 10.244.0.1:80
            fd00:96::1 address
            [fd00:96::1]:80/tcp cluster-ip cluster=1 local=0 has-endpoints
              cluster[0] -> [fd00:244::1]:80 local
            fd00:96::2 address
            [fd00:96::2]:80/tcp cluster-ip cluster=0 local=0
        "#]],
    );
}

#[test]
fn without_ip_families_the_cluster_ip_says_its_family() {
    let bare = |name, ip: &str| service(name).tcp(80).edit(|spec| spec.cluster_ip = Some(ip.to_owned()));
    check(
        [
            bare("four", "10.96.0.1").into(),
            bare("six", "fd00:96::1").into(),
            bare("padded", "010.096.000.002").into(),
            bare("mapped", "::ffff:10.96.0.3").into(),
            bare("families-only", "10.96.0.4").edit(|spec| spec.ip_families = Some(vec!["IPv4".to_owned()])).into(),
        ],
        expect![[r#"
            10.96.0.1 address
            10.96.0.1:80/tcp cluster-ip cluster=0 local=0
            10.96.0.2 address
            10.96.0.2:80/tcp cluster-ip cluster=0 local=0
            10.96.0.3 address
            10.96.0.3:80/tcp cluster-ip cluster=0 local=0
            10.96.0.4 address
            10.96.0.4:80/tcp cluster-ip cluster=0 local=0
            fd00:96::1 address
            [fd00:96::1]:80/tcp cluster-ip cluster=0 local=0
        "#]],
    );
}

#[test]
fn some_services_are_not_for_us() {
    let headless = |name| service(name).tcp(80).edit(|spec| spec.cluster_ip = Some("None".to_owned()));
    check(
        [
            headless("headless").into(),
            slice("headless-1", "headless").tcp(80).ready("10.244.0.1").into(),
            service("no-ip").tcp(80).into(),
            service("empty-ip").tcp(80).edit(|spec| spec.cluster_ip = Some(String::new())).into(),
            service("external").cluster_ip("10.96.0.1").type_("ExternalName").tcp(80).into(),
            service("proxied").cluster_ip("10.96.0.2").label("service.kubernetes.io/service-proxy-name").tcp(80).into(),
            service("node-port").cluster_ip("10.96.0.3").type_("NodePort").tcp(80).into(),
            // Its ClusterIP is ours, but no slice is: it rejects.
            service("labelled").cluster_ip("10.96.0.4").label("service.kubernetes.io/headless").tcp(80).into(),
            slice("labelled-1", "labelled")
                .label("service.kubernetes.io/headless", "")
                .tcp(80)
                .ready("10.244.0.1")
                .into(),
        ],
        expect![[r#"
            10.96.0.3 address
            10.96.0.3:80/tcp cluster-ip cluster=0 local=0
            10.96.0.4 address
            10.96.0.4:80/tcp cluster-ip cluster=0 local=0
        "#]],
    );
}

#[test]
fn what_cannot_be_read_costs_only_itself() {
    check(
        [
            service("bad-ip").cluster_ip("10.96.0.300").cluster_ip("fd00:96::1").tcp(80).into(),
            service("bad-ports")
                .cluster_ip("10.96.0.1")
                .tcp(0)
                .tcp(65_536)
                .port("", "ICMP", 80)
                .tcp(80)
                .port("again", "TCP", 80)
                .into(),
            slice("bad-ports-1", "bad-ports")
                .port("", "tcp", 1)
                .tcp(70_000)
                .tcp(8080)
                .edit(|slice| {
                    let mut nameless = slice.ports.iter().flatten().last().cloned().unwrap();
                    nameless.name = None;
                    let mut numberless = nameless.clone();
                    (numberless.name, numberless.port) = (Some(String::new()), None);
                    slice.ports.get_or_insert_default().extend([nameless, numberless]);
                })
                .ready("10.244.0.1")
                .ready("ten")
                .ready("fd00::1")
                .ready("0.0.0.0")
                .ready("10.244.0.2")
                .ready("-")
                .edit_last(|last| last.addresses.clear())
                .into(),
        ],
        expect![[r#"
            10.96.0.1 address
            10.96.0.1:80/tcp cluster-ip cluster=2 local=0 has-endpoints
              cluster[0] -> 10.244.0.1:8080
              cluster[1] -> 10.244.0.2:8080
            fd00:96::1 address
            [fd00:96::1]:80/tcp cluster-ip cluster=0 local=0
            skipped Service default/bad-ip spec.clusterIPs[0]: "10.96.0.300" is no IP address
            skipped EndpointSlice default/bad-ports-1 endpoints[1].addresses[0]: "ten" is no IP address
            skipped EndpointSlice default/bad-ports-1 endpoints[2].addresses[0]: "fd00::1" is no IPv4 address
            skipped EndpointSlice default/bad-ports-1 endpoints[3].addresses[0]: "0.0.0.0" is no address to send to
            skipped EndpointSlice default/bad-ports-1 endpoints[5].addresses[0]: missing
            skipped EndpointSlice default/bad-ports-1 ports[0].protocol: "tcp" is not one of TCP, UDP, SCTP
            skipped EndpointSlice default/bad-ports-1 ports[1].port: 70000 is not in 1..=65535
            skipped EndpointSlice default/bad-ports-1 ports[3].name: missing
            skipped EndpointSlice default/bad-ports-1 ports[4].port: missing
            skipped Service default/bad-ports spec.ports[0].port: 0 is not in 1..=65535
            skipped Service default/bad-ports spec.ports[1].port: 65536 is not in 1..=65535
            skipped Service default/bad-ports spec.ports[2].protocol: "ICMP" is not one of TCP, UDP, SCTP
            skipped Service default/bad-ports spec.ports[4]: 10.96.0.1:80/tcp is listed before
        "#]],
    );
}

#[test]
fn of_services_with_the_same_cluster_ip_the_oldest_holds_the_port() {
    let claim = |name, created: i64| service(name).cluster_ip("10.96.0.1").tcp(80).created(created);
    check(
        [
            claim("a", 300).into(),
            claim("b", 200).into(),
            claim("c", 200).port("other", "TCP", 81).into(),
            service("unborn").cluster_ip("10.96.0.1").tcp(80).into(),
            slice("a-1", "a").tcp(80).ready("10.244.0.1").into(),
            slice("b-1", "b").tcp(80).ready("10.244.0.2").into(),
        ],
        expect![[r#"
            10.96.0.1 address
            10.96.0.1:80/tcp cluster-ip cluster=1 local=0 has-endpoints
              cluster[0] -> 10.244.0.2:80
            10.96.0.1:81/tcp cluster-ip cluster=0 local=0
            skipped Service default/c spec.ports[0]: 10.96.0.1:80/tcp is held by Service default/b
            skipped Service default/a spec.ports[0]: 10.96.0.1:80/tcp is held by Service default/b
            skipped Service default/unborn spec.ports[0]: 10.96.0.1:80/tcp is held by Service default/b
        "#]],
    );
}
