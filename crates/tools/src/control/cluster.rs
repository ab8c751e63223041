//! A cluster's objects, as large as those of real controllers: with owners, labels and managed
//! fields.

use std::net::{Ipv4Addr, SocketAddrV4};

use proxy_common::addr::{Addr4, Port, Proto};
use proxy_common::frontend::{Backend, FrontendKey, Set, SlotKey};
use serde_json::{Value, json};

use crate::kube_rules::{self, ServicePort};

pub(crate) const NODE: &str = "node-0000";
pub(crate) const NODE_IP: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 10);
/// The range of ClusterIPs, large enough for 100,000 Services.
pub(crate) const SERVICE_CIDR: &str = "10.96.0.0/12";
/// The first address of new endpoints, above all initial addresses, so that a new endpoint is the
/// last of its set.
const NEWCOMERS: Ipv4Addr = Ipv4Addr::new(10, 192, 0, 0);
const ENDPOINTS: Ipv4Addr = Ipv4Addr::new(10, 128, 0, 0);
/// The networks of all endpoints.
pub(crate) const ENDPOINT_NETS: [&str; 2] = ["10.128.0.0/13", "10.192.0.0/13"];
/// The range of all pods, as kubeadm passes it to kube-proxy.
pub(crate) const CLUSTER_CIDR: &str = "10.128.0.0/9";
const PORT: u16 = 80;
pub(crate) const TARGET_PORT: u16 = 8080;
/// The number of pods per node.
const PODS: u32 = 50;
/// One in this many Services has a node port, and one is UDP.
const EVERY: u32 = 10;
const NODE_PORTS: u32 = 2_768;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Cluster {
    pub(crate) services: u32,
    pub(crate) endpoints: u32,
}

impl Cluster {
    /// Returns the final numbers of rows in the maps: frontends (with one per ClusterIP), services,
    /// slots.
    pub(crate) fn rows(&self) -> [usize; 3] {
        let node_ports = (0..self.services).filter(|nth| has_node_port(*nth)).count();
        let services = self.services as usize;
        [
            2 * services + node_ports,
            services,
            services * self.endpoints as usize,
        ]
    }

    pub(crate) fn node(&self) -> Value {
        json!({
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": { "name": NODE, "labels": { "topology.kubernetes.io/zone": zone(0) } },
            "spec": { "podCIDR": "10.244.0.0/24", "podCIDRs": ["10.244.0.0/24"] },
            "status": { "addresses": [{ "type": "InternalIP", "address": NODE_IP }] },
        })
    }

    pub(crate) fn service(&self, nth: u32) -> Value {
        let name = name(nth);
        let mut port = json!({ "name": "http", "protocol": protocol(nth), "port": PORT, "targetPort": "http" });
        if has_node_port(nth) {
            port["nodePort"] = json!(node_port(nth));
        }
        json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": name,
                "namespace": namespace(nth),
                "uid": uid("service", nth),
                "creationTimestamp": "2026-01-02T03:04:05Z",
                "labels": labels(&name),
                "annotations": { "meta.helm.sh/release-name": name, "meta.helm.sh/release-namespace": namespace(nth) },
                "managedFields": managed("helm", &["f:metadata", "f:labels", "f:spec", "f:ports", "f:selector", "f:type"]),
            },
            "spec": {
                "type": if has_node_port(nth) { "NodePort" } else { "ClusterIP" },
                "clusterIP": cluster_ip(nth),
                "clusterIPs": [cluster_ip(nth)],
                "ipFamilies": ["IPv4"],
                "ipFamilyPolicy": "SingleStack",
                "internalTrafficPolicy": "Cluster",
                "sessionAffinity": "None",
                "selector": labels(&name),
                "ports": [port],
            },
            "status": { "loadBalancer": {} },
        })
    }

    /// Returns an EndpointSlice; `last` replaces the address of its last endpoint.
    pub(crate) fn slice(&self, nth: u32, last: Option<Ipv4Addr>) -> Value {
        let service = name(nth);
        let first = nth * self.endpoints;
        let endpoints = (0..self.endpoints).map(|of_service| {
            let newcomer = last.filter(|_| of_service + 1 == self.endpoints);
            endpoint(
                nth,
                first + of_service,
                newcomer.unwrap_or(plus(ENDPOINTS, first + of_service)),
            )
        });
        let mut labels = labels(&service);
        labels["kubernetes.io/service-name"] = json!(service);
        labels["endpointslice.kubernetes.io/managed-by"] = json!("endpointslice-controller.k8s.io");
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": format!("{service}-x7k2p"),
                "generateName": format!("{service}-"),
                "namespace": namespace(nth),
                "uid": uid("slice", nth),
                "generation": 4,
                "creationTimestamp": "2026-01-02T03:04:06Z",
                "labels": labels,
                "annotations": { "endpoints.kubernetes.io/last-change-trigger-time": "2026-01-02T03:04:06Z" },
                "ownerReferences": [{ "apiVersion": "v1", "kind": "Service", "name": service, "uid": uid("service", nth),
                    "controller": true, "blockOwnerDeletion": true }],
                "managedFields": managed("kube-controller-manager", &["f:addressType", "f:endpoints", "f:metadata",
                    "f:annotations", "f:generateName", "f:labels", "f:ownerReferences", "f:ports"]),
            },
            "addressType": "IPv4",
            "endpoints": endpoints.collect::<Vec<_>>(),
            "ports": [{ "name": "http", "protocol": protocol(nth), "port": TARGET_PORT }],
        })
    }

    /// Returns the same as an Endpoints object, for proxies without EndpointSlices v1.
    pub(crate) fn endpoints_object(&self, nth: u32, last: Option<Ipv4Addr>) -> Value {
        let addresses: Vec<_> = self
            .port(nth, last)
            .endpoints
            .iter()
            .map(|at| json!({ "ip": at.ip() }))
            .collect();
        json!({
            "apiVersion": "v1",
            "kind": "Endpoints",
            "metadata": { "name": name(nth), "namespace": namespace(nth) },
            "subsets": [{
                "addresses": addresses,
                "ports": [{ "name": "http", "protocol": protocol(nth), "port": TARGET_PORT }],
            }],
        })
    }

    /// Returns the address that clients of the Service dial.
    pub(crate) fn frontend(nth: u32) -> SocketAddrV4 {
        SocketAddrV4::new(cluster_ip(nth), PORT)
    }

    pub(crate) fn last_frontend(&self) -> FrontendKey<Addr4> {
        service_port(self.services.saturating_sub(1))
    }

    /// Returns the first address of a Service's endpoints.
    pub(crate) fn first_endpoint(&self, nth: u32) -> Ipv4Addr {
        plus(ENDPOINTS, nth * self.endpoints)
    }

    /// Returns the port for kube-proxy's rules. `last` is as in [`Self::slice`].
    pub(crate) fn port(&self, nth: u32, last: Option<Ipv4Addr>) -> ServicePort {
        let addr = |of_service: u32| {
            let newcomer = last.filter(|_| of_service + 1 == self.endpoints);
            newcomer.unwrap_or(plus(self.first_endpoint(nth), of_service))
        };
        ServicePort {
            service: format!("{}/{}", namespace(nth), name(nth)),
            name: "http".to_owned(),
            proto: if is_udp(nth) {
                kube_rules::Proto::Udp
            } else {
                kube_rules::Proto::Tcp
            },
            cluster_ip: cluster_ip(nth),
            port: PORT,
            node_port: has_node_port(nth).then(|| node_port(nth)),
            endpoints: (0..self.endpoints)
                .map(|nth| SocketAddrV4::new(addr(nth), TARGET_PORT))
                .collect(),
            stand_in: false,
        }
    }

    /// Returns the row of the last endpoint: key and value.
    pub(crate) fn last_slot(&self, nth: u32, last: Ipv4Addr) -> (SlotKey<Addr4>, Backend<Addr4>) {
        let index =
            u16::try_from(self.endpoints - 1).expect("as many endpoints as a service may have");
        (
            SlotKey::new(service_port(nth), Set::CLUSTER, index),
            Backend::new(last.into(), Port::new(TARGET_PORT), 0),
        )
    }
}

