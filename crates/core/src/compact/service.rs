//! The compact form of a Service.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::{Compact, Labels, Needed, Shared, needed, shared, texts};
use crate::input::ObjectName;

/// The label (any value) that assigns a Service to another proxy.
const SERVICE_PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// The annotation for the Service's algorithm.
pub(crate) const ALGORITHM: &str = "kpx.dev/lb-algorithm";
/// The annotation with the selector of the pods of a local redirect.
pub(crate) const LOCAL_REDIRECT: &str = "kpx.dev/local-redirect";
/// The maximum length of the selector in bytes. A longer value is cut just above the limit.
pub(crate) const SELECTOR_LEN_MAX: usize = 4_096;
/// The annotation with the weights of endpoints, by name or address.
pub(crate) const WEIGHTS: &str = "kpx.dev/weights";
/// The maximum length of the weights in bytes. A longer value is cut one character above the limit.
pub(crate) const WEIGHTS_LEN_MAX: usize = 32 << 10;
/// The annotation for the Service's backend health mode.
pub(crate) const BACKEND_HEALTH: &str = "kpx.dev/backend-health";
/// The annotation for the way of external clients to backends on other nodes.
pub(crate) const EXTERNAL_FORWARDING: &str = "kpx.dev/external-forwarding";
/// The annotation that enables resets of connections to lost nodes.
pub(crate) const RESET_ON_NODE_LOSS: &str = "kpx.dev/reset-on-node-loss";

/// A Service, with the API's field names where they exist. Missing and empty lists are equal.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Service {
    pub name: ObjectName,
    pub uid: Box<str>,
    pub created: Option<Timestamp>,
    /// Set if another proxy serves the Service. Then only its ClusterIPs are kept.
    pub is_of_other_proxy: bool,
    /// Set for the stand-in of a LocalRedirect of an address.
    pub is_redirected_address: bool,
    /// The annotation's algorithm.
    pub algorithm: Option<Shared>,
    /// The annotation's pod selector, cut just above its maximum length.
    pub local_redirect: Option<Box<str>>,
    /// The labels, for the selectors of commands only.
    pub labels: Labels,
    /// The annotation's weights.
    pub weights: Option<Box<str>>,
    /// The annotation's backend health mode.
    pub backend_health: Option<Shared>,
    /// The annotation's way of external clients.
    pub external_forwarding: Option<Shared>,
    /// The annotation's value of `reset-on-node-loss`.
    pub reset_on_node_loss: Option<Shared>,
    pub type_: Option<Shared>,
    pub cluster_ip: Option<Box<str>>,
    pub cluster_ips: Box<[Box<str>]>,
    pub external_name: Option<Box<str>>,
    pub ip_families: Box<[Shared]>,
    pub ports: Box<[ServicePort]>,
    pub external_ips: Box<[Box<str>]>,
    pub internal_traffic_policy: Option<Shared>,
    pub external_traffic_policy: Option<Shared>,
    pub session_affinity: Option<Shared>,
    /// The value of `sessionAffinityConfig.clientIP.timeoutSeconds`.
    pub affinity_secs: Option<i32>,
    pub health_check_node_port: Option<i32>,
    pub load_balancer_source_ranges: Box<[Box<str>]>,
    /// The list `status.loadBalancer.ingress`.
    pub ingress: Box<[Ingress]>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ServicePort {
    pub name: Option<Shared>,
    pub protocol: Option<Shared>,
    pub port: i32,
    pub node_port: Option<i32>,
    pub target_port: Option<TargetPort>,
}

