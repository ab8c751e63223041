use expect_test::{expect, expect_file};
use k8s_openapi::api::core::v1::ObjectReference;

use crate::page::Row;
use crate::{Names, ServiceView, frontend_names, views};
use proxy_core::builders::{listed, node, service, slice};
use proxy_core::compact::{Compact, LocalPod};
use proxy_core::desired::Desired;
use proxy_core::health::Path;
use proxy_core::input::{Input, Update};
use proxy_core::model::ModelOptions;
use proxy_datapath::Counts;

fn desired(inputs: impl IntoIterator<Item = Input>) -> Desired {
    let mut desired = Desired::new("here");
    listed()
        .into_iter()
        .chain(inputs)
        .for_each(|input| desired.apply(input));
    let _sync = desired.sync();
    desired
}

fn web() -> [Input; 4] {
    let web = service("web")
        .cluster_ip("10.96.0.1")
        .cluster_ip("fd00::1")
        .type_("LoadBalancer")
        .created(1);
    let web = web.labelled("app", "web").labelled("tier", "front");
    let web = web
        .port("http", "TCP", 80)
        .node_port(30_080)
        .port("dns", "UDP", 53)
        .vip("192.0.2.1");
    let pod = |name: &str| ObjectReference {
        kind: Some("Pod".to_owned()),
        name: Some(name.to_owned()),
        ..ObjectReference::default()
    };
    let slice4 = slice("web-4", "web").port("http", "TCP", 8080);
    let slice4 = slice4.ready("10.244.0.5").on("here").edit_last(|last| {
        last.target_ref = Some(pod("web-0"));
        last.zone = Some("a".to_owned());
    });
    let slice4 = slice4
        .terminating("10.244.1.6")
        .on("there")
        .unready("10.244.1.7");
    let slice6 = slice("web-6", "web")
        .address_type("IPv6")
        .port("http", "TCP", 8080)
        .ready("fd00:244::5")
        .on("here");
    [
        node("here", None, &[]),
        web.external_local().affinity(Some(60)).into(),
        slice4.into(),
        slice6.into(),
    ]
}

#[test]
fn view_shows_all_known_of_a_service() {
    let views = views(&desired(web()).snapshot(), &Counts::default());
    let text = serde_json::to_string_pretty(&views).unwrap();
    expect_file!["web.json"].assert_eq(&text);
    assert_eq!(
        serde_json::from_str::<Vec<ServiceView>>(&text).unwrap(),
        views
    );
}

#[test]
fn frontend_held_by_another_service_is_shown_with_reason() {
    let mut inputs = Vec::from(web());
    let other = service("other")
        .cluster_ip("10.96.0.2")
        .port("http", "TCP", 80)
        .type_("NodePort")
        .node_port(30_080);
    inputs.push(other.created(2).into());
    let headless = service("headless").cluster_ip("None").tcp(80);
    inputs.push(headless.into());
    let snapshot = desired(inputs).snapshot();
    let views = views(&snapshot, &Counts::default());
    let rows = views.iter().flat_map(|service| {
        let frontends = service.ports.iter().flat_map(|port| &port.frontends);
        let lost =
            frontends.filter_map(|frontend| Some((&frontend.kind, frontend.conflict.as_ref()?)));
        lost.map(|(kind, conflict)| format!("{} {kind}: {conflict}\n", service.name))
    });
    expect![[r#"
        other NodePort: IPv4 *:30080/tcp is held by Service default/web
    "#]]
    .assert_eq(&rows.collect::<String>());
    assert_eq!(views.len(), 2, "no headless Service is served");
    let names = Names::new(frontend_names(&snapshot));
    let name = |at: &str, protocol| {
        let name = names.find(at.parse().unwrap(), protocol)?;
        Some(format!(
            "{}/{}:{}",
            name.namespace, name.name, name.port_name
        ))
    };
    assert_eq!(
        name("10.96.0.1:80", "tcp").as_deref(),
        Some("default/web:http")
    );
    assert_eq!(
        name("[fd00::1]:53", "UDP").as_deref(),
        Some("default/web:dns")
    );
    assert_eq!(
        name("192.0.2.1:53", "udp").as_deref(),
        Some("default/web:dns")
    );
    assert_eq!(
        name("10.96.0.2:80", "tcp").as_deref(),
        Some("default/other:http")
    );
    assert_eq!(
        name("203.0.113.9:30080", "tcp").as_deref(),
        Some("default/web:http"),
        "a node port, at any address"
    );
    assert_eq!(name("203.0.113.9:30080", "udp"), None);
    assert_eq!(name("10.96.0.3:80", "tcp"), None);
}

#[test]
fn silent_pods_of_a_redirect_are_shown_though_they_are_no_endpoints() {
    let options = ModelOptions {
        has_redirects: true,
        ..ModelOptions::default()
    };
    let mut desired = Desired::with_options("here", options);
    let web = service("web")
        .cluster_ip("10.96.0.1")
        .tcp(80)
        .annotation("kpx.dev/local-redirect", "app=cache");
    let pod = serde_json::json!({
        "metadata": { "namespace": "default", "name": "cache", "labels": { "app": "cache" } },
        "spec": { "containers": [{ "name": "main" }] },
        "status": { "phase": "Running", "podIPs": [{ "ip": "10.244.0.5" }], "conditions": [{ "type": "Ready", "status": "True" }] },
    });
    let pod = LocalPod::compact(serde_json::from_value(pod).unwrap());
    let endpoints = slice("web-1", "web").tcp(8080).ready("10.244.1.6");
    let inputs = [
        Input::Pod(Update::All(vec![pod])),
        Input::LocalRedirect(Update::All(Vec::new())),
    ];
    listed()
        .into_iter()
        .chain(inputs)
        .chain([web.into(), endpoints.into()])
        .for_each(|input| desired.apply(input));
    let path = |backend: &str| Path {
        service: "10.96.0.1:80".parse().unwrap(),
        backend: backend.parse().unwrap(),
    };
    desired.set_silent([path("10.244.0.5:80")].into());
    desired.sync();
    let views = views(&desired.snapshot(), &Counts::default());
    let backends = views[0].ports[0].backends.iter();
    let states = backends.map(|at| {
        (
            at.address.to_string(),
            at.in_redirect_set,
            at.silent,
            at.ejected,
        )
    });
    let want = [
        ("10.244.1.6:8080".to_owned(), false, false, false),
        ("10.244.0.5:80".to_owned(), true, true, false),
    ];
    assert_eq!(states.collect::<Vec<_>>(), want);
    let elsewhere = desired_of("10.244.1.6");
    assert_eq!(
        digest(&desired),
        digest(&elsewhere),
        "another node has a pod of its own"
    );
    assert_ne!(digest(&desired), digest(&desired_of("10.244.1.7")));
}

/// Returns a node's objects: a Service with this endpoint.
fn desired_of(endpoint: &str) -> Desired {
    let web = service("web").cluster_ip("10.96.0.1").tcp(80);
    let endpoints = slice("web-1", "web").tcp(8080).ready(endpoint);
    desired([web.into(), endpoints.into()])
}

/// Returns the digest of the endpoints of the first Service.
fn digest(desired: &Desired) -> String {
    let mut views = views(&desired.snapshot(), &Counts::default());
    Row::new(views.remove(0)).shape.endpoints
}
