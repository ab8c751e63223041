//! Ends connections to backends that were lost with their nodes, for Services with the annotation.
//! The agent's loop publishes the places of endpoints. This task finds their connections and
//! queries the API server about the nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use futures::StreamExt;
use proxy_core::compact::Shared;
use proxy_core::desired::Desired;
use proxy_core::health::Path;
use proxy_core::loss::{Losses, Placements};
use proxy_datapath::{EndedFlow, FlowMaps, Found, LostFlows, abort_sockets};
use proxy_source::events::Events;
use proxy_source::nodes::{AT_ONCE, NodeAsker, NodeQuestions, NodeState, questions};
use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, info, warn};

/// The time for which changes of endpoints are collected.
const PAUSE: Duration = Duration::from_millis(200);
/// The waits between scans while suspects have connections and nothing changes: first and longest.
const WAIT_MIN: Duration = Duration::from_secs(1);
const WAIT_MAX: Duration = Duration::from_secs(60);
/// Scans of flows and the computation of places each take at most 1/20 of the time.
const SHARE: u32 = 20;

/// The agent's side of the channel.
#[derive(Debug)]
pub struct EndpointPlaces {
    places: watch::Sender<Placements>,
    is_due: bool,
    not_before: Instant,
}

/// The task's side of the channel.
pub struct LostNodesTask {
    places: watch::Receiver<Placements>,
    losses: Losses,
    flows: Arc<Mutex<LostFlows>>,
    walked: Duration,
    nodes: NodeAsker,
    events: Events,
    started: Instant,
}

/// Returns the agent's side, the task, and the task's questions for the source of objects.
pub fn start(
    flows: &FlowMaps,
    events: &Events,
) -> Result<(EndpointPlaces, LostNodesTask, NodeQuestions)> {
    let (sender, places) = watch::channel(Placements::default());
    let (nodes, questions) = questions();
    let flows = Arc::new(Mutex::new(flows.lost()?));
    let task = LostNodesTask {
        places,
        losses: Losses::default(),
        flows,
        walked: Duration::ZERO,
        nodes,
        events: events.clone(),
        started: Instant::now(),
    };
    Ok((
        EndpointPlaces {
            places: sender,
            is_due: false,
            not_before: Instant::now(),
        },
        task,
        questions,
    ))
}

impl EndpointPlaces {
    /// Notes a pass that applied changes.
    pub fn changed(&mut self) {
        self.is_due = true;
    }

    /// Publishes the places of endpoints if they may have changed. The agent calls this often.
    pub fn report(&mut self, desired: &Desired) {
        let began = Instant::now();
        if !self.is_due || began < self.not_before {
            return;
        }
        self.is_due = false;
        let now = desired.placements();
        self.places.send_if_modified(|places| {
            let is_new = *places != now;
            *places = now;
            is_new
        });
        self.not_before = began + began.elapsed() * SHARE;
    }
}

impl LostNodesTask {
    pub async fn run(mut self) -> Result<()> {
        let mut wait = WAIT_MIN;
        let mut next = None;
        loop {
            let changed = match next {
                None => Some(self.places.changed().await),
                Some(next) => timeout(next, self.places.changed()).await.ok(),
            };
            match changed {
                Some(Ok(())) => {
                    wait = WAIT_MIN;
                    sleep(PAUSE.max(self.walked * SHARE)).await;
                    self.losses.see(&self.places.borrow_and_update());
                }
                // The agent ends, and reports why.
                Some(Err(_)) => return std::future::pending().await,
                None => {}
            }
            let looked = self.look().await;
            let is_done = looked.inspect_err(|error| {
                warn!(
                    error = format!("{error:#}"),
                    "connections to lost nodes may stay"
                )
            });
            next = (!is_done.unwrap_or_default()).then(|| wait.max(self.walked * SHARE));
            wait = (wait * 2).min(WAIT_MAX);
        }
    }