/// The port of a Service's pods.
#[derive(Clone, Debug, PartialEq)]
pub enum TargetPort {
    Number(i32),
    Name(Shared),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Ingress {
    pub ip: Option<Box<str>>,
    pub ip_mode: Option<Shared>,
}

impl From<core::Service> for Service {
    fn from(service: core::Service) -> Self {
        let name = ObjectName::from(&service.metadata);
        let core::Service {
            metadata,
            spec,
            status,
        } = service;
        let mut annotations = metadata.annotations.unwrap_or_default();
        let algorithm = annotations.remove(ALGORITHM);
        let weights = annotations.remove(WEIGHTS);
        let local_redirect = annotations.remove(LOCAL_REDIRECT);
        let kept = Self {
            name,
            uid: metadata.uid.unwrap_or_default().into(),
            created: metadata.creation_timestamp.map(|time| time.0),
            is_of_other_proxy: has_label(metadata.labels.as_ref(), SERVICE_PROXY_NAME),
            algorithm: shared(algorithm),
            local_redirect: local_redirect
                .map(|text| text[..text.floor_char_boundary(SELECTOR_LEN_MAX + 4)].into()),
            weights: weights.map(|text| text.chars().take(WEIGHTS_LEN_MAX + 1).collect()),
            backend_health: shared(annotations.remove(BACKEND_HEALTH)),
            external_forwarding: shared(annotations.remove(EXTERNAL_FORWARDING)),
            reset_on_node_loss: shared(annotations.remove(RESET_ON_NODE_LOSS)),
            ..Self::default()
        };
        let Some(spec) = spec else { return kept };
        let is_external = spec.type_.as_deref() == Some("ExternalName");
        let kept = Self {
            type_: shared(spec.type_),
            cluster_ip: spec.cluster_ip.map(String::into_boxed_str),
            cluster_ips: texts(spec.cluster_ips),
            external_name: spec
                .external_name
                .filter(|_| is_external)
                .map(String::into_boxed_str),
            ..kept
        };
        // kpx needs only the addresses of another proxy's Services.
        if kept.is_of_other_proxy {
            return kept;
        }
        let affinity = spec
            .session_affinity_config
            .and_then(|config| config.client_ip);
        let ingress = status
            .and_then(|status| status.load_balancer?.ingress)
            .into_iter()
            .flatten();
        Self {
            labels: Labels::of(metadata.labels.iter().flatten()),
            ip_families: spec
                .ip_families
                .into_iter()
                .flatten()
                .map(Shared::from)
                .collect(),
            ports: spec
                .ports
                .into_iter()
                .flatten()
                .map(ServicePort::from)
                .collect(),
            external_ips: texts(spec.external_ips),
            internal_traffic_policy: shared(spec.internal_traffic_policy),
            external_traffic_policy: shared(spec.external_traffic_policy),
            session_affinity: shared(spec.session_affinity),
            affinity_secs: affinity.and_then(|client_ip| client_ip.timeout_seconds),
            health_check_node_port: spec.health_check_node_port,
            load_balancer_source_ranges: texts(spec.load_balancer_source_ranges),
            ingress: ingress.map(Ingress::from).collect(),
            ..kept
        }
    }
}

impl From<core::ServicePort> for ServicePort {
    fn from(port: core::ServicePort) -> Self {
        let core::ServicePort {
            name,
            protocol,
            port,
            node_port,
            target_port,
            ..
        } = port;
        let target_port = target_port.map(|port| match port {
            IntOrString::Int(number) => TargetPort::Number(number),
            IntOrString::String(name) => TargetPort::Name(name.into()),
        });
        Self {
            name: shared(name),
            protocol: shared(protocol),
            port,
            node_port,
            target_port,
        }
    }
}

impl From<core::LoadBalancerIngress> for Ingress {
    fn from(ingress: core::LoadBalancerIngress) -> Self {
        Self {
            ip: ingress.ip.map(String::into_boxed_str),
            ip_mode: shared(ingress.ip_mode),
        }
    }
}

impl Compact for Service {
    type Object = core::Service;

    const NEEDED: Needed = needed::SERVICE;

    fn compact(object: core::Service) -> Self {
        object.into()
    }

    fn name(&self) -> ObjectName {
        self.name.clone()
    }

    fn uid(&self) -> &str {
        &self.uid
    }
}

pub(super) fn has_label(labels: Option<&BTreeMap<String, String>>, label: &str) -> bool {
    labels.is_some_and(|labels| labels.contains_key(label))
}
