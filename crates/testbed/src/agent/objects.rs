//! The cluster's objects.

use serde_json::{Value, json};

use crate::lab::{Dual, Family, Host, Lab, Node, SERVICE_CIDR};

/// The port of every Service of the lab, over TCP, UDP and SCTP.
pub const SERVICE_PORT: u16 = 80;

/// The manifest of a Service, an EndpointSlice or a Node.
#[derive(Clone, Debug, PartialEq)]
pub struct Object(pub Value);

/// A dual-stack Service of the lab, and its backends.
#[derive(Clone, Debug)]
pub struct Service {
    pub name: &'static str,
    namespace: &'static str,
    /// The ClusterIPs are the `nth` addresses of the service network.
    pub nth: u8,
    pub backends: Vec<&'static str>,
    /// The port of the backends.
    pub target_port: u16,
    /// The backends that are terminating and still serve.
    terminating: Vec<&'static str>,
    /// The zones or nodes that a backend is hinted for.
    hints: Vec<(&'static str, Hint)>,
    /// The fields of the spec other than names, addresses and ports.
    spec: Value,
    labels: Value,
    annotations: Value,
    node_port: Option<u16>,
    ingress: Vec<Value>,
    /// True if the endpoints refer to Pods with the hosts' names.
    names_pods: bool,
}

/// A topology hint of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    Zone(&'static str),
    Node(&'static str),
}

impl Service {
    pub fn new(name: &'static str, nth: u8, backends: &[&'static str], target_port: u16) -> Self {
        Self {
            name,
            namespace: "default",
            nth,
            backends: backends.to_vec(),
            target_port,
            terminating: Vec::new(),
            hints: Vec::new(),
            spec: json!({ "type": "ClusterIP", "internalTrafficPolicy": "Cluster", "sessionAffinity": "None" }),
            labels: json!({}),
            annotations: json!({}),
            node_port: None,
            ingress: Vec::new(),
            names_pods: true,
        }
    }

    /// Moves the Service to another namespace than `default`.
    pub fn in_namespace(self, namespace: &'static str) -> Self {
        Self { namespace, ..self }
    }

    /// Returns the Service with other backends.
    pub fn backed_by(&self, backends: &[&'static str]) -> Self {
        Self {
            backends: backends.to_vec(),
            ..self.clone()
        }
    }

    /// Returns the Service with endpoints that do not refer to Pods, like an operator's own.
    pub fn of_no_pods(self) -> Self {
        Self {
            names_pods: false,
            ..self
        }
    }

    /// Sets `internalTrafficPolicy: Local`.
    pub fn local(self) -> Self {
        self.spec("internalTrafficPolicy", "Local")
    }

    /// Sets `externalTrafficPolicy: Local`.
    pub fn external_local(self) -> Self {
        self.spec("externalTrafficPolicy", "Local")
    }

    pub fn external_ips(self, addrs: Dual) -> Self {
        self.spec(
            "externalIPs",
            json!(Family::ALL.map(|family| addrs.ip(family))),
        )
    }

    /// Sets the same node port for all protocols.
    pub fn node_port(self, number: u16) -> Self {
        let spec = if self.spec["type"] == "ClusterIP" {
            self.spec("type", "NodePort")
        } else {
            self
        };
        Self {
            node_port: Some(number),
            ..spec
        }
    }

    /// Sets these addresses in the status. Packets to them arrive at the nodes unchanged, unless
    /// `mode` is `Proxy`.
    pub fn load_balancer(self, addrs: Dual, mode: &str) -> Self {
        let ingress = Family::ALL
            .map(|family| json!({ "ip": addrs.ip(family), "ipMode": mode }))
            .to_vec();
        Self {
            ingress,
            ..self.spec("type", "LoadBalancer")
        }
    }

    /// Sets a host name in the status, which nodes cannot serve.
    pub fn load_balancer_at(self, hostname: &str) -> Self {
        Self {
            ingress: vec![json!({ "hostname": hostname })],
            ..self.spec("type", "LoadBalancer")
        }
    }

    pub fn without_node_ports(self) -> Self {
        self.spec("allocateLoadBalancerNodePorts", false)
    }

    /// Sets `loadBalancerSourceRanges`, in the form `address/length`.
    pub fn source_ranges(self, ranges: &[String]) -> Self {
        self.spec("loadBalancerSourceRanges", json!(ranges))
    }

    pub fn health_check_node_port(self, number: u16) -> Self {
        self.spec("healthCheckNodePort", number)
    }

    /// Sets `sessionAffinity: ClientIP`.
    pub fn affinity(self, timeout_secs: u32) -> Self {
        let config = json!({ "clientIP": { "timeoutSeconds": timeout_secs } });
        self.spec("sessionAffinity", "ClientIP")
            .spec("sessionAffinityConfig", config)
    }

    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels[key] = value.into();
        self
    }

