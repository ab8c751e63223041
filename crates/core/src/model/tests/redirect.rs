//! Tests of the pods that answer for a Service on their node, and of the clients that reach the
//! Service's own endpoints.

use std::net::Ipv4Addr;

use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use proxy_common::addr::{Addr4, Port, Proto};
use proxy_common::frontend::{Backend, EndpointKey, FrontendKey, Service, Set};
use serde_json::{Value, json};

use crate::builders::{ServiceBuilder, listed, object_name, service, slice};
use crate::compact::{Compact, LocalPod, LocalRedirect};
use crate::desired::Desired;
use crate::input::{Input, Update};
use crate::model::{Cause, ModelOptions, ObjectRef};
use crate::tables::Tables;

const ANNOTATION: &str = "kpx.dev/local-redirect";

fn desired() -> Desired {
    let mut desired = Desired::with_options(
        "here",
        ModelOptions {
            has_redirects: true,
            ..Default::default()
        },
    );
    let lists = listed().into_iter().chain([
        Input::Pod(Update::All(Vec::new())),
        Input::LocalRedirect(Update::All(Vec::new())),
        dns().into(),
        slice("dns-1", "dns")
            .port("dns", "UDP", 53)
            .port("dns-tcp", "TCP", 53)
            .ready("10.244.9.9")
            .into(),
    ]);
    lists.for_each(|input| desired.apply(input));
    desired
}

pub(super) fn addr(octets: [u8; 4]) -> Addr4 {
    Ipv4Addr::from(octets).into()
}

fn dns() -> ServiceBuilder {
    let dns = service("dns")
        .cluster_ip("10.96.0.10")
        .port("dns", "UDP", 53)
        .port("dns-tcp", "TCP", 53);
    dns.annotation(ANNOTATION, "app=cache")
}

/// Returns a running Pod with the label `app=cache`.
pub(super) fn pod(name: &str, ip: &str, is_ready: bool) -> Value {
    let name = object_name(name);
    let status = if is_ready { "True" } else { "False" };
    json!({
        "metadata": { "namespace": &*name.namespace, "name": &*name.name, "labels": { "app": "cache" } },
        "spec": { "containers": [{ "name": "main", "ports": [
            { "name": "dns", "protocol": "UDP", "containerPort": 5353 },
            { "name": "dns-tcp", "protocol": "TCP", "containerPort": 5354 },
        ] }] },
        "status": {
            "phase": "Running", "podIPs": [{ "ip": ip }], "conditions": [{ "type": "Ready", "status": status }],
        },
    })
}

pub(super) fn put_pod(object: Value) -> Input {
    Input::Pod(Update::Put(Box::new(LocalPod::compact(
        serde_json::from_value(object).unwrap(),
    ))))
}

pub(super) fn put(object: &Value) -> Input {
    let object = json!({ "metadata": object["metadata"], "spec": object["spec"] });
    Input::LocalRedirect(Update::Put(Box::new(LocalRedirect::compact(
        serde_json::from_value(object).unwrap(),
    ))))
}

/// Returns the rows of the UDP DNS port, as text.
fn rows(desired: &mut Desired) -> String {
    desired.sync();
    let from_scratch = Tables::of(
        desired.store(),
        &ModelOptions {
            has_redirects: true,
            ..Default::default()
        },
    );
    assert_eq!(desired.tables(), &from_scratch);
    let text = desired.tables().to_string();
    let paragraph = text
        .split("10.96.0.10:53/udp")
        .nth(1)
        .expect("a paragraph of DNS");
    paragraph
        .lines()
        .take_while(|line| !line.starts_with(char::is_numeric))
        .collect::<Vec<_>>()
        .join("\n")
}

pub(super) fn skipped(desired: &Desired) -> Vec<String> {
    desired.skipped().map(ToString::to_string).collect()
}

const OF_ITS_OWN: &str = " cluster-ip cluster=1 local=0 has-endpoints\n  \
    cluster[0] -> 10.244.9.9:53\n  endpoint 10.244.9.9:53 in-cluster";

