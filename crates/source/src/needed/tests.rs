//! Generates objects with nulls, missing fields and unknown fields everywhere. Kubernetes' own
//! types are the counter-example: they refuse objects that the API server stores.

use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Value, json};

use super::*;
use k8s_openapi::api::core::v1::{self as core, Node};
use k8s_openapi::api::discovery::v1 as discovery;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use proxy_core::compact::{Compact, EndpointSlice, LocalPod, LocalRedirect, Service};

/// A step from a value to an inner value.
type Step = String;

/// A change of an object at one place.
#[derive(Clone, Debug)]
enum Edit {
    /// A null in place of the value.
    Null(Index),
    /// Removal of the value.
    Remove(Index),
    /// An unknown field, or a null item.
    Add(Index, Value),
    /// Another value in place of a value that kpx does not need.
    Spoil(Index, Value),
}

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-1e9..1e9).prop_map(Value::from),
        "\\PC{0,6}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::btree_map("[a-z]{1,5}", inner, 0..3)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let edit = prop_oneof![
        any::<Index>().prop_map(Edit::Null),
        any::<Index>().prop_map(Edit::Remove),
        (any::<Index>(), any_value()).prop_map(|(at, value)| Edit::Add(at, value)),
        (any::<Index>(), any_value()).prop_map(|(at, value)| Edit::Spoil(at, value)),
    ];
    prop::collection::vec(edit, 1..6)
}

/// Returns the places of all values within `value`, as JSON pointers.
fn places(value: &Value, at: &str, found: &mut Vec<Step>) {
    let within = |key: String, value: &Value, found: &mut Vec<Step>| {
        let at = format!("{at}/{}", key.replace('~', "~0").replace('/', "~1"));
        found.push(at.clone());
        places(value, &at, found);
    };
    match value {
        Value::Object(fields) => fields
            .iter()
            .for_each(|(key, value)| within(key.clone(), value, found)),
        Value::Array(items) => items
            .iter()
            .enumerate()
            .for_each(|(n, item)| within(n.to_string(), item, found)),
        _ => {}
    }
}

fn needed_at(needed: Needed, place: &str) -> bool {
    let steps = place
        .split('/')
        .skip(1)
        .map(|step| step.replace("~1", "/").replace("~0", "~"));
    let is_index = |step: &str| step.parse::<usize>().is_ok();
    let mut needed = Some(needed);
    for step in steps.filter(|step| !is_index(step)) {
        needed = needed.and_then(|needed| needed.of(&step));
    }
    needed.is_some()
}

/// Edits `object`, and `same` without nulls and unknown fields. kpx must read equal objects from
/// both.
fn edit(object: &mut Value, same: &mut Value, edit: &Edit, needed: Needed) {
    // Only places in both objects are edited.
    let mut all = Vec::new();
    places(same, "", &mut all);
    let pick = |at: &Index| (!all.is_empty()).then(|| at.get(&all).clone());
    match edit {
        Edit::Null(at) => {
            let Some(place) = pick(at) else { return };
            *object.pointer_mut(&place).unwrap() = Value::Null;
            // Items keep their numbers until the end.
            *same.pointer_mut(&place).unwrap() = Value::Null;
        }
        Edit::Remove(at) => {
            let Some(place) = pick(at) else { return };
            for value in [object, same] {
                let (parent, key) = place.rsplit_once('/').unwrap();
                let key = key.replace("~1", "/").replace("~0", "~");
                match value.pointer_mut(parent).unwrap() {
                    Value::Object(fields) => drop(fields.remove(&key)),
                    Value::Array(items) => drop(items.remove(key.parse().unwrap())),
                    _ => unreachable!("{place}"),
                }
            }
        }
        Edit::Add(at, value) => {
            let parent = pick(at).unwrap_or_default();
            for (target, is_same) in [(object, false), (same, true)] {
                match target.pointer_mut(&parent).unwrap() {
                    // Maps of texts have no fields: any key is needed there.
                    Value::Object(fields)
                        if !needed_at(needed, &format!("{parent}/newInTheAPI")) =>
                    {
                        let value = if is_same { Value::Null } else { value.clone() };
                        fields.insert("newInTheAPI".to_owned(), value);
                    }
                    Value::Array(items) => items.push(Value::Null),
                    _ => {}
                }
            }
        }
        Edit::Spoil(at, value) => {
            let Some(place) = pick(at).filter(|place| !needed_at(needed, place)) else {
                return;
            };
            *object.pointer_mut(&place).unwrap() = value.clone();
            *same.pointer_mut(&place).unwrap() = Value::Null;
        }
    }
}

fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let fields = fields.into_iter().filter(|(_, value)| !value.is_null());
            Value::Object(
                fields
                    .map(|(key, value)| (key, without_nulls(value)))
                    .collect(),
            )
        }
        Value::Array(items) => items
            .into_iter()
            .filter(|item| !item.is_null())
            .map(without_nulls)
            .collect(),
        other => other,
    }
}

/// Returns the compact form of an object.
fn kept<K: Compact>(object: &Value) -> Result<K, Misread> {
    read::<K::Object>(&object.to_string(), K::NEEDED).map(K::compact)
}

/// Returns how many of the edited objects Kubernetes' own types refuse.
fn holds_for<K>(object: &Value) -> usize
where
    K: Compact + PartialEq + fmt::Debug,
{
    let mut runner = proptest::test_runner::TestRunner::default();
    let refused = std::cell::Cell::new(0);
    let checked = runner.run(&edits(), |edits| {
        let mut edited = object.clone();
        let mut same = object.clone();
        edits
            .iter()
            .for_each(|one| edit(&mut edited, &mut same, one, K::NEEDED));
        let of_edited =
            kept::<K>(&edited).map_err(|why| TestCaseError::fail(format!("{why} of {edited}")))?;
        let of_same =
            kept::<K>(&without_nulls(same)).map_err(|why| TestCaseError::fail(why.to_string()))?;
        prop_assert_eq!(of_edited, of_same, "{}", edited);
        refused
            .set(refused.get() + usize::from(serde_json::from_value::<K::Object>(edited).is_err()));
        Ok(())
    });
    checked.unwrap_or_else(|error| panic!("{error}"));
    refused.get()
}

#[test]
fn nothing_but_needed_fields_can_refuse_an_object() {
    let refused = [
        ("Service", holds_for::<Service>(&service())),
        ("EndpointSlice", holds_for::<EndpointSlice>(&slice())),
        ("Node", holds_for::<Node>(&node())),
        ("ServiceCIDR", holds_for::<ServiceCIDR>(&service_cidr())),
        ("Pod", holds_for::<LocalPod>(&pod())),
        (
            "LocalRedirect",
            holds_for::<LocalRedirect>(&local_redirect()),
        ),
    ];
    for (kind, refused) in refused {
        assert!(
            refused > 0,
            "the types of {kind} refuse none of the objects, so these show nothing"
        );
    }
}

/// Kubernetes' types verify that the needed fields include all that kpx keeps of an object.
#[test]
fn needed_fields_suffice_for_what_is_kept() {
    fn check<K: Compact + PartialEq + fmt::Debug>(object: &Value) {
        let whole: K::Object = serde_json::from_value(object.clone()).unwrap();
        assert_eq!(kept::<K>(object).unwrap(), K::compact(whole));
    }
    check::<Service>(&service());
    check::<EndpointSlice>(&slice());
    check::<LocalPod>(&pod());
}

/// A heartbeat repeats tens of kilobytes.
#[test]
fn heartbeat_changes_nothing_of_a_node() {
    let mut later = node();
    later["metadata"]["resourceVersion"] = json!("18");
    later["metadata"]["annotations"]["other"] = json!("changed");
    later["status"]["conditions"][0]["lastHeartbeatTime"] = json!("2026-01-02T03:04:15Z");
    later["status"]["conditions"]
        .as_array_mut()
        .unwrap()
        .push(json!({ "type": "DiskPressure", "status": "False" }));
    later["status"]["images"] = json!([]);
    let now: Node = kept(&later).unwrap();
    assert_eq!(now, kept::<Node>(&node()).unwrap());
    let text = serde_json::to_string(&now).unwrap();
    assert!(text.contains("Ready") && !text.contains("images"), "{text}");
}

