//! The Services of a fixture: the measured Services, and any number of other Services.

use std::net::{Ipv4Addr, SocketAddrV4};

use serde_json::{Value, json};

use super::Path;
use crate::kube_rules::{Proto, Rules, ServicePort};
use testbed::lab::{CLUSTER_PODS, Family, Lab, SERVICE_CIDR};

/// The port of backends, over TCP and UDP.
pub(super) const TARGET_PORT: u16 = 8080;
const PORT: u16 = 80;
const NODE_PORT: u16 = 30080;
const FAR_NODE_PORT: u16 = 30081;
/// The number of endpoints of each other Service.
const ENDPOINTS: u32 = 3;
/// The first address of other Services, after those of the lab.
const FIRST_SERVICE: Ipv4Addr = Ipv4Addr::new(10, 96, 1, 0);
const FIRST_POD: Ipv4Addr = Ipv4Addr::new(10, 244, 16, 0);
const PODS: u32 = 240 << 8;

struct Measured {
    name: &'static str,
    /// The number of its address in the service network.
    nth: u8,
    backend: &'static str,
    node_port: Option<u16>,
}

const NEAR: Measured = Measured {
    name: "near",
    nth: 10,
    backend: "p1b",
    node_port: Some(NODE_PORT),
};
const FAR: Measured = Measured {
    name: "far",
    nth: 11,
    backend: "p2a",
    node_port: Some(FAR_NODE_PORT),
};

/// Returns the host of the server.
pub(super) fn backend(path: Path) -> &'static str {
    match path {
        Path::Local
        | Path::Routable
        | Path::Calico
        | Path::KubeRouter
        | Path::Host
        | Path::Outside => NEAR.backend,
        Path::Remote | Path::Overlay | Path::OutsideRemote => FAR.backend,
    }
}

pub(super) fn client(path: Path) -> &'static str {
    match path {
        Path::Local
        | Path::Routable
        | Path::Calico
        | Path::KubeRouter
        | Path::Remote
        | Path::Overlay => "p1a",
        Path::Host => "n1",
        Path::Outside | Path::OutsideRemote => "x",
    }
}

/// Returns the address that clients of the Service dial.
pub(super) fn frontend(lab: &Lab, path: Path) -> SocketAddrV4 {
    let (ip, port) = match path {
        Path::Local | Path::Routable | Path::Calico | Path::KubeRouter | Path::Host => {
            (NEAR.cluster_ip(), PORT)
        }
        Path::Remote | Path::Overlay => (FAR.cluster_ip(), PORT),
        Path::Outside => (lab.n1.host.addrs.v4, NODE_PORT),
        Path::OutsideRemote => (lab.n1.host.addrs.v4, FAR_NODE_PORT),
    };
    SocketAddrV4::new(ip, port)
}

/// Returns the Services for kube-proxy's rules on n1. The measured Services are in the middle, the
/// mean position where order counts. Without `whole`, all other Services share one Service's
/// chains.
pub(super) fn rules(lab: &Lab, count: usize, whole: bool) -> Rules {
    let others = u32::try_from(count.saturating_sub(1))
        .expect("less than the service network has addresses");
    let measured = [NEAR, FAR]
        .into_iter()
        .flat_map(|service| service.ports(lab));
    let other = |nth| ServicePort {
        stand_in: !whole,
        ..other(nth)
    };
    let ports = (0..others / 2)
        .map(other)
        .chain(measured)
        .chain((others / 2..others).map(other))
        .collect();
    Rules {
        pods: CLUSTER_PODS.cidr(Family::V4),
        services: SERVICE_CIDR.cidr(Family::V4),
        node: lab.n1.host.addrs.v4,
        local: lab.n1.pods.iter().map(|pod| pod.addrs.v4).collect(),
        ports,
    }
}

impl Measured {
    fn cluster_ip(&self) -> Ipv4Addr {
        SERVICE_CIDR.host(self.nth).v4
    }

    fn ports(&self, lab: &Lab) -> [ServicePort; 2] {
        [Proto::Tcp, Proto::Udp].map(|proto| ServicePort {
            service: format!("default/{}", self.name),
            name: proto.to_string(),
            proto,
            cluster_ip: self.cluster_ip(),
            port: PORT,
            node_port: self.node_port,
            endpoints: vec![SocketAddrV4::new(
                lab.host(self.backend).addrs.v4,
                TARGET_PORT,
            )],
            stand_in: false,
        })
    }
}

