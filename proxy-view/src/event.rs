//! The view of an agent's Events and problems. The form is stable: fields may be added, and no field is renamed or removed.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::object_name::{ObjectName, ServiceName};

/// An Event that the agent sent to the API server, or would have sent, or a change of one of the agent's problems.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EventView {
    pub first_seen: Timestamp,
    pub last_seen: Timestamp,
    /// How often it was told.
    pub count: u64,
    /// The type: `Normal` or `Warning`.
    pub r#type: String,
    pub reason: String,
    /// The kind of the object: `Service`, `EndpointSlice`, `LocalRedirect`, `Node`, or `Problem` for one of the agent's.
    pub kind: String,
    /// The namespace of the object; empty if it has none.
    pub namespace: String,
    pub name: String,
    pub note: String,
}

impl EventView {
    /// Returns true if the Event is about the Service, or about an EndpointSlice whose name begins with the Service's and a dash.
    pub fn is_about(&self, service: &ServiceName) -> bool {
        let ServiceName(ObjectName { namespace, name }) = service;
        let is_name = match self.kind.as_str() {
            "Service" => self.name == *name,
            "EndpointSlice" => self.name.strip_prefix(name.as_str()).is_some_and(|rest| rest.starts_with('-')),
            _ => false,
        };
        is_name && namespace.as_ref().is_none_or(|namespace| self.namespace == *namespace)
    }

    /// Returns the object as `kind/NAMESPACE/NAME`.
    pub fn object(&self) -> String {
        let kind = self.kind.to_lowercase();
        if self.namespace.is_empty() {
            format!("{kind}/{}", self.name)
        } else {
            format!("{kind}/{}/{}", self.namespace, self.name)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_a_service_are_those_of_its_slices_too() {
        let event = |kind: &str, namespace: &str, name: &str| EventView {
            first_seen: Timestamp::UNIX_EPOCH,
            last_seen: Timestamp::UNIX_EPOCH,
            count: 1,
            r#type: "Warning".to_owned(),
            reason: "InvalidField".to_owned(),
            kind: kind.to_owned(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            note: String::new(),
        };
        let cases = [
            (event("Service", "shop", "web"), true, true),
            (event("Service", "other", "web"), true, false),
            (event("EndpointSlice", "shop", "web-x7"), true, true),
            (event("EndpointSlice", "shop", "website"), false, false),
            (event("Service", "shop", "web-x7"), false, false),
            (event("Node", "", "web"), false, false),
        ];
        for (event, by_name, in_shop) in cases {
            let is_about = |name: &str| event.is_about(&name.parse().unwrap());
            assert_eq!((is_about("web"), is_about("svc/shop/web")), (by_name, in_shop), "{}", event.object());
        }
        assert_eq!(event("Node", "", "n1").object(), "node/n1");
        assert_eq!(event("Service", "shop", "web").object(), "service/shop/web");
    }
}
