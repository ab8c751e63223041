//! The cluster's objects.

use serde_json::{Value, json};

use crate::lab::{Dual, Family, Host, Lab, Node, SERVICE_CIDR};

/// The ports that every service of the lab offers, TCP and UDP.
const SERVICE_PORT: u16 = 80;

/// A Service, an EndpointSlice or a Node, as its manifest says it.
#[derive(Clone, Debug, PartialEq)]
pub struct Object(pub Value);

/// A dual-stack ClusterIP service of the lab and what backs it.
#[derive(Clone, Debug)]
pub struct Service {
    pub name: &'static str,
    /// Its ClusterIPs are the service network's `nth` addresses.
    pub nth: u8,
    /// `internalTrafficPolicy: Local`.
    pub local: bool,
    pub backends: Vec<&'static str>,
    /// Of the backends.
    pub target_port: u16,
}

impl Service {
    pub fn new(name: &'static str, nth: u8, backends: &[&'static str], target_port: u16) -> Self {
        Self { name, nth, local: false, backends: backends.to_vec(), target_port }
    }

    pub fn local(self) -> Self {
        Self { local: true, ..self }
    }

    pub fn cluster_ip(&self) -> Dual {
        SERVICE_CIDR.host(self.nth)
    }

    /// Where clients dial.
    pub fn frontend(&self, family: Family) -> std::net::SocketAddr {
        (self.cluster_ip().ip(family), SERVICE_PORT).into()
    }

    /// The Service and an EndpointSlice for each family.
    pub fn objects(&self, lab: &Lab) -> Vec<Object> {
        let service = json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": self.name, "namespace": "default" },
            "spec": {
                "type": "ClusterIP",
                "clusterIP": self.cluster_ip().v4,
                "clusterIPs": Family::ALL.map(|family| self.cluster_ip().ip(family)),
                "ipFamilies": Family::ALL.map(|family| family.to_string()),
                "ipFamilyPolicy": "RequireDualStack",
                "internalTrafficPolicy": if self.local { "Local" } else { "Cluster" },
                "sessionAffinity": "None",
                "ports": ports(SERVICE_PORT, |port| port["targetPort"] = self.target_port.into()),
            },
        });
        let slices = Family::ALL.map(|family| Object(self.slice(lab, family)));
        [Object(service)].into_iter().chain(slices).collect()
    }

    fn slice(&self, lab: &Lab, family: Family) -> Value {
        let endpoint = |host: &Host| {
            let mut endpoint = json!({
                "addresses": [host.addrs.ip(family)],
                "conditions": { "ready": true, "serving": true, "terminating": false },
            });
            if let Some(node) = lab.node_of(host) {
                endpoint["nodeName"] = node.host.name.into();
            }
            endpoint
        };
        let endpoints: Vec<Value> = self.backends.iter().map(|name| endpoint(lab.host(name))).collect();
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": format!("{}-{}", self.name, family.to_string().to_lowercase()),
                "namespace": "default",
                "labels": { "kubernetes.io/service-name": self.name },
            },
            "addressType": family.to_string(),
            "endpoints": endpoints,
            "ports": ports(self.target_port, |_| ()),
        })
    }
}

fn ports(number: u16, complete: impl Fn(&mut Value)) -> [Value; 2] {
    ["TCP", "UDP"].map(|protocol| {
        let mut port = json!({ "name": protocol.to_lowercase(), "protocol": protocol, "port": number });
        complete(&mut port);
        port
    })
}

pub fn node(node: &Node) -> Object {
    let addresses = Family::ALL.map(|family| json!({ "type": "InternalIP", "address": node.host.addrs.ip(family) }));
    let cidrs = Family::ALL.map(|family| node.pod_net.cidr(family));
    Object(json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": { "name": node.host.name },
        "spec": { "podCIDR": &cidrs[0], "podCIDRs": cidrs },
        "status": { "addresses": addresses },
    }))
}
