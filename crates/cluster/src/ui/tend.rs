//! Reads every node, and the cluster's pods and nodes, until dropped.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use futures::TryStreamExt;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::ListParams;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, ResourceExt};
use proxy_view::page::{Clock, Digest, Round, Shaped};
use proxy_view::status::Status;
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};

use super::link::{self, Link};
use super::skew::Skew;
use super::{Shared, lock};
use crate::pods::{self, NodePod};

/// The time between two lists of kpx's pods, and of Nodes.
const PODS_PERIOD: Duration = Duration::from_secs(10);
const NODES_PERIOD: Duration = Duration::from_secs(60);
/// The time between two readings of a node's status; with many nodes it is longer.
const STATUS_PERIOD: u64 = 4;
/// The time of one watch of pods, and the time within which a dead one is found, in seconds.
const WATCH: u32 = 30;
const DEAF: SignedDuration = SignedDuration::from_secs(WATCH as i64 + 5);
/// The time before a node that failed is tried again, and before the names are.
const RETRY: Duration = Duration::from_secs(5);
/// The longest time before a node that fails again and again is tried again.
const LONGEST_RETRY: Duration = Duration::from_secs(60);
/// The time for which a node that connects may keep others waiting.
const TURN: Duration = Duration::from_secs(1);
/// The time of an answering session after which a node counts as well again.
const WELL: Duration = Duration::from_secs(60);
/// The maximum number of digests of a question. More are asked for as all.
const ASKED: usize = 200;

/// Begins to read these nodes, later nodes, and the names of pods.
pub(super) fn begin(shared: &Arc<Shared>, nodes: Vec<NodePod>) {
    follow(shared, nodes);
    tokio::spawn(find(Arc::clone(shared)));
    tokio::spawn(name_pods(Arc::clone(shared)));
    tokio::spawn(name_nodes(Arc::clone(shared)));
}

/// Lists kpx's pods from time to time.
async fn find(shared: Arc<Shared>) {
    loop {
        sleep(PODS_PERIOD).await;
        // If the API server fails, so do the nodes, and the page names them.
        let wanted = &shared.connect.node;
        if let Ok(mut nodes) = pods::find(&shared.client, &shared.connect, wanted).await {
            nodes.extend(without_pod(&shared, &nodes));
            follow(&shared, nodes);
        }
    }
}

/// Returns the nodes that have lost their pod of kpx, and are still Nodes.
fn without_pod(shared: &Shared, found: &[NodePod]) -> Vec<NodePod> {
    let names = lock(&shared.names);
    let has_lost = |node: &&String| {
        let is_found = found.iter().any(|at| at.node == **node);
        !is_found && names.has_node(node)
    };
    let tasks = lock(&shared.tasks);
    let lost = tasks.keys().filter(has_lost);
    lost.map(|node| pods::missing(&shared.connect, node))
        .collect()
}

/// Reads these nodes alone. A node whose pod is another one is read anew.
fn follow(shared: &Arc<Shared>, nodes: Vec<NodePod>) {
    let names: Vec<_> = nodes.iter().map(|at| at.node.clone()).collect();
    lock(&shared.merged).keep(&names);
    let mut tasks = lock(&shared.tasks);
    tasks.retain(|name, (_, task)| {
        let is_kept = names.contains(name);
        if !is_kept {
            task.abort();
            lock(&shared.links).remove(name);
        }
        is_kept
    });
    for at in nodes {
        let is_same = |(pod, _): &(Identity, _)| *pod == Identity::of(&at);
        if tasks.get(&at.node).is_some_and(is_same) {
            continue;
        }
        let (name, identity) = (at.node.clone(), Identity::of(&at));
        let task = tokio::spawn(tend(Arc::clone(shared), at)).abort_handle();
        if let Some((_, before)) = tasks.insert(name, (identity, task)) {
            before.abort();
        }
    }
}

/// What makes a pod another one.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Identity {
    pod: String,
    absent: Option<String>,
}

impl Identity {
    fn of(at: &NodePod) -> Self {
        Self {
            pod: at.pod.clone(),
            absent: at.absent.clone(),
        }
    }
}

/// Reads a node, again and again.
async fn tend(shared: Arc<Shared>, at: NodePod) {
    let mut wait = None;
    loop {
        let begun = Instant::now();
        let ended = session(&shared, &at).await;
        let has_answered = lock(&shared.links).remove(&at.node).is_some();
        let was_well = has_answered && begun.elapsed() >= WELL;
        let next = next_wait(wait.filter(|_| !was_well));
        wait = Some(next);
        let why = ended.err().unwrap_or_else(|| anyhow!("ended"));
        lock(&shared.merged).end(&at.node, format!("{why:#}"), Timestamp::now());
        sleep(jittered(next, rand::random())).await;
    }
}

