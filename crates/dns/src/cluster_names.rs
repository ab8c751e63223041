//! The interface to the cluster's objects: requests and results.

use std::net::IpAddr;
use std::sync::Arc;

use proxy_core::compact::{Address, EndpointSlice, Service};
use proxy_core::input::ObjectName;
use proxy_core::store::Store;

use crate::zone::Subject;

/// A source of the watched objects.
pub trait Cluster: Clone + Send + Sync + 'static {
    /// Returns the wanted objects. `None` while they are unknown, as before the first lists.
    fn known(&self, wanted: Wanted) -> impl Future<Output = Option<Known>> + Send;
}

/// The objects behind a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    Namespace(String),
    Service(ObjectName),
    Pod { namespace: String, address: IpAddr },
}

/// The objects as last seen.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// Set if the namespace has a Service, or if the pod is an endpoint in the namespace.
    pub is_there: bool,
    pub service: Option<Arc<Service>>,
    pub slices: Vec<Arc<EndpointSlice>>,
}

impl Wanted {
    /// Returns the objects of a subject's records. `None` if the records need no objects.
    pub fn of(subject: &Subject) -> Option<Self> {
        match subject {
            Subject::Apex
            | Subject::Inner
            | Subject::NameServer
            | Subject::Version
            | Subject::Unknown => None,
            Subject::Namespace(namespace) => Some(Self::Namespace(namespace.clone())),
            Subject::Service(service)
            | Subject::Protocol(service)
            | Subject::Port { service, .. }
            | Subject::Endpoint { service, .. } => Some(Self::Service(service.clone())),
            Subject::Pod { namespace, address } => Some(Self::Pod {
                namespace: namespace.clone(),
                address: *address,
            }),
        }
    }
}

impl Known {
    pub fn of(store: &Store, wanted: &Wanted) -> Self {
        match wanted {
            Wanted::Namespace(namespace) => {
                let is_there = store.services_of(namespace).next().is_some();
                Self {
                    is_there,
                    ..Self::default()
                }
            }
            Wanted::Service(name) => Self {
                service: store.service(name).cloned(),
                slices: store.slices_of(name).cloned().collect(),
                ..Self::default()
            },
            Wanted::Pod { namespace, address } => {
                let mut endpoints = store
                    .slices_in(namespace)
                    .flat_map(|slice| &slice.endpoints);
                let is_there = endpoints.any(|endpoint| endpoint.address == Address::Ip(*address));
                Self {
                    is_there,
                    ..Self::default()
                }
            }
        }
    }
}
