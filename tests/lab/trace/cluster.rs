//! A cluster of manifests: two nodes, their pods, and a Service for each case.

use std::fs;

use anyhow::Result;
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::lab::Family;

use crate::trace::Names;

/// A folder of manifests.
pub(crate) struct Folder(TempDir);

impl Folder {
    pub(crate) fn create() -> Result<Self> {
        let folder = Self(tempfile::tempdir()?);
        let nodes = ["n1", "n2"].map(node);
        let services = SERVICES
            .iter()
            .enumerate()
            .flat_map(|(n, service)| service.objects(n));
        for (n, object) in nodes
            .into_iter()
            .chain(services)
            .chain([service_cidr()])
            .enumerate()
        {
            fs::write(
                folder.0.path().join(format!("{n}.yaml")),
                serde_saphyr::to_string(&object)?,
            )?;
        }
        Ok(folder)
    }

    /// Writes another object.
    pub(crate) fn put(&self, name: &str, object: &Value) -> Result<()> {
        Ok(fs::write(
            self.0.path().join(format!("{name}.yaml")),
            serde_saphyr::to_string(object)?,
        )?)
    }

    pub(crate) fn path(&self) -> &str {
        self.0.path().to_str().expect("a path in UTF-8")
    }
}

/// Returns the names: pods p1a and p1b on node n1, p2a on n2; each Service's name stands for its
/// ClusterIP, and `vip` for a load balancer's address.
pub(crate) fn names(family: Family) -> Names {
    let hosts = [
        ("p1a", "10.244.1.10", "fd00:10:244:1::10"),
        ("p1b", "10.244.1.11", "fd00:10:244:1::11"),
        ("p2a", "10.244.2.10", "fd00:10:244:2::10"),
        ("n1", "172.18.0.11", "fd00:172:18::11"),
        ("n2", "172.18.0.12", "fd00:172:18::12"),
        ("friend", "198.51.100.10", "fd00:198:51::10"),
        ("stranger", "203.0.113.10", "fd00:203::10"),
        ("vip", "192.0.2.1", "fd00:192::1"),
        ("external", "192.0.2.2", "fd00:192::2"),
        ("nobody", "10.96.0.200", "fd00:10:96::200"),
        ("loopback", "127.0.0.1", "::1"),
    ];
    let hosts = hosts.map(|(name, v4, v6)| (name, of(family, v4, v6).parse().expect("an address")));
    let services = SERVICES.iter().enumerate();
    let services = services.map(|(n, service)| {
        (
            service.name,
            cluster_ip(family, n).parse().expect("an address"),
        )
    });
    Names::new(hosts.into_iter().chain(services))
}

/// A Service with TCP port `http` (80), and ports of the other protocols.
struct Service {
    name: &'static str,
    /// The backends, which listen on port 8080.
    backends: &'static [&'static str],
    /// Further fields of the spec.
    spec: fn() -> Value,
    status: fn() -> Value,
}

const PLAIN: Service = Service {
    name: "",
    backends: &[],
    spec: || json!({}),
    status: || json!({}),
};

const SERVICES: [Service; 9] = [
    Service {
        name: "web",
        backends: &["p2a"],
        ..PLAIN
    },
    Service {
        name: "many",
        backends: &["p1b", "p2a"],
        ..PLAIN
    },
    Service {
        name: "itself",
        backends: &["p1a"],
        ..PLAIN
    },
    Service {
        name: "empty",
        backends: &[],
        spec: || json!({ "type": "NodePort" }),
        ..PLAIN
    },
    Service {
        name: "port",
        backends: &["p2a"],
        spec: || json!({ "type": "NodePort" }),
        ..PLAIN
    },
    Service {
        name: "near",
        backends: &["p2a"],
        spec: || json!({ "type": "NodePort", "externalTrafficPolicy": "Local" }),
        ..PLAIN
    },
    Service {
        name: "balanced",
        backends: &["p2a"],
        spec: || {
            json!({
                "type": "LoadBalancer",
                "loadBalancerSourceRanges": ["198.51.100.0/24", "fd00:198:51::/64"],
            })
        },
        status: || json!({ "loadBalancer": { "ingress": [{ "ip": "192.0.2.1" }, { "ip": "fd00:192::1" }] } }),
    },
    Service {
        name: "sticky",
        backends: &["p1b", "p2a"],
        spec: || {
            json!({
                "sessionAffinity": "ClientIP",
                "sessionAffinityConfig": { "clientIP": { "timeoutSeconds": 60 } },
                "externalIPs": ["192.0.2.2", "fd00:192::2"],
            })
        },
        ..PLAIN
    },
    Service {
        name: "host",
        backends: &["n1"],
        ..PLAIN
    },
];

