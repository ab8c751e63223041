//! The inputs of the agent's loop: events reach it in no other way.

use std::collections::BTreeSet;
use std::fmt;
use std::net::SocketAddr;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{self as core, Node};
use k8s_openapi::api::discovery::v1 as discovery;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::compact::{EndpointSlice, LocalPod, LocalRedirect, Service, Shared};
use crate::ip_family::IpFamily;

/// A single event of an object that kpx watches.
///
/// Boxed where an object travels alone, so that a burst of inputs stays small.
#[derive(Clone, Debug)]
pub enum Input {
    Service(Update<Service>),
    EndpointSlice(Update<EndpointSlice>),
    /// An update of this node's object only.
    Node(Update<Node>),
    ServiceCidr(Update<ServiceCIDR>),
    /// An update of this node's Pods only. A source need not deliver any.
    Pod(Update<LocalPod>),
    /// An update of the LocalRedirects. A source need not deliver any.
    LocalRedirect(Update<LocalRedirect>),
    /// The addresses at which the source reaches the API server, all of them.
    ApiServer(BTreeSet<SocketAddr>),
}

/// A source's update about one kind of object.
#[derive(Clone, Debug)]
pub enum Update<K> {
    /// The full list: an object not on it is gone. Every source starts with a full list of every
    /// kind.
    All(Vec<K>),
    /// The full list except for objects that could not be read, whose last known version stays.
    AllBut(Vec<K>, BTreeSet<ObjectName>),
    /// A refusal in place of the first list: the API server does not serve this kind, or not to
    /// kpx.
    Refused,
    /// A new object, or a new version of one.
    Put(Box<K>),
    Del(ObjectName),
}

impl<K> Update<K> {
    /// Converts the objects to another form.
    pub fn map<C>(self, form: impl Fn(K) -> C) -> Update<C> {
        let all = |objects: Vec<K>| objects.into_iter().map(&form).collect();
        match self {
            Self::All(objects) => Update::All(all(objects)),
            Self::AllBut(objects, unreadable) => Update::AllBut(all(objects), unreadable),
            Self::Refused => Update::Refused,
            Self::Put(object) => Update::Put(Box::new(form(*object))),
            Self::Del(name) => Update::Del(name),
        }
    }
}

impl From<Update<core::Service>> for Input {
    fn from(update: Update<core::Service>) -> Self {
        Self::Service(update.map(Service::from))
    }
}

impl From<Update<discovery::EndpointSlice>> for Input {
    fn from(update: Update<discovery::EndpointSlice>) -> Self {
        Self::EndpointSlice(update.map(EndpointSlice::from))
    }
}

/// The time of a change, as an EndpointSlice tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trigger {
    pub service: ObjectName,
    pub family: IpFamily,
    /// The time of the change. None if the slice is gone: its pending triggers will never be in
    /// force.
    pub at: Option<Timestamp>,
}

/// The name of a namespaced object; cluster-wide objects have an empty namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectName {
    pub namespace: Shared,
    pub name: Shared,
}

impl ObjectName {
    pub fn new(namespace: impl Into<Shared>, name: impl Into<Shared>) -> Self {
        Self {
            namespace: namespace.into(),
            name: name.into(),
        }
    }
}

impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.namespace.is_empty() {
            f.write_str(&self.name)
        } else {
            write!(f, "{}/{}", self.namespace, self.name)
        }
    }
}

impl From<&ObjectMeta> for ObjectName {
    fn from(meta: &ObjectMeta) -> Self {
        Self::new(
            meta.namespace.as_deref().unwrap_or_default(),
            meta.name.as_deref().unwrap_or_default(),
        )
    }
}
