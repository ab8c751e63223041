//! `kubectl kpx ui`: the data of the page for the whole cluster. proxy-agent serves the page.

#[cfg(test)]
mod fake;
mod history;
mod link;
mod live;
mod map;
mod merge;
mod names;
mod pace;
mod service;
mod skew;
mod tend;
mod trace;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use futures::stream::FuturesUnordered;
use jiff::Timestamp;
use kube::Client;
use serde::de::DeserializeOwned;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

use crate::connect::ConnectArgs;
use crate::pods::Cluster as Found;
use link::Link;
use merge::Merged;
use names::Names;
use pace::Paced;

pub use history::ClusterHistory;
pub use live::EventQuery;
pub use map::ClusterMap;
pub use merge::{ClusterRow, ClusterStatus};
pub use names::Whose;
pub use service::{ClusterService, NodeService};

/// Time limit for an answer of a node in seconds.
const TIMEOUT: u64 = 10;
/// The nodes that share one second between two rounds of changes: with many nodes, each sends less
/// often.
const NODES_PER_SECOND: usize = 40;
/// The rows stay for as many times as long as their merging took.
const REST: u32 = 16;
/// The longest such time. The page computes rates of the last 12 s.
const LONGEST_REST: Duration = Duration::from_secs(5);
/// The shortest and the longest time between two rounds, in seconds.
const LEAST_PERIOD: usize = 2;
const LONGEST_PERIOD: usize = 60;

/// Serve a web page of the whole cluster on this machine, until stopped.
///
/// The page shows all nodes' Services, problems and packets. It listens at 127.0.0.1 alone, and asks
/// each node's kpx through the API server as the other commands do. Pods have names if you may list
/// pods of all namespaces.
#[derive(Args, Debug)]
pub struct UiArgs {
    /// Port of the page; 0 for any free port.
    #[arg(long, value_name = "PORT", default_value_t = 10_290)]
    port: u16,
}

/// The data of the page. Clones share it.
#[derive(Clone)]
pub struct Page(Arc<Shared>);

struct Shared {
    connect: ConnectArgs,
    port: u16,
    client: Client,
    /// The server that is asked, as the page's title.
    title: String,
    limit: Duration,
    merged: Mutex<Merged>,
    rows: Mutex<Paced<Vec<ClusterRow>>>,
    names: Mutex<Names>,
    /// The reason why pods have no names.
    names_missing: Mutex<Option<String>>,
    links: Mutex<BTreeMap<String, Link>>,
    tasks: Mutex<BTreeMap<String, (tend::Identity, AbortHandle)>>,
    /// The nodes that have not answered for the last map.
    maps: Mutex<BTreeMap<String, map::Asked>>,
    /// The permits to connect: a limited number of nodes at a time.
    connecting: Semaphore,
}

impl Page {
    /// Connects, and begins to read all nodes.
    pub(crate) async fn start(connect: ConnectArgs, args: &UiArgs) -> Result<Self> {
        let found = Found::find(&connect).await?;
        let page = Self(Arc::new(Shared::new(connect, args.port, found.client)));
        tend::begin(&page.0, found.nodes);
        Ok(page)
    }

    pub fn port(&self) -> u16 {
        self.0.port
    }

    pub fn status(&self) -> ClusterStatus {
        let missing = lock(&self.0.names_missing).clone();
        lock(&self.0.merged).status(self.0.title.clone(), missing)
    }

    /// Returns the rows of all Services. With many nodes they may be some seconds old, as the nodes'
    /// rounds are: merging them takes a small part of the time.
    pub fn rows(&self) -> Arc<Vec<ClusterRow>> {
        let merge = || {
            let mut merged = lock(&self.0.merged);
            let start = Instant::now();
            let rows = merged.rows(start);
            // The first rows come as soon as they can.
            let rest = if merged.has_begun() {
                (start.elapsed() * REST).min(LONGEST_REST)
            } else {
                Duration::ZERO
            };
            (rows, rest)
        };
        lock(&self.0.rows).get(Instant::now, merge)
    }
}

/// Returns what to ask a node for: its data of this name, with parameters.
fn question<'a>(data: &str, pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let pairs = form_urlencoded::Serializer::new(String::new())
        .extend_pairs(pairs)
        .finish();
    format!("{data}?{pairs}")
}

impl Shared {
    fn new(connect: ConnectArgs, port: u16, client: Client) -> Self {
        Self {
            limit: connect.timeout(TIMEOUT),
            connecting: Semaphore::new(connect.parallel()),
            title: connect.title(),
            connect,
            port,
            client,
            merged: Mutex::default(),
            rows: Mutex::default(),
            names: Mutex::default(),
            names_missing: Mutex::default(),
            links: Mutex::default(),
            tasks: Mutex::default(),
            maps: Mutex::default(),
        }
    }

    fn links(&self) -> Vec<(String, Link)> {
        let links = lock(&self.links);
        let links = links
            .iter()
            .map(|(name, link)| (name.clone(), link.clone()));
        links.collect()
    }

    /// Asks all nodes at once, and returns each answer as it arrives.
    fn ask_all<'a, T: DeserializeOwned + 'a>(
        &self,
        what: &'a str,
        limit: Duration,
    ) -> FuturesUnordered<impl Future<Output = (String, Result<T>)> + use<'a, T>> {
        let asked = self.links().into_iter();
        let asked = asked.map(|(node, link)| async move {
            let answer = link.ask(what, limit).await;
            (node, answer)
        });
        asked.collect()
    }

    /// Returns the seconds between two rounds of a node.
    fn period(&self) -> usize {
        period(self.nodes())
    }

    /// Returns the number of nodes, also of those without an answer.
    fn nodes(&self) -> usize {
        lock(&self.tasks).len()
    }

    /// Returns whose an address was, in the words of the page.
    fn whose(&self, address: IpAddr, at: Timestamp) -> Option<Whose> {
        let node = lock(&self.merged).node_of(address).map(str::to_owned);
        node.map(Whose::Node)
            .or_else(|| lock(&self.names).whose(address, at))
    }
}

/// Returns the seconds between two rounds of each of these nodes.
fn period(nodes: usize) -> usize {
    (nodes / NODES_PER_SECOND).clamp(LEAST_PERIOD, LONGEST_PERIOD)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