impl Service {
    /// Returns the Service and an EndpointSlice of each family. `n` is its index in the list.
    fn objects(&self, n: usize) -> Vec<Value> {
        let mut port = json!({ "name": "http", "port": 80, "protocol": "TCP" });
        let mut spec = (self.spec)();
        if spec.get("type").is_some() {
            port["nodePort"] = (30_000 + n).into();
        }
        spec["clusterIP"] = cluster_ip(Family::V4, n).into();
        spec["clusterIPs"] = Family::ALL
            .map(|family| cluster_ip(family, n))
            .into_iter()
            .collect();
        spec["ipFamilies"] = Family::ALL
            .map(|family| family.to_string())
            .into_iter()
            .collect();
        let others = [("dns", 53, "UDP"), ("sigtran", 2905, "SCTP")];
        let others = others
            .map(|(name, port, proto)| json!({ "name": name, "port": port, "protocol": proto }));
        spec["ports"] = [port].into_iter().chain(others).collect();
        let service = json!({
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": { "name": self.name },
            "spec": spec,
            "status": (self.status)(),
        });
        [service]
            .into_iter()
            .chain(Family::ALL.map(|family| self.slice(family)))
            .collect()
    }

    fn slice(&self, family: Family) -> Value {
        let endpoint = |name: &&str| {
            let address = names(family).resolve(name).expect("a name of this cluster");
            let node = if name.starts_with("p2") || *name == "n2" {
                "n2"
            } else {
                "n1"
            };
            let mut endpoint = json!({ "addresses": [address], "nodeName": node, "conditions": { "ready": true } });
            if name.starts_with('p') {
                endpoint["targetRef"] =
                    json!({ "kind": "Pod", "namespace": "default", "name": name });
            }
            endpoint
        };
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": format!("{}-{}", self.name, family.to_string().to_lowercase()),
                "labels": { "kubernetes.io/service-name": self.name },
            },
            "addressType": family.to_string(),
            "endpoints": self.backends.iter().map(endpoint).collect::<Vec<_>>(),
            "ports": [
                { "name": "http", "port": 8080, "protocol": "TCP" },
                { "name": "dns", "port": 5353, "protocol": "UDP" },
                { "name": "sigtran", "port": 2905, "protocol": "SCTP" },
            ],
        })
    }
}

fn cluster_ip(family: Family, n: usize) -> String {
    of(
        family,
        &format!("10.96.0.{}", 10 + n),
        &format!("fd00:10:96::{}", 10 + n),
    )
    .to_owned()
}

fn node(name: &str) -> Value {
    let number = &name[1..];
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": { "name": name },
        "spec": { "podCIDRs": [format!("10.244.{number}.0/24"), format!("fd00:10:244:{number}::/64")] },
        "status": {
            "addresses": [
                { "type": "InternalIP", "address": format!("172.18.0.1{number}") },
                { "type": "InternalIP", "address": format!("fd00:172:18::1{number}") },
            ],
        },
    })
}

fn service_cidr() -> Value {
    json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "ServiceCIDR",
        "metadata": { "name": "kubernetes" },
        "spec": { "cidrs": ["10.96.0.0/16", "fd00:10:96::/112"] },
    })
}

fn of<'a>(family: Family, v4: &'a str, v6: &'a str) -> &'a str {
    match family {
        Family::V4 => v4,
        Family::V6 => v6,
    }
}