#[test]
fn needed_field_of_the_wrong_shape_is_named() {
    let wrong = json!({ "wrong": true });
    for (object, needed, read_as) in [
        (
            service(),
            Service::NEEDED,
            kept_error::<Service> as fn(&Value) -> Option<Misread>,
        ),
        (slice(), EndpointSlice::NEEDED, kept_error::<EndpointSlice>),
        (node(), Node::NEEDED, kept_error::<Node>),
        (
            service_cidr(),
            ServiceCIDR::NEEDED,
            kept_error::<ServiceCIDR>,
        ),
        (pod(), LocalPod::NEEDED, kept_error::<LocalPod>),
        (
            local_redirect(),
            LocalRedirect::NEEDED,
            kept_error::<LocalRedirect>,
        ),
    ] {
        let mut all = Vec::new();
        places(&object, "", &mut all);
        let is_leaf = |place: &&Step| {
            object
                .pointer(place)
                .is_some_and(|value| !value.is_object())
        };
        let mut named = 0;
        for place in all
            .iter()
            .filter(is_leaf)
            .filter(|place| needed_at(needed, place))
        {
            let mut broken = object.clone();
            *broken.pointer_mut(place).unwrap() = wrong.clone();
            let Misread { field, why } =
                read_as(&broken).unwrap_or_else(|| panic!("{place} is read as {wrong}"));
            let dotted = place
                .split('/')
                .skip(1)
                .map(|step| match step.parse::<usize>() {
                    Ok(index) => format!("[{index}]"),
                    Err(_) => format!(".{}", step.replace("~1", "/")),
                });
            assert_eq!(format!(".{field}"), dotted.collect::<String>(), "{why}");
            assert!(why.contains("expected"), "{why}");
            named += 1;
        }
        assert!(named > 3, "{named} fields of {object}");
    }
}

fn kept_error<K: Compact>(object: &Value) -> Option<Misread> {
    kept::<K>(object).err()
}

#[test]
fn text_that_is_no_object_is_refused_as_a_whole() {
    for text in ["", "{\"metadata\": ", "7", "[]"] {
        let misread = read::<core::Service>(text, Service::NEEDED).unwrap_err();
        assert_eq!(misread.field, "", "{text}: {misread}");
    }
    let _: discovery::EndpointSlice = read("{}", EndpointSlice::NEEDED).unwrap();
}

fn metadata() -> Value {
    json!({
        "name": "web", "namespace": "shop", "uid": "u-1", "resourceVersion": "17", "generation": 3,
        "creationTimestamp": "2026-01-02T03:04:05Z",
        "labels": { "app": "web", "kubernetes.io/service-name": "web", "topology.kubernetes.io/zone": "a" },
        "annotations": { "kpx.dev/lb-algorithm": "maglev", "kpx.dev/weight": "3", "other": "text" },
        "ownerReferences": [{ "apiVersion": "v1", "kind": "Service", "name": "web", "uid": "u" }],
        "managedFields": [{ "manager": "m", "operation": "Update", "time": "2026-01-02T03:04:05Z", "fieldsV1": { "f:spec": {} } }],
    })
}

fn condition() -> Value {
    json!({
        "type": "Ready", "status": "True", "lastTransitionTime": "2026-01-02T03:04:05Z", "reason": "r", "message": "m",
        "lastHeartbeatTime": "2026-01-02T03:04:05Z", "observedGeneration": 2,
    })
}

