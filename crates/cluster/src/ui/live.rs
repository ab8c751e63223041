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
use tokio::time::sleep;

use super::link::{Link, is_refused};
use super::{Page, Shared, lock};

/// The packets per second of all nodes together, and the least and the most of one node. The least
/// counts with more nodes than packets.
const PER_SECOND: usize = 200;
const LEAST: usize = 1;
const MOST: usize = 100;
/// The maximum number of packets that wait for the browser. The nodes count what they cannot send.
const QUEUE: usize = 256;
/// The number of nodes that check a query.
const CHECKS: usize = 3;
/// The time before a node is asked again that has ended its stream, and between two looks for new
/// nodes.
const RETRY: Duration = Duration::from_secs(2);

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
        // The first answer shows whether the query is right. A node may hang, so some are asked.
        let links = shared.links();
        let what = what(&query, shared.nodes());
        let asked = links.iter().take(CHECKS);
        let mut asked: FuturesUnordered<_> = asked
            .map(|(_, link)| link.lines(&what, shared.limit))
            .collect();
        if let Some(Err(error)) = asked.next().await
            && is_refused(&error, 400)
        {
            return Err(error);
        }
        let tasks = JoinSet::from_iter([follow_all(shared, query, sender)]);
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
async fn follow_all(shared: Arc<Shared>, query: EventQuery, sender: mpsc::Sender<Value>) {
    let mut open = FuturesUnordered::new();
    let mut names: Vec<String> = Vec::new();
    loop {
        let links = shared.links();
        let what = what(&query, shared.nodes());
        for (name, link) in links {
            if !names.contains(&name) {
                names.push(name.clone());
                let (shared, sender, what) = (&shared, &sender, what.clone());
                open.push(async move {
                    // The node's problem says why it fails.
                    let _ended = follow(shared, &name, &link, &what, sender).await;
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
) -> Result<()> {
    let mut lines = link.lines(what, shared.limit).await?;
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
    if let Some(fields) = event.as_object_mut() {
        fields.insert(
            "nodeTime".to_owned(),
            fields.get("time").cloned().unwrap_or_default(),
        );
        fields.insert("time".to_owned(), json!(at));
        fields.insert("node".to_owned(), json!(node));
        fields.insert("clientName".to_owned(), json!(client));
        fields.insert("backendName".to_owned(), json!(backend));
    }
    event
}

#[cfg(test)]
mod tests {
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
