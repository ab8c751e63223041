//! Tests frontends beside the ClusterIP, and which clients may dial them.

use expect_test::expect;

use super::check;
use crate::builders::{listed, node, object_name, service, slice};
use crate::desired::Desired;
use crate::model::{HealthCheck, ModelOptions};

#[test]
fn a_service_is_dialled_at_all_its_addresses() {
    check(
        [service("web")
            .cluster_ip("10.96.0.1")
            .cluster_ip("fd00:96::1")
            .type_("LoadBalancer")
            .port("http", "TCP", 80)
            .node_port(30_080)
            .port("quic", "UDP", 80)
            .node_port(30_080)
            .port("diameter", "SCTP", 3868)
            .external_ip("192.0.2.1")
            .external_ip("2001:db8::1")
            .vip("203.0.113.1")
            .ingress("203.0.113.2", Some("VIP"))
            .ingress("203.0.113.3", Some("Proxy"))
            .ingress("", None)
            .into()],
        expect![[r#"
            IPv4 *:30080/tcp node-port of 10.96.0.1:80/tcp
            IPv4 *:30080/udp node-port of 10.96.0.1:80/udp
            10.96.0.1 address
            10.96.0.1:80/tcp cluster-ip cluster=0 local=0
            10.96.0.1:80/udp cluster-ip cluster=0 local=0
            10.96.0.1:3868/sctp cluster-ip cluster=0 local=0
            192.0.2.1:80/tcp external-ip of 10.96.0.1:80/tcp
            192.0.2.1:80/udp external-ip of 10.96.0.1:80/udp
            192.0.2.1:3868/sctp external-ip of 10.96.0.1:3868/sctp
            203.0.113.1:80/tcp load-balancer of 10.96.0.1:80/tcp
            203.0.113.1:80/udp load-balancer of 10.96.0.1:80/udp
            203.0.113.1:3868/sctp load-balancer of 10.96.0.1:3868/sctp
            203.0.113.2:80/tcp load-balancer of 10.96.0.1:80/tcp
            203.0.113.2:80/udp load-balancer of 10.96.0.1:80/udp
            203.0.113.2:3868/sctp load-balancer of 10.96.0.1:3868/sctp
            IPv6 *:30080/tcp node-port of [fd00:96::1]:80/tcp
            IPv6 *:30080/udp node-port of [fd00:96::1]:80/udp
            [2001:db8::1]:80/tcp external-ip of [fd00:96::1]:80/tcp
            [2001:db8::1]:80/udp external-ip of [fd00:96::1]:80/udp
            [2001:db8::1]:3868/sctp external-ip of [fd00:96::1]:3868/sctp
            fd00:96::1 address
            [fd00:96::1]:80/tcp cluster-ip cluster=0 local=0
            [fd00:96::1]:80/udp cluster-ip cluster=0 local=0
            [fd00:96::1]:3868/sctp cluster-ip cluster=0 local=0
        "#]],
    );
}

#[test]
fn node_ports_need_a_type_with_node_ports() {
    let web = |name, ip: &str, port| service(name).cluster_ip(ip).tcp(80).node_port(port);
    check(
        [
            web("cluster-ip", "10.96.0.1", 30_001).into(),
            web("node-port", "10.96.0.2", 30_002).type_("NodePort").into(),
            web("load-balancer", "10.96.0.3", 30_003).type_("LoadBalancer").into(),
            web("not-allocated", "10.96.0.4", 0).type_("LoadBalancer").into(),
            web("bad", "10.96.0.5", 70_000).type_("NodePort").into(),
            web("twice", "10.96.0.6", 30_006).port("again", "TCP", 81).node_port(30_006).type_("NodePort").into(),
        ],
        expect![[r#"
            IPv4 *:30002/tcp node-port of 10.96.0.2:80/tcp
            IPv4 *:30003/tcp node-port of 10.96.0.3:80/tcp
            IPv4 *:30006/tcp node-port of 10.96.0.6:80/tcp
            10.96.0.1 address
            10.96.0.1:80/tcp cluster-ip cluster=0 local=0
            10.96.0.2 address
            10.96.0.2:80/tcp cluster-ip cluster=0 local=0
            10.96.0.3 address
            10.96.0.3:80/tcp cluster-ip cluster=0 local=0
            10.96.0.4 address
            10.96.0.4:80/tcp cluster-ip cluster=0 local=0
            10.96.0.5 address
            10.96.0.5:80/tcp cluster-ip cluster=0 local=0
            10.96.0.6 address
            10.96.0.6:80/tcp cluster-ip cluster=0 local=0
            10.96.0.6:81/tcp cluster-ip cluster=0 local=0
            skipped Service default/bad spec.ports[0].nodePort: 70000 is not in 1..=65535
            skipped Service default/twice spec.ports[1].nodePort: IPv4 *:30006/tcp is listed before
        "#]],
    );
}

/// An unreadable field costs only itself. An address with two roles gets the one with the stricter rules.
#[test]
fn odd_addresses_are_skipped_or_get_the_stricter_rules() {
    check(
        [service("web")
            .cluster_ip("10.96.0.1")
            .type_("LoadBalancer")
            .tcp(80)
            .external_ip("nonsense")
            .external_ip("0.0.0.0")
            .external_ip("192.000.002.001")
            .external_ip("192.0.2.1")
            .external_ip("203.0.113.1")
            .external_ip("10.96.0.1")
            .vip("203.0.113.1")
            .vip("203.0.113.300")
            .into()],
        expect![[r#"
            10.96.0.1 address
            10.96.0.1:80/tcp cluster-ip cluster=0 local=0
            192.0.2.1:80/tcp external-ip of 10.96.0.1:80/tcp
            203.0.113.1:80/tcp load-balancer of 10.96.0.1:80/tcp
            skipped Service default/web spec.externalIPs[0]: "nonsense" is no IP address
            skipped Service default/web spec.externalIPs[1]: "0.0.0.0" is no address to send to
            skipped Service default/web spec.externalIPs[5]: "10.96.0.1" is the Service's own ClusterIP
            skipped Service default/web status.loadBalancer.ingress[1].ip: "203.0.113.300" is no IP address
        "#]],
    );
}

#[test]
fn external_policy_counts_with_external_frontends() {
    let web = |name, ip: &str| service(name).cluster_ip(ip).tcp(80).external_local();
    check(
        [
            web("cluster-ip", "10.96.0.1").into(),
            web("external-ip", "10.96.0.2").external_ip("192.0.2.1").into(),
            // The type has external frontends, but there is none yet: no frontend would choose from the local set.
            web("pending", "10.96.0.3").type_("LoadBalancer").into(),
            web("other-family", "10.96.0.4").external_ip("2001:db8::1").into(),
            web("both", "10.96.0.5").internal_local().type_("NodePort").node_port(30_080).into(),
            slice("a", "external-ip").tcp(80).ready("10.244.0.1").on("here").into(),
            slice("b", "pending").tcp(80).ready("10.244.0.1").on("here").into(),
            slice("c", "other-family").tcp(80).ready("10.244.0.1").on("here").into(),
            slice("d", "both").tcp(80).ready("10.244.0.1").on("there").into(),
        ],
        expect![[r#"
            IPv4 *:30080/tcp node-port of 10.96.0.5:80/tcp
            10.96.0.1 address
            10.96.0.1:80/tcp cluster-ip cluster=0 local=0
            10.96.0.2 address
            10.96.0.2:80/tcp cluster-ip cluster=1 local=1 external-local has-endpoints
              cluster[0] -> 10.244.0.1:80 local
              local[0] -> 10.244.0.1:80 local
            10.96.0.3 address
            10.96.0.3:80/tcp cluster-ip cluster=1 local=0 external-local has-endpoints
              cluster[0] -> 10.244.0.1:80 local
            10.96.0.4 address
            10.96.0.4:80/tcp cluster-ip cluster=1 local=0 external-local has-endpoints
              cluster[0] -> 10.244.0.1:80 local
            10.96.0.5 address
            10.96.0.5:80/tcp cluster-ip cluster=1 local=0 internal-local external-local has-endpoints
              cluster[0] -> 10.244.0.1:80
            192.0.2.1:80/tcp external-ip of 10.96.0.2:80/tcp
            skipped Service default/pending spec.healthCheckNodePort: 0 is not in 1..=65535
        "#]],
    );
}

#[test]
fn source_ranges_are_split_by_family_and_trimmed() {
    let web = |name, ip: &str| service(name).cluster_ip(ip).type_("LoadBalancer").tcp(80);
    check(
        [
            web("some", "10.96.0.1")
                .cluster_ip("fd00:96::1")
                .vip("203.0.113.1")
                .vip("2001:db8::1")
                .source_range(" 198.51.100.7/24\t")
                .source_range("10.0.0.0/8 ")
                .source_range("2001:db8:1::/48")
                .source_range("everyone")
                .into(),
            web("other-family", "10.96.0.2").vip("203.0.113.2").source_range("2001:db8:1::/48").into(),
            web("all", "10.96.0.3").vip("203.0.113.3").source_range("0.0.0.0/0").into(),
            web("no-vip", "10.96.0.4").external_ip("192.0.2.1").source_range("10.0.0.0/8").into(),
        ],
        expect![[r#"
            10.96.0.1 address
            10.96.0.1:80/tcp cluster-ip cluster=0 local=0 source-ranges
              from 10.0.0.0/8
              from 198.51.100.0/24
            10.96.0.2 address
            10.96.0.2:80/tcp cluster-ip cluster=0 local=0
            10.96.0.3 address
            10.96.0.3:80/tcp cluster-ip cluster=0 local=0 source-ranges
              from 0.0.0.0/0
            10.96.0.4 address
            10.96.0.4:80/tcp cluster-ip cluster=0 local=0
            192.0.2.1:80/tcp external-ip of 10.96.0.4:80/tcp
            203.0.113.1:80/tcp load-balancer of 10.96.0.1:80/tcp
            203.0.113.2:80/tcp load-balancer of 10.96.0.2:80/tcp
            203.0.113.3:80/tcp load-balancer of 10.96.0.3:80/tcp
            [2001:db8::1]:80/tcp load-balancer of [fd00:96::1]:80/tcp
            fd00:96::1 address
            [fd00:96::1]:80/tcp cluster-ip cluster=0 local=0 source-ranges
              from 2001:db8:1::/48
            skipped Service default/some spec.loadBalancerSourceRanges[3]: "everyone" is no CIDR
        "#]],
    );
}

/// The node's own packets to a load balancer address that it carries have that address as their source.
#[test]
fn source_ranges_of_the_node_include_its_load_balancer_addresses() {
    let web = || {
        let web = service("web").cluster_ip("10.96.0.1").cluster_ip("fd00:96::1").type_("LoadBalancer").tcp(80);
        web.vip("203.0.113.1").vip("203.0.113.2").vip("2001:db8::1").source_range("10.0.0.0/8").source_range("fd00::/8")
    };
    let ranges = |options: ModelOptions, addresses: &[(&str, &str)]| {
        let mut desired = Desired::with_options("here", options);
        for input in listed().into_iter().chain([web().into(), node("here", None, addresses)]) {
            desired.apply(input);
        }
        desired.sync();
        let lines = desired.tables().to_string();
        let lines = lines.lines().filter_map(|line| line.strip_prefix("  from "));
        lines.collect::<Vec<_>>().join(" ")
    };
    let by_node = |addresses: &[(&str, &str)]| ranges(ModelOptions::default(), addresses);
    assert_eq!(by_node(&[]), "10.0.0.0/8 fd00::/8");
    assert_eq!(by_node(&[("InternalIP", "192.0.2.1")]), "10.0.0.0/8 fd00::/8");
    assert_eq!(by_node(&[("InternalIP", "10.1.2.3")]), "10.0.0.0/8 203.0.113.1/32 203.0.113.2/32 fd00::/8");
    assert_eq!(by_node(&[("InternalIP", "fd00::1")]), "10.0.0.0/8 2001:db8::1/128 fd00::/8");
    let secondary = [("ExternalIP", "10.1.2.3"), ("InternalIP", "192.0.2.1"), ("InternalIP", "10.1.2.4")];
    assert_eq!(by_node(&secondary), "10.0.0.0/8 fd00::/8", "only the first address is the primary one");
    let options = ModelOptions { node_ips: vec!["10.9.9.9".parse().unwrap()], ..Default::default() };
    assert_eq!(ranges(options, &secondary), "10.0.0.0/8 203.0.113.1/32 203.0.113.2/32 fd00::/8");
}

#[test]
fn health_checks_count_local_endpoints() {
    let web = || {
        let web = service("web").cluster_ip("10.96.0.1").cluster_ip("fd00:96::1").type_("LoadBalancer");
        web.port("http", "TCP", 80).port("https", "TCP", 443).edit(|spec| spec.health_check_node_port = Some(32_000))
    };
    let slices = [
        slice("web-4", "web").port("http", "TCP", 8080).port("https", "TCP", 8443).port("other", "TCP", 1),
        slice("web-6", "web").address_type("IPv6").port("http", "TCP", 8080),
    ];
    let slices = [
        slices[0].clone().ready("10.244.0.1").on("here").ready("10.244.0.2").on("here").ready("10.244.0.3").on("there"),
        slices[1].clone().ready("fd00:244::1").on("here").terminating("fd00:244::2").on("here"),
    ];
    let mut desired = Desired::new("here");
    let [first, second] = slices;
    let unmatched = slice("web-no", "web").port("other", "TCP", 1).ready("10.244.0.9").on("here");
    for input in listed().into_iter().chain([first.into(), second.into(), unmatched.into()]) {
        desired.apply(input);
    }
    let mut checks = |web: crate::builders::ServiceBuilder| {
        desired.apply(web.into());
        let skipped = desired.sync().skipped.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
        (desired.health_checks().get(&object_name("web")).copied(), skipped)
    };
    let some = Some(HealthCheck { port: 32_000, local_endpoints: 2 });
    assert_eq!(checks(web().external_local()), (some, String::new()));
    assert_eq!(checks(web()), (None, String::new()), "not under the Cluster policy");
    assert_eq!(checks(web().external_local().type_("NodePort")), (None, String::new()));
    let portless = web().external_local().edit(|spec| spec.health_check_node_port = None);
    let why = "Service default/web spec.healthCheckNodePort: 0 is not in 1..=65535";
    assert_eq!(checks(portless), (None, why.to_owned()));
}
