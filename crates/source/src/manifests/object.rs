//! Decodes objects as `kubectl apply` would accept them.

use std::fmt::{self, Display};

use k8s_openapi::Resource as _;
use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::core::ObjectMeta;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::validate;
use crate::needed::{Misread, read};
use proxy_core::compact::{self, Compact};
use proxy_core::input::ObjectName;

/// The kinds that kpx reads, in sending order: backends precede the objects that refer to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    ServiceCidr,
    Node,
    EndpointSlice,
    Service,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Object {
    ServiceCidr(Box<ServiceCIDR>),
    Node(Box<Node>),
    EndpointSlice(Box<EndpointSlice>),
    Service(Box<Service>),
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) kind: Kind,
    pub(super) name: ObjectName,
}

/// The reason why an object is refused, or doubtful.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refused {
    /// The field, such as `spec.ports[0].port`; empty for the whole object.
    pub(super) field: String,
    /// The reason, which names the field.
    pub(super) why: String,
}

/// The kinds that kpx does not read in its kinds' API versions: any further name is a typing error.
const OTHER_KINDS: [(&str, &[&str]); 3] = [
    (
        "v1",
        &[
            "Binding",
            "ComponentStatus",
            "ConfigMap",
            "Endpoints",
            "Event",
            "LimitRange",
            "List",
            "Namespace",
            "PersistentVolume",
            "PersistentVolumeClaim",
            "Pod",
            "PodTemplate",
            "ReplicationController",
            "ResourceQuota",
            "Secret",
            "ServiceAccount",
        ],
    ),
    ("discovery.k8s.io/v1", &[]),
    (
        "networking.k8s.io/v1",
        &["IPAddress", "Ingress", "IngressClass", "NetworkPolicy"],
    ),
];

/// Returns the kind of an object as written, or `None` for a kind that kpx does not read.
pub(super) fn kind(value: &Value) -> Result<Option<Kind>, Refused> {
    if !value.is_object() {
        return Err(Refused::new("", "is not an object"));
    }
    let name = text(value, "kind")?;
    let version = text(value, "apiVersion")?;
    let ours = Kind::ALL.into_iter().find(|kind| kind.name() == name);
    if let Some(kind) = ours {
        if kind.version() == version {
            return Ok(Some(kind));
        }
        // Knative also has Services; but the author of a Service of apps/v1 meant a core Service.
        let group = version.split_once('/').map_or("", |(group, _)| group);
        if group.contains('.') && !group.ends_with(".k8s.io") {
            return Ok(None);
        }
        return Err(Refused::new(
            "apiVersion",
            format!("{name} is in version {:?}, not {version:?}", kind.version()),
        ));
    }
    let others = OTHER_KINDS.iter().find(|(known, _)| *known == version);
    let exists =
        others.is_none_or(|(_, kinds)| kinds.contains(&name.strip_suffix("List").unwrap_or(name)));
    let why = || {
        Refused::new(
            "kind",
            format!("no matches for kind {name:?} in version {version:?}"),
        )
    };
    if exists { Ok(None) } else { Err(why()) }
}

/// Returns the objects of a List with their places in it, or the object itself.
pub(super) fn items(value: Value) -> Result<Vec<(String, Value)>, Refused> {
    let (name, version) = (
        value["kind"].as_str().unwrap_or_default(),
        value["apiVersion"].as_str().unwrap_or_default(),
    );
    let of = Kind::ALL
        .into_iter()
        .find(|kind| name.strip_suffix("List") == Some(kind.name()) && version == kind.version());
    if of.is_none() && (name, version) != ("List", "v1") {
        return Ok(vec![(String::new(), value)]);
    }
    let items = match &value["items"] {
        Value::Array(items) => items.as_slice(),
        Value::Null => &[],
        _ => return Err(Refused::new("items", "is not a list")),
    };
    let mut objects = Vec::new();
    for (index, item) in items.iter().enumerate() {
        let mut item = item.clone();
        // A typed list may omit these fields in its items.
        if let (Some(kind), Some(fields)) = (of, item.as_object_mut()) {
            fields.entry("kind").or_insert_with(|| kind.name().into());
            fields
                .entry("apiVersion")
                .or_insert_with(|| kind.version().into());
        }
        let within = |(place, object): (String, Value)| match place.as_str() {
            "" => (format!("items[{index}]"), object),
            place => (format!("items[{index}].{place}"), object),
        };
        objects.extend(self::items(item)?.into_iter().map(within));
    }
    Ok(objects)
}

/// Returns the name of an object, even if the rest is unreadable.
pub(super) fn key(kind: Kind, value: &Value) -> Option<Key> {
    let name = value["metadata"]["name"]
        .as_str()
        .filter(|name| !name.is_empty())?;
    let namespace = match &value["metadata"]["namespace"] {
        _ if !kind.is_namespaced() => "",
        Value::Null => DEFAULT_NAMESPACE,
        Value::String(namespace) if namespace.is_empty() => DEFAULT_NAMESPACE,
        Value::String(namespace) => namespace,
        _ => return None,
    };
    Some(Key {
        kind,
        name: ObjectName::new(namespace, name),
    })
}

/// Returns a title for an object whose kind may be wrong.
pub(super) fn title(value: &Value) -> Option<String> {
    let kind = value["kind"].as_str()?;
    let meta = &value["metadata"];
    let name = ObjectName::new(
        meta["namespace"].as_str().unwrap_or_default(),
        meta["name"].as_str()?,
    );
    Some(format!("{kind} {name}"))
}

const DEFAULT_NAMESPACE: &str = "default";