    /// Looks for connections to suspects, and ends those to lost nodes. Returns true if no suspect
    /// has connections.
    async fn look(&mut self) -> Result<bool> {
        let back = self.losses.back().clone();
        if !back.is_empty() {
            let spared = self
                .walk(move |flows| flows.spare(&back).map(|()| back))
                .await?;
            self.losses.were_spared(&spared);
        }
        let suspects: BTreeSet<_> = self.losses.suspects().map(|(path, _)| *path).collect();
        if suspects.is_empty() {
            return Ok(true);
        }
        let began = Instant::now();
        let Found { open, heard } = self.walk(move |flows| flows.find(&suspects)).await?;
        self.walked = began.elapsed();
        self.losses.have_flows(&open);
        let mut by_node = BTreeMap::<_, BTreeSet<Path>>::new();
        for (path, node) in self
            .losses
            .suspects()
            .filter(|(path, _)| !heard.contains(&path.backend))
        {
            by_node.entry(node.clone()).or_default().insert(*path);
        }
        let nodes = self.nodes.clone();
        // Nodes whose answers arrive together are processed together, because to end flows takes
        // two scans.
        let mut answers = pin!(nodes.ask(by_node.keys().cloned()).ready_chunks(AT_ONCE));
        while let Some(answers) = answers.next().await {
            let mut lost = BTreeMap::new();
            for (node, state) in answers {
                match state {
                    NodeState::There => self.losses.is_there(&node, self.started.elapsed()),
                    NodeState::Unknown(why) => {
                        debug!(node = &*node, why, "it is unknown whether a node is there")
                    }
                    NodeState::Lost => {
                        let paths = by_node.get(&node).into_iter().flatten();
                        lost.extend(paths.map(|path| (*path, node.clone())));
                    }
                }
            }
            if !lost.is_empty() {
                let ended = self.end(&mut lost).await?;
                self.report(&lost, &ended);
                abort_sockets(&ended).await?;
            }
        }
        let left: BTreeSet<_> = self.losses.suspects().map(|(path, _)| *path).collect();
        Ok(left.is_empty())
    }

    /// Ends the connections to endpoints of lost nodes, except endpoints that serve again or sent
    /// packets recently: the API server's answer may have taken long.
    async fn end(&mut self, lost: &mut BTreeMap<Path, Shared>) -> Result<Vec<EndedFlow>> {
        self.losses.see(&self.places.borrow());
        lost.retain(|path, node| self.losses.suspects_on(path, node));
        let mut paths: BTreeSet<_> = lost.keys().copied().collect();
        // A scan that fails may have ended some connections.
        self.losses.were_ended(paths.iter().copied());
        let ended = self.walk(move |flows| {
            let Found { heard, .. } = flows.find(&paths)?;
            paths.retain(|path| !heard.contains(&path.backend));
            flows.end(&paths)
        });
        ended.await
    }

    async fn walk<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut LostFlows) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let flows = Arc::clone(&self.flows);
        let work =
            spawn_blocking(move || work(&mut flows.lock().unwrap_or_else(PoisonError::into_inner)));
        work.await.context("look for connections to lost nodes")?
    }

    /// Reports to each Service how many of its connections ended, for each lost node.
    fn report(&self, lost: &BTreeMap<Path, Shared>, ended: &[EndedFlow]) {
        let mut reported = BTreeMap::<_, (usize, BTreeSet<String>)>::new();
        let open = ended.iter().filter(|flow| !flow.is_half_open);
        for (flow, node) in open.filter_map(|flow| Some((flow, &**lost.get(&flow.path)?))) {
            let (count, backends) = reported.entry((flow.path.service, node)).or_default();
            *count += 1;
            backends.insert(flow.path.backend.to_string());
        }
        for ((at, node), (count, backends)) in reported {
            info!(service = %at, node, count, "ended connections to a lost node");
            if let Some((service, uid)) = self.places.borrow().services.get(&at) {
                self.events.connections_ended(
                    service,
                    uid.as_deref(),
                    at.port(),
                    node,
                    count,
                    &backends,
                );
            }
        }
    }
}
