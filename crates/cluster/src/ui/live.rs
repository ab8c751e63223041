//! The packets of all nodes, as they come, with names on both ends.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use futures::Stream;
use futures::stream::{self, FuturesUnordered, StreamExt};
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::link::{Link, is_refused};
use super::{Page, Shared, lock};

/// The packets per second of all nodes together, and the least and the most of one node. The least
/// counts with more nodes than packets.
const PER_SECOND: usize = 200;
const LEAST: usize = 1;
const MOST: usize = 100;
/// The maximum number of packets that wait for the browser. The nodes count what they cannot send.
const QUEUE: usize = 256;
/// The time before a node is asked again that has ended its stream, and between two looks for new
/// nodes.
const RETRY: Duration = Duration::from_secs(2);

/// Takes whether a node answers the query.
type Opened = mpsc::Sender<Result<()>>;

/// The selection of packets, as parameters of a node's `/ui/api/events`.
pub type EventQuery = Vec<(String, String)>;

impl Page {
    /// Returns the packets of all nodes until dropped. Fails if a node refuses the query.
    pub async fn events(
        &self,
        query: EventQuery,
    ) -> Result<impl Stream<Item = Value> + Send + use<>> {
        let shared = Arc::clone(&self.0);
        let (sender, receiver) = mpsc::channel(QUEUE);
        let (opened, mut first) = mpsc::channel(1);
        let has_nodes = !shared.links().is_empty();
        let limit = shared.limit;
        let tasks = JoinSet::from_iter([follow_all(shared, query, sender, opened)]);
        // The node that answers first shows whether the query is right.
        if has_nodes
            && let Ok(Some(Err(error))) = timeout(limit, first.recv()).await
            && is_refused(&error, 400)
        {
            return Err(error);
        }
        Ok(stream::unfold(
            (receiver, tasks),
            async |(mut receiver, tasks)| Some((receiver.recv().await?, (receiver, tasks))),
        ))
    }
}

fn what(query: &EventQuery, nodes: usize) -> String {
    let limit = (PER_SECOND / nodes.max(1)).clamp(LEAST, MOST).to_string();
    let mut text = form_urlencoded::Serializer::new("events?".to_owned());
    for (name, value) in query {
        text.append_pair(name, value);
    }
    text.append_pair("limit", &limit)
        .finish()
        .replace("?&", "?")
}

/// Follows each node that answers, now or later.
async fn follow_all(
    shared: Arc<Shared>,
    query: EventQuery,
    sender: mpsc::Sender<Value>,
    opened: Opened,
) {
    let mut open = FuturesUnordered::new();
    let mut names: Vec<String> = Vec::new();
    loop {
        let links = shared.links();
        let what = what(&query, shared.nodes());
        for (name, link) in links {
            if !names.contains(&name) {
                names.push(name.clone());
                let (shared, sender, opened) = (&shared, &sender, &opened);
                let what = what.clone();
                open.push(async move {
                    // The node's problem says why it fails.
                    let _ended = follow(shared, &name, &link, &what, sender, opened).await;
                    sleep(RETRY).await;
                    name
                });
            }
        }
        tokio::select! {
            () = sleep(RETRY) => {}
            Some(ended) = open.next(), if !open.is_empty() => {
                names.retain(|name| *name != ended);
            }
            () = sender.closed() => return,
        }
    }
}

async fn follow(
    shared: &Shared,
    node: &str,
    link: &Link,
    what: &str,
    sender: &mpsc::Sender<Value>,
    opened: &Opened,
) -> Result<()> {
    // Only the first answer is read.
    let mut lines = match link.lines(what, shared.limit).await {
        Ok(lines) => {
            let _later = opened.try_send(Ok(()));
            lines
        }
        Err(error) => {
            let _later = opened.try_send(Err(error));
            return Ok(());
        }
    };
    while let Some(line) = lines.next().await? {
        let Some(event) = line.strip_prefix(b"data: ") else {
            continue;
        };
        let event: Value = serde_json::from_slice(event).context("read an event")?;
        let event = named(shared, node, event);
        sender.send(event).await.context("the browser has left")?;
    }
    Ok(())
}

/// Adds the node, the time on this machine's clock, and the names of both ends.
fn named(shared: &Shared, node: &str, mut event: Value) -> Value {
    let skew = lock(&shared.merged).skew(node);
    let time = event["time"]
        .as_str()
        .and_then(|time| time.parse::<Timestamp>().ok());
    let time = time.map(|time| skew.map_or(time, |skew| skew.corrected(time)));
    let at = time.unwrap_or_else(Timestamp::now);
    let whose = |end: &Value| {
        let end: SocketAddr = end.as_str()?.parse().ok()?;
        shared.whose(end.ip(), at)
    };
    // A socket of the node may have any of its addresses.
    let is_node = event["decision"]["origin"] == "node";
    let client = if is_node {
        Some(super::Whose::Node(node.to_owned()))
    } else {
        whose(&event["client"])
    };
    let backend = whose(&event["decision"]["backend"]);
    let backend_node = event["decision"]["backend"]
        .as_str()
        .and_then(|end| end.parse::<SocketAddr>().ok())
        .and_then(|end| shared.node_at(end.ip(), at));
    if let Some(fields) = event.as_object_mut() {
        fields.insert(
            "nodeTime".to_owned(),
            fields.get("time").cloned().unwrap_or_default(),
        );
        fields.insert("time".to_owned(), json!(at));
        fields.insert("node".to_owned(), json!(node));
        fields.insert("clientName".to_owned(), json!(client));
        fields.insert("backendName".to_owned(), json!(backend));
        fields.insert("backendNode".to_owned(), json!(backend_node));
    }
    event
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Instant;

    use bytes::Bytes;

    use super::super::fake;
    use super::*;

    #[test]
    fn nodes_share_the_packets_of_a_second() {
        let limit = |nodes| what(&Vec::new(), nodes);
        let limits = [0, 1, 10, 200, 900].map(limit);
        let want = [100, 100, 20, 1, 1].map(|limit| format!("events?limit={limit}"));
        assert_eq!(limits, want);
    }

    #[tokio::test]
    async fn query_opens_one_stream_of_each_node() {
        static OPENED: AtomicUsize = AtomicUsize::new(0);
        let shared = fake::shared();
        for node in ["n1", "n2"] {
            fake::answer(&shared, node, |_| {
                OPENED.fetch_add(1, Ordering::Relaxed);
                stream::once(async { Bytes::from_static(b"data: {}\n\n") })
                    .chain(stream::pending())
                    .boxed()
            })
            .await;
        }
        let packets = Page(shared).events(Vec::new()).await.unwrap();
        let packets: Vec<_> = packets.take(2).collect().await;
        assert_ne!(packets[0]["node"], packets[1]["node"]);
        assert_eq!(OPENED.load(Ordering::Relaxed), 2);
    }

    #[tokio::test]
    async fn node_that_ends_its_stream_delays_no_other_node() {
        let shared = fake::shared();
        fake::answer(&shared, "n1", |_| stream::empty().boxed()).await;
        fake::answer(&shared, "n2", |_| {
            stream::unfold((), async |()| {
                sleep(RETRY / 10).await;
                Some((Bytes::from_static(b"data: {}\n\n"), ()))
            })
            .boxed()
        })
        .await;
        let begun = Instant::now();
        let packets = Page(shared).events(Vec::new()).await.unwrap();
        let packets: Vec<_> = packets.take(3).collect().await;
        assert!(packets.iter().all(|packet| packet["node"] == "n2"));
        assert!(begun.elapsed() < RETRY, "{:?}", begun.elapsed());
    }
}