fn service() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": metadata(),
        "spec": {
            "type": "LoadBalancer", "clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1", "fd00::1"],
            "ipFamilies": ["IPv4", "IPv6"], "ipFamilyPolicy": "RequireDualStack", "externalName": "web.example",
            "ports": [
                { "name": "http", "protocol": "TCP", "port": 80, "nodePort": 30080, "targetPort": 8080, "appProtocol": "h2c" },
                { "name": "dns", "protocol": "UDP", "port": 53, "targetPort": "dns" },
            ],
            "externalIPs": ["192.0.2.1"], "internalTrafficPolicy": "Local", "externalTrafficPolicy": "Cluster",
            "sessionAffinity": "ClientIP", "sessionAffinityConfig": { "clientIP": { "timeoutSeconds": 5 } },
            "healthCheckNodePort": 30081, "loadBalancerSourceRanges": ["192.0.2.0/24"], "selector": { "app": "web" },
        },
        "status": {
            "loadBalancer": { "ingress": [{ "ip": "192.0.2.2", "ipMode": "VIP", "ports": [{ "port": 80, "protocol": "TCP" }] }] },
            "conditions": [condition()],
        },
    })
}

fn slice() -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "metadata": metadata(), "addressType": "IPv4",
        "ports": [{ "name": "http", "protocol": "TCP", "port": 8080, "appProtocol": "h2c" }],
        "endpoints": [{
            "addresses": ["10.0.0.1"], "conditions": { "ready": true, "serving": true, "terminating": false },
            "hostname": "web-0", "nodeName": "n1", "zone": "a",
            "hints": { "forNodes": [{ "name": "n1" }], "forZones": [{ "name": "a" }] },
            "targetRef": { "kind": "Pod", "namespace": "shop", "name": "web-0", "uid": "u" },
            "deprecatedTopology": { "a": "b" },
        }],
    })
}

fn node() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": metadata(),
        "spec": {
            "podCIDR": "10.0.0.0/24", "podCIDRs": ["10.0.0.0/24"], "unschedulable": true,
            "taints": [{ "key": "node.kubernetes.io/unreachable", "effect": "NoSchedule", "timeAdded": "2026-01-02T03:04:05Z" }],
        },
        "status": {
            "addresses": [{ "type": "InternalIP", "address": "192.0.2.1" }], "conditions": [condition()],
            "images": [{ "names": ["a"], "sizeBytes": 7 }], "capacity": { "cpu": "2" },
        },
    })
}

fn service_cidr() -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": metadata(),
        "spec": { "cidrs": ["10.96.0.0/16", "fd00::/112"] }, "status": { "conditions": [condition()] },
    })
}

fn pod() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": metadata(),
        "spec": {
            "hostNetwork": true, "runtimeClassName": "gvisor", "nodeName": "n1",
            "containers": [{ "name": "a", "image": "b", "ports": [{ "name": "http", "protocol": "TCP", "containerPort": 80 }] }],
            "initContainers": [{ "name": "istio-proxy", "ports": [{ "name": "x", "protocol": "UDP", "containerPort": 5 }] }],
            "volumes": [{ "name": "v", "emptyDir": {} }],
        },
        "status": {
            "phase": "Running", "conditions": [condition()], "podIP": "10.0.0.1", "podIPs": [{ "ip": "10.0.0.1" }],
            "startTime": "2026-01-02T03:04:05Z",
        },
    })
}

fn local_redirect() -> Value {
    let ports = json!([{ "name": "dns", "port": "53", "protocol": "UDP" }]);
    json!({
        "apiVersion": "kpx.dev/v1alpha1", "kind": "LocalRedirect", "metadata": metadata(),
        "spec": {
            "redirectFrontend": {
                "serviceMatcher": { "serviceName": "web", "namespace": "shop", "toPorts": ports },
                "addressMatcher": { "ip": "192.0.2.1", "toPorts": ports },
            },
            "redirectBackend": {
                "localEndpointSelector": { "matchLabels": { "a": "b" }, "matchExpressions": [{ "key": "a", "operator": "In", "values": ["b"] }] },
                "toPorts": ports,
            },
            "skipRedirectFromBackend": true, "description": "text",
        },
        "status": { "conditions": [condition()] },
    })
}
