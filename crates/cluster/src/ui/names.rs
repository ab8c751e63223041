//! The names of addresses at a time. Pure.
//!
//! Pods come and go, and addresses are given again. A name stands for an address only if exactly
//! one pod can have had the address at that time.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;

use ipnet::IpNet;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, Pod};
use serde::Serialize;

/// The time around an event in which a pod counts as having had its address: the kubelet reports
/// addresses late.
const MARGIN: SignedDuration = SignedDuration::from_secs(2);
/// The time for which ended pods are remembered.
const REMEMBERED: SignedDuration = SignedDuration::from_mins(15);

/// Whose an address was.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Whose {
    /// A pod, as `namespace/name`.
    Pod(String),
    Node(String),
    /// No pod and no node.
    Outside,
}

#[derive(Default)]
pub(crate) struct Names {
    /// The pods by UID.
    pods: HashMap<String, Tenant>,
    /// The UIDs by address.
    tenants: HashMap<IpAddr, HashSet<String>>,
    /// The nodes by address; `None` until Nodes are listed.
    nodes: Option<HashMap<IpAddr, String>>,
    /// The addresses of pods in their nodes' networks.
    of_nodes: HashSet<IpAddr>,
    /// The networks of pods, as far as Nodes name them.
    nets: Vec<IpNet>,
    /// True if all pods are known.
    is_complete: bool,
    /// The time since which changes of pods are missed, until the next list.
    deaf_since: Option<Timestamp>,
}

struct Tenant {
    name: String,
    node: Option<String>,
    addresses: Vec<IpAddr>,
    from: Timestamp,
    until: Option<Timestamp>,
}

impl Names {
    /// Takes in a pod as it is now.
    pub(crate) fn put(&mut self, pod: &Pod, now: Timestamp) {
        let Some(uid) = pod
            .metadata
            .uid
            .clone()
            .or_else(|| pod.metadata.name.clone())
        else {
            return;
        };
        let is_of_node = pod.spec.as_ref().and_then(|spec| spec.host_network) == Some(true);
        let status = pod.status.as_ref();
        let ips = status.and_then(|status| status.pod_ips.as_ref());
        let all = ips.into_iter().flatten().map(|ip| &ip.ip);
        let addresses = all.chain(status.and_then(|status| status.pod_ip.as_ref()));
        let mut addresses: Vec<IpAddr> = addresses.filter_map(|ip| ip.parse().ok()).collect();
        if is_of_node {
            self.of_nodes.extend(addresses);
            return;
        }
        if addresses.is_empty() {
            return;
        }
        addresses.sort_unstable();
        addresses.dedup();
        let phase = status.and_then(|status| status.phase.as_deref());
        let has_ended = matches!(phase, Some("Succeeded" | "Failed"));
        let known = self.pods.get(&uid);
        let tenant = Tenant {
            name: full_name(pod),
            node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
            from: started(pod)
                .or_else(|| known.map(|known| known.from))
                .unwrap_or(now),
            until: known
                .and_then(|known| known.until)
                .or_else(|| has_ended.then_some(now)),
            addresses,
        };
        for address in &tenant.addresses {
            self.tenants
                .entry(*address)
                .or_default()
                .insert(uid.clone());
        }
        self.pods.insert(uid, tenant);
    }

    /// Takes in that a pod is gone.
    pub(crate) fn remove(&mut self, pod: &Pod, now: Timestamp) {
        let uid = pod.metadata.uid.as_ref().or(pod.metadata.name.as_ref());
        if let Some(tenant) = uid.and_then(|uid| self.pods.get_mut(uid)) {
            tenant.until.get_or_insert(now);
        }
        self.forget(now);
    }

    /// Takes in that all pods are known: those that were not listed are gone.
    pub(crate) fn complete(&mut self, listed: &HashSet<String>, now: Timestamp) {
        for (uid, tenant) in &mut self.pods {
            if !listed.contains(uid) {
                tenant.until.get_or_insert(now);
            }
        }
        self.is_complete = true;
        self.deaf_since = None;
        self.forget(now);
    }

    /// Takes in that changes of pods are missed since that time.
    pub(crate) fn lose(&mut self, since: Timestamp) {
        self.deaf_since.get_or_insert(since);
    }

    pub(crate) fn set_nodes(&mut self, nodes: &[Node]) {
        let mut by_address = HashMap::new();
        self.nets.clear();
        for node in nodes {
            let name = node.metadata.name.clone().unwrap_or_default();
            let addresses = node
                .status
                .iter()
                .flat_map(|status| status.addresses.iter().flatten());
            let addresses = addresses.filter_map(|address| address.address.parse().ok());
            by_address.extend(addresses.map(|address: IpAddr| (address, name.clone())));
            let nets = node
                .spec
                .iter()
                .flat_map(|spec| spec.pod_cidrs.iter().flatten());
            self.nets
                .extend(nets.filter_map(|net| net.parse::<IpNet>().ok()));
        }
        self.nodes = Some(by_address);
    }