    pub fn annotation(mut self, key: &str, value: &str) -> Self {
        self.annotations[key] = value.into();
        self
    }

    pub fn backends(self, backends: &[&'static str]) -> Self {
        Self {
            backends: backends.to_vec(),
            ..self
        }
    }

    pub fn terminating(self, backends: &[&'static str]) -> Self {
        Self {
            terminating: backends.to_vec(),
            ..self
        }
    }

    pub fn hints(self, hints: &[(&'static str, Hint)]) -> Self {
        Self {
            hints: hints.to_vec(),
            ..self
        }
    }

    fn spec(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.spec[field] = value.into();
        self
    }

    pub fn cluster_ip(&self) -> Dual {
        SERVICE_CIDR.host(self.nth)
    }

    /// Returns the address that clients dial.
    pub fn frontend(&self, family: Family) -> std::net::SocketAddr {
        (self.cluster_ip().ip(family), SERVICE_PORT).into()
    }

    /// Returns the Service and an EndpointSlice for each family.
    pub fn objects(&self, lab: &Lab) -> Vec<Object> {
        let slices = Family::ALL.map(|family| Object(self.slice(lab, family)));
        [self.service()].into_iter().chain(slices).collect()
    }

    /// Returns the Service without slices.
    pub fn service(&self) -> Object {
        let mut spec = self.spec.clone();
        spec["clusterIP"] = json!(self.cluster_ip().v4);
        spec["clusterIPs"] = json!(Family::ALL.map(|family| self.cluster_ip().ip(family)));
        spec["ipFamilies"] = json!(Family::ALL.map(|family| family.to_string()));
        spec["ipFamilyPolicy"] = "RequireDualStack".into();
        let ports = ports(SERVICE_PORT, |port| {
            port["targetPort"] = self.target_port.into();
            if let Some(number) = self.node_port {
                port["nodePort"] = number.into();
            }
        });
        spec["ports"] = json!(ports);
        let mut service = json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": self.name,
                "namespace": self.namespace,
                "labels": self.labels,
                "annotations": self.annotations,
            },
            "spec": spec,
        });
        if !self.ingress.is_empty() {
            service["status"] = json!({ "loadBalancer": { "ingress": self.ingress } });
        }
        Object(service)
    }

    fn slice(&self, lab: &Lab, family: Family) -> Value {
        let endpoints: Vec<Value> = self
            .backends
            .iter()
            .map(|name| self.endpoint(lab, lab.host(name), family))
            .collect();
        // The control plane copies the Service's labels too.
        let mut labels = self.labels.clone();
        labels["kubernetes.io/service-name"] = self.name.into();
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": format!("{}-{}", self.name, family.to_string().to_lowercase()),
                "namespace": self.namespace,
                "labels": labels,
            },
            "addressType": family.to_string(),
            "endpoints": endpoints,
            "ports": ports(self.target_port, |_| ()),
        })
    }

    fn endpoint(&self, lab: &Lab, host: &Host, family: Family) -> Value {
        let terminating = self.terminating.contains(&host.name);
        let mut endpoint = json!({
            "addresses": [host.addrs.ip(family)],
            "conditions": { "ready": !terminating, "serving": true, "terminating": terminating },
        });
        if let Some(node) = lab.node_of(host) {
            endpoint["nodeName"] = node.host.name.into();
            endpoint["zone"] = zone(node).into();
            // The control plane adds the pod of an endpoint. Nodes and outside machines have no
            // pod.
            if self.names_pods && node.host.name != host.name {
                endpoint["targetRef"] =
                    json!({ "kind": "Pod", "name": host.name, "namespace": self.namespace });
            }
        }
        for (_, hint) in self.hints.iter().filter(|(name, _)| *name == host.name) {
            let (field, name) = match hint {
                Hint::Zone(name) => ("forZones", name),
                Hint::Node(name) => ("forNodes", name),
            };
            endpoint["hints"] = json!({ field: [{ "name": name }] });
        }
        endpoint
    }
}

fn ports(number: u16, complete: impl Fn(&mut Value)) -> [Value; 3] {
    ["TCP", "UDP", "SCTP"].map(|protocol| {
        let mut port =
            json!({ "name": protocol.to_lowercase(), "protocol": protocol, "port": number });
        complete(&mut port);
        port
    })
}

/// Returns the node's zone; each node has its own: n1 is in `zone-n1`.
fn zone(node: &Node) -> String {
    format!("zone-{}", node.host.name)
}

pub fn node(node: &Node) -> Object {
    let addresses = Family::ALL
        .map(|family| json!({ "type": "InternalIP", "address": node.host.addrs.ip(family) }));
    let cidrs = Family::ALL.map(|family| node.pod_net.cidr(family));
    Object(json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": { "name": node.host.name, "labels": { "topology.kubernetes.io/zone": zone(node) } },
        "spec": { "podCIDR": &cidrs[0], "podCIDRs": cidrs },
        "status": { "addresses": addresses },
    }))
}
