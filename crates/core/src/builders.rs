//! Builders of test objects, in the namespace `default` unless the name has the form
//! `namespace/name`.
#![allow(
    clippy::unwrap_used,
    reason = "a builder that gets nonsense ends its test"
)]

use k8s_openapi::api::core::v1::{
    ClientIPConfig, LoadBalancerIngress, Node, NodeAddress, NodeSpec, NodeStatus, ObjectReference,
    Service, ServicePort, ServiceSpec, SessionAffinityConfig,
};
use k8s_openapi::api::discovery::v1::{
    Endpoint, EndpointConditions, EndpointHints, EndpointPort, EndpointSlice, ForNode, ForZone,
};
use k8s_openapi::api::networking::v1::{ServiceCIDR, ServiceCIDRSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;

use crate::compact;
use crate::input::{Input, ObjectName, Update};

pub fn object_name(name: &str) -> ObjectName {
    let (namespace, name) = name.split_once('/').unwrap_or(("default", name));
    ObjectName::new(namespace, name)
}

pub fn names<const N: usize>(names: [&str; N]) -> [String; N] {
    names.map(|name| object_name(name).to_string())
}

/// Returns an empty first list of every kind.
pub fn listed() -> [Input; 4] {
    [
        Input::Service(Update::All(Vec::new())),
        Input::EndpointSlice(Update::All(Vec::new())),
        Input::Node(Update::All(Vec::new())),
        Input::ServiceCidr(Update::All(Vec::new())),
    ]
}

fn meta(name: &str) -> ObjectMeta {
    let ObjectName { namespace, name } = object_name(name);
    ObjectMeta {
        namespace: Some(namespace.to_string()),
        name: Some(name.to_string()),
        ..Default::default()
    }
}

#[derive(Clone, Debug)]
pub struct ServiceBuilder(Service);

pub fn service(name: &str) -> ServiceBuilder {
    ServiceBuilder(Service {
        metadata: meta(name),
        spec: Some(ServiceSpec::default()),
        status: None,
    })
}

impl ServiceBuilder {
    pub fn edit(mut self, edit: impl FnOnce(&mut ServiceSpec)) -> Self {
        edit(self.0.spec.get_or_insert_default());
        self
    }

    pub fn labelled(mut self, key: &str, value: &str) -> Self {
        self.0
            .metadata
            .labels
            .get_or_insert_default()
            .insert(key.to_owned(), value.to_owned());
        self
    }

    pub fn cluster_ip(self, ip: &str) -> Self {
        let family = if ip.contains(':') { "IPv6" } else { "IPv4" };
        self.edit(|spec| {
            spec.cluster_ip.get_or_insert_with(|| ip.to_owned());
            spec.cluster_ips.get_or_insert_default().push(ip.to_owned());
            spec.ip_families
                .get_or_insert_default()
                .push(family.to_owned());
        })
    }

    pub fn port(self, name: &str, protocol: &str, port: i32) -> Self {
        let name = (!name.is_empty()).then(|| name.to_owned());
        let port = ServicePort {
            name,
            protocol: Some(protocol.to_owned()),
            port,
            ..Default::default()
        };
        self.edit(|spec| spec.ports.get_or_insert_default().push(port))
    }

    pub fn tcp(self, port: i32) -> Self {
        self.port("", "TCP", port)
    }

    pub fn type_(self, type_: &str) -> Self {
        self.edit(|spec| spec.type_ = Some(type_.to_owned()))
    }

    pub fn internal_local(self) -> Self {
        self.edit(|spec| spec.internal_traffic_policy = Some("Local".to_owned()))
    }

    pub fn external_local(self) -> Self {
        self.edit(|spec| spec.external_traffic_policy = Some("Local".to_owned()))
    }

    /// Sets the last port's node port.
    pub fn node_port(self, node_port: i32) -> Self {
        self.edit(|spec| {
            spec.ports
                .iter_mut()
                .flatten()
                .last()
                .expect("a port to edit")
                .node_port = Some(node_port);
        })
    }

    pub fn external_ip(self, ip: &str) -> Self {
        self.edit(|spec| {
            spec.external_ips
                .get_or_insert_default()
                .push(ip.to_owned())
        })
    }

    pub fn source_range(self, range: &str) -> Self {
        self.edit(|spec| {
            spec.load_balancer_source_ranges
                .get_or_insert_default()
                .push(range.to_owned())
        })
    }

    /// Adds a load balancer address, with an optional `ipMode`.
    pub fn ingress(mut self, ip: &str, mode: Option<&str>) -> Self {
        let status = self.0.status.get_or_insert_default();
        let ingress = status
            .load_balancer
            .get_or_insert_default()
            .ingress
            .get_or_insert_default();
        let ip = Some(ip.to_owned());
        let ip_mode = mode.map(str::to_owned);
        ingress.push(LoadBalancerIngress {
            ip,
            ip_mode,
            ..Default::default()
        });
        self
    }

    pub fn vip(self, ip: &str) -> Self {
        self.ingress(ip, None)
    }

    pub fn affinity(self, secs: Option<i32>) -> Self {
        self.edit(|spec| {
            spec.session_affinity = Some("ClientIP".to_owned());
            let client_ip = Some(ClientIPConfig {
                timeout_seconds: secs,
            });
            spec.session_affinity_config = secs.map(|_| SessionAffinityConfig { client_ip });
        })
    }

    pub fn algorithm(self, name: &str) -> Self {
        self.annotation("kpx.dev/lb-algorithm", name)
    }

    /// Sets the weights of endpoints: `10.244.0.1=3,web-2=0`.
    pub fn weights(self, weights: &str) -> Self {
        self.annotation("kpx.dev/weights", weights)
    }

    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        self.0
            .metadata
            .annotations
            .get_or_insert_default()
            .insert(key.to_owned(), value.to_owned());
        self
    }

    pub fn label(mut self, label: &str) -> Self {
        self.0
            .metadata
            .labels
            .get_or_insert_default()
            .insert(label.to_owned(), String::new());
        self
    }

    /// Sets the creation time, in seconds since 1970.
    pub fn created(mut self, second: i64) -> Self {
        self.0.metadata.creation_timestamp = Some(Time(Timestamp::from_second(second).unwrap()));
        self
    }

    pub fn object(&self) -> compact::Service {
        self.0.clone().into()
    }

    pub fn deleted(&self) -> Input {
        Input::Service(Update::Del(ObjectName::from(&self.0.metadata)))
    }
}

