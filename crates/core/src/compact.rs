//! Compact forms of Services and EndpointSlices: only the fields that kpx reads. A large cluster
//! has hundreds of thousands of endpoints, and the API's types take half a kilobyte for each.
//!
//! This module does not validate. Texts stay texts until the model reads them.

mod flat;
mod handover;
mod labels;
mod local_pod;
mod local_redirect;
mod needed;
mod service;
mod shared;
mod slice;

pub use flat::Flat;
pub use handover::{ACCEPTS, ADDRESSES, HandoverLease, PeerNode, SINCE};
pub use labels::Labels;
pub(crate) use local_pod::SOCKET_LB;
pub use local_pod::{ContainerPort, LocalPod};
pub(crate) use local_redirect::STAND_IN;
pub use local_redirect::{
    AddressMatcher, LocalRedirect, LocalRedirectSpec, PortInfo, RedirectBackend, RedirectFrontend,
    ServiceMatcher,
};
pub use needed::{MARK, NAMED, Needed};
pub(crate) use service::{
    ALGORITHM, BACKEND_HEALTH, EXTERNAL_FORWARDING, LOCAL_REDIRECT, RESET_ON_NODE_LOSS,
    SELECTOR_LEN_MAX, WEIGHTS, WEIGHTS_LEN_MAX,
};
pub use service::{Ingress, Service, ServicePort, TargetPort};
pub use shared::Shared;
pub(crate) use slice::WEIGHT;
pub use slice::{Address, Endpoint, EndpointPort, EndpointSlice, Hints, Pod};

use k8s_openapi::Metadata;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::DeserializeOwned;

use crate::input::ObjectName;

pub trait Compact: Sized {
    /// The API's type of the object.
    type Object: Metadata<Ty = ObjectMeta> + Clone + DeserializeOwned;

    /// The fields that kpx reads. A source drops all other fields, and nulls, before it decodes the
    /// object.
    const NEEDED: Needed;

    /// The name of the watch in problems and metrics, if it is not the object's kind.
    const WATCH: Option<&'static str> = None;

    fn compact(object: Self::Object) -> Self;

    fn name(&self) -> ObjectName;

    /// Returns the object's uid. A new object with the same name has a new uid.
    fn uid(&self) -> &str;
}

/// A Node keeps its Ready condition only, and no resource version, so a heartbeat is not a change.
impl Compact for Node {
    type Object = Self;

    const NEEDED: Needed = needed::NODE;

    fn compact(mut node: Self) -> Self {
        node.metadata.resource_version = None;
        for conditions in node
            .status
            .iter_mut()
            .flat_map(|status| &mut status.conditions)
        {
            conditions.retain(|condition| condition.type_ == "Ready");
        }
        node
    }

    fn name(&self) -> ObjectName {
        ObjectName::from(&self.metadata)
    }

    fn uid(&self) -> &str {
        self.metadata.uid.as_deref().unwrap_or_default()
    }
}

impl Compact for ServiceCIDR {
    type Object = Self;

    const NEEDED: Needed = needed::SERVICE_CIDR;

    fn compact(cidr: Self) -> Self {
        cidr
    }

    fn name(&self) -> ObjectName {
        ObjectName::from(&self.metadata)
    }

    fn uid(&self) -> &str {
        self.metadata.uid.as_deref().unwrap_or_default()
    }
}

fn texts(list: Option<Vec<String>>) -> Box<[Box<str>]> {
    list.into_iter()
        .flatten()
        .map(String::into_boxed_str)
        .collect()
}

fn shared(text: Option<String>) -> Option<Shared> {
    text.as_deref().map(Shared::from)
}
