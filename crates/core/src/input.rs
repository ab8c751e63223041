//! The inputs of the agent's loop, which are its only source of events.

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

/// An event about one kind of object. Single objects are boxed, so that bursts of inputs stay
/// small.
#[derive(Clone, Debug)]
pub enum Input {
    Service(Update<Service>),
    EndpointSlice(Update<EndpointSlice>),
    /// This node's object only.
    Node(Update<Node>),
    ServiceCidr(Update<ServiceCIDR>),
    /// This node's Pods only. Optional for a source.
    Pod(Update<LocalPod>),
    /// Optional for a source.
    LocalRedirect(Update<LocalRedirect>),
    /// All addresses at which the source reaches the API server.
    ApiServer(BTreeSet<SocketAddr>),
}

/// A source's update of one kind of object.
#[derive(Clone, Debug)]
pub enum Update<K> {
    /// The full list, which removes absent objects. Every source starts with a full list of each
    /// kind.
    All(Vec<K>),
    /// The full list, except the named objects, which could not be read and keep their last
    /// version.
    AllBut(Vec<K>, BTreeSet<ObjectName>),
    /// The API server refuses the first list: the kind does not exist, or RBAC forbids it.
    Refused,
    /// An added or changed object.
    Put(Box<K>),
    Del(ObjectName),
}

impl<K> Update<K> {
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

/// The time of a change, from the annotation `endpoints.kubernetes.io/last-change-trigger-time`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trigger {
    pub service: ObjectName,
    pub family: IpFamily,
    /// `None` if the slice was deleted. Its pending changes then do not count in the programming
    /// latency.
    pub at: Option<Timestamp>,
}

/// A namespaced name. The namespace of cluster-wide objects is empty.
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