impl From<ServiceBuilder> for Input {
    fn from(service: ServiceBuilder) -> Self {
        Update::Put(Box::new(service.0)).into()
    }
}

#[derive(Clone, Debug)]
pub struct SliceBuilder(EndpointSlice);

/// Builds an IPv4 slice.
pub fn slice(name: &str, service: &str) -> SliceBuilder {
    let slice = EndpointSlice {
        metadata: meta(name),
        address_type: "IPv4".to_owned(),
        ..Default::default()
    };
    SliceBuilder(slice).label("kubernetes.io/service-name", service)
}

impl SliceBuilder {
    pub fn address_type(mut self, address_type: &str) -> Self {
        self.0.address_type = address_type.to_owned();
        self
    }

    pub fn label(mut self, label: &str, value: &str) -> Self {
        self.0
            .metadata
            .labels
            .get_or_insert_default()
            .insert(label.to_owned(), value.to_owned());
        self
    }

    pub fn without_service(mut self) -> Self {
        self.0.metadata.labels = None;
        self
    }

    pub fn port(mut self, name: &str, protocol: &str, port: i32) -> Self {
        let name = Some(name.to_owned());
        let protocol = Some(protocol.to_owned());
        let port = EndpointPort {
            name,
            protocol,
            port: Some(port),
            ..Default::default()
        };
        self.0.ports.get_or_insert_default().push(port);
        self
    }

    pub fn tcp(self, port: i32) -> Self {
        self.port("", "TCP", port)
    }

    /// Adds an endpoint without conditions.
    pub fn endpoint(mut self, ip: &str) -> Self {
        let endpoint = Endpoint {
            addresses: vec![ip.to_owned()],
            ..Default::default()
        };
        self.0.endpoints.get_or_insert_default().push(endpoint);
        self
    }

    pub fn ready(self, ip: &str) -> Self {
        self.conditions(ip, true, true, false)
    }

    pub fn unready(self, ip: &str) -> Self {
        self.conditions(ip, false, false, false)
    }

