//! The properties of this node that affect Services.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use proxy_common::frontend::Algorithm;

use super::guard::Guard;
use super::handover::{AbleNodes, ExternalForwarding};
use super::host_mode::{HostMode, HostRoutes};
use super::read::{Reader, cidr, ip};
use crate::health::{HealthMode, Silent};
use crate::room::Room;
use crate::store::Store;

/// The taint (any value, any effect) of a node that the cluster autoscaler is about to remove.
const TO_BE_DELETED: &str = "ToBeDeletedByClusterAutoscaler";
const ZONE: &str = "topology.kubernetes.io/zone";

/// The operator's settings for the model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelOptions {
    /// The algorithm of Services without the annotation.
    pub algorithm: Algorithm,
    /// The backend health mode of Services without the annotation.
    pub backend_health: HealthMode,
    /// The way of external clients of Services without the annotation.
    pub external_forwarding: ExternalForwarding,
    /// The nodes that take over packets of external clients.
    pub able: Arc<AbleNodes>,
    /// The silent backends: see [`crate::health`].
    pub silent: Arc<Silent>,
    /// The node's addresses from the operator. The first of each family replaces the Node object's
    /// primary address.
    pub node_ips: Vec<IpAddr>,
    /// The permitted ExternalIPs; `None` permits any. In host mode the ranges also apply to load
    /// balancer addresses, and `None` permits none.
    pub external_ip_cidrs: Option<Vec<IpNet>>,
    /// Set to ignore ExternalIPs: Kubernetes' feature gate `AllowServiceExternalIPs` is off.
    pub ignores_external_ips: bool,
    /// The ClusterIP ranges. Empty uses the cluster's ServiceCIDRs.
    pub service_cidrs: Vec<IpNet>,
    /// The networks in these ranges that pods or routes also use, so that endpoints may be there.
    pub shared_networks: Vec<IpNet>,
    /// The routes in host mode. `None` on a node, which reaches every backend.
    pub host_routes: Option<Arc<HostRoutes>>,
    /// The addresses on dummy devices and empty bridges, by device. The host keeps their packets,
    /// so their ClusterIP frontends are not programmed.
    pub kept_addresses: BTreeMap<IpAddr, String>,
    /// The maps' capacity, which limits the backends in each model.
    pub room: Room,
    /// Set if local redirects are enabled.
    pub has_redirects: bool,
    /// The addresses, other than Services', that LocalRedirects may redirect.
    pub redirect_addresses: Vec<IpNet>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeModel {
    pub name: String,
    pub zone: Option<String>,
    /// The primary addresses, at most one for each family.
    pub primary: Vec<IpAddr>,
    pub algorithm: Algorithm,
    pub backend_health: HealthMode,
    pub external_forwarding: ExternalForwarding,
    /// See [`ModelOptions::able`].
    pub able: Arc<AbleNodes>,
    /// The silent backends: see [`ModelOptions::silent`].
    pub silent: Arc<Silent>,
    pub guard: Guard,
    /// Set in host mode.
    pub host_mode: Option<HostMode>,
    /// See [`ModelOptions::kept_addresses`].
    pub kept_addresses: BTreeMap<IpAddr, String>,
    /// See [`ModelOptions::room`].
    pub room: Room,
    /// See [`ModelOptions::has_redirects`].
    pub has_redirects: bool,
}

impl NodeModel {
    pub fn of(store: &Store, options: &ModelOptions) -> Self {
        let labels = store.node().and_then(|node| node.metadata.labels.as_ref());
        let zone = labels
            .and_then(|labels| labels.get(ZONE))
            .filter(|zone| !zone.is_empty());
        let known = store.node().map(node_addresses).unwrap_or_default();
        let first = |is_of_family: fn(&IpAddr) -> bool| {
            options
                .node_ips
                .iter()
                .chain(&known)
                .find(|ip| is_of_family(ip))
        };
        Self {
            name: store.node_name().to_owned(),
            zone: zone.cloned(),
            primary: [first(IpAddr::is_ipv4), first(IpAddr::is_ipv6)]
                .into_iter()
                .flatten()
                .copied()
                .collect(),
            algorithm: options.algorithm,
            backend_health: options.backend_health,
            external_forwarding: options.external_forwarding,
            able: Arc::clone(&options.able),
            silent: Arc::clone(&options.silent),
            guard: Guard::of(store, options),
            host_mode: options
                .host_routes
                .clone()
                .map(|host_routes| HostMode::of(store, host_routes)),
            kept_addresses: options.kept_addresses.clone(),
            room: options.room,
            has_redirects: options.has_redirects,
        }
    }
}

impl NodeModel {
    /// Returns true if a device of the host has this ClusterIP, and reports the address.
    pub(super) fn keeps(&self, reader: &mut Reader<'_>, ip: IpAddr) -> bool {
        let Some(device) = self.kept_addresses.get(&ip) else {
            return false;
        };
        let why =
            format!("{ip} is an address of device {device}: packets to it stay with the host");
        reader.keep_by_host(format_args!("spec.clusterIP"), why);
        true
    }
}

/// Returns the node's addresses, internal addresses first, otherwise in the object's order.
pub fn node_addresses(node: &Node) -> Vec<IpAddr> {
    let addresses = || {
        node.status
            .iter()
            .flat_map(|status| status.addresses.iter().flatten())
    };
    let of_type = |type_| addresses().filter(move |address| address.type_ == type_);
    of_type("InternalIP")
        .chain(of_type("ExternalIP"))
        .filter_map(|address| ip(&address.address).ok())
        .collect()
}

