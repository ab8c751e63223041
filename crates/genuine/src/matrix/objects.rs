//! The objects of the matrix: backends, clients, and a Service of each kind.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::Result;
use serde_json::{Value, json};

use crate::images;
use crate::network::Node;
use crate::parts::Parts;

pub(crate) const NAMESPACE: &str = "kpx-matrix";
/// The Services' port.
pub(crate) const PORT: u16 = 80;
/// The port of backends, and of the backend in a node's network.
const BACKEND: u16 = 8080;
const BACKEND_OF_NODE: u16 = 8081;
const FIRST_NODE_PORT: u16 = 30_100;

/// A kind of Service.
pub(crate) struct Kind {
    number: u8,
    pub(crate) name: &'static str,
    /// The label of its backends.
    backends: &'static str,
    pub(crate) affinity: bool,
    spec: Value,
}

/// The addresses of a Service that packets from outside reach by way of one node.
pub(crate) struct VirtualIps {
    pub(crate) load_balancer: [IpAddr; 2],
    pub(crate) external: [IpAddr; 2],
}

/// Returns all kinds. Those with network policies need a plugin that enforces them.
pub(crate) fn kinds(policies: bool) -> Vec<Kind> {
    let local = json!({ "externalTrafficPolicy": "Local", "internalTrafficPolicy": "Local" });
    let ranges = |ranges: [&str; 2]| json!({ "loadBalancerSourceRanges": ranges });
    let mut kinds = vec![
        ("cluster", "pod", json!({})),
        ("local", "pod", local.clone()),
        ("affinity", "two", json!({ "sessionAffinity": "ClientIP" })),
        ("host", "host", json!({})),
        ("host-local", "host", local.clone()),
        ("none", "none", json!({})),
        ("none-local", "none", local.clone()),
        (
            "range-of-x",
            "pod",
            ranges(["172.31.0.0/24", "fd00:172:31::/64"]),
        ),
        (
            "range-of-others",
            "pod",
            ranges(["192.0.2.0/24", "2001:db8::/32"]),
        ),
    ];
    if policies {
        kinds.push(("policy", "guarded", json!({})));
        kinds.push(("policy-local", "guarded", local));
    }
    let kind = |(number, (name, backends, spec)): (u8, (_, _, Value))| Kind {
        number,
        name,
        backends,
        affinity: spec.get("sessionAffinity").is_some(),
        spec,
    };
    (1..).zip(kinds).map(kind).collect()
}

impl Kind {
    /// Returns true for the kinds that a network policy guards.
    pub(crate) fn is_guarded(&self) -> bool {
        self.backends == "guarded"
    }

    pub(crate) fn node_port(&self) -> u16 {
        FIRST_NODE_PORT + u16::from(self.number)
    }

    pub(crate) fn virtual_ips(&self, node: &Node) -> VirtualIps {
        let ips = |host: u8| {
            let number = node.number;
            let ipv6 = [0xfd00, 0x172, 0x29, number.into(), 0, 0, 0, host.into()];
            [
                Ipv4Addr::new(172, 29, number, host).into(),
                Ipv6Addr::from(ipv6).into(),
            ]
        };
        VirtualIps {
            load_balancer: ips(self.number),
            external: ips(100 + self.number),
        }
    }

    /// Returns the status that a load balancer writes.
    pub(crate) fn status(&self, nodes: &[Node]) -> Value {
        let ips = nodes
            .iter()
            .flat_map(|node| self.virtual_ips(node).load_balancer);
        let ingress: Vec<_> = ips.map(|ip| json!({ "ip": ip })).collect();
        json!({ "status": { "loadBalancer": { "ingress": ingress } } })
    }

    fn service(&self, nodes: &[Node]) -> Value {
        let external = nodes
            .iter()
            .flat_map(|node| self.virtual_ips(node).external);
        let port = |protocol: &str| {
            let target = if self.backends == "host" {
                BACKEND_OF_NODE
            } else {
                BACKEND
            };
            json!({
                "name": protocol.to_lowercase(), "protocol": protocol, "port": PORT,
                "targetPort": target, "nodePort": self.node_port(),
            })
        };
        let mut spec = json!({
            "type": "LoadBalancer",
            "ipFamilyPolicy": "RequireDualStack",
            "selector": { self.backends: "yes" },
            "externalIPs": external.collect::<Vec<_>>(),
            "ports": [port("TCP"), port("UDP")],
        });
        for (field, value) in self.spec.as_object().into_iter().flatten() {
            spec[field] = value.clone();
        }
        let metadata = json!({ "name": self.name, "namespace": NAMESPACE });
        json!({ "apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec })
    }
}

/// Returns the policy of the guarded backend: one client enters.
pub(crate) fn policy() -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": { "name": "guarded", "namespace": NAMESPACE },
        "spec": {
            "podSelector": { "matchLabels": { "guarded": "yes" } },
            "policyTypes": ["Ingress"],
            "ingress": [{ "from": [{ "podSelector": { "matchLabels": { "enters": "yes" } } }] }],
        },
    })
}

/// Returns backends, clients and Services as a list.
pub(crate) fn manifest(parts: &Parts, nodes: &[Node], kinds: &[Kind]) -> Result<Value> {
    let image = images::agnhost(parts)?;
    let (first, second) = (&nodes[0].name, &nodes[1].name);
    let server = |name: &str, node: &str, labels: Value, port: u16| {
        let ports = [format!("--http-port={port}"), format!("--udp-port={port}")];
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": name, "namespace": NAMESPACE, "labels": labels },
            "spec": {
                "nodeName": node,
                "hostNetwork": port == BACKEND_OF_NODE,
                "terminationGracePeriodSeconds": 1,
                "tolerations": [{ "operator": "Exists" }],
                "containers": [{
                    "name": "server", "image": image, "imagePullPolicy": "Never",
                    "args": ["netexec", ports[0], ports[1]],
                    "readinessProbe": { "httpGet": { "path": "/healthz", "port": port } },
                }],
            },
        })
    };
    let mut items = vec![
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": NAMESPACE } }),
        // The backend is a client of itself.
        server(
            "backend",
            first,
            json!({ "pod": "yes", "two": "yes", "client": "yes" }),
            BACKEND,
        ),
        server("other", second, json!({ "two": "yes" }), BACKEND),
        server("of-node", first, json!({ "host": "yes" }), BACKEND_OF_NODE),
        server(
            "near",
            first,
            json!({ "client": "yes", "enters": "yes" }),
            BACKEND,
        ),
        server("far", second, json!({ "client": "yes" }), BACKEND),
    ];
    if kinds.iter().any(Kind::is_guarded) {
        items.push(server(
            "guarded",
            first,
            json!({ "guarded": "yes" }),
            BACKEND,
        ));
    }
    items.extend(kinds.iter().map(|kind| kind.service(nodes)));
    Ok(json!({ "apiVersion": "v1", "kind": "List", "items": items }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn services_share_no_address() {
        let nodes = crate::network::nodes(3);
        let mut seen = BTreeSet::new();
        for kind in kinds(true) {
            for node in &nodes {
                let ips = kind.virtual_ips(node);
                for ip in ips.load_balancer.into_iter().chain(ips.external) {
                    assert!(seen.insert(ip), "{ip} of {}", kind.name);
                }
            }
        }
    }
}