    /// Adds an endpoint that is terminating and still serving.
    pub fn terminating(self, ip: &str) -> Self {
        self.conditions(ip, false, true, true)
    }

    pub fn conditions(self, ip: &str, ready: bool, serving: bool, terminating: bool) -> Self {
        let ready = Some(ready);
        let serving = Some(serving);
        let terminating = Some(terminating);
        self.endpoint(ip).edit_last(|last| {
            last.conditions = Some(EndpointConditions {
                ready,
                serving,
                terminating,
            });
        })
    }

    pub fn weight(self, weight: &str) -> Self {
        self.edit(|slice| {
            slice
                .metadata
                .annotations
                .get_or_insert_default()
                .insert("kpx.dev/weight".to_owned(), weight.to_owned());
        })
    }

    /// Makes the last endpoint a pod.
    pub fn pod(self, name: &str) -> Self {
        let kind = Some("Pod".to_owned());
        let name = Some(name.to_owned());
        self.edit_last(|last| {
            last.target_ref = Some(ObjectReference {
                kind,
                name,
                ..Default::default()
            })
        })
    }

    pub fn on(self, node: &str) -> Self {
        self.edit_last(|last| last.node_name = Some(node.to_owned()))
    }

    pub fn hints(self, nodes: &[&str], zones: &[&str]) -> Self {
        let for_nodes = nodes
            .iter()
            .map(|&name| ForNode {
                name: name.to_owned(),
            })
            .collect::<Vec<_>>();
        let for_zones = zones
            .iter()
            .map(|&name| ForZone {
                name: name.to_owned(),
            })
            .collect::<Vec<_>>();
        let for_nodes = Some(for_nodes);
        let for_zones = Some(for_zones);
        self.edit_last(|last| {
            last.hints = Some(EndpointHints {
                for_nodes,
                for_zones,
            })
        })
    }

    pub fn hostname(self, name: &str) -> Self {
        self.edit_last(|last| last.hostname = Some(name.to_owned()))
    }

    pub fn edit_last(mut self, edit: impl FnOnce(&mut Endpoint)) -> Self {
        edit(
            self.0
                .endpoints
                .iter_mut()
                .flatten()
                .last()
                .expect("an endpoint to edit"),
        );
        self
    }

    pub fn edit(mut self, edit: impl FnOnce(&mut EndpointSlice)) -> Self {
        edit(&mut self.0);
        self
    }

    pub fn object(&self) -> compact::EndpointSlice {
        self.0.clone().into()
    }

    pub fn deleted(&self) -> Input {
        Input::EndpointSlice(Update::Del(ObjectName::from(&self.0.metadata)))
    }
}

impl From<SliceBuilder> for Input {
    fn from(slice: SliceBuilder) -> Self {
        Update::Put(Box::new(slice.0)).into()
    }
}

pub fn node(name: &str, zone: Option<&str>, addresses: &[(&str, &str)]) -> Input {
    let address = |(type_, address): &(&str, &str)| NodeAddress {
        type_: (*type_).into(),
        address: (*address).into(),
    };
    let addresses = Some(addresses.iter().map(address).collect());
    let mut node = Node {
        status: Some(NodeStatus {
            addresses,
            ..Default::default()
        }),
        ..Default::default()
    };
    node.metadata.name = Some(name.to_owned());
    node.metadata.labels =
        zone.map(|zone| [("topology.kubernetes.io/zone".to_owned(), zone.to_owned())].into());
    Input::Node(Update::Put(Box::new(node)))
}

pub fn node_with_pods(name: &str, pod_cidrs: &[&str]) -> Input {
    let mut node = Node::default();
    node.metadata.name = Some(name.to_owned());
    let pod_cidrs = pod_cidrs.iter().map(|&cidr| cidr.to_owned()).collect();
    node.spec = Some(NodeSpec {
        pod_cidrs: Some(pod_cidrs),
        ..Default::default()
    });
    Input::Node(Update::Put(Box::new(node)))
}

pub fn service_cidr(name: &str, cidrs: &[&str]) -> Input {
    let mut object = ServiceCIDR::default();
    object.metadata.name = Some(name.to_owned());
    object.spec = Some(ServiceCIDRSpec {
        cidrs: Some(cidrs.iter().map(|&cidr| cidr.to_owned()).collect()),
    });
    Input::ServiceCidr(Update::Put(Box::new(object)))
}
