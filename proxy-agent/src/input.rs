//! One thing that happened: the only way anything reaches the agent's loop.

use std::fmt;

use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::ServiceCIDR;

/// One thing that happened to an object that kpx watches.
///
/// Boxed where an object travels alone, so that a burst of inputs stays small.
#[derive(Clone, Debug)]
pub enum Input {
    Service(Update<Service>),
    EndpointSlice(Update<EndpointSlice>),
    /// Of this node only.
    Node(Update<Node>),
    ServiceCidr(Update<ServiceCIDR>),
}

/// What a source says of one kind of object.
#[derive(Clone, Debug)]
pub enum Update<K> {
    /// All there are: what is not among them is gone. Every source starts with this, for every kind.
    All(Vec<K>),
    /// Nobody says which there are, in place of the first list: the API server does not serve this kind, or not to us.
    Refused,
    /// A new object, or a new version of one.
    Put(Box<K>),
    Del(ObjectName),
}

/// How a namespaced object is called; cluster-wide objects have an empty namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectName {
    pub namespace: String,
    pub name: String,
}

impl ObjectName {
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() { f.write_str(&self.name) } else { write!(f, "{}/{}", self.namespace, self.name) }
    }
}

impl<K: kube::Resource> From<&K> for ObjectName {
    fn from(object: &K) -> Self {
        let meta = object.meta();
        Self::new(meta.namespace.clone().unwrap_or_default(), meta.name.clone().unwrap_or_default())
    }
}