    /// Returns whose an address was; `None` if that is unknown or not certain.
    pub(crate) fn whose(&self, address: IpAddr, at: Timestamp) -> Option<Whose> {
        let address = address.to_canonical();
        let nodes = self.nodes.as_ref();
        if let Some(node) = nodes.and_then(|nodes| nodes.get(&address)) {
            return Some(Whose::Node(node.clone()));
        }
        if self.deaf_since.is_some_and(|since| at >= since) {
            return None;
        }
        let mut names: Vec<_> = self.had(address, at).map(|tenant| &tenant.name).collect();
        names.dedup();
        match names[..] {
            [name] => Some(Whose::Pod(name.clone())),
            [] if !self.tenants.contains_key(&address) && self.is_outside(address) => {
                Some(Whose::Outside)
            }
            _ => None,
        }
    }

    /// Returns the node of the pod that had an address; `None` if that is unknown or not certain.
    pub(crate) fn node_at(&self, address: IpAddr, at: Timestamp) -> Option<String> {
        let address = address.to_canonical();
        let Some(Whose::Pod(_)) = self.whose(address, at) else {
            return None;
        };
        let mut nodes = self.had(address, at).map(|tenant| &tenant.node);
        let node = nodes.next()?;
        node.clone().filter(|_| nodes.all(|other| other == node))
    }

    /// Returns the pods that can have had an address at that time.
    fn had(&self, address: IpAddr, at: Timestamp) -> impl Iterator<Item = &Tenant> {
        let all = self.tenants.get(&address).into_iter().flatten();
        let tenants = all.filter_map(|uid| self.pods.get(uid));
        tenants.filter(move |tenant| tenant.had(at))
    }

    /// Returns true if a Node of this name was listed.
    pub(crate) fn has_node(&self, name: &str) -> bool {
        let mut names = self.nodes.iter().flat_map(HashMap::values);
        names.any(|node| node == name)
    }

    /// Returns true if all pods and nodes are known, and none of them can have this address.
    fn is_outside(&self, address: IpAddr) -> bool {
        let is_local = match address {
            IpAddr::V4(ip) => ip.is_loopback() || ip.is_link_local() || ip.is_unspecified(),
            IpAddr::V6(ip) => ip.is_loopback() || ip.is_unicast_link_local() || ip.is_unspecified(),
        };
        self.is_complete
            && self.nodes.is_some()
            && !is_local
            && !self.of_nodes.contains(&address)
            && !self.is_near_pods(address)
    }

    /// Returns true if a pod could have this address: a new pod's first packets come before its
    /// address is reported.
    fn is_near_pods(&self, address: IpAddr) -> bool {
        let prefix = if address.is_ipv4() { 24 } else { 64 };
        let near = IpNet::new(address, prefix).map(|net| net.trunc());
        let is_near = |tenant: &IpAddr| near.as_ref().is_ok_and(|near| near.contains(tenant));
        self.nets.iter().any(|net| net.contains(&address)) || self.tenants.keys().any(is_near)
    }

    fn forget(&mut self, now: Timestamp) {
        let Self { pods, tenants, .. } = self;
        pods.retain(|uid, tenant| {
            let is_kept = tenant
                .until
                .is_none_or(|until| now.duration_since(until) < REMEMBERED);
            if !is_kept {
                for address in &tenant.addresses {
                    if let Some(uids) = tenants.get_mut(address) {
                        uids.remove(uid);
                    }
                }
            }
            is_kept
        });
        tenants.retain(|_, uids| !uids.is_empty());
    }
}

impl Tenant {
    fn had(&self, at: Timestamp) -> bool {
        let has_begun = at.duration_since(self.from) >= -MARGIN;
        has_begun
            && self
                .until
                .is_none_or(|until| at.duration_since(until) <= MARGIN)
    }
}

/// Returns the pod as `namespace/name`.
fn full_name(pod: &Pod) -> String {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or("default");
    format!(
        "{namespace}/{}",
        pod.metadata.name.as_deref().unwrap_or_default()
    )
}

