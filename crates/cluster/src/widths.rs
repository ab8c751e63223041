//! The tables on terminals of 80, 100 and 120 columns.

use clap::Parser;
use proxy_view::flow_args::FlowArgs;
use proxy_view::list::BackendOrder;
use proxy_view::output::Form;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::answers::Answers;
use crate::{backends, events, flows, services, status};

const WIDTHS: [u16; 3] = [80, 100, 120];
const NOTE: &str =
    "spec.ports[0].nodePort: IPv4 *:30080/tcp is held by Service shop/web since 2026-01-02";

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    flows: FlowArgs,
}

/// Returns the answers of two nodes. `object` creates a node's object.
fn answers<T: DeserializeOwned>(object: impl Fn(u8) -> Value) -> Answers<T> {
    let answer = |nth| serde_json::from_value(object(nth)).unwrap();
    Answers::of([("worker-1", answer(1)), ("worker-2", answer(2))])
}

fn backend(nth: u8) -> Value {
    json!({
        "address": format!("10.244.{nth}.10:8080"), "pod": format!("shop/web-7db6d8ff4d-abcd{nth}"),
        "node": format!("worker-{nth}"), "zone": null, "ready": true, "serving": true, "terminating": false, "local": true,
        "inClusterSet": true, "inLocalSet": true, "flows": nth,
    })
}

fn service(nth: u8) -> Value {
    let port = json!({
        "name": "http", "protocol": "TCP", "port": 80, "nodePort": 30080, "frontends": [], "backends": [backend(nth)],
        "counts": {
            "flowsOpened": 0, "flows": nth, "packets": 0, "bytes": 0, "packetsReturned": 0, "bytesReturned": 0, "refused": 0,
        },
    });
    json!([{
        "namespace": "shop", "name": format!("web-frontend-{nth}"), "type": "LoadBalancer", "created": null,
        "clusterIps": ["10.96.0.1", "fd00:10:96::1"], "externalIps": [], "loadBalancerIps": [],
        "internalTrafficPolicy": "Cluster", "externalTrafficPolicy": "Cluster", "affinitySecs": null,
        "healthCheckNodePort": null, "algorithm": "random", "ports": [port],
    }])
}

fn backend_row(nth: u8) -> Value {
    let mut row = backend(nth);
    row.as_object_mut().unwrap().extend(
        json!({ "namespace": "shop", "service": "web", "portName": "http", "protocol": "TCP", "port": 80 })
            .as_object()
            .unwrap()
            .clone(),
    );
    json!([row])
}

fn flow(nth: u8) -> Value {
    json!([{
        "protocol": "TCP", "client": format!("10.244.{nth}.20:40000"), "frontend": "10.96.0.10:80",
        "backend": format!("10.244.{nth}.10:8080"), "source": format!("10.244.{nth}.20:40000"), "masqueraded": false,
        "fromNode": false, "state": "established", "idleSecs": nth, "timeoutSecs": 86_400,
        "service": { "namespace": "shop", "name": "web", "portName": "http" },
    }])
}

fn event(nth: u8) -> Value {
    let time = "2026-01-02T03:04:05Z";
    json!([{
        "firstSeen": time, "lastSeen": time, "count": nth, "type": "Warning", "reason": "FrontendConflict", "kind": "Service",
        "namespace": "shop", "name": format!("web-{nth}"), "note": NOTE,
    }])
}

fn state(nth: u8) -> Value {
    json!({
        "version": format!("0.1.{nth}"), "started": "2026-01-02T03:04:05Z", "mode": "node", "nodeName": "n", "nodeAddresses": [],
        "options": {
            "masquerade": "default", "masqueradeAll": false, "localPods": "none", "nodePortAddresses": "all",
            "clusterIpExternal": true, "fastPath": "auto: on",
        },
        "healthy": true, "complete": true, "lastSync": null, "syncs": 3, "skipped": [], "devices": [],
        "problems": [{ "what": "kpx_ingress", "why": NOTE, "since": "2026-01-02T03:04:05Z" }],
        "tables": {}, "flows": {}, "events": {}, "reasons": {}, "maps": {}, "mapFill": {}, "programs": {},
    })
}

#[test]
fn tables_fit_terminals_without_cut_values() {
    let line = Line::parse_from(["kpx"]);
    let texts = |form: Form| {
        [
            ("status", status::text(&answers(state), form)),
            ("services", services::text(&answers(service), form)),
            (
                "backends",
                backends::text(&answers(backend_row), BackendOrder::default(), form),
            ),
            ("flows", flows::text(&answers(flow), &line.flows, form)),
            ("events", events::text(&answers(event), form)),
        ]
    };
    let form = |width| Form {
        headers: true,
        width,
        ..Form::default()
    };
    let mut headers = Vec::new();
    for width in WIDTHS {
        let whole = texts(form(None));
        for ((command, text), (_, whole)) in texts(form(Some(width))).into_iter().zip(whole) {
            println!("{width} columns, kubectl kpx {command}:\n{text}");
            let words: Vec<_> = whole.split_whitespace().collect();
            let cut = text.split_whitespace().find(|word| !words.contains(word));
            assert_eq!(cut, None, "{command} at {width}: {text}");
            let longest = text.lines().map(|line| line.chars().count()).max();
            assert!(
                longest <= Some(width.into()),
                "{command} at {width}: {text}"
            );
            let header = text.lines().next().unwrap_or_default();
            let header: Vec<_> = header.split_whitespace().collect();
            headers.push(format!("{width} {command}: {}", header.join(" ")));
        }
    }
    let expected = [
        "80 status: NODE HEALTH VERSION UP FLOWS UNSERVED FAST-PATH PROBLEMS",
        "80 services: NODE NAMESPACE NAME CLUSTER-IP PORT(S) BACKENDS",
        "80 backends: NODE SERVICE PORT ADDRESS POD STATE",
        "80 flows: NODE CLIENT SERVICE BACKEND STATE",
        "80 events: NODE LAST-SEEN OBJECT COUNT NOTE",
        "100 status: NODE HEALTH VERSION UP SERVICES FLOWS UNSERVED FAST-PATH PROBLEMS",
        "100 services: NODE NAMESPACE NAME CLUSTER-IP PORT(S) BACKENDS FLOWS",
        "100 backends: NODE SERVICE PORT ADDRESS POD ON STATE FLOWS",
        "100 flows: NODE CLIENT SERVICE BACKEND STATE IDLE",
        "100 events: NODE LAST-SEEN REASON OBJECT COUNT NOTE",
        "120 status: NODE HEALTH VERSION UP SERVICES FLOWS UNSERVED FAST-PATH PROBLEMS",
        "120 services: NODE NAMESPACE NAME TYPE CLUSTER-IP PORT(S) BACKENDS FLOWS",
        "120 backends: NODE SERVICE PORT ADDRESS POD ON STATE FLOWS",
        "120 flows: NODE CLIENT SERVICE BACKEND STATE IDLE",
        "120 events: NODE LAST-SEEN TYPE REASON OBJECT COUNT NOTE",
    ];
    assert_eq!(headers, expected);
}
