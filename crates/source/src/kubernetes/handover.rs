//! Publishes that this node takes over packets of external clients, and finds the other nodes that
//! do: each has a Lease in a namespace for these Leases alone.
//!
//! ```text
//! node B reads Node A, version 7 ─▶ B's programs accept A's addresses ─▶ B's Lease: accepts 7
//! node A: its addresses are those of version 5 (its Lease: since 5) ─▶ 5 ≤ 7: A hands clients over to B
//! ```
//!
//! A Lease holds versions alone. The addresses come from Node objects, of which a right over Leases
//! changes nothing. Versions are compared as numbers (KEP-5504); one that is no number is accepted by
//! nobody. An agent writes its Lease when it starts, after the set of nodes has changed, and for a node
//! whose Lease names a later version than it accepts: each write reaches every agent. Node objects get
//! a new version with each heartbeat, so such a Lease is the rule when an agent starts.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::pending;
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use proxy_core::compact::{ACCEPTS, ADDRESSES, Compact, HandoverLease, PeerNode, SINCE};
use proxy_core::input::{ObjectName, Update};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{info, warn};

use super::client::Clients;
use super::errors::explain;
use super::outage::Outage;
use super::watch::{Watch, WatchExit};
use crate::health::{Health, Problem};
use crate::peers::{Offer, PeerSource, Peers};

/// The namespace of the Leases. Only agents have rights there.
const NAMESPACE: &str = "kpx-handover";
/// The label of the Leases. Its value is the version of what the nodes agree on: the table, the
/// outer headers, and the packets that they take.
const LABEL: &str = "kpx.dev/handover";
const VERSION: &str = "1";
/// The time between attempts to write the Lease.
const RETRY: Duration = Duration::from_secs(10);
/// The time by which each node of the cluster spreads the writes of all nodes after a change of the
/// nodes: 50 writes per second, each of which reaches every agent.
const SPREAD: Duration = Duration::from_millis(20);
/// The time in which another agent accepts this node, besides the spread of all writes.
const PATIENCE: Duration = Duration::from_secs(60);
/// The nodes that a problem names.
const NAMED: usize = 3;
/// The updates that wait for [`State`].
const QUEUE: usize = 256;

/// An update of one of the two kinds.
enum Found {
    Node(Update<PeerNode>),
    Lease(Update<HandoverLease>),
}

/// The part of a source that outlives its clients.
pub(super) struct Handover {
    nodes: Watch<PeerNode, Found>,
    leases: Watch<HandoverLease, Found>,
    /// Watches continue behind an update that they have sent, so the queue outlives clients too.
    sender: mpsc::Sender<Found>,
    found: mpsc::Receiver<Found>,
    state: State,
}

struct State {
    node_name: String,
    link: PeerSource,
    /// `None` until the list is read.
    nodes: Option<BTreeMap<ObjectName, PeerNode>>,
    leases: Option<BTreeMap<ObjectName, HandoverLease>>,
    since: Option<Since>,
    /// The uids and addresses of all nodes, and the version that this node accepts: the newest among
    /// them at the last change that needed a new Lease.
    seen: (BTreeMap<ObjectName, (String, Vec<IpAddr>)>, u64),
    /// The time of the next write.
    write_at: Option<Instant>,
    /// The failure of the last write, while the Lease differs from the offer.
    failure: Option<String>,
    /// The nodes with a Lease that do not accept this node, and since when.
    unaccepting: BTreeMap<String, Instant>,
}

/// The Node object in which its addresses were first read.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Since {
    node_uid: String,
    addresses: String,
    version: u64,
}

impl Handover {
    pub(super) fn new(node_name: &str, link: PeerSource) -> Self {
        let (sender, found) = mpsc::channel(QUEUE);
        Self {
            nodes: Watch::new(Found::Node).cached().dispensable(),
            leases: Watch::new(Found::Lease)
                .in_namespace(NAMESPACE)
                .labels(&format!("{LABEL}={VERSION}"))
                .dispensable(),
            sender,
            found,
            state: State {
                node_name: node_name.to_owned(),
                link,
                nodes: None,
                leases: None,
                since: None,
                seen: (BTreeMap::new(), 0),
                write_at: None,
                failure: None,
                unaccepting: BTreeMap::new(),
            },
        }
    }

    /// Runs until the credentials are refused. The peers found stay while the server is unavailable.
    pub(super) async fn run(
        &mut self,
        clients: &Clients,
        health: &Health,
        outage: &Outage,
    ) -> WatchExit {
        tokio::select! {
            ended = self.nodes.run(clients, &self.sender, health, outage) => ended,
            ended = self.leases.run(clients, &self.sender, health, outage) => ended,
            never = self.state.follow(&mut self.found, &clients.limited, health) => match never {},
        }
    }
}

