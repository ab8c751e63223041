//! The Kubernetes objects of the test.

use std::net::IpAddr;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Namespace, Pod, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// The label of the test's namespaces.
pub(super) const LABEL: (&str, &str) = ("app.kubernetes.io/managed-by", "kpx-connectivity-test");
/// The annotation for the time after which the run no longer needs its namespace.
pub(super) const ENDS_BY: &str = "kpx.dev/ends-by";
/// The annotation with the random word of the run that created the namespace.
pub(super) const RUN: &str = "kpx.dev/run";
const ROLE: &str = "kpx.dev/test-role";
const SERVER: &str = "kpx.dev/test-server";
pub(super) const SERVED: u16 = 18_480;
/// The guarded server's port that the NetworkPolicy closes.
pub(super) const CLOSED: u16 = 18_481;
pub(super) const PORT: u16 = 80;
/// The Service port whose target port the policy closes.
pub(super) const CLOSED_PORT: u16 = 81;
/// A port that no Service of the test has.
pub(super) const NO_PORT: u16 = 82;
/// The user id of containers without privileges.
const NOBODY: u32 = 65_534;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Client,
    /// A client in its node's network namespace.
    Host,
    Server,
    /// A server whose NetworkPolicy admits clients at one of its two ports.
    Guarded,
}

impl Role {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Client => "client",
            Self::Host => "host",
            Self::Server => "server",
            Self::Guarded => "guarded",
        }
    }

    fn ports(self) -> &'static [u16] {
        match self {
            Self::Client | Self::Host => &[],
            Self::Server => &[SERVED],
            Self::Guarded => &[SERVED, CLOSED],
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct TestPod {
    pub(super) name: String,
    pub(super) node: String,
    pub(super) role: Role,
    /// The addresses; empty until the pod runs.
    pub(super) ips: Vec<IpAddr>,
}

/// Returns the pods for these nodes: two servers and a guarded server on the first two nodes, and
/// clients on all nodes.
pub(super) fn pods_for(nodes: &[String]) -> Vec<TestPod> {
    let pod = |role: Role, number: usize, node: &str| TestPod {
        name: format!("{}-{number}", role.name()),
        node: node.to_owned(),
        role,
        ips: Vec::new(),
    };
    let first = nodes.first().map(String::as_str).unwrap_or_default();
    let second = nodes.get(1).map_or(first, String::as_str);
    let mut pods = vec![
        pod(Role::Server, 1, first),
        pod(Role::Server, 2, second),
        pod(Role::Guarded, 1, first),
    ];
    for (node, number) in nodes.iter().zip(1..) {
        pods.extend([
            pod(Role::Client, number, node),
            pod(Role::Host, number, node),
        ]);
    }
    pods
}

pub(super) fn namespace(name: &str, run: &str, ends_by: &str) -> Result<Namespace> {
    object(json!({"metadata": {
        "name": name,
        // Pods with `hostNetwork` need the level `privileged`.
        "labels": {LABEL.0: LABEL.1, "pod-security.kubernetes.io/enforce": "privileged"},
        "annotations": {ENDS_BY: ends_by, RUN: run},
    }}))
}

/// Returns the manifest of a pod that ends by itself after `seconds`. With `forwards`, a pod in its
/// node's network can send the packets of external forwarding.
pub(super) fn pod(pod: &TestPod, image: &str, seconds: u64, forwards: bool) -> Result<Pod> {
    let mut command = vec![
        crate::exec::KPX.to_owned(),
        "probe".to_owned(),
        "serve".to_owned(),
    ];
    command.push(format!("--name={}", pod.name));
    command.extend(pod.role.ports().iter().map(|port| format!("--port={port}")));
    let host = pod.role == Role::Host;
    // Only root has the capability that a container adds.
    let (user, capabilities) = match host && forwards {
        true => (0, json!({"drop": ["ALL"], "add": ["NET_RAW"]})),
        false => (NOBODY, json!({"drop": ["ALL"]})),
    };
    object(json!({
        "metadata": {"name": pod.name, "labels": {LABEL.0: LABEL.1, ROLE: pod.role.name(), SERVER: pod.name}},
        "spec": {
            "nodeName": pod.node,
            "hostNetwork": host,
            "dnsPolicy": if host { "ClusterFirstWithHostNet" } else { "ClusterFirst" },
            "restartPolicy": "Never",
            "activeDeadlineSeconds": seconds,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": false,
            "enableServiceLinks": false,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{
                "name": CONTAINER,
                "image": image,
                "imagePullPolicy": "IfNotPresent",
                "command": command,
                "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "64Mi"}},
                "securityContext": {
                    "runAsUser": user,
                    "runAsNonRoot": user != 0,
                    "allowPrivilegeEscalation": false,
                    "readOnlyRootFilesystem": true,
                    "capabilities": capabilities,
                },
            }],
        },
    }))
}

