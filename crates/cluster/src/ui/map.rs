//! Who calls what: the open flows of all nodes by client, Service, backend and the backend's node.

use std::collections::BTreeMap;
use std::mem;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout_at};

use super::link::Link;
use super::{Page, Shared, Whose, lock, question};

/// Time limit for each node, which reads its flow tables.
const LIMIT: Duration = Duration::from_secs(5);
/// The time that an answer of the page waits for nodes. A node that answers later is in the next
/// answer, and no answer waits for a node that has not answered the one before.
const PATIENCE: Duration = Duration::from_secs(1);
/// The maximum age of a late answer.
const STALE: SignedDuration = SignedDuration::from_secs(30);
/// The maximum number of paths in the answer, the busiest first.
const SHOWN: usize = 512;

/// A node that is asked for its map.
pub(super) struct Asked {
    since: Instant,
    what: String,
    answer: JoinHandle<Option<Found>>,
}

/// A node's map, and the time of its answer.
#[derive(Debug)]
struct Found {
    at: Timestamp,
    map: NodeMap,
}

impl Drop for Asked {
    fn drop(&mut self) {
        self.answer.abort();
    }
}

impl Asked {
    fn new(link: Link, what: &str) -> Self {
        let asked = what.to_owned();
        let answer = tokio::spawn(async move {
            let map = link.ask(&asked, LIMIT).await.ok()?;
            let at = Timestamp::now();
            Some(Found { at, map })
        });
        Self {
            since: Instant::now(),
            what: what.to_owned(),
            answer,
        }
    }

    /// Returns the answer; `None` if the node fails or has not answered at that time.
    async fn until(&mut self, end: Instant) -> Option<Found> {
        timeout_at(end, &mut self.answer).await.ok()?.ok().flatten()
    }
}

/// A node's map.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct NodeMap {
    ways: Vec<NodeWay>,
    left_out: u64,
    partial: bool,
}

#[derive(Debug, Deserialize)]
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
        let maps = self.0.maps(&question).await;
        let all = lock(&self.0.merged);
        let missing = all.names().filter(|name| !maps.contains_key(*name));
        let missing = missing.map(str::to_owned).collect();
        drop(all);
        let named = |address, at| (self.0.whose(address, at), self.0.node_at(address, at));
        ClusterMap {
            missing,
            ..merged(maps, named)
        }
    }
}

impl Shared {
    /// Asks all nodes for their maps.
    async fn maps(self: &Arc<Self>, what: &str) -> BTreeMap<String, Found> {
        let now = Timestamp::now();
        let mut late = mem::take(&mut *lock(&self.maps));
        late.retain(|_, asked| asked.what == what);
        let end = Instant::now() + PATIENCE;
        let mut maps = BTreeMap::new();
        let mut waits = Vec::new();
        for (node, link) in self.links() {
            let is_waited_for = match late.get_mut(&node) {
                None => true,
                Some(asked) if asked.answer.is_finished() => {
                    let found = asked.until(end).await;
                    let found = found.filter(|found| now.duration_since(found.at) <= STALE);
                    found.is_some_and(|found| maps.insert(node.clone(), found).is_none())
                }
                Some(_) => continue,
            };
            let asked = Asked::new(link, what);
            if is_waited_for {
                waits.push((node, asked));
            } else {
                late.insert(node, asked);
            }
        }
        late.retain(|_, asked| !asked.answer.is_finished());
        for (node, mut asked) in waits {
            match asked.until(end).await {
                Some(found) => drop(maps.insert(node, found)),
                // A node that failed is asked anew.
                None if asked.answer.is_finished() => {}
                None => drop(late.insert(node, asked)),
            }
        }
        if !late.is_empty() {
            tokio::spawn(Arc::clone(self).discard_stale_maps());
        }
        *lock(&self.maps) = late;
        maps
    }

    /// Discards the late answers that have become stale, because there may be no next map.
    async fn discard_stale_maps(self: Arc<Self>) {
        let age = LIMIT + STALE.unsigned_abs();
        sleep(age).await;
        lock(&self.maps).retain(|_, asked| asked.since.elapsed() < age);
    }

    /// Returns the node of an address: a node's own, or that of the pod which had it.
    pub(super) fn node_at(&self, address: IpAddr, at: Timestamp) -> Option<String> {
        let own = lock(&self.merged).node_of(address).map(str::to_owned);
        own.or_else(|| lock(&self.names).node_at(address, at))
    }
}