/// Decodes, completes and checks an object as the API server would.
pub(super) fn decode(kind: Kind, value: &Value) -> Result<(Key, Object), Refused> {
    let mut object = match kind {
        Kind::ServiceCidr => Object::ServiceCidr(typed::<ServiceCIDR>(value)?),
        Kind::Node => Object::Node(typed::<Node>(value)?),
        Kind::EndpointSlice => Object::EndpointSlice(typed::<compact::EndpointSlice>(value)?),
        Kind::Service => Object::Service(typed::<compact::Service>(value)?),
    };
    let key = key(kind, value).ok_or_else(|| Refused::new("metadata.name", "is missing"))?;
    validate::name(&key.name)?;
    object.meta_mut().namespace = kind.is_namespaced().then(|| key.name.namespace.to_string());
    validate::object(&mut object)?;
    Ok((key, object))
}

/// Returns the fields that the kind does not have in the API: typing errors, or fields of a newer
/// API.
pub(super) fn unknown_fields(kind: Kind, value: &Value) -> Option<Refused> {
    let unknown = match kind {
        Kind::ServiceCidr => unknown_of::<ServiceCIDR>(value),
        Kind::Node => unknown_of::<Node>(value),
        Kind::EndpointSlice => unknown_of::<EndpointSlice>(value),
        Kind::Service => unknown_of::<Service>(value),
    };
    let all: Vec<_> = unknown
        .iter()
        .map(|field| format!("unknown field {field:?}"))
        .collect();
    Some(Refused {
        field: unknown.first()?.clone(),
        why: all.join(", "),
    })
}

fn typed<K: Compact>(value: &Value) -> Result<Box<K::Object>, Refused> {
    let object = read(&value.to_string(), K::NEEDED);
    object
        .map(Box::new)
        .map_err(|Misread { field, why }| Refused::new(field, why))
}

fn unknown_of<T: DeserializeOwned>(value: &Value) -> Vec<String> {
    let mut unknown = Vec::new();
    // Decoding stops at a field of the wrong shape.
    let _known: Result<T, _> =
        serde_ignored::deserialize(value, |path| unknown.push(dotted(&path)));
    unknown
}

fn dotted(path: &serde_ignored::Path<'_>) -> String {
    use serde_ignored::Path;
    match path {
        Path::Root => String::new(),
        Path::Seq { parent, index } => format!("{}[{index}]", dotted(parent)),
        Path::Map { parent, key } => match dotted(parent) {
            parent if parent.is_empty() => key.clone(),
            parent => format!("{parent}.{key}"),
        },
        Path::Some { parent }
        | Path::NewtypeStruct { parent }
        | Path::NewtypeVariant { parent } => dotted(parent),
    }
}

fn text<'a>(value: &'a Value, field: &str) -> Result<&'a str, Refused> {
    match &value[field] {
        Value::String(text) if !text.is_empty() => Ok(text),
        Value::String(_) | Value::Null => Err(Refused::new(field, "is missing")),
        _ => Err(Refused::new(field, "is not a string")),
    }
}

impl Refused {
    /// Returns the refusal with its consequence before the reason.
    pub(super) fn said(self, what: &str) -> Self {
        Self {
            why: format!("{what}: {}", self.why),
            ..self
        }
    }

    pub(super) fn new(field: impl Display, why: impl Display) -> Self {
        let field = field.to_string();
        let why = if field.is_empty() {
            why.to_string()
        } else {
            format!("{field}: {why}")
        };
        Self { field, why }
    }
}

impl Kind {
    const ALL: [Self; 4] = [
        Self::ServiceCidr,
        Self::Node,
        Self::EndpointSlice,
        Self::Service,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::ServiceCidr => ServiceCIDR::KIND,
            Self::Node => Node::KIND,
            Self::EndpointSlice => EndpointSlice::KIND,
            Self::Service => Service::KIND,
        }
    }

    fn version(self) -> &'static str {
        match self {
            Self::ServiceCidr => ServiceCIDR::API_VERSION,
            Self::Node => Node::API_VERSION,
            Self::EndpointSlice => EndpointSlice::API_VERSION,
            Self::Service => Service::API_VERSION,
        }
    }

    fn is_namespaced(self) -> bool {
        matches!(self, Self::EndpointSlice | Self::Service)
    }
}

impl Object {
    fn meta_mut(&mut self) -> &mut ObjectMeta {
        match self {
            Self::ServiceCidr(object) => &mut object.metadata,
            Self::Node(object) => &mut object.metadata,
            Self::EndpointSlice(object) => &mut object.metadata,
            Self::Service(object) => &mut object.metadata,
        }
    }

    /// Returns true if the selectors of a watch on an API server would match the object.
    pub(super) fn is_watched(&self, node_name: Option<&str>) -> bool {
        let labelled = |meta: &ObjectMeta, label| {
            meta.labels
                .as_ref()
                .is_some_and(|labels| labels.contains_key(label))
        };
        match self {
            Self::ServiceCidr(_) => true,
            Self::Node(node) => node_name.is_none() || node.metadata.name.as_deref() == node_name,
            // A host outside the cluster also serves the names of headless Services.
            Self::EndpointSlice(_) | Self::Service(_) if node_name.is_none() => true,
            Self::EndpointSlice(slice) => {
                !labelled(&slice.metadata, "service.kubernetes.io/headless")
            }
            Self::Service(service) => {
                let cluster_ip = service
                    .spec
                    .as_ref()
                    .and_then(|spec| spec.cluster_ip.as_deref());
                cluster_ip != Some("None")
            }
        }
    }
}

impl Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.name(), self.name)
    }
}
