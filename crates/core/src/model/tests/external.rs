//! Tests of external frontends, and of the clients allowed to dial them.

use super::dumps::Dump;
use super::objects::dump_tests;
use super::{check, dump};
use crate::builders::{listed, node, object_name, service, slice};
use crate::desired::Desired;
use crate::model::{HealthCheck, ModelOptions};

dump_tests! {
    "external.rs", dump:
    a_service_is_dialled_at_all_its_addresses,
    node_ports_need_a_type_with_node_ports,
    odd_addresses_are_skipped_or_get_the_stricter_rules,
    external_policy_counts_with_external_frontends,
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
            web("other-family", "10.96.0.2")
                .vip("203.0.113.2")
                .source_range("2001:db8:1::/48")
                .into(),
            web("all", "10.96.0.3")
                .vip("203.0.113.3")
                .source_range("0.0.0.0/0")
                .into(),
            web("no-vip", "10.96.0.4")
                .external_ip("192.0.2.1")
                .source_range("10.0.0.0/8")
                .into(),
        ],
        Dump::of_rust(file!(), "source_ranges_are_split_by_family_and_trimmed"),
    );
}

/// A node that dials its own load balancer address uses that address as source.
#[test]
fn source_ranges_of_the_node_include_its_load_balancer_addresses() {
    let web = || {
        let web = service("web")
            .cluster_ip("10.96.0.1")
            .cluster_ip("fd00:96::1")
            .type_("LoadBalancer")
            .tcp(80);
        web.vip("203.0.113.1")
            .vip("203.0.113.2")
            .vip("2001:db8::1")
            .source_range("10.0.0.0/8")
            .source_range("fd00::/8")
    };
    let ranges = |options: ModelOptions, addresses: &[(&str, &str)]| {
        let mut desired = Desired::with_options("here", options);
        for input in listed()
            .into_iter()
            .chain([web().into(), node("here", None, addresses)])
        {
            desired.apply(input);
        }
        desired.sync();
        let lines = desired.tables().to_string();
        let lines = lines
            .lines()
            .filter_map(|line| line.strip_prefix("  from "));
        lines.collect::<Vec<_>>().join(" ")
    };
    let by_node = |addresses: &[(&str, &str)]| ranges(ModelOptions::default(), addresses);
    assert_eq!(by_node(&[]), "10.0.0.0/8 fd00::/8");
    assert_eq!(
        by_node(&[("InternalIP", "192.0.2.1")]),
        "10.0.0.0/8 fd00::/8"
    );
    assert_eq!(
        by_node(&[("InternalIP", "10.1.2.3")]),
        "10.0.0.0/8 203.0.113.1/32 203.0.113.2/32 fd00::/8"
    );
    assert_eq!(
        by_node(&[("InternalIP", "fd00::1")]),
        "10.0.0.0/8 2001:db8::1/128 fd00::/8"
    );
    // KEP-3705.
    let both = [("InternalIP", "10.1.2.3"), ("InternalIP", "fd00::1")];
    assert_eq!(
        by_node(&both),
        "10.0.0.0/8 203.0.113.1/32 203.0.113.2/32 2001:db8::1/128 fd00::/8"
    );
    let secondary = [
        ("ExternalIP", "10.1.2.3"),
        ("InternalIP", "192.0.2.1"),
        ("InternalIP", "10.1.2.4"),
    ];
    assert_eq!(
        by_node(&secondary),
        "10.0.0.0/8 fd00::/8",
        "only the first address is the primary one"
    );
    let options = ModelOptions {
        node_ips: vec!["10.9.9.9".parse().unwrap()],
        ..Default::default()
    };
    assert_eq!(
        ranges(options, &secondary),
        "10.0.0.0/8 203.0.113.1/32 203.0.113.2/32 fd00::/8"
    );
}

#[test]
fn health_checks_count_local_endpoints() {
    let web = || {
        let web = service("web")
            .cluster_ip("10.96.0.1")
            .cluster_ip("fd00:96::1")
            .type_("LoadBalancer");
        web.port("http", "TCP", 80)
            .port("https", "TCP", 443)
            .edit(|spec| spec.health_check_node_port = Some(32_000))
    };
    let slices = [
        slice("web-4", "web")
            .port("http", "TCP", 8080)
            .port("https", "TCP", 8443)
            .port("other", "TCP", 1),
        slice("web-6", "web")
            .address_type("IPv6")
            .port("http", "TCP", 8080),
    ];
    let slices = [
        slices[0]
            .clone()
            .ready("10.244.0.1")
            .on("here")
            .ready("10.244.0.2")
            .on("here")
            .ready("10.244.0.3")
            .on("there"),
        slices[1]
            .clone()
            .ready("fd00:244::1")
            .on("here")
            .terminating("fd00:244::2")
            .on("here"),
    ];
    let mut desired = Desired::new("here");
    let [first, second] = slices;
    let unmatched = slice("web-no", "web")
        .port("other", "TCP", 1)
        .ready("10.244.0.9")
        .on("here");
    for input in listed()
        .into_iter()
        .chain([first.into(), second.into(), unmatched.into()])
    {
        desired.apply(input);
    }
    let mut checks = |web: crate::builders::ServiceBuilder| {
        desired.apply(web.into());
        let skipped = desired
            .sync()
            .skipped
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join("\n");
        (
            desired.health_checks().get(&object_name("web")).copied(),
            skipped,
        )
    };
    let some = Some(HealthCheck {
        port: 32_000,
        local_endpoints: 2,
    });
    assert_eq!(checks(web().external_local()), (some, String::new()));
    assert_eq!(
        checks(web()),
        (None, String::new()),
        "not under the Cluster policy"
    );
    assert_eq!(
        checks(web().external_local().type_("NodePort")),
        (None, String::new())
    );
    let portless = web()
        .external_local()
        .edit(|spec| spec.health_check_node_port = None);
    let why = "Service default/web spec.healthCheckNodePort: 0 is not in 1..=65535";
    assert_eq!(checks(portless), (None, why.to_owned()));
}
