//! Stores Services and EndpointSlices compactly: only the fields that kpx reads, in as little memory as possible. A
//! cluster has hundreds of thousands of endpoints, and the API's types take half a kilobyte for each.
//!
//! This module does not validate: texts stay texts until the model reads them.

mod flat;
mod labels;
mod local_pod;
mod local_redirect;
mod service;
mod shared;
mod slice;

pub use flat::Flat;
pub use labels::Labels;
pub(crate) use local_pod::SOCKET_LB;
pub use local_pod::{ContainerPort, LocalPod};
pub(crate) use local_redirect::STAND_IN;
pub use local_redirect::{
    AddressMatcher, LocalRedirect, LocalRedirectSpec, PortInfo, RedirectBackend, RedirectFrontend, ServiceMatcher,
};
pub(crate) use service::{
    ALGORITHM, BACKEND_HEALTH, LOCAL_REDIRECT, RESET_ON_NODE_LOSS, SELECTOR_LEN_MAX, WEIGHTS, WEIGHTS_LEN_MAX,
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

/// A compact form of an object.
pub trait Compact: Sized {
    /// The API's type of the object.
    type Object: Metadata<Ty = ObjectMeta> + Clone + DeserializeOwned;

    fn compact(object: Self::Object) -> Self;

    fn name(&self) -> ObjectName;

    /// Returns the API server's uid of the object, which survives every reuse of the name.
    fn uid(&self) -> &str;
}

/// A Node is kept without most of its status, and without its version. A cluster has few Nodes, but each takes tens of kilobytes,
/// mostly images. A heartbeat sends them again, and is no change.
impl Compact for Node {
    type Object = Self;

    fn compact(mut node: Self) -> Self {
        node.metadata.managed_fields = None;
        node.metadata.annotations = None;
        node.metadata.resource_version = None;
        node.metadata.generation = None;
        if let Some(status) = &mut node.status {
            status.images = None;
            status.volumes_attached = None;
            status.volumes_in_use = None;
            // The Ready condition stays, without the time of its last heartbeat.
            status
                .conditions
                .iter_mut()
                .for_each(|conditions| conditions.retain(|condition| condition.type_ == "Ready"));
            for ready in status.conditions.iter_mut().flatten() {
                ready.last_heartbeat_time = None;
            }
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

    fn compact(mut cidr: Self) -> Self {
        cidr.metadata.managed_fields = None;
        cidr.metadata.annotations = None;
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
    list.into_iter().flatten().map(String::into_boxed_str).collect()
}

fn shared(text: Option<String>) -> Option<Shared> {
    text.as_deref().map(Shared::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_keeps_its_ready_condition_without_heartbeat_and_version() {
        let node = |heartbeat: &str, version: &str| {
            serde_json::json!({
                "metadata": {
                    "name": "a", "resourceVersion": version, "annotations": { "note": "long" },
                    "managedFields": [{ "manager": "kubelet" }],
                },
                "status": { "images": [{ "names": ["pause"] }], "conditions": [
                    { "type": "Ready", "status": "True", "lastHeartbeatTime": heartbeat },
                    { "type": "DiskPressure", "status": "False" },
                ] },
            })
        };
        let kept = |heartbeat, version| Node::compact(serde_json::from_value(node(heartbeat, version)).unwrap());
        let kept = [kept("2026-01-01T00:00:00Z", "1"), kept("2026-01-01T00:00:10Z", "2")];
        assert_eq!(kept[0], kept[1]);
        let text = serde_json::to_string(&kept[0]).unwrap();
        assert!(text.contains("Ready") && text.len() < 150, "{text}");
    }
}
