//! The served kinds and their particulars.

use k8s_openapi::Resource;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Endpoints, Event as CoreEvent, Namespace, Node, Pod, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::networking::v1::{NetworkPolicy, ServiceCIDR};
use proxy_core::compact::LocalRedirect;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

/// A kind in the only version of its group.
#[derive(Debug)]
pub(crate) struct Kind {
    /// Empty for the core group.
    pub(crate) group: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) singular: &'static str,
    pub(crate) plural: &'static str,
    pub(crate) short: &'static [&'static str],
    pub(crate) namespaced: bool,
    pub(crate) status: Status,
    /// The selectable fields in addition to name and namespace.
    pub(crate) fields: &'static [&'static str],
    /// The lists that a strategic merge patch merges: path of the list, and the key field of its
    /// items (empty for plain values).
    pub(crate) merge_keys: &'static [(&'static str, &'static str)],
    /// Decodes and re-encodes an object: checks types, drops unknown fields.
    pub(crate) decode: fn(&Value) -> serde_json::Result<Value>,
}

/// The way to write an object's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// The kind has no status.
    None,
    /// Only through the subresource.
    Apart,
    /// Through the subresource, and with the object at creation.
    WithCreation,
}

pub(crate) static NAMESPACE: &Kind = &KINDS[2];
pub(crate) static SERVICE: &Kind = &KINDS[0];
pub(crate) static SERVICE_CIDR: &Kind = &KINDS[4];

pub(crate) static KINDS: [Kind; 12] = [
    Kind {
        group: "",
        kind: "Service",
        singular: "service",
        plural: "services",
        short: &["svc"],
        namespaced: true,
        status: Status::Apart,
        fields: &["spec.clusterIP", "spec.type"],
        merge_keys: &[("spec.ports", "port"), ("status.conditions", "type")],
        decode: decode::<Service>,
    },
    Kind {
        group: "",
        kind: "Node",
        singular: "node",
        plural: "nodes",
        short: &["no"],
        namespaced: false,
        status: Status::WithCreation,
        fields: &["spec.unschedulable"],
        merge_keys: &[
            ("spec.podCIDRs", ""),
            ("status.addresses", "type"),
            ("status.conditions", "type"),
        ],
        decode: decode::<Node>,
    },
    Kind {
        group: "",
        kind: "Namespace",
        singular: "namespace",
        plural: "namespaces",
        short: &["ns"],
        namespaced: false,
        status: Status::Apart,
        fields: &["status.phase"],
        merge_keys: &[("status.conditions", "type")],
        decode: decode::<Namespace>,
    },
    Kind {
        group: "discovery.k8s.io",
        kind: "EndpointSlice",
        singular: "endpointslice",
        plural: "endpointslices",
        short: &[],
        namespaced: true,
        status: Status::None,
        fields: &[],
        merge_keys: &[],
        decode: decode::<EndpointSlice>,
    },
    Kind {
        group: "networking.k8s.io",
        kind: "ServiceCIDR",
        singular: "servicecidr",
        plural: "servicecidrs",
        short: &[],
        namespaced: false,
        status: Status::Apart,
        fields: &[],
        merge_keys: &[("status.conditions", "type")],
        decode: decode::<ServiceCIDR>,
    },
    Kind {
        group: "",
        kind: "Event",
        singular: "event",
        plural: "events",
        short: &["ev"],
        namespaced: true,
        status: Status::None,
        fields: &[
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "reason",
            "type",
        ],
        merge_keys: &[],
        decode: decode::<CoreEvent>,
    },
    Kind {
        group: "events.k8s.io",
        kind: "Event",
        singular: "event",
        plural: "events",
        short: &["ev"],
        namespaced: true,
        status: Status::None,
        fields: &[],
        merge_keys: &[],
        decode: decode::<Event>,
    },
    Kind {
        group: "",
        kind: "Pod",
        singular: "pod",
        plural: "pods",
        short: &["po"],
        namespaced: true,
        status: Status::WithCreation,
        fields: &["spec.nodeName", "status.phase", "status.podIP"],
        merge_keys: &[("spec.containers", "name"), ("status.conditions", "type")],
        decode: decode::<Pod>,
    },
    Kind {
        group: "",
        kind: "Endpoints",
        singular: "endpoints",
        plural: "endpoints",
        short: &["ep"],
        namespaced: true,
        status: Status::None,
        fields: &[],
        merge_keys: &[],
        decode: decode::<Endpoints>,
    },
    Kind {
        group: "networking.k8s.io",
        kind: "NetworkPolicy",
        singular: "networkpolicy",
        plural: "networkpolicies",
        short: &["netpol"],
        namespaced: true,
        status: Status::None,
        fields: &[],
        merge_keys: &[],
        decode: decode::<NetworkPolicy>,
    },
    Kind {
        group: "kpx.dev",
        kind: "LocalRedirect",
        singular: "localredirect",
        plural: "localredirects",
        short: &["lr"],
        namespaced: true,
        status: Status::None,
        fields: &[],
        merge_keys: &[],
        decode: decode_own::<LocalRedirect>,
    },
    Kind {
        group: "coordination.k8s.io",
        kind: "Lease",
        singular: "lease",
        plural: "leases",
        short: &[],
        namespaced: true,
        status: Status::None,
        fields: &[],
        merge_keys: &[],
        decode: decode::<Lease>,
    },
];

pub(crate) fn version(group: &str) -> &'static str {
    if group == "kpx.dev" { "v1alpha1" } else { "v1" }
}

impl Kind {
    /// Returns the kind in an object's `apiVersion` and `kind`.
    pub(crate) fn of(object: &Value) -> Option<&'static Self> {
        let version = object["apiVersion"].as_str()?;
        let kind = object["kind"].as_str()?;
        KINDS
            .iter()
            .find(|k| k.kind == kind && k.api_version() == version)
    }

    /// Returns the kind of a path.
    pub(crate) fn at(group: &str, plural: &str) -> Option<&'static Self> {
        KINDS
            .iter()
            .find(|k| k.group == group && k.plural == plural)
    }

    /// Returns the kind with this name: its kind, plural or singular.
    pub(crate) fn named(name: &str) -> Option<&'static Self> {
        KINDS
            .iter()
            .find(|k| [k.kind, k.plural, k.singular].contains(&name))
    }

    pub(crate) fn api_version(&self) -> String {
        api_version(self.group)
    }

    /// Returns the resource with its group: `endpointslices.discovery.k8s.io`.
    pub(crate) fn resource(&self) -> String {
        if self.group.is_empty() {
            self.plural.to_owned()
        } else {
            format!("{}.{}", self.plural, self.group)
        }
    }
}

pub(crate) fn api_version(group: &str) -> String {
    if group.is_empty() {
        version(group).to_owned()
    } else {
        format!("{group}/{}", version(group))
    }
}

/// Decodes like `decode`, for a type that does not write its kind.
fn decode_own<K: Resource + Serialize + DeserializeOwned>(
    object: &Value,
) -> serde_json::Result<Value> {
    let mut decoded = decode::<K>(object)?;
    decoded["apiVersion"] = K::API_VERSION.into();
    decoded["kind"] = K::KIND.into();
    Ok(decoded)
}

fn decode<K: Serialize + DeserializeOwned>(object: &Value) -> serde_json::Result<Value> {
    serde_json::to_value(K::deserialize(object)?)
}