/// Returns the address of the `nth` new endpoint.
pub(crate) fn newcomer(nth: u32) -> Ipv4Addr {
    plus(NEWCOMERS, nth)
}

fn endpoint(service: u32, nth: u32, addr: Ipv4Addr) -> Value {
    let node = nth % PODS + 1;
    json!({
        "addresses": [addr],
        "conditions": { "ready": true, "serving": true, "terminating": false },
        "nodeName": format!("node-{node:04}"),
        "targetRef": { "kind": "Pod", "name": format!("{}-5d7c9f8b6d-{nth:05x}", name(service)),
            "namespace": namespace(service), "uid": uid("pod", nth) },
        "zone": zone(node),
    })
}

fn name(nth: u32) -> String {
    format!("service-{nth:05}")
}

fn namespace(nth: u32) -> String {
    format!("team-{:03}", nth % 100)
}

fn zone(node: u32) -> String {
    format!("region-1{}", ["a", "b", "c"][node as usize % 3])
}

fn labels(name: &str) -> Value {
    json!({ "app.kubernetes.io/name": name, "app.kubernetes.io/instance": name, "app.kubernetes.io/managed-by": "Helm" })
}

fn service_port(nth: u32) -> FrontendKey<Addr4> {
    let proto = if is_udp(nth) { Proto::UDP } else { Proto::TCP };
    FrontendKey::new(cluster_ip(nth).into(), Port::new(PORT), proto)
}

fn cluster_ip(nth: u32) -> Ipv4Addr {
    plus(Ipv4Addr::new(10, 96, 0, 10), nth)
}

fn plus(addr: Ipv4Addr, nth: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(addr.to_bits() + nth)
}

fn has_node_port(nth: u32) -> bool {
    nth.is_multiple_of(EVERY) && nth / EVERY < NODE_PORTS
}

fn node_port(nth: u32) -> u16 {
    30_000 + u16::try_from(nth / EVERY).expect("as many as there are node ports")
}

pub(crate) fn is_udp(nth: u32) -> bool {
    nth % EVERY == 5
}

fn protocol(nth: u32) -> &'static str {
    if is_udp(nth) { "UDP" } else { "TCP" }
}

fn uid(kind: &str, nth: u32) -> String {
    format!("{:08x}-0000-4000-8000-{nth:012x}", kind.len())
}

/// Makes managed fields of realistic size.
fn managed(manager: &str, fields: &[&str]) -> Value {
    let fields: serde_json::Map<_, _> = fields
        .iter()
        .map(|field| ((*field).to_owned(), json!({ ".": {} })))
        .collect();
    json!([{ "manager": manager, "operation": "Update", "apiVersion": "v1", "time": "2026-01-02T03:04:06Z",
        "fieldsType": "FieldsV1", "fieldsV1": fields }])
}
