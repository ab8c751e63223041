//! The view of an agent's Events and problems. The form is stable.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::object_name::ServiceName;

/// An Event that the agent sent to the API server or would have sent, or a change of an agent's
/// problem.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EventView {
    pub first_seen: Timestamp,
    pub last_seen: Timestamp,
    /// The number of times the Event was reported.
    pub count: u64,
    /// The type: `Normal` or `Warning`.
    pub r#type: String,
    pub reason: String,
    /// The kind of the object: `Service`, `EndpointSlice`, `LocalRedirect`, `Node`, or `Problem`
    /// for an agent's problem.
    pub kind: String,
    /// The namespace of the object; empty for a cluster-scoped object.
    pub namespace: String,
    pub name: String,
    pub note: String,
    /// The Services concerned, each as `namespace/name`.
    #[serde(default)]
    pub services: Vec<String>,
}

impl EventView {
    /// Returns true if the Event concerns the Service, or one of its slices, redirects, pods or
    /// problems.
    pub fn concerns(&self, service: &ServiceName) -> bool {
        let mut services = self.services.iter().filter_map(|full| full.split_once('/'));
        services.any(|(namespace, name)| service.matches(namespace, name))
    }

    /// Returns true if `has` accepts the namespace of the object or of a Service that the Event
    /// concerns.
    pub fn is_within(&self, has: impl Fn(&str) -> bool) -> bool {
        let services = self.services.iter().filter_map(|full| full.split_once('/'));
        has(&self.namespace) || services.map(|(namespace, _)| namespace).any(has)
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
    fn event_concerns_services_besides_its_object() {
        let event = |kind: &str, namespace: &str, name: &str, services: &[&str]| EventView {
            first_seen: Timestamp::UNIX_EPOCH,
            last_seen: Timestamp::UNIX_EPOCH,
            count: 1,
            r#type: "Warning".to_owned(),
            reason: "InvalidField".to_owned(),
            kind: kind.to_owned(),
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            note: String::new(),
            services: services.iter().map(ToString::to_string).collect(),
        };
        let cases = [
            (
                event("Service", "shop", "web", &["shop/web"]),
                [true, true, true],
            ),
            (
                event("Service", "other", "web", &["other/web"]),
                [true, false, false],
            ),
            (
                event("EndpointSlice", "shop", "x7", &["shop/web"]),
                [true, true, true],
            ),
            (
                event("EndpointSlice", "shop", "web-x7", &["shop/website"]),
                [false, false, true],
            ),
            (
                event("Pod", "shop", "cache", &["shop/dns", "shop/web"]),
                [true, true, true],
            ),
            (
                event(
                    "Problem",
                    "",
                    "healthCheckNodePort of shop/web",
                    &["shop/web"],
                ),
                [true, true, true],
            ),
            (event("Node", "", "web", &[]), [false, false, false]),
        ];
        for (event, expected) in cases {
            let concerns = |name: &str| event.concerns(&name.parse().unwrap());
            let within = event.is_within(|namespace| namespace == "shop");
            assert_eq!(
                [concerns("web"), concerns("svc/shop/web"), within],
                expected,
                "{}",
                event.object()
            );
        }
        assert_eq!(event("Node", "", "n1", &[]).object(), "node/n1");
        assert_eq!(
            event("Service", "shop", "web", &[]).object(),
            "service/shop/web"
        );
    }
}