/// Returns the time before the next attempt, after the time before this one.
fn next_wait(before: Option<Duration>) -> Duration {
    before.map_or(RETRY, |before| (2 * before).min(LONGEST_RETRY))
}

/// Returns up to a fifth more or less, by a random number below 1, so that nodes which failed
/// together are spread.
fn jittered(wait: Duration, random: f64) -> Duration {
    wait.mul_f64(0.8 + 0.4 * random)
}

/// Connects when there is a permit, and gives the permit back after [`TURN`], so that nodes which
/// hang keep no other node waiting.
async fn in_turn<T>(permits: &Semaphore, connect: impl Future<Output = T>) -> T {
    let permit = permits.acquire().await;
    let mut connect = std::pin::pin!(connect);
    if let Ok(connected) = timeout(TURN, &mut connect).await {
        return connected;
    }
    drop(permit);
    connect.await
}

/// Reads a node until a failure.
async fn session(shared: &Shared, at: &NodePod) -> Result<()> {
    let opening = timeout(shared.limit, link::open(&shared.client, at));
    let opened = in_turn(&shared.connecting, opening).await;
    let no_answer = || anyhow!("no answer within {} s", shared.limit.as_secs());
    let (link, work) = opened.map_err(|_| no_answer())??;
    let reading = async {
        lock(&shared.merged).begin(&at.node);
        read_status(shared, at, &link).await?;
        lock(&shared.links).insert(at.node.clone(), link.clone());
        tokio::try_join!(
            keep_reading_status(shared, at, &link),
            read_changes(shared, at, &link)
        )?;
        Ok(())
    };
    let mut work = std::pin::pin!(work);
    let failed: Result<()> = tokio::select! {
        // The relay's words say more than the broken connection.
        biased;
        why = &mut work => return Err(why),
        failed = reading => failed,
    };
    let is_broken = |error: &anyhow::Error| format!("{error:#}").contains(crate::exec::BROKEN);
    if failed.as_ref().is_err_and(is_broken)
        && let Ok(why) = timeout(2 * link::WORDS, work).await
    {
        return Err(why);
    }
    failed
}

async fn keep_reading_status(shared: &Shared, at: &NodePod, link: &Link) -> Result<()> {
    loop {
        let period = u64::try_from(2 * shared.period()).unwrap_or(STATUS_PERIOD);
        sleep(Duration::from_secs(period.max(STATUS_PERIOD))).await;
        read_status(shared, at, link).await?;
    }
}

async fn read_status(shared: &Shared, at: &NodePod, link: &Link) -> Result<()> {
    let before = Timestamp::now();
    let Clock { now } = link.ask("clock", shared.limit).await?;
    let skew = Skew::between(before, now, Timestamp::now());
    let status: Status = link.ask("status", shared.limit).await?;
    let mut merged = lock(&shared.merged);
    merged.take_status(&at.node, status, skew, Instant::now());
    merged.take_bytes(&at.node, link.bytes(), Instant::now());
    Ok(())
}

async fn read_changes(shared: &Shared, at: &NodePod, link: &Link) -> Result<()> {
    let period = shared.period();
    let what = format!("changes?every={period}");
    let limit = shared.limit + Duration::from_secs(period as u64);
    let lines = link.lines(&what, shared.limit).await?;
    let mut lines = lines.until_silent(limit);
    loop {
        let Some(line) = lines.next().await.context("read changes")? else {
            bail!("the agent has ended its answer");
        };
        let round: Round =
            serde_json::from_slice(&line).context("this node runs another version of kpx")?;
        let unknown = {
            let now = Instant::now();
            let mut merged = lock(&shared.merged);
            let mut unknown = merged.take_round(&at.node, round, now);
            unknown.extend(merged.missing(&at.node, now));
            unknown
        };
        if !unknown.is_empty() {
            // On failure the session ends, and another node is asked.
            let shapes = read_shapes(link, &unknown, shared.limit).await?;
            lock(&shared.merged).take_shapes(&at.node, &unknown, shapes);
        }
    }
}

async fn read_shapes(link: &Link, digests: &[Digest], limit: Duration) -> Result<Vec<Shaped>> {
    let what = if digests.len() > ASKED {
        "shapes".to_owned()
    } else {
        let digests: Vec<String> = digests.iter().copied().map(String::from).collect();
        format!("shapes?of={}", digests.join(","))
    };
    let mut lines = link.lines(&what, limit).await?.until_silent(limit);
    let (mut shapes, mut bytes) = (Vec::new(), 0);
    while let Some(line) = lines.next().await.context("read shapes")? {
        bytes += line.len();
        ensure!(
            bytes <= link::LONGEST,
            "the shapes are longer than {} MiB",
            link::LONGEST >> 20
        );
        shapes.push(serde_json::from_slice(&line).context("read a shape")?);
    }
    Ok(shapes)
}

