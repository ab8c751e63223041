//! Who calls what: the open flows of all nodes by client, Service, backend and the backend's node.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use futures::StreamExt;
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::{Page, Shared, Whose, lock, question};

/// Time limit for each node, which reads its flow tables: a slow one is left out of this answer.
const LIMIT: Duration = Duration::from_secs(5);
/// The maximum number of paths in the answer, the busiest first.
const SHOWN: usize = 512;

/// A node's map.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct NodeMap {
    ways: Vec<NodeWay>,
    left_out: u64,
    partial: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct NodeWay {
    /// The address of the client; `None` if it is the node.
    client: Option<IpAddr>,
    service: String,
    backend: SocketAddr,
    flows: u64,
    /// The least and most seconds since the flows' last packets. An older agent sends neither.
    #[serde(default)]
    idle_secs: u32,
    #[serde(default = "always")]
    longest_idle_secs: u32,
}

/// Returns a time before all pods.
const fn always() -> u32 {
    u32::MAX
}

/// The open flows of all nodes.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterMap {
    ways: Vec<Counted>,
    /// The number of open flows whose paths are not in the answer.
    left_out: u64,
    /// True if the tables of a node have more flows than it reads.
    partial: bool,
    /// The nodes whose flows are missing.
    missing: Vec<String>,
}

#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Counted {
    #[serde(flatten)]
    way: Way,
    flows: u64,
}

/// A path from a client to a backend.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
struct Way {
    /// The address of the client; `None` if it is a node.
    client: Option<IpAddr>,
    client_name: Option<Whose>,
    service: String,
    backend: SocketAddr,
    backend_name: Option<Whose>,
    /// The node of the backend.
    backend_node: Option<String>,
}

impl Page {
    /// Returns the open flows of a namespace, or of one of its Services.
    pub async fn map(&self, namespace: &str, service: Option<&str>) -> ClusterMap {
        let named = service.map(|service| ("service", service));
        let pairs = [("namespace", namespace)].into_iter().chain(named);
        let question = question("map", pairs);
        let mut answers = self.0.ask_all::<NodeMap>(&question, LIMIT);
        let mut maps = BTreeMap::new();
        while let Some((node, answer)) = answers.next().await {
            if let Ok(map) = answer {
                maps.insert(node, map);
            }
        }
        let all = lock(&self.0.merged);
        let missing = all.names().filter(|name| !maps.contains_key(*name));
        let missing = missing.map(str::to_owned).collect();
        drop(all);
        let named = |address, at| (self.0.whose(address, at), self.0.node_at(address, at));
        ClusterMap {
            missing,
            ..merged(maps, Timestamp::now(), named)
        }
    }
}

impl Shared {
    /// Returns the node of an address: a node's own, or that of the pod which had it.
    pub(super) fn node_at(&self, address: IpAddr, at: Timestamp) -> Option<String> {
        let own = lock(&self.merged).node_of(address).map(str::to_owned);
        own.or_else(|| lock(&self.names).node_at(address, at))
    }
}

/// Adds up the paths. `named` returns whose an address was, and its node.
fn merged(
    maps: BTreeMap<String, NodeMap>,
    now: Timestamp,
    named: impl Fn(IpAddr, Timestamp) -> (Option<Whose>, Option<String>),
) -> ClusterMap {
    let mut found = ClusterMap::default();
    let mut counts = BTreeMap::<Way, u64>::new();
    for (node, map) in maps {
        found.left_out = found.left_out.saturating_add(map.left_out);
        found.partial |= map.partial;
        for way in map.ways {
            // A flow that is open for long may be of a pod that is gone. An address has a name if
            // the same pod had it at the last packets of all these flows.
            let [first, last] = [way.longest_idle_secs, way.idle_secs].map(|secs| {
                let idle = SignedDuration::from_secs(secs.into());
                now.checked_sub(idle).unwrap_or(now)
            });
            let named = |addr| {
                let ((name, node), (before, node_before)) = (named(addr, last), named(addr, first));
                (
                    if name == before { name } else { None },
                    if node == node_before { node } else { None },
                )
            };
            let client_name = match way.client {
                Some(client) => named(client).0,
                None => Some(Whose::Node(node.clone())),
            };
            let (backend_name, backend_node) = named(way.backend.ip());
            let named = Way {
                // What is outside is one client.
                client: way.client.filter(|_| client_name != Some(Whose::Outside)),
                client_name,
                service: way.service,
                backend: way.backend,
                backend_name,
                backend_node,
            };
            let sum = counts.entry(named).or_default();
            *sum = sum.saturating_add(way.flows);
        }
    }
    let mut ways: Vec<_> = counts
        .into_iter()
        .map(|(way, flows)| Counted { way, flows })
        .collect();
    ways.sort_by_key(|counted| std::cmp::Reverse(counted.flows));
    let rest = ways.split_off(ways.len().min(SHOWN));
    let rest = rest.iter().map(|counted| counted.flows);
    found.left_out = rest.fold(found.left_out, u64::saturating_add);
    found.ways = ways;
    found
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ways_of_nodes_are_summed_and_named_for_their_time() {
        let now = Timestamp::from_second(1_700_000_000).unwrap();
        let map = |ways: serde_json::Value| -> NodeMap {
            serde_json::from_value(json!({"ways": ways, "leftOut": 3, "partial": false})).unwrap()
        };
        let way = |client: serde_json::Value, idle: u32, flows: u64| json!({"client": client, "service": "shop/web", "backend": "10.244.2.2:8080", "flows": flows, "idleSecs": 0, "longestIdleSecs": idle});
        let maps = BTreeMap::from([
            (
                "n1".to_owned(),
                map(json!([
                    way(json!("198.51.100.1"), 0, 1),
                    way(json!("198.51.100.2"), 0, 2),
                    way(json!(null), 0, 1),
                    way(json!("10.244.1.2"), 600, 1),
                ])),
            ),
            (
                "n2".to_owned(),
                map(json!([way(json!("198.51.100.1"), 0, 4)])),
            ),
        ]);
        let named = |address: IpAddr, at| match address.to_string().as_str() {
            "10.244.2.2" => (
                Some(Whose::Pod("shop/web-1".to_owned())),
                Some("n2".to_owned()),
            ),
            // The pod has begun since.
            "10.244.1.2" if at < now => (None, None),
            "10.244.1.2" => (Some(Whose::Pod("shop/new".to_owned())), None),
            _ => (Some(Whose::Outside), None),
        };
        let found = merged(maps, now, named);
        let ways: Vec<_> = found
            .ways
            .iter()
            .map(|Counted { way, flows }| {
                let client = way.client.map(|client| client.to_string());
                assert_eq!(way.backend_node.as_deref(), Some("n2"));
                (client, way.client_name.clone(), *flows)
            })
            .collect();
        let old = Some("10.244.1.2".to_owned());
        assert_eq!(
            ways,
            [
                (None, Some(Whose::Outside), 7),
                (None, Some(Whose::Node("n1".to_owned())), 1),
                (old, None, 1),
            ]
        );
        assert_eq!(found.left_out, 6);
    }
}
