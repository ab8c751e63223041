//! Tests of LocalRedirects for addresses that no Service has, and of their rows.

use ipnet::IpNet;
use proxy_common::addr::{Port, Proto};
use proxy_common::frontend::{FrontendKey, Service};
use serde_json::{Value, json};

use super::redirect::{addr, pod, put, put_pod, skipped};
use crate::builders::{listed, node, object_name, service, service_cidr, slice};
use crate::desired::Desired;
use crate::input::{Input, Update};
use crate::model::ModelOptions;
use crate::tables::Tables;

const METADATA: &str = "169.254.169.254";

fn options(permitted: &[&str]) -> ModelOptions {
    let redirect_addresses = permitted
        .iter()
        .map(|net| net.parse::<IpNet>().unwrap())
        .collect();
    ModelOptions {
        has_redirects: true,
        redirect_addresses,
        ..ModelOptions::default()
    }
}

fn desired(permitted: &[&str]) -> Desired {
    let mut desired = Desired::with_options("here", options(permitted));
    let lists = listed().into_iter().chain([
        Input::Pod(Update::All(Vec::new())),
        Input::LocalRedirect(Update::All(Vec::new())),
    ]);
    lists.for_each(|input| desired.apply(input));
    desired
}

/// Returns an object that redirects port 80 of an address to pods with the label `app=cache`.
fn of_address(name: &str, ip: &str) -> Value {
    let name = object_name(name);
    json!({
        "metadata": { "namespace": &*name.namespace, "name": &*name.name, "uid": "1" },
        "spec": {
            "redirectFrontend": { "addressMatcher": { "ip": ip, "toPorts": [{ "port": "80", "protocol": "TCP" }] } },
            "redirectBackend": {
                "localEndpointSelector": { "matchLabels": { "app": "cache" } },
                "toPorts": [{ "port": "8181", "protocol": "TCP" }],
            },
            "skipRedirectFromBackend": true,
        },
    })
}

fn text(desired: &mut Desired, permitted: &[&str]) -> String {
    desired.sync();
    assert_eq!(
        desired.tables(),
        &Tables::of(desired.store(), &options(permitted))
    );
    desired.tables().to_string()
}

#[test]
fn pods_answer_at_permitted_address_and_others_pass() {
    let permitted = ["169.254.169.254/32"];
    let mut desired = desired(&permitted);
    let empty = text(&mut desired, &permitted);
    desired.apply(put(&of_address("proxy", METADATA)));
    let key = FrontendKey::new(addr([169, 254, 169, 254]), Port::new(80), Proto::TCP);
    let row = text(&mut desired, &permitted);
    assert!(
        row.contains(
            "169.254.169.254:80/tcp cluster-ip cluster=0 local=0 has-endpoints else-passes"
        ),
        "{row}"
    );
    assert!(desired.tables().v4.services[&key].has(Service::ELSE_PASSES));
    let whole = FrontendKey::address(addr([169, 254, 169, 254]));
    assert!(
        !desired.tables().v4.frontends.contains_key(&whole),
        "other ports of the address are left alone"
    );

    desired.apply(put_pod(pod("cache", "10.244.0.5", true)));
    let row = text(&mut desired, &permitted);
    assert!(
        row.contains("cluster=0 local=1 has-endpoints redirected spares-pods else-passes"),
        "{row}"
    );
    assert!(
        row.contains("local[0] -> 10.244.0.5:8181 local")
            && row.contains("endpoint 10.244.0.5:0 local"),
        "{row}"
    );
    assert_eq!(skipped(&desired), [""; 0]);

    desired.apply(put_pod(pod("cache", "10.244.0.5", false)));
    assert!(text(&mut desired, &permitted).contains("cluster=0 local=0 has-endpoints else-passes"));
    desired.apply(Input::LocalRedirect(Update::Del(object_name("proxy"))));
    assert_eq!(text(&mut desired, &permitted), empty);
}

#[test]
fn pods_of_other_namespaces_never_answer_at_address() {
    let permitted = ["169.254.169.254/32"];
    let mut desired = desired(&permitted);
    desired.apply(put(&of_address("tenant/proxy", METADATA)));
    desired.apply(put_pod(pod("cache", "10.244.0.5", true)));
    assert!(text(&mut desired, &permitted).contains("cluster=0 local=0"));
    desired.apply(put_pod(pod("tenant/cache", "10.244.0.6", true)));
    assert!(text(&mut desired, &permitted).contains("local[0] -> 10.244.0.6:8181 local"));
}