#[test]
fn a_ready_pod_answers_and_the_endpoints_do_without_one() {
    let mut desired = desired();
    assert_eq!(rows(&mut desired), OF_ITS_OWN);
    desired.apply(put_pod(pod("cache", "10.244.0.5", false)));
    assert_eq!(rows(&mut desired), OF_ITS_OWN, "not ready");

    desired.apply(put_pod(pod("cache", "10.244.0.5", true)));
    assert_eq!(
        rows(&mut desired),
        " cluster-ip cluster=1 local=1 has-endpoints redirected spares-pods\n  \
         cluster[0] -> 10.244.9.9:53\n  local[0] -> 10.244.0.5:53 local\n  \
         endpoint 10.244.0.5:0 local\n  endpoint 10.244.0.5:53 in-local local\n  endpoint 10.244.9.9:53 in-cluster"
    );
    // The next pod is not ready, but its own packets already go to the Service's endpoints.
    desired.apply(put_pod(pod("next", "10.244.0.6", false)));
    assert!(rows(&mut desired).contains("endpoint 10.244.0.6:0 local"));
    let going = |mut object: Value| {
        object["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
        object
    };
    desired.apply(put_pod(going(pod("cache", "10.244.0.5", true))));
    assert_eq!(rows(&mut desired), OF_ITS_OWN, "it is being deleted");
    desired.apply(put_pod(pod("cache", "10.244.0.5", true)));
    desired.apply(Input::Pod(Update::Del(object_name("cache"))));
    assert_eq!(rows(&mut desired), OF_ITS_OWN);
    desired.apply(put_pod(pod("other/cache", "10.244.0.7", true)));
    assert_eq!(rows(&mut desired), OF_ITS_OWN, "a pod of another namespace");
    assert_eq!(skipped(&desired), [""; 0]);
}

#[test]
fn a_pod_with_the_hosts_network_spares_the_node() {
    let mut desired = desired();
    let mut object = pod("cache", "192.0.2.1", true);
    object["spec"]["hostNetwork"] = json!(true);
    desired.apply(put_pod(object));
    let rows = rows(&mut desired);
    assert!(
        rows.starts_with(
            " cluster-ip cluster=1 local=1 has-endpoints redirected spares-pods spares-node\n"
        ),
        "{rows}"
    );
    let key = FrontendKey::new(addr([10, 96, 0, 10]), Port::new(53), Proto::UDP);
    let tables = &desired.tables().v4;
    assert!(
        tables.services[&key].has(Service::SPARES_NODE)
            && tables.services[&key].count(Set::LOCAL) == 1
    );
    assert!(
        tables
            .endpoints
            .contains_key(&EndpointKey::spared(key, addr([192, 0, 2, 1])))
    );
    let backend = Backend::new(addr([192, 0, 2, 1]), Port::new(53), Backend::<Addr4>::LOCAL);
    assert!(
        tables.slots.values().any(|slot| *slot == backend),
        "{tables}"
    );
}

#[test]
fn a_target_port_is_a_number_or_a_pods_name_for_one() {
    use IntOrString::{Int, String as Name};
    let with = |target: IntOrString| {
        dns().edit(|spec| {
            spec.ports
                .iter_mut()
                .flatten()
                .for_each(|port| port.target_port = Some(target.clone()))
        })
    };
    for (target, at) in [
        (Int(5300), "10.244.0.5:5300"),
        (Name("dns".to_owned()), "10.244.0.5:5353"),
    ] {
        let mut desired = desired();
        desired.apply(with(target).into());
        desired.apply(put_pod(pod("cache", "10.244.0.5", true)));
        let rows = rows(&mut desired);
        assert!(rows.contains(&format!("local[0] -> {at} local")), "{rows}");
    }
    // No TCP port has the name.
    let mut desired = desired();
    desired.apply(with(Name("dns".to_owned())).into());
    desired.apply(put_pod(pod("cache", "10.244.0.5", true)));
    desired.sync();
    let why = "Service default/dns metadata.annotations[kpx.dev/local-redirect]: no ready pod has a port named \
               \"dns\" for tcp";
    assert_eq!(skipped(&desired), [why]);
}

#[test]
fn an_annotation_without_effect_is_reported() {
    let mut without = Desired::new("here");
    listed()
        .into_iter()
        .chain([dns().into()])
        .for_each(|input| without.apply(input));
    without.sync();
    let field = "Service default/dns metadata.annotations[kpx.dev/local-redirect]";
    assert_eq!(
        skipped(&without),
        [format!(
            "{field}: ignored: kpx runs without --local-redirect"
        )]
    );

    let mut desired = desired();
    desired.apply(put_pod(pod("cache", "10.244.0.5", true)));
    for (changed, why) in [
        (
            dns().annotation(ANNOTATION, "app in"),
            "found the end, expected: '('",
        ),
        (
            dns().annotation(ANNOTATION, " "),
            "an empty selector would select every pod of the namespace",
        ),
        (
            dns().annotation(ANNOTATION, &"a".repeat(5_000)),
            "a selector may have 4096 bytes",
        ),
        (
            dns().internal_local(),
            "Service default/dns has internalTrafficPolicy Local, which overrides the redirect",
        ),
    ] {
        desired.apply(changed.into());
        desired.sync();
        assert_eq!(skipped(&desired), [format!("{field}: {why}")]);
    }
    desired.apply(dns().into());
    assert!(rows(&mut desired).contains("redirected"));
    desired.apply(Input::Pod(Update::Refused));
    desired.apply(dns().tcp(99).into());
    desired.sync();
    assert_eq!(
        skipped(&desired),
        [format!(
            "{field}: the API server does not let kpx list and watch Pods"
        )]
    );
}

/// An object of Cilium's, except for apiVersion and kind.
fn object(name: &str, service: &str) -> Value {
    let name = object_name(name);
    let service = object_name(service);
    json!({
        "metadata": { "namespace": &*name.namespace, "name": &*name.name, "uid": "1" },
        "spec": {
            "redirectFrontend": { "serviceMatcher": { "serviceName": &*service.name, "namespace": &*service.namespace } },
            "redirectBackend": {
                "localEndpointSelector": { "matchLabels": { "app": "cache" } },
                "toPorts": [
                    { "port": "5300", "name": "dns", "protocol": "UDP" },
                    { "port": "5301", "name": "dns-tcp", "protocol": "TCP" },
                ],
            },
        },
    })
}

#[test]
fn an_object_redirects_a_service_of_its_namespace() {
    let plain = || {
        service("dns")
            .cluster_ip("10.96.0.10")
            .port("dns", "UDP", 53)
            .port("dns-tcp", "TCP", 53)
    };
    let mut desired = desired();
    desired.apply(plain().into());
    desired.apply(put_pod(pod("cache", "10.244.0.5", true)));
    assert_eq!(rows(&mut desired), OF_ITS_OWN);

    let mut redirect = object("cache", "dns");
    desired.apply(put(&redirect));
    let rows_of = rows(&mut desired);
    assert!(
        rows_of.starts_with(" cluster-ip cluster=1 local=1 has-endpoints redirected\n"),
        "{rows_of}"
    );
    assert!(
        rows_of.contains("local[0] -> 10.244.0.5:5300 local") && !rows_of.contains(":0 "),
        "{rows_of}"
    );
    assert!(
        desired
            .tables()
            .to_string()
            .contains("local[0] -> 10.244.0.5:5301 local")
    );

    redirect["spec"]["skipRedirectFromBackend"] = json!(true);
    redirect["spec"]["redirectFrontend"]["serviceMatcher"]["toPorts"] =
        json!([{ "port": "53", "name": "dns", "protocol": "UDP" }]);
    desired.apply(put(&redirect));
    assert!(rows(&mut desired).contains("redirected spares-pods"));
    assert!(
        !desired.tables().to_string().contains(":5301"),
        "TCP is not among the ports"
    );
    assert_eq!(skipped(&desired), [""; 0]);

    desired.apply(put(&object("later", "dns")));
    desired.sync();
    let field = "spec.redirectFrontend.serviceMatcher.serviceName";
    let why = format!(
        "LocalRedirect default/later {field}: LocalRedirect default/cache redirects Service default/dns, and is older"
    );
    assert_eq!(skipped(&desired), [why]);
    desired.apply(dns().into());
    desired.sync();
    let why = |name| {
        format!(
            "LocalRedirect default/{name} {field}: Service default/dns has the annotation {ANNOTATION}, which counts"
        )
    };
    assert_eq!(skipped(&desired), ["cache", "later"].map(why));
    for name in ["cache", "later"] {
        desired.apply(Input::LocalRedirect(Update::Del(object_name(name))));
    }
    desired.apply(plain().into());
    assert_eq!(rows(&mut desired), OF_ITS_OWN);
}

#[test]
fn an_object_has_no_say_in_other_namespaces() {
    let mut desired = desired();
    desired.apply(
        service("dns")
            .cluster_ip("10.96.0.10")
            .port("dns", "UDP", 53)
            .into(),
    );
    for namespace in ["tenant", "default"] {
        desired.apply(put_pod(pod(
            &format!("{namespace}/cache"),
            "10.244.0.5",
            true,
        )));
    }
    desired.apply(put(&object("tenant/thief", "default/dns")));
    assert_eq!(rows(&mut desired), OF_ITS_OWN);
    let all: Vec<_> = desired.skipped().cloned().collect();
    assert_eq!(
        all[0].to_string(),
        "LocalRedirect tenant/thief spec.redirectFrontend.serviceMatcher.namespace: \"default\" is not the object's own namespace; only Services of that namespace can be redirected"
    );
    assert_eq!((all.len(), all[0].cause), (1, Cause::Refused));
    assert_eq!(desired.uid(&all[0].object), Some("1"));
    assert_eq!(
        desired.concerned(&all[0].object),
        [],
        "its author does not write to the Service's Events"
    );
}

#[test]
fn a_service_is_concerned_by_its_redirects_and_their_pods() {
    let mut desired = desired();
    desired.apply(dns().into());
    desired.apply(
        service("web")
            .cluster_ip("10.96.0.11")
            .port("http", "TCP", 80)
            .into(),
    );
    desired.apply(put_pod(pod("cache", "10.244.0.5", true)));
    desired.apply(put(&object("cache", "web")));
    desired.sync();
    let concerned = |kind, name| {
        let names = desired.concerned(&ObjectRef {
            kind,
            name: object_name(name),
        });
        names
            .iter()
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(" ")
    };
    assert_eq!(concerned("LocalRedirect", "cache"), "default/web");
    assert_eq!(concerned("Pod", "cache"), "default/dns default/web");
    assert_eq!(
        [
            concerned("Pod", "other"),
            concerned("Service", "web"),
            concerned("Node", "cache")
        ],
        ["", "", ""]
    );
}

#[test]
fn a_wrong_field_of_an_object_is_named() {
    let ports = |port: Value| json!([port]);
    let edits: [(&str, Value, &str); 5] = [
        (
            "/spec/redirectFrontend",
            json!({}),
            "spec.redirectFrontend: needs either a serviceMatcher or an addressMatcher",
        ),
        (
            "/spec/redirectBackend/toPorts",
            json!([]),
            "spec.redirectBackend.toPorts: no port is listed",
        ),
        (
            "/spec/redirectBackend/toPorts",
            ports(json!({ "port": "x", "protocol": "UDP" })),
            "spec.redirectBackend.toPorts[0].port: \"x\" is not a number",
        ),
        (
            "/spec/redirectBackend/toPorts",
            ports(json!({ "port": "53", "protocol": "ICMP" })),
            "spec.redirectBackend.toPorts[0].protocol: \"ICMP\" is not one of TCP, UDP, SCTP",
        ),
        (
            "/spec/redirectBackend/toPorts/0/name",
            json!(""),
            "spec.redirectBackend.toPorts[0].name: with several ports, each needs the name of its Service port",
        ),
    ];
    for (path, value, why) in edits {
        let mut desired = desired();
        let mut redirect = object("cache", "web");
        *redirect.pointer_mut(path).expect(path) = value;
        desired.apply(put(&redirect));
        desired.sync();
        assert_eq!(
            skipped(&desired),
            [format!("LocalRedirect default/cache {why}")]
        );
    }
}