impl State {
    async fn follow(
        &mut self,
        found: &mut mpsc::Receiver<Found>,
        client: &Client,
        health: &Health,
    ) -> Infallible {
        let leases = Api::namespaced(client.clone(), NAMESPACE);
        loop {
            let next_report = self.next_report();
            tokio::select! {
                update = found.recv() => {
                    self.take(update);
                    while let Ok(update) = found.try_recv() {
                        self.take(Some(update));
                    }
                    self.report();
                }
                changed = self.link.offer.changed() => if changed.is_err() {
                    // The agent is about to end.
                    return pending().await;
                },
                () = at(self.write_at) => {
                    self.write_at = None;
                    self.failure = None;
                    if let Err(error) = self.write(&leases).await {
                        let why = format!("write Lease {NAMESPACE}/{}: {}", self.node_name, explain(&error));
                        self.failure = Some(why);
                        self.write_at = Some(Instant::now() + RETRY);
                    }
                }
                () = at(next_report) => {}
            }
            self.schedule();
            match self.problem() {
                Some(why) => health.begin(&Problem::Handover, why),
                None => health.end(&Problem::Handover),
            }
        }
    }

    /// Returns the failure of the last write, or the names of the nodes that do not accept this node.
    fn problem(&self) -> Option<String> {
        if self.failure.is_some() {
            return self.failure.clone();
        }
        let now = Instant::now();
        let late = |(name, since): (_, &Instant)| (*since + self.patience() <= now).then_some(name);
        let late: Vec<&String> = self.unaccepting.iter().filter_map(late).collect();
        let (named, more) = late.split_at(late.len().min(NAMED));
        let named: Vec<_> = named.iter().map(|name| name.as_str()).collect();
        let more = match more.len() {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        (!late.is_empty()).then(|| {
            format!(
                "clients outside of backends at {}{more} are masqueraded, because the agents there have not accepted this node for {} s: check these agents",
                named.join(", "),
                self.patience().as_secs()
            )
        })
    }

    /// Returns the time at which the next node is late.
    fn next_report(&self) -> Option<Instant> {
        let now = Instant::now();
        let times = self
            .unaccepting
            .values()
            .map(|since| *since + self.patience());
        times.filter(|time| *time > now).min()
    }

    fn patience(&self) -> Duration {
        PATIENCE + self.spread()
    }

    /// Returns the time by which all nodes spread their writes.
    fn spread(&self) -> Duration {
        let nodes = self.nodes.as_ref().map_or(0, BTreeMap::len);
        SPREAD * u32::try_from(nodes).unwrap_or(u32::MAX)
    }

    /// Notes which nodes do not accept this node, once this node's Lease is written: without it, this
    /// node expects nothing.
    fn note_unaccepting(&mut self) {
        let now = Instant::now();
        let is_offered =
            matches!(*self.link.offer.borrow(), Offer::Accepts(_)) && self.own_lease().is_some();
        let unaccepting = self
            .foreign_leases()
            .filter(|(lease, _)| is_offered && !self.accepts(lease))
            .map(|(lease, _)| lease.name.name.to_string());
        let since = |name: &String| self.unaccepting.get(name).copied().unwrap_or(now);
        self.unaccepting = unaccepting
            .map(|name| (name.clone(), since(&name)))
            .collect();
    }

    fn take(&mut self, update: Option<Found>) {
        match update {
            Some(Found::Node(update)) => apply(&mut self.nodes, update),
            Some(Found::Lease(update)) => apply(&mut self.leases, update),
            None => {}
        }
    }

    /// Hands the nodes to the agent, if they have changed.
    fn report(&mut self) {
        self.note_since();
        self.note_version();
        let Some(found) = self.peers() else {
            return;
        };
        self.link.peers.send_if_modified(|peers| {
            let is_change = peers.as_ref() != Some(&found);
            if is_change {
                *peers = Some(found);
            }
            is_change
        });
    }

    /// Notes the newest version after a node has come or has other addresses, and for a node that
    /// waits to be accepted. Heartbeats and deletions need no new Leases.
    fn note_version(&mut self) {
        let Some(nodes) = &self.nodes else {
            return;
        };
        let identity = |node: &PeerNode| (node.uid.clone(), sorted(&node.addresses));
        let now: BTreeMap<_, _> = nodes
            .iter()
            .map(|(name, node)| (name.clone(), identity(node)))
            .collect();
        let (before, version) = &self.seen;
        let has_changed = |(name, node)| before.get(name) != Some(node);
        let is_news = now.iter().any(has_changed) || self.awaits_more_than(*version);
        let newest = nodes
            .values()
            .filter_map(|node| node.version)
            .max()
            .unwrap_or_default();
        self.seen = (now, if is_news { newest } else { *version });
    }

    /// Returns true if a node waits for a later version, and this node has read that version.
    fn awaits_more_than(&self, version: u64) -> bool {
        let mut leases = self.foreign_leases();
        leases.any(|(lease, node)| {
            lease
                .since
                .is_some_and(|since| since > version && node.version >= Some(since))
        })
    }

    /// Returns the Leases of the other nodes, with the nodes.
    fn foreign_leases(&self) -> impl Iterator<Item = (&HandoverLease, &PeerNode)> {
        let leases = self.leases.iter().flat_map(BTreeMap::values);
        leases.filter_map(|lease| {
            let name = ObjectName::new("", &*lease.name.name);
            let node = self.nodes.as_ref()?.get(&name)?;
            // A Node of the same name may be another machine.
            (!self.is_own(&lease.name) && lease.node_uid == node.uid).then_some((lease, node))
        })
    }

    /// Returns true if the node of a Lease accepts this node.
    fn accepts(&self, lease: &HandoverLease) -> bool {
        self.since
            .as_ref()
            .is_some_and(|since| lease.accepts >= Some(since.version))
    }

    /// Returns the nodes, once both kinds are listed.
    fn peers(&self) -> Option<Peers> {
        let (nodes, _) = (self.nodes.as_ref()?, self.leases.as_ref()?);
        let others = nodes.values().filter(|node| !self.is_own(&node.name));
        let accepting = self
            .foreign_leases()
            .filter(|(lease, _)| self.accepts(lease));
        Some(Peers {
            own: self
                .own_node()
                .map(|node| node.addresses.clone())
                .unwrap_or_default(),
            nodes: others
                .map(|node| (node.name.name.to_string(), node.addresses.clone()))
                .collect(),
            version: self.seen.1,
            accepting: accepting
                .map(|(lease, _)| lease.name.name.to_string())
                .collect(),
        })
    }

    /// Notes the version in which this node's addresses were first read: by an earlier agent, if its
    /// Lease names the same.
    fn note_since(&mut self) {
        let (Some(node), Some(_)) = (self.own_node(), &self.leases) else {
            return;
        };
        let addresses = sorted(&node.addresses);
        let addresses = addresses.iter().map(ToString::to_string);
        let addresses = addresses.collect::<Vec<_>>().join(",");
        let is_same = |uid: &str, of: &str| uid == node.uid && of == addresses;
        if self
            .since
            .as_ref()
            .is_some_and(|since| is_same(&since.node_uid, &since.addresses))
        {
            return;
        }
        let earlier = self
            .own_lease()
            .filter(|lease| is_same(&lease.node_uid, &lease.addresses))
            .and_then(|lease| lease.since);
        self.since = earlier.or(node.version).map(|version| Since {
            node_uid: node.uid.clone(),
            addresses,
            version,
        });
    }

    /// Sets the time of a write if this node's Lease differs from its offer.
    fn schedule(&mut self) {
        self.note_unaccepting();
        let offer = *self.link.offer.borrow();
        let is_withdrawn =
            offer == Offer::Nothing && self.leases.is_some() && self.own_lease().is_none();
        self.link.withdrawn.send_replace(is_withdrawn);
        let is_due = match offer {
            Offer::Unknown => false,
            Offer::Nothing => self.own_lease().is_some(),
            Offer::Accepts(version) => {
                self.leases.is_some()
                    && self.since.is_some()
                    && self.wanted(version).as_ref() != self.own_lease()
            }
        };
        if !is_due {
            self.write_at = None;
            self.failure = None;
        } else if self.write_at.is_none() {
            let spread = self.spread();
            let delay = if offer == Offer::Nothing {
                Duration::ZERO
            } else {
                spread.mul_f32(rand::random())
            };
            self.write_at = Some(Instant::now() + delay);
        }
    }

    /// Makes this node's Lease match its offer.
    async fn write(&mut self, leases: &Api<Lease>) -> kube::Result<()> {
        let offer = *self.link.offer.borrow();
        let name = self.own_name();
        let wanted = match offer {
            Offer::Unknown => return Ok(()),
            Offer::Nothing => {
                delete(leases, &self.node_name).await?;
                info!("this node takes no packets of external clients over");
                self.leases
                    .iter_mut()
                    .for_each(|leases| drop(leases.remove(&name)));
                return Ok(());
            }
            Offer::Accepts(version) => self.wanted(version),
        };
        let Some(wanted) = wanted else {
            return Ok(());
        };
        let lease = object(&wanted);
        let patch = Patch::Merge(&lease);
        let written = match leases
            .patch(&self.node_name, &PatchParams::default(), &patch)
            .await
        {
            Err(kube::Error::Api(status)) if status.code == 404 => {
                let created = leases.create(&PostParams::default(), &lease).await?;
                info!("this node takes packets of external clients over");
                created
            }
            patched => patched?,
        };
        if let Some(leases) = &mut self.leases {
            leases.insert(name, HandoverLease::compact(written));
        }
        Ok(())
    }

    /// Returns the Lease of this node if it accepts this version of the nodes.
    fn wanted(&self, version: u64) -> Option<HandoverLease> {
        let since = self.since.clone()?;
        Some(HandoverLease {
            name: self.own_name(),
            uid: self
                .own_lease()
                .map(|lease| lease.uid.clone())
                .unwrap_or_default(),
            node_uid: since.node_uid,
            accepts: Some(version),
            since: Some(since.version),
            addresses: since.addresses,
        })
    }

    fn own_lease(&self) -> Option<&HandoverLease> {
        self.leases.as_ref()?.get(&self.own_name())
    }

    fn own_node(&self) -> Option<&PeerNode> {
        self.nodes
            .as_ref()?
            .get(&ObjectName::new("", self.node_name.as_str()))
    }

    fn own_name(&self) -> ObjectName {
        ObjectName::new(NAMESPACE, self.node_name.as_str())
    }

    fn is_own(&self, name: &ObjectName) -> bool {
        *name.name == *self.node_name
    }
}

/// Returns the addresses of a node in an order of their own: a kubelet may change theirs.
fn sorted(addresses: &[IpAddr]) -> Vec<IpAddr> {
    let mut sorted = addresses.to_vec();
    sorted.sort_unstable();
    sorted
}

/// Applies an update to the objects of a kind. A kind that the server refuses has none.
fn apply<K: Compact>(known: &mut Option<BTreeMap<ObjectName, K>>, update: Update<K>) {
    let by_name = |objects: Vec<K>| objects.into_iter().map(|object| (object.name(), object));
    let before = known.take().unwrap_or_default();
    *known = Some(match update {
        Update::All(objects) => by_name(objects).collect(),
        Update::AllBut(objects, unreadable) => {
            let kept = before
                .into_iter()
                .filter(|(name, _)| unreadable.contains(name));
            kept.chain(by_name(objects)).collect()
        }
        Update::Refused => BTreeMap::new(),
        Update::Put(object) => {
            let mut objects = before;
            objects.insert(object.name(), *object);
            objects
        }
        Update::Del(name) => {
            let mut objects = before;
            objects.remove(&name);
            objects
        }
    });
}

fn object(lease: &HandoverLease) -> Lease {
    let node = &*lease.name.name;
    let annotations = [
        (ACCEPTS, lease.accepts.map(|version| version.to_string())),
        (SINCE, lease.since.map(|version| version.to_string())),
        (ADDRESSES, Some(lease.addresses.clone())),
    ];
    Lease {
        metadata: ObjectMeta {
            name: Some(node.to_owned()),
            labels: Some([(LABEL.to_owned(), VERSION.to_owned())].into()),
            annotations: Some(
                annotations
                    .into_iter()
                    .filter_map(|(key, value)| Some((key.to_owned(), value?)))
                    .collect(),
            ),
            // The Lease goes with the Node.
            owner_references: Some(vec![OwnerReference {
                api_version: "v1".to_owned(),
                kind: "Node".to_owned(),
                name: node.to_owned(),
                uid: lease.node_uid.clone(),
                ..OwnerReference::default()
            }]),
            ..ObjectMeta::default()
        },
        spec: Some(LeaseSpec {
            holder_identity: Some(node.to_owned()),
            ..LeaseSpec::default()
        }),
    }
}

/// Deletes the Lease of a node on which the mode is off now. Returns true once that is done, and
/// false if it is forbidden.
pub(super) async fn withdraw(client: &Client, node_name: &str) -> bool {
    let leases = Api::namespaced(client.clone(), NAMESPACE);
    loop {
        let error = match delete(&leases, node_name).await {
            Ok(()) => return true,
            Err(error) => error,
        };
        let is_denied = matches!(&error, kube::Error::Api(status) if status.code == 403);
        warn!(
            error = explain(&error),
            "deleting Lease {NAMESPACE}/{node_name} failed: other nodes hand clients over to this node until it is deleted"
        );
        if is_denied {
            return false;
        }
        sleep(RETRY).await;
    }
}

async fn delete(leases: &Api<Lease>, node_name: &str) -> kube::Result<()> {
    match leases.delete(node_name, &DeleteParams::default()).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        deleted => deleted.map(drop),
    }
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => pending().await,
    }
}

#[cfg(test)]
mod tests;
