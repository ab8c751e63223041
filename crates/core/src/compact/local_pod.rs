//! The compact form of a Pod of this node: the fields that decide on socket load balancing and on
//! local redirects.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Container, Pod, PodStatus};

use super::{Compact, Needed, Shared, needed, shared};
use crate::input::ObjectName;
use crate::selector::Labels;

/// The annotation by which a Pod opts in or out: `on` or `off`.
pub(crate) const SOCKET_LB: &str = "kpx.dev/socket-lb";

/// The annotations by which meshes mark a Pod. `None` matches any value.
const MESH_ANNOTATIONS: [(&str, Option<&str>); 7] = [
    ("sidecar.istio.io/status", None),
    ("ambient.istio.io/redirection", Some("enabled")),
    // Istio already redirects the Pod's packets, but its proxy does not have the Pod yet.
    ("ambient.istio.io/redirection", Some("pending")),
    ("kmesh.net/redirection", Some("enabled")),
    ("linkerd.io/proxy-version", None),
    ("kuma.io/sidecar-injected", Some("true")),
    (
        "consul.hashicorp.com/connect-inject-status",
        Some("injected"),
    ),
];
const MESH_LABELS: [(&str, Option<&str>); 4] = [
    ("istio.io/dataplane-mode", Some("ambient")),
    ("istio.io/dataplane-mode", Some("Kmesh")),
    ("kuma.io/sidecar-injection", Some("enabled")),
    ("osm-proxy-uuid", None),
];
const MESH_CONTAINERS: [&str; 2] = ["istio-proxy", "linkerd-proxy"];
/// The label of KubeVirt's Pods.
const VIRTUAL_MACHINE: (&str, Option<&str>) = ("kubevirt.io", Some("virt-launcher"));

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalPod {
    pub name: ObjectName,
    /// Also names the Pod's cgroup.
    pub uid: Box<str>,
    /// Set from the start of its containers until their end.
    pub is_running: bool,
    pub host_network: bool,
    /// A mesh's marker: an annotation, a label or a container.
    pub mesh: Option<Box<str>>,
    pub is_virtual_machine: bool,
    pub runtime_class: Option<Box<str>>,
    /// The value of the annotation `socket-lb`.
    pub choice: Option<Box<str>>,
    pub labels: Labels,
    /// At most one address of each family.
    pub ips: Box<[Box<str>]>,
    /// Set while the Pod is ready and not being deleted.
    pub is_ready: bool,
    /// The named ports of its containers.
    pub ports: Box<[ContainerPort]>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerPort {
    pub name: Option<Shared>,
    pub protocol: Option<Shared>,
    pub port: i32,
}

impl Compact for LocalPod {
    type Object = Pod;

    const NEEDED: Needed = needed::POD;

    fn compact(pod: Pod) -> Self {
        let name = ObjectName::from(&pod.metadata);
        let annotations = pod.metadata.annotations.as_ref();
        let labels = pod.metadata.labels.as_ref();
        let spec = pod.spec.unwrap_or_default();
        let status = pod.status.unwrap_or_default();
        let is_ready = pod.metadata.deletion_timestamp.is_none() && has_ready_condition(&status);
        let containers = spec
            .containers
            .iter()
            .chain(spec.init_containers.iter().flatten());
        let ports = containers
            .clone()
            .flat_map(|container| container.ports.iter().flatten());
        let ports = ports
            .filter(|port| port.name.is_some())
            .map(|port| ContainerPort {
                name: shared(port.name.clone()),
                protocol: shared(port.protocol.clone()),
                port: port.container_port,
            });
        let mesh = sign("annotation", annotations, &MESH_ANNOTATIONS)
            .or_else(|| sign("label", labels, &MESH_LABELS))
            .or_else(|| mesh_container(containers));
        Self {
            name,
            uid: pod.metadata.uid.unwrap_or_default().into(),
            is_running: status.phase.as_deref() == Some("Running"),
            host_network: spec.host_network.unwrap_or(false),
            mesh,
            is_virtual_machine: sign("label", labels, &[VIRTUAL_MACHINE]).is_some(),
            runtime_class: spec.runtime_class_name.map(String::into_boxed_str),
            choice: annotations
                .and_then(|all| all.get(SOCKET_LB))
                .map(|value| start(value).into()),
            labels: labels
                .into_iter()
                .flatten()
                .map(|(key, value)| (key.as_str().into(), value.as_str().into()))
                .collect(),
            ips: ips(&status),
            is_ready,
            ports: ports.collect(),
        }
    }

    fn name(&self) -> ObjectName {
        self.name.clone()
    }

    fn uid(&self) -> &str {
        &self.uid
    }
}

fn has_ready_condition(status: &PodStatus) -> bool {
    let mut conditions = status.conditions.iter().flatten();
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// Returns a Pod's addresses. `podIP` repeats the first of `podIPs`; only old objects have `podIP`
/// alone.
fn ips(status: &PodStatus) -> Box<[Box<str>]> {
    let all: Box<[Box<str>]> = status
        .pod_ips
        .iter()
        .flatten()
        .map(|ip| ip.ip.as_str().into())
        .collect();
    if all.is_empty() {
        status.pod_ip.iter().map(|ip| ip.as_str().into()).collect()
    } else {
        all
    }
}

/// Returns the start of the value, enough for an error message. An annotation may have 256 KiB.
fn start(choice: &str) -> &str {
    const MOST: usize = 64;
    &choice[..choice.floor_char_boundary(MOST)]
}

/// Returns the first matching marker.
fn sign(
    what: &str,
    all: Option<&BTreeMap<String, String>>,
    marks: &[(&str, Option<&str>)],
) -> Option<Box<str>> {
    let is_there = |(key, value): &&(&str, Option<&str>)| {
        all.and_then(|all| all.get(*key))
            .is_some_and(|has| value.is_none_or(|value| has == value))
    };
    marks
        .iter()
        .find(is_there)
        .map(|(key, _)| format!("{what} {key}").into())
}

fn mesh_container<'a>(mut containers: impl Iterator<Item = &'a Container>) -> Option<Box<str>> {
    let container =
        containers.find(|container| MESH_CONTAINERS.contains(&container.name.as_str()))?;
    Some(format!("container {}", container.name).into())
}