/// Returns true if load balancers may send new traffic to the node.
pub fn is_node_eligible(node: &Node) -> bool {
    let mut taints = node
        .spec
        .iter()
        .flat_map(|spec| spec.taints.iter().flatten());
    node.metadata.deletion_timestamp.is_none() && taints.all(|taint| taint.key != TO_BE_DELETED)
}

/// The taint (any value, any effect) of a node that lost contact with the control plane.
const UNREACHABLE: &str = "node.kubernetes.io/unreachable";

/// Returns true if the node lost contact with the control plane. A node that itself reports "not
/// ready" is in contact.
pub fn is_node_lost(node: &Node) -> bool {
    let mut taints = node
        .spec
        .iter()
        .flat_map(|spec| spec.taints.iter().flatten());
    let mut conditions = node
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    let is_unknown =
        conditions.any(|condition| condition.type_ == "Ready" && condition.status == "Unknown");
    is_unknown || taints.any(|taint| taint.key == UNREACHABLE)
}

/// Returns the node's pod CIDRs, in the object's order.
pub fn pod_cidrs(node: &Node) -> Vec<IpNet> {
    let Some(spec) = &node.spec else {
        return Vec::new();
    };
    let cidrs = spec.pod_cidrs.as_deref().unwrap_or_default();
    // `podCIDR` repeats the first of `podCIDRs`. Only old objects have `podCIDR` alone.
    let single = spec.pod_cidr.as_slice();
    let texts = if cidrs.is_empty() { single } else { cidrs };
    texts.iter().filter_map(|text| cidr(text).ok()).collect()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{NodeCondition, NodeSpec, NodeStatus, Taint};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
    use k8s_openapi::jiff::Timestamp;

    use super::*;

    #[test]
    fn a_node_about_to_be_removed_is_not_eligible() {
        let tainted = |keys: &[&str]| {
            let taint = |key: &&str| Taint {
                key: (*key).to_owned(),
                effect: "NoSchedule".to_owned(),
                ..Taint::default()
            };
            let taints = Some(keys.iter().map(taint).collect());
            Node {
                spec: Some(NodeSpec {
                    taints,
                    ..Default::default()
                }),
                ..Default::default()
            }
        };
        assert!(
            is_node_eligible(&Node::default())
                && is_node_eligible(&tainted(&["node.kubernetes.io/unreachable"]))
        );
        assert!(!is_node_eligible(&tainted(&["other", TO_BE_DELETED])));
        let metadata = ObjectMeta {
            deletion_timestamp: Some(Time(Timestamp::now())),
            ..Default::default()
        };
        assert!(!is_node_eligible(&Node {
            metadata,
            ..Default::default()
        }));
    }

    #[test]
    fn only_a_node_that_is_not_heard_of_is_lost() {
        let node = |ready: &str, key: Option<&str>| {
            let condition = NodeCondition {
                type_: "Ready".into(),
                status: ready.into(),
                ..Default::default()
            };
            let pressure = NodeCondition {
                type_: "DiskPressure".into(),
                status: "Unknown".into(),
                ..Default::default()
            };
            let status = NodeStatus {
                conditions: Some(vec![pressure, condition]),
                ..Default::default()
            };
            let taint = |key: &str| Taint {
                key: key.into(),
                effect: "NoExecute".into(),
                ..Default::default()
            };
            let taints = key.map(|key| vec![taint(key)]);
            let spec = NodeSpec {
                taints,
                ..Default::default()
            };
            Node {
                spec: Some(spec),
                status: Some(status),
                ..Default::default()
            }
        };
        assert!(is_node_lost(&node("Unknown", None)));
        assert!(is_node_lost(&node(
            "True",
            Some("node.kubernetes.io/unreachable")
        )));
        assert!(!is_node_lost(&node("True", None)) && !is_node_lost(&Node::default()));
        assert!(
            !is_node_lost(&node("False", Some("node.kubernetes.io/not-ready"))),
            "its kubelet is heard of"
        );
    }

    #[test]
    fn pod_cidrs_come_from_the_list_or_from_the_single_field() {
        let list = |texts: &[&str]| Some(texts.iter().map(|&text| text.to_owned()).collect());
        let cases = [
            (None, None, ""),
            (Some("10.244.1.0/24"), None, "10.244.1.0/24"),
            (
                Some("10.244.1.0/24"),
                list(&["10.244.1.0/24", "fd00:244:1::/64"]),
                "10.244.1.0/24 fd00:244:1::/64",
            ),
            (None, list(&["nonsense", "10.244.1.7/24"]), "10.244.1.0/24"),
        ];
        for (pod_cidr, pod_cidrs, expected) in cases {
            let spec = NodeSpec {
                pod_cidr: pod_cidr.map(str::to_owned),
                pod_cidrs,
                ..Default::default()
            };
            let node = Node {
                spec: Some(spec),
                ..Default::default()
            };
            let cidrs: Vec<_> = super::pod_cidrs(&node)
                .iter()
                .map(ToString::to_string)
                .collect();
            assert_eq!(cidrs.join(" "), expected);
        }
    }
}
