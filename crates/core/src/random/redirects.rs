//! Random Pods, and LocalRedirects of Services and addresses, some of which collide.

use ipnet::IpNet;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

use crate::builders::object_name;
use crate::compact::{Compact, LocalPod, LocalRedirect};
use crate::input::{Input, Update};
use crate::model::ModelOptions;

const PODS: [&str; 3] = ["default/p", "default/q", "other/p"];
const REDIRECTS: [&str; 3] = ["default/r", "default/s", "other/r"];

/// Returns options that permit most of the objects' addresses.
pub(crate) fn options() -> ModelOptions {
    let permitted = [
        "192.0.2.0/24",
        "169.254.169.254/32",
        "10.96.0.0/16",
        "10.244.0.0/30",
        "2001:db8::/64",
    ];
    let redirect_addresses = permitted.map(|net| net.parse::<IpNet>().unwrap()).to_vec();
    ModelOptions {
        has_redirects: true,
        redirect_addresses,
        ..ModelOptions::default()
    }
}

/// Generates an input about one Pod or LocalRedirect.
pub(crate) fn input() -> impl Strategy<Value = Input> {
    prop_oneof![
        4 => pod().prop_map(|pod| Input::Pod(Update::Put(Box::new(LocalPod::compact(read(pod)))))),
        1 => select(PODS.to_vec()).prop_map(|name| Input::Pod(Update::Del(object_name(name)))),
        4 => redirect().prop_map(|object| Input::LocalRedirect(Update::Put(Box::new(LocalRedirect::compact(read(object)))))),
        1 => select(REDIRECTS.to_vec()).prop_map(|name| Input::LocalRedirect(Update::Del(object_name(name)))),
    ]
}

fn read<K: serde::de::DeserializeOwned>(object: Value) -> K {
    serde_json::from_value(object).unwrap()
}

fn metadata(name: &str) -> Value {
    let name = object_name(name);
    json!({ "namespace": &*name.namespace, "name": &*name.name, "uid": &*name.name })
}

fn pod() -> impl Strategy<Value = Value> {
    let app = select(vec!["cache", "cache", "web"]);
    let ips = select(vec![
        vec!["10.244.0.1"],
        vec!["10.244.0.2", "fd00:244::2"],
        vec!["fd00:244::1"],
        vec![],
    ]);
    (select(PODS.to_vec()), app, ips, any::<bool>(), any::<bool>()).prop_map(|(name, app, ips, is_ready, is_hosts)| {
        let mut metadata = metadata(name);
        metadata["labels"] = json!({ "app": app });
        let ips: Vec<_> = ips.into_iter().map(|ip| json!({ "ip": ip })).collect();
        let status = if is_ready { "True" } else { "False" };
        json!({
            "metadata": metadata,
            "spec": { "hostNetwork": is_hosts, "containers": [{ "name": "main", "ports": [
                { "name": "http", "protocol": "TCP", "containerPort": 8181 },
            ] }] },
            "status": { "phase": "Running", "podIPs": ips, "conditions": [{ "type": "Ready", "status": status }] },
        })
    })
}

fn redirect() -> impl Strategy<Value = Value> {
    let ports = || {
        let tcp = json!({ "port": "80", "protocol": "TCP" });
        let udp = json!({ "port": "53", "protocol": "UDP" });
        select(vec![
            json!([tcp]),
            json!([udp]),
            json!([{ "name": "http", "port": "80", "protocol": "TCP" }]),
            json!([]),
        ])
    };
    let ips = vec![
        "192.0.2.1",
        "169.254.169.254",
        "10.96.0.1",
        "10.244.0.2",
        "2001:db8::1",
        "198.51.100.7",
        "none",
    ];
    let of_address = (select(ips), ports())
        .prop_map(|(ip, ports)| json!({ "addressMatcher": { "ip": ip, "toPorts": ports } }));
    let of_service = (select(vec!["a", "b", "none"]), select(vec!["default", "other"]), ports()).prop_map(
        |(name, namespace, ports)| {
            json!({ "serviceMatcher": { "serviceName": name, "namespace": namespace, "toPorts": ports } })
        },
    );
    let frontend = prop_oneof![of_address, of_service];
    (select(REDIRECTS.to_vec()), frontend, ports(), any::<bool>()).prop_map(|(name, frontend, ports, spares)| {
        json!({
            "metadata": metadata(name),
            "spec": {
                "redirectFrontend": frontend,
                "redirectBackend": { "localEndpointSelector": { "matchLabels": { "app": "cache" } }, "toPorts": ports },
                "skipRedirectFromBackend": spares,
            },
        })
    })
}