/// Returns another Service, with its own endpoints; they differ by port where addresses do not
/// suffice.
fn other(nth: u32) -> ServicePort {
    let endpoint = |nth: u32| {
        let port =
            TARGET_PORT + u16::try_from(nth / PODS).expect("a few times more endpoints than pods");
        SocketAddrV4::new(Ipv4Addr::from(u32::from(FIRST_POD) + nth % PODS), port)
    };
    ServicePort {
        service: format!("default/other-{nth}"),
        name: "tcp".to_owned(),
        proto: Proto::Tcp,
        cluster_ip: Ipv4Addr::from(u32::from(FIRST_SERVICE) + nth),
        port: PORT,
        node_port: None,
        endpoints: (0..ENDPOINTS)
            .map(|which| endpoint(nth * ENDPOINTS + which))
            .collect(),
        stand_in: false,
    }
}

/// Returns the API objects of these rules: a Service and an EndpointSlice each.
pub(super) fn objects(lab: &Lab, rules: &Rules) -> Vec<Value> {
    // The ports of a Service are adjacent.
    let services = rules.ports.chunk_by(|a, b| a.service == b.service);
    services
        .flat_map(|ports| [service(ports), slice(lab, ports)])
        .collect()
}

/// Returns an Endpoints object each, for proxies without EndpointSlices v1.
pub(super) fn endpoints(rules: &Rules) -> Vec<Value> {
    let services = rules.ports.chunk_by(|a, b| a.service == b.service);
    let subset = |ports: &[ServicePort]| {
        let addresses: Vec<Value> = ports[0]
            .endpoints
            .iter()
            .map(|at| json!({ "ip": at.ip() }))
            .collect();
        json!({ "addresses": addresses, "ports": ports.iter().map(target).collect::<Vec<_>>() })
    };
    let object = |ports: &[ServicePort]| {
        let metadata = json!({ "name": name(&ports[0]), "namespace": "default" });
        json!({ "apiVersion": "v1", "kind": "Endpoints", "metadata": metadata, "subsets": [subset(ports)] })
    };
    services.map(object).collect()
}

/// Returns the endpoints' port, in the form of both kinds of objects.
fn target(port: &ServicePort) -> Value {
    json!({ "name": port.name, "protocol": port.proto.to_string().to_uppercase(), "port": port.endpoints[0].port() })
}

fn name(port: &ServicePort) -> &str {
    port.service.rsplit('/').next().unwrap_or_default()
}

fn service(ports: &[ServicePort]) -> Value {
    let first = &ports[0];
    let list: Vec<Value> = ports
        .iter()
        .map(|port| {
            let target = port.endpoints[0].port();
            let protocol = port.proto.to_string().to_uppercase();
            let mut port_ = json!({ "name": port.name, "protocol": protocol, "port": port.port, "targetPort": target });
            if let Some(number) = port.node_port {
                port_["nodePort"] = number.into();
            }
            port_
        })
        .collect();
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "name": name(first), "namespace": "default" },
        "spec": {
            "type": if first.node_port.is_some() { "NodePort" } else { "ClusterIP" },
            "clusterIP": first.cluster_ip,
            "clusterIPs": [first.cluster_ip],
            "ipFamilies": ["IPv4"],
            "ipFamilyPolicy": "SingleStack",
            "internalTrafficPolicy": "Cluster",
            "sessionAffinity": "None",
            "ports": list,
        },
    })
}

fn slice(lab: &Lab, ports: &[ServicePort]) -> Value {
    let first = &ports[0];
    let host = |ip: Ipv4Addr| lab.backends().find(|host| host.addrs.v4 == ip);
    let endpoint = |at: &SocketAddrV4| {
        let node = host(*at.ip())
            .and_then(|host| lab.node_of(host))
            .unwrap_or(&lab.n2)
            .host
            .name;
        let conditions = json!({ "ready": true, "serving": true, "terminating": false });
        json!({ "addresses": [at.ip()], "conditions": conditions, "nodeName": node })
    };
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": format!("{}-ipv4", name(first)),
            "namespace": "default",
            "labels": { "kubernetes.io/service-name": name(first) },
        },
        "addressType": "IPv4",
        "endpoints": first.endpoints.iter().map(endpoint).collect::<Vec<_>>(),
        "ports": ports.iter().map(target).collect::<Vec<_>>(),
    })
}
