//! The compact form of an EndpointSlice.

use std::net::IpAddr;

use jiff::Timestamp;
use k8s_openapi::api::discovery::v1 as discovery;

use super::service::has_label;
use super::{Compact, Needed, Shared, needed, shared};
use crate::input::ObjectName;

/// The label with the slice's Service (well-known label of discovery.k8s.io).
pub(super) const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// The label (any value) of a headless Service's slice, which proxies ignore.
pub(super) const HEADLESS: &str = "service.kubernetes.io/headless";
/// The annotation with the time of the change that the slice reflects, in RFC 3339.
pub(super) const LAST_CHANGE_TRIGGER_TIME: &str =
    "endpoints.kubernetes.io/last-change-trigger-time";

/// The annotation with the weight of all endpoints of a slice.
pub(crate) const WEIGHT: &str = "kpx.dev/weight";

/// The maximum number of characters kept of that annotation: more than any valid weight.
const WEIGHT_LETTERS: usize = 20;

/// An EndpointSlice, with the API's field names where they exist. Missing and empty lists are
/// equal.
#[derive(Clone, Debug, PartialEq)]
pub struct EndpointSlice {
    pub name: ObjectName,
    pub uid: Box<str>,
    /// The slice's Service, which may not exist.
    pub service: Option<ObjectName>,
    pub is_headless: bool,
    /// The time of the change that the slice reflects.
    pub triggered: Option<Timestamp>,
    /// The annotation's weight of all endpoints.
    pub weight: Option<Shared>,
    pub address_type: Shared,
    pub ports: Box<[EndpointPort]>,
    pub endpoints: Box<[Endpoint]>,
    /// The hostnames of `endpoints`, in the same order. Empty if no endpoint has a hostname, which
    /// saves memory in most slices.
    pub hostnames: Box<[Option<Box<str>>]>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct EndpointPort {
    pub name: Option<Shared>,
    pub protocol: Option<Shared>,
    pub port: Option<i32>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Endpoint {
    /// The first of `addresses`, as the API defines.
    pub address: Address,
    /// The three conditions, with their API defaults applied.
    pub ready: bool,
    pub serving: bool,
    pub terminating: bool,
    pub node_name: Option<Shared>,
    pub zone: Option<Shared>,
    pub hints: Option<Box<Hints>>,
    /// The `targetRef`, if it is a Pod.
    pub pod: Option<Pod>,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Address {
    Ip(IpAddr),
    /// A text that is not a canonical address, though it may parse as an address.
    Text(Box<str>),
    Missing,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Hints {
    pub nodes: Box<[Shared]>,
    pub zones: Box<[Shared]>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Pod {
    pub namespace: Option<Shared>,
    pub name: Option<Box<str>>,
}

impl From<discovery::EndpointSlice> for EndpointSlice {
    fn from(slice: discovery::EndpointSlice) -> Self {
        let name = ObjectName::from(&slice.metadata);
        let meta = &slice.metadata;
        let service = meta
            .labels
            .as_ref()
            .and_then(|labels| labels.get(SERVICE_NAME))
            .filter(|name| !name.is_empty());
        let triggered = meta
            .annotations
            .as_ref()
            .and_then(|all| all.get(LAST_CHANGE_TRIGGER_TIME));
        let weight = meta.annotations.as_ref().and_then(|all| all.get(WEIGHT));
        let weight = weight.map(|weight| weight.chars().take(WEIGHT_LETTERS).collect::<String>());
        let is_headless = has_label(meta.labels.as_ref(), HEADLESS);
        let hostname = |endpoint: &discovery::Endpoint| {
            endpoint
                .hostname
                .as_deref()
                .filter(|name| !name.is_empty())
                .map(|name| name.to_ascii_lowercase().into())
        };
        let hostnames: Box<[Option<Box<str>>]> = slice
            .endpoints
            .iter()
            .flatten()
            .filter(|_| is_headless)
            .map(hostname)
            .collect();
        Self {
            service: service.map(|service| ObjectName {
                name: service.as_str().into(),
                ..name.clone()
            }),
            name,
            is_headless,
            weight: shared(weight),
            triggered: triggered.and_then(|time| time.parse().ok()),
            uid: slice.metadata.uid.unwrap_or_default().into(),
            address_type: slice.address_type.into(),
            ports: slice
                .ports
                .into_iter()
                .flatten()
                .map(EndpointPort::from)
                .collect(),
            endpoints: slice
                .endpoints
                .into_iter()
                .flatten()
                .map(Endpoint::from)
                .collect(),
            hostnames: if hostnames.iter().any(Option::is_some) {
                hostnames
            } else {
                Box::default()
            },
        }
    }
}

impl From<discovery::EndpointPort> for EndpointPort {
    fn from(port: discovery::EndpointPort) -> Self {
        Self {
            name: shared(port.name),
            protocol: shared(port.protocol),
            port: port.port,
        }
    }
}

impl From<discovery::Endpoint> for Endpoint {
    fn from(endpoint: discovery::Endpoint) -> Self {
        let conditions = endpoint.conditions.unwrap_or_default();
        let pod = endpoint
            .target_ref
            .filter(|target| target.kind.as_deref() == Some("Pod"));
        Self {
            address: endpoint
                .addresses
                .into_iter()
                .next()
                .map_or(Address::Missing, Address::from),
            ready: conditions.ready.unwrap_or(true),
            serving: conditions.serving.unwrap_or(true),
            terminating: conditions.terminating.unwrap_or(false),
            node_name: shared(endpoint.node_name),
            zone: shared(endpoint.zone),
            hints: endpoint.hints.map(|hints| Box::new(Hints::from(hints))),
            pod: pod.map(|pod| Pod {
                namespace: shared(pod.namespace),
                name: pod.name.map(String::into_boxed_str),
            }),
        }
    }
}

impl From<discovery::EndpointHints> for Hints {
    fn from(hints: discovery::EndpointHints) -> Self {
        Self {
            nodes: hints
                .for_nodes
                .into_iter()
                .flatten()
                .map(|node| node.name.into())
                .collect(),
            zones: hints
                .for_zones
                .into_iter()
                .flatten()
                .map(|zone| zone.name.into())
                .collect(),
        }
    }
}

impl From<String> for Address {
    fn from(text: String) -> Self {
        match text.parse::<IpAddr>() {
            Ok(ip) if ip.to_string() == text => Self::Ip(ip),
            _ => Self::Text(text.into()),
        }
    }
}

impl Compact for EndpointSlice {
    type Object = discovery::EndpointSlice;

    const NEEDED: Needed = needed::SLICE;

    fn compact(object: discovery::EndpointSlice) -> Self {
        object.into()
    }

    fn name(&self) -> ObjectName {
        self.name.clone()
    }

    fn uid(&self) -> &str {
        &self.uid
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The agent holds a hundred thousand endpoints.
    #[test]
    fn an_endpoint_is_small() {
        assert!(
            size_of::<Endpoint>() <= 112,
            "{} bytes",
            size_of::<Endpoint>()
        );
    }

    #[test]
    fn an_address_is_shown_as_it_was_written() {
        for text in ["10.244.0.1", "fd00::1"] {
            assert_eq!(
                Address::from(text.to_owned()),
                Address::Ip(text.parse().unwrap())
            );
        }
        for text in [
            "010.244.0.1",
            "FD00::1",
            "fd00:0::1",
            "::ffff:a00:1",
            "nonsense",
            "",
        ] {
            assert_eq!(Address::from(text.to_owned()), Address::Text(text.into()));
        }
    }
}