/// Follows all pods, for their names.
async fn name_pods(shared: Arc<Shared>) {
    loop {
        let ended = follow_pods(&shared).await;
        lock(&shared.names).lose(Timestamp::now() - DEAF);
        let why = ended.err().map(|error| format!("{error:#}"));
        *lock(&shared.names_missing) = why.or_else(|| Some("the watch has ended".to_owned()));
        sleep(RETRY).await;
    }
}

async fn follow_pods(shared: &Shared) -> Result<()> {
    let pods: Api<Pod> = Api::all(shared.client.clone());
    // After a sleep of this machine, a dead watch would otherwise be read for minutes.
    let config = watcher::Config::default().timeout(WATCH);
    let mut events = std::pin::pin!(watcher(pods, config));
    let mut listed = HashSet::new();
    while let Some(event) = events
        .try_next()
        .await
        .context("list the pods of the cluster")?
    {
        let now = Timestamp::now();
        let mut names = lock(&shared.names);
        match event {
            Event::Init => listed.clear(),
            Event::InitApply(pod) => {
                listed.extend(pod.uid().or_else(|| pod.metadata.name.clone()));
                names.put(&pod, now);
            }
            Event::InitDone => {
                names.complete(&std::mem::take(&mut listed), now);
                *lock(&shared.names_missing) = None;
            }
            Event::Apply(pod) => names.put(&pod, now),
            Event::Delete(pod) => names.remove(&pod, now),
        }
    }
    Ok(())
}

/// Lists the Nodes from time to time, for their addresses and their pods' networks.
async fn name_nodes(shared: Arc<Shared>) {
    let nodes: Api<Node> = Api::all(shared.client.clone());
    loop {
        // Without the right, the agents' addresses name nodes.
        if let Ok(listed) = nodes.list(&ListParams::default()).await {
            lock(&shared.names).set_nodes(&listed.items);
        }
        sleep(NODES_PERIOD).await;
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use futures::StreamExt;
    use serde_json::json;

    use super::super::fake;
    use super::*;

    #[tokio::test]
    async fn nodes_that_hang_keep_no_other_waiting() {
        let permits = Semaphore::new(1);
        let waited = async {
            tokio::select! {
                biased;
                () = in_turn(&permits, pending()) => unreachable!("it hangs"),
                () = in_turn(&permits, pending()) => unreachable!("it hangs"),
                () = in_turn(&permits, ready(())) => {}
            }
        };
        timeout(Duration::from_secs(30), waited).await.unwrap();
    }

    #[tokio::test]
    async fn node_that_loses_its_pod_stays_until_its_node_object_is_gone() {
        let shared = fake::shared();
        let at = |node: &str| NodePod {
            absent: None,
            ..pods::missing(&shared.connect, node)
        };
        follow(&shared, ["n1", "n2", "n3"].map(at).into());
        let node = |name: &str, address: &str| {
            let addresses = json!([{"type": "InternalIP", "address": address}]);
            let node = json!({"metadata": {"name": name}, "status": {"addresses": addresses}});
            serde_json::from_value(node).unwrap()
        };
        let nodes = [node("n1", "10.0.0.1"), node("n2", "10.0.0.2")];
        lock(&shared.names).set_nodes(&nodes);
        let lost = without_pod(&shared, &[at("n1")]);
        let lost: Vec<_> = lost.iter().map(|at| (&*at.node, &at.absent)).collect();
        assert_eq!(lost, [("n2", &pods::missing(&shared.connect, "n2").absent)]);
    }

    #[tokio::test]
    async fn shapes_without_end_are_an_error() {
        let link = fake::link(|_| {
            let line = r#"{"digest":"AAAAAAAAAAAAAAAA","shape":{"namespace":"a","name":"NAME","type":"","addresses":[],"ports":[],"ready":0,"total":0,"conflicts":0}}"#;
            let line = line.replace("NAME", &"n".repeat(1 << 20)) + "\n";
            futures::stream::repeat(line.into()).boxed()
        })
        .await;
        let read = read_shapes(&link, &[], Duration::from_secs(30)).await;
        let error = read.err().unwrap();
        assert_eq!(error.to_string(), "the shapes are longer than 16 MiB");
    }

    #[test]
    fn node_that_fails_again_and_again_is_tried_less_often() {
        let mut wait = None;
        let secs: Vec<u64> = (0..6)
            .map(|_| wait.insert(next_wait(wait)).as_secs())
            .collect();
        assert_eq!(secs, [5, 10, 20, 40, 60, 60]);
        let millis = |random| jittered(RETRY, random).as_millis();
        assert_eq!(
            [millis(0.0), millis(0.5), millis(1.0)],
            [4_000, 5_000, 6_000]
        );
    }
}