#[test]
fn address_without_operators_leave_is_refused() {
    let field = "LocalRedirect default/proxy spec.redirectFrontend.addressMatcher.ip";
    for (permitted, ip, why) in [
        (
            &[][..],
            METADATA,
            "169.254.169.254 is not among the operator's local-redirect-addresses",
        ),
        (
            &["169.254.169.0/30"],
            METADATA,
            "169.254.169.254 is not among the operator's local-redirect-addresses",
        ),
        (
            &["0.0.0.0/0"],
            "127.0.0.1",
            "127.0.0.1 is a loopback address",
        ),
        (
            &["0.0.0.0/0"],
            "224.0.0.1",
            "224.0.0.1 is a multicast address",
        ),
        (&["::/0"], "fe80::1", "fe80::1 is a link-local address"),
        (
            &["0.0.0.0/0"],
            "0.0.0.0",
            "0.0.0.0 is not a unicast address",
        ),
        (
            &["0.0.0.0/0"],
            "192.0.2.7",
            "192.0.2.7 is an address of this node",
        ),
        (
            &["0.0.0.0/0"],
            "10.96.0.10",
            "10.96.0.10 is in 10.96.0.0/16, from which ClusterIPs are taken: a serviceMatcher is for these",
        ),
        (
            &["0.0.0.0/0"],
            "255.255.255.255",
            "255.255.255.255 is the broadcast address",
        ),
        (&["0.0.0.0/0"], "meta", "\"meta\" is not an IP address"),
    ] {
        let mut desired = desired(permitted);
        desired.apply(node("here", None, &[("InternalIP", "192.0.2.7")]));
        desired.apply(service_cidr("default", &["10.96.0.0/16"]));
        desired.apply(put_pod(pod("cache", "10.244.0.5", true)));
        desired.apply(put(&of_address("proxy", ip)));
        assert!(!text(&mut desired, permitted).contains(":8181"), "{ip}");
        assert_eq!(skipped(&desired), [format!("{field}: {why}")]);
    }
}

#[test]
fn services_keep_their_addresses_from_redirects() {
    let permitted = ["203.0.113.0/24"];
    let mut desired = desired(&permitted);
    desired.apply(put_pod(pod("cache", "10.244.0.5", true)));
    desired.apply(put(&of_address("proxy", "203.0.113.9")));
    assert!(text(&mut desired, &permitted).contains(":8181"));
    desired.apply(
        service("web")
            .cluster_ip("10.96.0.11")
            .tcp(80)
            .external_ip("203.0.113.9")
            .into(),
    );
    desired.apply(slice("web-1", "web").tcp(80).ready("10.244.9.9").into());
    let rows = text(&mut desired, &permitted);
    assert!(
        !rows.contains(":8181")
            && rows.contains("203.0.113.9:80/tcp external-ip of 10.96.0.11:80/tcp"),
        "{rows}"
    );
    let field = "LocalRedirect default/proxy spec.redirectFrontend.addressMatcher.toPorts[0]";
    assert_eq!(
        skipped(&desired),
        [format!(
            "{field}: 203.0.113.9:80/tcp is held by Service default/web"
        )]
    );
}

#[test]
fn cluster_ip_outside_known_ranges_keeps_its_other_ports() {
    let permitted = ["203.0.113.0/24"];
    let mut desired = desired(&permitted);
    desired.apply(put_pod(pod("cache", "10.244.0.5", true)));
    desired.apply(put(&of_address("proxy", "203.0.113.9")));
    assert!(text(&mut desired, &permitted).contains(":8181"));
    desired.apply(service("web").cluster_ip("203.0.113.9").tcp(443).into());
    assert!(!text(&mut desired, &permitted).contains(":8181"));
    let field = "LocalRedirect default/proxy spec.redirectFrontend.addressMatcher.toPorts[0]";
    let why = "203.0.113.9:80/tcp is at the ClusterIP of Service default/web";
    assert_eq!(skipped(&desired), [format!("{field}: {why}")]);
    desired.apply(service("web").deleted());
    assert!(text(&mut desired, &permitted).contains(":8181"));
}