/// Adds up the paths. `named` returns whose an address was, and its node.
fn merged(
    maps: BTreeMap<String, Found>,
    named: impl Fn(IpAddr, Timestamp) -> (Option<Whose>, Option<String>),
) -> ClusterMap {
    let mut found = ClusterMap::default();
    let mut counts = BTreeMap::<Way, u64>::new();
    for (node, Found { at: now, map }) in maps {
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
    use std::sync::atomic::{AtomicBool, Ordering};

    use bytes::Bytes;
    use futures::stream::{self, BoxStream, StreamExt};
    use serde_json::json;

    use super::super::fake;
    use super::*;

    #[test]
    fn ways_of_nodes_are_summed_and_named_for_their_time() {
        let now = Timestamp::from_second(1_700_000_000).unwrap();
        let map = |ways: serde_json::Value| Found {
            at: now,
            map: serde_json::from_value(json!({"ways": ways, "leftOut": 3, "partial": false}))
                .unwrap(),
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
        let found = merged(maps, named);
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

    /// The pods with the address follow one another.
    #[test]
    fn flows_of_two_pods_with_one_address_have_no_name() {
        let now = Timestamp::from_second(1_700_000_000).unwrap();
        let before = now - SignedDuration::from_secs(60);
        let named = |_, at| {
            let (pod, node) = match at < before {
                true => ("shop/old", "n1"),
                false => ("shop/new", "n2"),
            };
            let whose = Some(Whose::Pod(pod.to_owned()));
            (whose, Some(node.to_owned()))
        };
        let found = |first: u32, last: u32| {
            let way = json!({"client": "10.244.1.2", "service": "shop/web", "backend": "10.244.1.2:80", "flows": 2, "idleSecs": last, "longestIdleSecs": first});
            let map = json!({"ways": [way], "leftOut": 0, "partial": false});
            let map = serde_json::from_value(map).unwrap();
            let maps = BTreeMap::from([("n1".to_owned(), Found { at: now, map })]);
            let way = merged(maps, named).ways.remove(0).way;
            assert_eq!(way.client_name, way.backend_name);
            (way.client_name, way.backend_node)
        };
        let of = |pod: &str, node: &str| (Some(Whose::Pod(pod.to_owned())), Some(node.to_owned()));
        assert_eq!(found(120, 90), of("shop/old", "n1"));
        assert_eq!(found(30, 0), of("shop/new", "n2"));
        assert_eq!(found(120, 0), (None, None), "flows of both pods");
    }

    /// Waits until late nodes have answered or failed.
    async fn answered(shared: &Shared) {
        let mut late = mem::take(&mut *lock(&shared.maps));
        for asked in late.values_mut() {
            while !asked.answer.is_finished() {
                for _ in 0..100 {
                    tokio::task::yield_now().await;
                }
                tokio::time::advance(PATIENCE / 10).await;
            }
        }
        *lock(&shared.maps) = late;
    }

    /// Time passes only while all tasks wait.
    #[tokio::test(start_paused = true)]
    async fn hung_node_delays_one_map_and_is_in_the_next_when_it_answers() {
        static HANGS: AtomicBool = AtomicBool::new(true);
        fn empty() -> BoxStream<'static, Bytes> {
            let map = json!({"ways": [], "leftOut": 0, "partial": false});
            stream::once(async move { Bytes::from(map.to_string()) }).boxed()
        }
        let shared = fake::shared();
        fake::answer(&shared, "n1", |_| empty()).await;
        let hung: fake::Answers = |_| match HANGS.load(Ordering::Relaxed) {
            true => stream::pending().boxed(),
            false => empty(),
        };
        fake::answer(&shared, "n2", hung).await;
        let asked = async || {
            let start = Instant::now();
            let maps = shared.maps("map?namespace=shop").await;
            (maps.len(), start.elapsed().as_secs())
        };
        assert_eq!(asked().await, (1, 1), "at first it is waited for");
        assert_eq!(asked().await, (1, 0));
        answered(&shared).await;
        assert_eq!(asked().await, (1, 0), "asked again, and not waited for");
        HANGS.store(false, Ordering::Relaxed);
        answered(&shared).await;
        assert_eq!(asked().await, (1, 0), "asked once more");
        answered(&shared).await;
        assert_eq!(asked().await, (2, 0));
        assert_eq!(asked().await, (2, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn late_map_that_nobody_asks_for_is_discarded() {
        let shared = fake::shared();
        let hung: fake::Answers = |_| stream::pending().boxed();
        fake::answer(&shared, "n1", hung).await;
        assert!(shared.maps("map?namespace=shop").await.is_empty());
        assert_eq!(lock(&shared.maps).len(), 1, "it may answer late");
        sleep(Duration::from_secs(36)).await;
        assert!(lock(&shared.maps).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn node_that_answers_nonsense_is_asked_again_for_each_map() {
        let shared = fake::shared();
        let nonsense: fake::Answers = |_| stream::once(async { Bytes::from_static(b"{") }).boxed();
        fake::answer(&shared, "n1", nonsense).await;
        for _ in 0..3 {
            assert!(shared.maps("map?namespace=shop").await.is_empty());
        }
    }
}