/// Returns the time at which the kubelet accepted the pod.
fn started(pod: &Pod) -> Option<Timestamp> {
    let started = pod.status.as_ref()?.start_time.as_ref()?;
    Some(started.0)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn at(secs: i64) -> Timestamp {
        Timestamp::from_second(1_700_000_000 + secs).unwrap()
    }

    fn pod(uid: &str, ip: &str, started: i64, phase: &str) -> Pod {
        pod_of(
            json!({"containers": [], "nodeName": "n1"}),
            uid,
            ip,
            started,
            phase,
        )
    }

    fn pod_of(spec: Value, uid: &str, ip: &str, started: i64, phase: &str) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"namespace": "shop", "name": uid, "uid": uid}, "spec": spec,
            "status": {"phase": phase, "podIP": ip, "podIPs": [{"ip": ip}], "startTime": at(started).to_string()},
        }))
        .unwrap()
    }

    fn listed(pods: &[Pod]) -> Names {
        let mut names = Names::default();
        for pod in pods {
            names.put(pod, at(0));
        }
        let uids = pods.iter().filter_map(|pod| pod.metadata.uid.clone());
        names.complete(&uids.collect(), at(0));
        names
    }

    const IP: &str = "10.244.1.7";

    fn whose(names: &Names, secs: i64) -> Option<Whose> {
        names.whose(IP.parse().unwrap(), at(secs))
    }

    #[test]
    fn address_that_changes_hands_has_the_name_of_its_time() {
        let first = pod("cart-0", IP, -100, "Running");
        let mut names = listed(std::slice::from_ref(&first));
        assert_eq!(whose(&names, 5), Some(Whose::Pod("shop/cart-0".to_owned())));
        names.remove(&first, at(10));
        names.put(&pod("web-0", IP, 20, "Running"), at(21));
        let of = |name: &str| Some(Whose::Pod(format!("shop/{name}")));
        assert_eq!(whose(&names, 11), of("cart-0"));
        assert_eq!(whose(&names, 15), None, "between both");
        assert_eq!(whose(&names, 19), of("web-0"));
        assert_eq!(whose(&names, -200), None, "before the first");
        // The first pod is forgotten, and the address stays the second's.
        names.remove(&pod("other", "10.244.1.8", 0, "Running"), at(2_000));
        assert_eq!(whose(&names, 11), None);
        assert_eq!(whose(&names, 30), of("web-0"));
    }

    #[test]
    fn address_has_no_name_while_changes_are_missed() {
        let mut names = listed(&[pod("cart-0", IP, -100, "Running")]);
        names.set_nodes(&[]);
        names.lose(at(50));
        names.lose(at(90));
        assert_eq!(
            whose(&names, 49),
            Some(Whose::Pod("shop/cart-0".to_owned()))
        );
        assert_eq!(whose(&names, 50), None);
        let far = "203.0.113.9".parse().unwrap();
        assert_eq!(names.whose(far, at(50)), None, "a new pod may have it");
        names.put(&pod("web-0", IP, 60, "Running"), at(100));
        names.complete(&HashSet::from(["web-0".to_owned()]), at(100));
        assert_eq!(
            whose(&names, 110),
            Some(Whose::Pod("shop/web-0".to_owned()))
        );
    }

    #[test]
    fn address_of_two_pods_at_once_has_no_name() {
        let first = pod("cart-0", IP, -100, "Running");
        let mut names = listed(std::slice::from_ref(&first));
        names.remove(&first, at(10));
        names.put(&pod("web-0", IP, 11, "Running"), at(11));
        assert_eq!(whose(&names, 10), None);
        // A pod that has ended keeps its address in its status.
        let mut names = listed(&[pod("job-1", IP, -100, "Succeeded")]);
        names.put(&pod("web-0", IP, 50, "Running"), at(50));
        assert_eq!(whose(&names, 60), Some(Whose::Pod("shop/web-0".to_owned())));
    }

    #[test]
    fn pod_in_a_nodes_network_has_no_address_of_its_own() {
        let spec = json!({"containers": [], "nodeName": "n1", "hostNetwork": true});
        let mut names = listed(&[pod_of(spec, "etcd", "192.0.2.1", -1, "Running")]);
        let node = "192.0.2.1".parse().unwrap();
        assert_eq!(names.whose(node, at(5)), None, "no Node is known");
        names.set_nodes(&[]);
        assert_eq!(
            names.whose(node, at(5)),
            None,
            "a pod has its node's address"
        );
        let object = json!({"metadata": {"name": "n1"}, "spec": {"podCIDRs": ["10.244.0.0/16"]},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]}});
        names.set_nodes(&[serde_json::from_value(object).unwrap()]);
        assert_eq!(names.whose(node, at(5)), Some(Whose::Node("n1".to_owned())));
    }

    #[test]
    fn outside_is_what_no_pod_can_have() {
        let mut names = listed(&[pod("web-0", IP, -100, "Running")]);
        let whose = |names: &Names, ip: &str| names.whose(ip.parse().unwrap(), at(5));
        assert_eq!(whose(&names, "203.0.113.9"), None, "a node may have it");
        names.set_nodes(&[]);
        for local in ["127.0.0.1", "169.254.1.1", "::1", "fe80::1"] {
            assert_eq!(whose(&names, local), None, "{local}");
        }
        assert_eq!(whose(&names, "203.0.113.9"), Some(Whose::Outside));
        assert_eq!(whose(&names, "10.244.1.99"), None, "a new pod may have it");
        assert_eq!(whose(&names, "10.244.9.1"), Some(Whose::Outside));
        let object = json!({"metadata": {"name": "n1"}, "spec": {"podCIDRs": ["10.244.0.0/16"]}});
        names.set_nodes(&[serde_json::from_value(object).unwrap()]);
        assert_eq!(whose(&names, "10.244.9.1"), None);
        let mut names = Names::default();
        names.set_nodes(&[]);
        assert_eq!(whose(&names, "203.0.113.9"), None, "no pod is listed yet");
    }
}
