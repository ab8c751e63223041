//! One Service with all details, as all nodes see it.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use futures::StreamExt;
use proxy_view::page::RowFailures;
use proxy_view::rates::Reading;
use proxy_view::{PortCounts, PortView, ServiceView, UdpOutcomes};
use serde::Serialize;

use super::link::is_refused;
use super::merge::Apart;
use super::{Page, lock, question};
use crate::sum::{add_backend, summed};

/// Time limit for each node: a slow one is left out of this answer.
const LIMIT: Duration = Duration::from_secs(3);

/// A Service in the form of a node's answer: numbers are sums over the nodes that answered.
#[derive(Clone, Debug, Serialize)]
pub struct ClusterService {
    #[serde(flatten)]
    pub service: ServiceView,
    pub nodes: Vec<NodeService>,
}

/// A Service on one node.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeService {
    pub node: String,
    /// `serves`, `absent` or `silent`.
    pub state: &'static str,
    /// The backends that take new flows of the node.
    pub in_use: usize,
    pub total: usize,
    pub counts: PortCounts,
    pub refused: u64,
    pub unanswered: u64,
    pub connect_p50: Option<f64>,
    pub connect_p99: Option<f64>,
    /// The outcomes of UDP flows; missing without a UDP port.
    pub udp: Option<UdpOutcomes>,
    /// The backends that the node avoids or that do not answer it.
    pub avoided: Vec<SocketAddr>,
    /// What the node differs in from most nodes.
    pub differs: Option<String>,
    /// The failures of the node's clients per second.
    pub failures: RowFailures,
}

impl Page {
    /// Returns the Service; `None` if no node has it.
    pub async fn service(&self, namespace: &str, name: &str) -> Option<ClusterService> {
        let question = question("service", [("namespace", namespace), ("name", name)]);
        let mut answers = self.0.ask_all::<ServiceView>(&question, LIMIT);
        let mut nodes: BTreeMap<String, NodeService> = lock(&self.0.merged)
            .names()
            .map(|node| (node.to_owned(), NodeService::without(node, "silent")))
            .collect();
        let mut sum = None;
        while let Some((node, answer)) = answers.next().await {
            let found = match answer {
                Ok(service) => {
                    let found = NodeService::of(&node, &service);
                    sum = Some(merged(sum, service));
                    found
                }
                Err(error) if is_refused(&error, 404) => NodeService::without(&node, "absent"),
                Err(_) => NodeService::without(&node, "silent"),
            };
            nodes.insert(node, found);
        }
        let apart = lock(&self.0.merged).apart(namespace, name, Instant::now());
        for (node, Apart { differs, failures }) in apart {
            if let Some(found) = nodes.get_mut(&node) {
                (found.differs, found.failures) = (differs, failures);
            }
        }
        Some(ClusterService {
            service: sum?,
            nodes: nodes.into_values().collect(),
        })
    }
}

impl NodeService {
    fn without(node: &str, state: &'static str) -> Self {
        Self {
            node: node.to_owned(),
            state,
            in_use: 0,
            total: 0,
            counts: PortCounts::default(),
            refused: 0,
            unanswered: 0,
            connect_p50: None,
            connect_p99: None,
            udp: None,
            avoided: Vec::new(),
            differs: None,
            failures: RowFailures::default(),
        }
    }

    fn of(node: &str, service: &ServiceView) -> Self {
        let (in_use, total) = service.backends_in_use();
        let Reading {
            counts,
            connect,
            udp,
        } = Reading::of(service);
        let has_udp = service.ports.iter().any(|port| port.udp.is_some());
        let backends = service.ports.iter().flat_map(|port| &port.backends);
        let avoided = backends.filter(|backend| backend.silent || backend.is_ejected());
        Self {
            in_use,
            total,
            counts,
            refused: connect.refused,
            unanswered: connect.unanswered,
            connect_p50: connect.connect_p50,
            connect_p99: connect.connect_p99,
            udp: has_udp.then_some(udp),
            avoided: avoided.map(|backend| backend.address).collect(),
            ..Self::without(node, "serves")
        }
    }
}