pub(super) const CONTAINER: &str = "probe";

/// Returns the Services that every cluster supports.
pub(super) fn services() -> Result<Vec<Service>> {
    let one = json!({SERVER: "server-1"});
    let all = json!({ROLE: "server"});
    let node_port = |local: &str| json!({"type": "NodePort", "externalTrafficPolicy": local});
    let services = [
        ("first", one.clone(), json!({})),
        ("second", json!({SERVER: "server-2"}), json!({})),
        ("both", all.clone(), json!({})),
        (
            "sticky",
            all.clone(),
            json!({"sessionAffinity": "ClientIP"}),
        ),
        ("nowhere", json!({SERVER: "none"}), json!({})),
        (
            "internal",
            one.clone(),
            json!({"internalTrafficPolicy": "Local"}),
        ),
        ("node-port", all.clone(), node_port("Cluster")),
        ("node-port-local", one, node_port("Local")),
        ("headless", all, json!({"clusterIP": "None"})),
    ];
    let mut services: Vec<_> = services
        .into_iter()
        .map(|(name, pods, more)| service(name, &pods, more))
        .collect();
    services.push(guarded());
    services.into_iter().collect()
}

/// Returns the Service with the operator's external addresses.
pub(super) fn external_ip(addresses: &[IpAddr]) -> Result<Service> {
    service(
        "external-ip",
        &json!({ROLE: "server"}),
        json!({"externalIPs": addresses}),
    )
}

/// Returns a Service of type LoadBalancer. Its class has no controller, so the test writes its
/// address.
pub(super) fn load_balancer() -> Result<Service> {
    let class = json!({"type": "LoadBalancer", "loadBalancerClass": "kpx.dev/connectivity-test"});
    service("load-balancer", &json!({ROLE: "server"}), class)
}

pub(super) fn load_balancer_status(addresses: &[IpAddr]) -> Value {
    let ingress: Vec<_> = addresses
        .iter()
        .map(|ip| json!({"ip": ip, "ipMode": "VIP"}))
        .collect();
    json!({"status": {"loadBalancer": {"ingress": ingress}}})
}

fn service(name: &str, pods: &Value, more: Value) -> Result<Service> {
    let ports = ["TCP", "UDP"].map(|protocol| port(protocol, PORT, SERVED));
    let mut spec = json!({"selector": pods, "ipFamilyPolicy": "PreferDualStack", "ports": ports});
    for (field, value) in more.as_object().into_iter().flatten() {
        spec[field] = value.clone();
    }
    object(json!({"metadata": {"name": name}, "spec": spec}))
}

fn guarded() -> Result<Service> {
    let ports = [
        ("TCP", PORT, SERVED),
        ("UDP", PORT, SERVED),
        ("TCP", CLOSED_PORT, CLOSED),
        ("UDP", CLOSED_PORT, CLOSED),
    ];
    let ports = ports.map(|(protocol, number, target)| port(protocol, number, target));
    service(
        "guarded",
        &json!({ROLE: "guarded"}),
        json!({"ports": ports}),
    )
}

fn port(protocol: &str, number: u16, target: u16) -> Value {
    let name = format!("{}-{number}", protocol.to_lowercase());
    json!({"name": name, "protocol": protocol, "port": number, "targetPort": target})
}

/// Returns the policy that admits clients at one port of the guarded pod.
pub(super) fn policy() -> Result<NetworkPolicy> {
    let ports = ["TCP", "UDP"].map(|protocol| json!({"protocol": protocol, "port": SERVED}));
    let clients =
        json!({"from": [{"podSelector": {"matchLabels": {ROLE: "client"}}}], "ports": ports});
    object(json!({
        "metadata": {"name": "guarded"},
        "spec": {"podSelector": {"matchLabels": {ROLE: "guarded"}}, "policyTypes": ["Ingress"], "ingress": [clients]},
    }))
}

fn object<K: DeserializeOwned>(value: Value) -> Result<K> {
    serde_json::from_value(value).context("make an object of the connectivity test")
}
