//! Generates random EndpointSlices of a Service.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use rand::RngExt;
use serde_json::{Value, json};

use crate::reference::cluster::object;
use crate::reference::generate::{Dice, one};
use crate::reference::place::{BRIDGED, FAR, FARTHER, Family, NODES, Net, PODS};

/// The places of endpoints, with their usual node.
const PLACES: [(Net, u8, &str); 9] = [
    (PODS, 10, "here"),
    (PODS, 11, "here"),
    (BRIDGED, 10, "here"),
    (BRIDGED, 11, "here"),
    (NODES, 11, "here"),
    (NODES, 12, "there"),
    (FAR, 10, "there"),
    (FAR, 11, "there"),
    (FARTHER, 10, "there"),
];

/// The hints on the endpoints of a Service.
#[derive(Clone, Copy)]
enum Hints {
    None,
    Zones,
    /// The controller's hints for PreferSameNode.
    NodesAndZones,
    /// Hints on some endpoints only.
    Mixed,
}

/// Returns up to three slices for each family, which may repeat an endpoint. Its records agree,
/// except that only one may be terminating.
pub fn of(dice: &mut Dice, service: &Service) -> Vec<EndpointSlice> {
    let hints = one(
        dice,
        &[
            Hints::None,
            Hints::None,
            Hints::Zones,
            Hints::NodesAndZones,
            Hints::Mixed,
        ],
    );
    let is_quiet = dice.random_bool(0.2);
    let mut known: BTreeMap<IpAddr, Value> = BTreeMap::new();
    let mut slices = Vec::new();
    for family in Family::ALL {
        for index in 0..one(dice, &[0, 1, 1, 2, 2, 3]) {
            let mut endpoints = Vec::new();
            for _ in 0..dice.random_range(0..6) {
                let (net, host, node) = one(dice, &PLACES);
                let addr = net.addr(family, host);
                let facts = known
                    .entry(addr)
                    .or_insert_with(|| endpoint(dice, addr, node, hints, is_quiet));
                let mut listed = facts.clone();
                if listed["conditions"]["terminating"] != true && dice.random_bool(0.1) {
                    listed["conditions"] =
                        json!({ "ready": false, "serving": true, "terminating": true });
                }
                endpoints.push(listed);
            }
            slices.push(slice(dice, service, family, index, endpoints));
        }
    }
    slices
}

fn slice(
    dice: &mut Dice,
    service: &Service,
    family: Family,
    index: u8,
    endpoints: Vec<Value>,
) -> EndpointSlice {
    let name = service.metadata.name.as_deref();
    let namespace = service.metadata.namespace.as_deref();
    let name = name.expect("a Service has a name");
    let ports = service
        .spec
        .iter()
        .flat_map(|spec| spec.ports.iter().flatten());
    let ports = ports.filter_map(|port| {
        let number = one(dice, &[8_080, 8_080, 9_090]);
        let listed = json!({ "name": port.name.as_deref().unwrap_or(""), "protocol": port.protocol, "port": number });
        dice.random_bool(0.9).then_some(listed)
    });
    let ports: Vec<_> = ports.collect();
    let mut labels = json!({ "kubernetes.io/service-name": name });
    if dice.random_bool(0.03) {
        labels["service.kubernetes.io/headless"] = "".into();
    }
    let name = format!("{name}-{}-{index}", family.name().to_lowercase());
    object(json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": { "namespace": namespace, "name": name, "labels": labels },
        "addressType": family.name(),
        "ports": ports,
        "endpoints": endpoints,
    }))
}

fn endpoint(dice: &mut Dice, addr: IpAddr, node: &str, hints: Hints, is_quiet: bool) -> Value {
    let conditions = match dice.random_range(0..20) {
        // No endpoint is ready.
        _ if is_quiet => {
            let (serving, terminating) = one(
                dice,
                &[(false, false), (true, true), (true, true), (false, true)],
            );
            json!({ "ready": false, "serving": serving, "terminating": terminating })
        }
        0 | 1 => json!({ "ready": false, "serving": false, "terminating": false }),
        2 => json!({ "ready": false, "serving": true, "terminating": false }),
        3..=5 => json!({ "ready": false, "serving": true, "terminating": true }),
        6 => json!({ "ready": false, "serving": false, "terminating": true }),
        // publishNotReadyAddresses
        7 => json!({ "ready": true, "serving": false, "terminating": true }),
        8 => json!({}),
        9 => json!({ "terminating": true }),
        _ => json!({ "ready": true, "serving": true, "terminating": false }),
    };
    let node = match dice.random_range(0..20) {
        0 => Value::Null,
        // An address of a pod network on the wrong node.
        1 => one(dice, &["here", "there"]).into(),
        _ => node.into(),
    };
    let zones = json!([{ "name": one(dice, &["east", "west", "north"]) }]);
    let nodes = json!([{ "name": one(dice, &["here", "there", "there"]) }]);
    let hints = match hints {
        Hints::Zones => json!({ "forZones": zones }),
        Hints::NodesAndZones => json!({ "forZones": zones, "forNodes": nodes }),
        Hints::Mixed if dice.random_bool(0.5) => json!({ "forZones": zones }),
        Hints::Mixed | Hints::None => Value::Null,
    };
    json!({ "addresses": [addr], "conditions": conditions, "nodeName": node, "hints": hints })
}