/// Adds a view to the sum of others: the objects as the first node sees them, and sums.
fn merged(sum: Option<ServiceView>, mut view: ServiceView) -> ServiceView {
    // No backend is nearer than another to a whole cluster.
    let backends = view.ports.iter_mut().flat_map(|port| &mut port.backends);
    backends.for_each(|backend| backend.local = false);
    view.ports.iter_mut().for_each(judge);
    let Some(mut sum) = sum else {
        return view;
    };
    for port in view.ports {
        let key = |port: &PortView| (port.protocol.clone(), port.port);
        match sum.ports.iter_mut().find(|known| key(known) == key(&port)) {
            Some(known) => add_port(known, port),
            None => sum.ports.push(port),
        }
    }
    sum
}

/// Judges by the numbers whether a port expects answers, because older agents send no judgement.
fn judge(port: &mut PortView) {
    if let Some(udp) = port.udp {
        port.expects_answers = udp.expect_answers(port.port);
    }
}

fn add_port(sum: &mut PortView, port: PortView) {
    sum.counts.add(&port.counts);
    sum.connect = sum.connect.plus(&port.connect);
    sum.udp = summed(sum.udp, port.udp);
    judge(sum);
    sum.redirected |= port.redirected;
    let known = sum.backends.iter().enumerate();
    let places: HashMap<_, _> = known.map(|(place, one)| (one.address, place)).collect();
    for backend in port.backends {
        match places.get(&backend.address) {
            Some(place) => add_backend(&mut sum.backends[*place], &backend),
            None => sum.backends.push(backend),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn view(backends: &[(&str, u64, bool)]) -> ServiceView {
        let backends: Vec<_> = backends
            .iter()
            .map(|(address, flows, silent)| {
                json!({
                    "address": address, "pod": null, "node": "n1", "zone": null, "ready": true, "serving": true,
                    "terminating": false, "local": true, "inClusterSet": true, "inLocalSet": false, "flows": flows,
                    "silent": silent,
                })
            })
            .collect();
        let udp = json!({"answered": 9, "unanswered": 1, "refused": 0});
        let counts = json!({
            "flowsOpened": 7, "flows": 2, "packets": 1, "bytes": 1, "packetsReturned": 1, "bytesReturned": 1, "refused": 0,
        });
        let port = json!({
            "name": "", "protocol": "TCP", "port": 80, "nodePort": null, "frontends": [], "backends": backends, "counts": counts,
            "udp": udp,
        });
        serde_json::from_value(json!({
            "namespace": "shop", "name": "web", "type": "ClusterIP", "created": null, "clusterIps": ["10.96.0.1"],
            "externalIps": [], "loadBalancerIps": [], "internalTrafficPolicy": "Cluster", "externalTrafficPolicy": "Cluster",
            "affinitySecs": null, "healthCheckNodePort": null, "algorithm": "random", "ports": [port],
        }))
        .unwrap()
    }

    #[test]
    fn numbers_of_nodes_are_sums_and_a_backend_of_one_node_is_kept() {
        let (a, b) = ("10.244.1.1:80", "10.244.1.2:80");
        let views = vec![view(&[(a, 2, false)]), view(&[(a, 3, true), (b, 1, false)])];
        let of_second = NodeService::of("n2", &views[1]);
        assert_eq!(of_second.avoided, [a.parse().unwrap()]);
        assert_eq!((of_second.in_use, of_second.total), (2, 2));
        let add = |sum, view| Some(merged(sum, view));
        let sum = views.into_iter().fold(None, add).unwrap();
        let port = &sum.ports[0];
        assert_eq!((port.counts.flows_opened, port.counts.flows), (14, 4));
        assert_eq!(port.udp.map(|udp| udp.text()).as_deref(), Some("18/20"));
        assert_eq!(of_second.udp.map(|udp| udp.unanswered), Some(1));
        let backends: Vec<_> = port
            .backends
            .iter()
            .map(|backend| (backend.flows, backend.silent, backend.local))
            .collect();
        assert_eq!(backends, [(5, true, false), (1, false, false)]);
    }

    #[test]
    fn port_expects_answers_by_the_numbers_of_all_nodes() {
        let with = |answered| {
            let mut view = view(&[]);
            let udp = UdpOutcomes {
                answered,
                unanswered: 5,
                refused: 0,
            };
            view.ports[0].udp = Some(udp);
            view.ports[0].expects_answers = true; // As for an older agent.
            view
        };
        let sum = merged(None, with(0));
        assert!(!sum.ports[0].expects_answers);
        let sum = merged(Some(sum), with(0));
        assert!(!sum.ports[0].expects_answers);
        let sum = merged(Some(sum), with(1));
        assert!(sum.ports[0].expects_answers);
    }
}