/// Returns an object for a Service, possibly another object's stand-in.
fn of_service(name: &str, namespace: &str, service: &str) -> Value {
    let mut object = of_address(name, METADATA);
    let matcher = json!({ "serviceName": service, "namespace": namespace });
    object["spec"]["redirectFrontend"] = json!({ "serviceMatcher": matcher });
    object
}

#[test]
fn objects_for_services_take_no_address_from_others() {
    let permitted = ["169.254.169.254/32"];
    let mut desired = desired(&permitted);
    desired.apply(put_pod(pod("cache", "10.244.0.5", true)));
    desired.apply(put(&of_address("proxy", METADATA)));
    let served = text(&mut desired, &permitted);
    assert!(served.contains(":8181"));
    for name in ["tenant/thief", "default/a-thief"] {
        desired.apply(put(&of_service(name, "default", "localredirect.proxy")));
        assert_eq!(text(&mut desired, &permitted), served);
        let field = "spec.redirectFrontend.serviceMatcher.serviceName";
        let why = format!(
            "LocalRedirect {name} {field}: \"localredirect.proxy\" is not a valid Service name"
        );
        assert_eq!(skipped(&desired), [why]);
        desired.apply(Input::LocalRedirect(Update::Del(object_name(name))));
        assert_eq!(text(&mut desired, &permitted), served);
    }
}

#[test]
fn slices_add_no_endpoints_to_address() {
    let permitted = ["169.254.169.254/32"];
    let mut desired = desired(&permitted);
    desired.apply(
        slice("foreign", "localredirect.proxy")
            .port("", "TCP", 80)
            .ready("198.51.100.9")
            .into(),
    );
    desired.apply(put(&of_address("proxy", METADATA)));
    assert!(text(&mut desired, &permitted).contains("cluster=0 local=0"));
    desired.apply(
        slice("more", "localredirect.proxy")
            .port("", "TCP", 80)
            .ready("198.51.100.8")
            .into(),
    );
    assert!(text(&mut desired, &permitted).contains("cluster=0 local=0"));
}

#[test]
fn older_redirect_keeps_address_from_younger() {
    let permitted = ["203.0.113.0/24"];
    let mut desired = desired(&permitted);
    desired.apply(put_pod(pod("a/cache", "10.244.0.5", true)));
    desired.apply(put_pod(pod("b/cache", "10.244.0.6", true)));
    for (name, created) in [
        ("a/proxy", "2026-02-01T00:00:00Z"),
        ("b/proxy", "2026-01-01T00:00:00Z"),
    ] {
        let mut object = of_address(name, "203.0.113.9");
        object["metadata"]["creationTimestamp"] = json!(created);
        desired.apply(put(&object));
    }
    let rows = text(&mut desired, &permitted);
    assert!(
        rows.contains("10.244.0.6:8181") && !rows.contains("10.244.0.5:8181"),
        "{rows}"
    );
    let field = "LocalRedirect a/proxy spec.redirectFrontend.addressMatcher.toPorts[0]";
    assert_eq!(
        skipped(&desired),
        [format!(
            "{field}: 203.0.113.9:80/tcp is held by LocalRedirect b/proxy"
        )]
    );
}

#[test]
fn wrong_ports_of_address_are_named() {
    let permitted = ["169.254.169.254/32"];
    for (ports, why) in [
        (json!([]), ": no port is listed"),
        (
            json!([{ "port": "x", "protocol": "TCP" }]),
            "[0].port: \"x\" is not a number",
        ),
        (
            json!([{ "port": "80", "protocol": "UDP" }]),
            "[0]: no port of redirectBackend has its name and protocol",
        ),
        (
            json!(vec![json!({ "port": "80", "protocol": "TCP" }); 101]),
            ": 101 ports are more than 100",
        ),
    ] {
        let mut desired = desired(&permitted);
        let mut object = of_address("proxy", METADATA);
        object["spec"]["redirectFrontend"]["addressMatcher"]["toPorts"] = ports;
        desired.apply(put(&object));
        desired.sync();
        let field = "LocalRedirect default/proxy spec.redirectFrontend.addressMatcher.toPorts";
        assert_eq!(skipped(&desired), [format!("{field}{why}")]);
    }
}
