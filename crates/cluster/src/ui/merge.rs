//! Merges the rows and states of all nodes. Pure: the caller passes the time.
//!
//! The rows of a Service are compared by their shapes. The shape of most nodes is the cluster's, or
//! that most nodes do not have the Service, and the other nodes differ. A change reaches the nodes within a second or so, so a
//! difference counts only after [`GRACE`] and two rounds.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use proxy_common::counter::{Reason, Verdict};
use proxy_view::page::{COUNTERS, Digest, Round, Row, RowCounts, RowFailures, Shape, Shaped};
use proxy_view::status::{ProblemStatus, Status};
use serde::Serialize;

use super::skew::Skew;

/// The time that nodes have to follow a change, beside two rounds.
const GRACE: Duration = Duration::from_secs(5);
/// The time that a node has for the shapes that it is asked for, before another node is asked too.
const PATIENCE: Duration = Duration::from_secs(1);
/// The maximum number of nodes that a row names.
const NAMED: usize = 8;
/// The maximum number of Services that a node may have here: several times what Kubernetes supports.
const MOST_SERVICES: usize = 50_000;
/// The failures per second from which a node counts as failing; fewer show as 0.
const FAILS: f64 = 0.005;
/// The difference of clocks that is a problem of its node, in seconds.
const MUCH_SKEW: f64 = 2.0;

#[derive(Default)]
pub(crate) struct Merged {
    nodes: BTreeMap<String, Node>,
    /// The known shapes by digest, which this program computed.
    shapes: Shapes,
    asked: Asked,
    keys: HashMap<(String, String), usize>,
    /// The counters by Service. They count what this program saw, so they never decrease.
    totals: Vec<[u64; COUNTERS]>,
    reasons: BTreeMap<String, u64>,
    events: BTreeMap<String, u64>,
    has_begun: bool,
}

/// The digests that a node has been asked for, with the node and the time.
#[derive(Default)]
struct Asked(HashMap<Digest, (String, Instant)>);

#[derive(Debug)]
struct Known {
    shape: Shape,
    digest: Digest,
    key: usize,
}

#[derive(Default)]
struct Node {
    link: LinkState,
    status: Option<Status>,
    status_at: Option<Instant>,
    last_answer: Option<Timestamp>,
    unserved_per_sec: f64,
    skew: Option<Skew>,
    /// The time since which the clock is far off.
    skewed: Option<Timestamp>,
    bytes: Bytes,
    services: HashMap<u32, Cell>,
    /// The shapes with another digest than this program computes: of another version, or a lie.
    own: Shapes,
    first_round: Option<Instant>,
    /// True if the node has more than [`MOST_SERVICES`].
    is_cut: bool,
    /// The times at which Services were removed, by key.
    gone: HashMap<usize, Instant>,
    /// True until every Service has been counted once. What was counted before is no news.
    is_baseline: bool,
}

/// Whether a node answers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum LinkState {
    #[default]
    Connecting,
    Answers,
    /// The reason, and the beginning.
    Silent(String, Timestamp),
}

/// The bytes that a node sent so far, and in the last second.
#[derive(Clone, Copy, Debug, Default)]
struct Bytes {
    total: u64,
    per_sec: f64,
    at: Option<Instant>,
}

/// A node whose Services are merged.
struct Answering<'a> {
    name: &'a str,
    node: &'a Node,
    /// True if a Service that is missing here is missing on the node.
    is_whole: bool,
}

/// A Service on a node.
#[derive(Clone, Copy)]
struct Here<'a> {
    name: &'a str,
    node: &'a Node,
    cell: &'a Cell,
    known: &'a Arc<Known>,
}

/// A Service as all nodes have it.
struct Compared<'a> {
    major: &'a Arc<Known>,
    differ: Vec<Differs>,
    /// The worst node is the first.
    failing: Vec<Failing>,
}

/// The nodes that agree. The first field in which two votes differ decides.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Votes {
    /// The number of nodes that hear of changes.
    hearing: usize,
    count: usize,
    latest: Option<Instant>,
}

struct Cell {
    digest: Digest,
    known: Option<Arc<Known>>,
    counts: RowCounts,
    is_counted: bool,
    changed: Instant,
}

/// A Service of the cluster, in the form of a node's row with the nodes in addition.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterRow {
    /// The Service in the shape of most nodes, with sums.
    #[serde(flatten)]
    pub row: Row,
    /// The number of nodes that serve the Service in this shape.
    pub serving: usize,
    /// The nodes that differ, at most [`NAMED`], and their number.
    pub differ: Vec<Differs>,
    pub differing: usize,
    /// The nodes whose clients fail, the worst first, at most [`NAMED`].
    pub failing: Vec<Failing>,
    pub failing_nodes: FailingNodes,
}

/// The numbers of nodes whose packets are unserved, and whose connects fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FailingNodes {
    pub unserved: usize,
    pub failed: usize,
}

/// What a node has to do with the others in a Service.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Apart {
    /// What differs.
    pub(crate) differs: Option<String>,
    pub(crate) failures: RowFailures,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Differs {
    pub node: String,
    pub what: String,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Failing {
    pub node: String,
    #[serde(flatten)]
    pub failures: RowFailures,
}

/// The state of the cluster, in the form of a node's status where both have it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterStatus {
    pub node_name: String,
    pub healthy: bool,
    pub complete: bool,
    pub version: String,
    pub reasons: BTreeMap<String, u64>,
    pub events: BTreeMap<String, u64>,
    pub nodes: Vec<NodeView>,
    /// The reason why pods have no names here; `None` if they have.
    pub names_missing: Option<String>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeView {
    pub name: String,
    /// `answers`, `connecting` or `silent`.
    pub state: &'static str,
    pub last_answer: Option<Timestamp>,
    pub version: Option<String>,
    pub healthy: bool,
    pub problems: Vec<ProblemStatus>,
    /// The difference of the node's clock to this machine's, and its greatest error, in seconds.
    pub skew: Option<Skew>,
    pub services: usize,
    pub flows: usize,
    pub unserved_per_sec: f64,
    /// The bytes that the node sent to this program.
    pub bytes: u64,
    pub bytes_per_sec: f64,
}

impl Merged {
    /// Forgets nodes that are not among these, and adds new ones.
    pub(crate) fn keep(&mut self, names: &[String]) {
        self.nodes.retain(|name, _| names.contains(name));
        self.asked.0.retain(|_, (name, _)| names.contains(name));
        for name in names {
            self.nodes.entry(name.clone()).or_default();
        }
    }

    /// Begins the answers of a node: its Services follow as a whole.
    pub(crate) fn begin(&mut self, name: &str) {
        self.asked.release(name);
        let node = self.nodes.entry(name.to_owned()).or_default();
        node.services.clear();
        node.own.clear();
        node.bytes = Bytes::default();
        node.first_round = None;
        node.gone.clear();
        node.is_cut = false;
        node.is_baseline = true;
    }

    /// Ends the answers of a node. Its last status stays, with its age.
    pub(crate) fn end(&mut self, name: &str, why: String, at: Timestamp) {
        self.asked.release(name);
        let Some(node) = self.nodes.get_mut(name) else {
            return;
        };
        let since = match &node.link {
            LinkState::Silent(_, since) => *since,
            _ => at,
        };
        node.link = LinkState::Silent(why, since);
        node.services.clear();
        node.first_round = None;
        node.unserved_per_sec = 0.0;
        node.bytes.per_sec = 0.0;
        node.skew = None;
    }

    pub(crate) fn take_status(&mut self, name: &str, status: Status, skew: Skew, at: Instant) {
        let Some(node) = self.nodes.get_mut(name) else {
            return;
        };
        node.last_answer = Some(Timestamp::now());
        let was_seen = node.link == LinkState::Answers;
        node.link = LinkState::Answers;
        node.skew = Some(match &node.skew {
            Some(before) => before.joined(skew),
            None => skew,
        });
        let is_far = node.skew.is_some_and(|skew| skew.is_beyond(MUCH_SKEW));
        node.skewed = is_far.then(|| node.skewed.unwrap_or_else(Timestamp::now));
        // An agent that restarted counts from 0, and one that was silent has counted unseen.
        let is_same = |before: &Status| was_seen && before.started == status.started;
        if let Some(before) = node.status.as_ref().filter(|before| is_same(before)) {
            let unserved = added(&mut self.reasons, &before.reasons, &status.reasons);
            added(&mut self.events, &before.events, &status.events);
            let secs = node
                .status_at
                .map(|before| at.duration_since(before).as_secs_f64());
            node.unserved_per_sec = proxy_view::rates::per_second(unserved, secs.unwrap_or(0.0));
        }
        node.status_at = Some(at);
        node.status = Some(status);
    }

    pub(crate) fn take_bytes(&mut self, name: &str, total: u64, at: Instant) {
        let Some(node) = self.nodes.get_mut(name) else {
            return;
        };
        let secs = node
            .bytes
            .at
            .map_or(0.0, |before| at.duration_since(before).as_secs_f64());
        let more = total.saturating_sub(node.bytes.total);
        node.bytes = Bytes {
            total,
            per_sec: proxy_view::rates::per_second(more, secs),
            at: Some(at),
        };
    }

    /// Takes in a round, and returns the digests of unknown shapes that this node must be asked
    /// for.
    pub(crate) fn take_round(&mut self, name: &str, round: Round, at: Instant) -> Vec<Digest> {
        let grace = self.grace();
        let Some(node) = self.nodes.get_mut(name) else {
            return Vec::new();
        };
        node.first_round.get_or_insert(at);
        let mut unknown = Vec::new();
        for (number, digest) in round.shapes {
            let known = find(&self.shapes, &node.own, digest);
            let is_known = known.is_some();
            let is_full = node.services.len() >= MOST_SERVICES;
            match node.services.get_mut(&number) {
                Some(cell) => {
                    (cell.digest, cell.known, cell.changed) = (digest, known, at);
                }
                None if is_full => node.is_cut = true,
                None => drop(node.services.insert(
                    number,
                    Cell {
                        digest,
                        known,
                        counts: RowCounts::default(),
                        is_counted: false,
                        changed: at,
                    },
                )),
            }
            let is_kept = node.services.contains_key(&number);
            if !is_known && is_kept && self.asked.claim(digest, name, at) {
                unknown.push(digest);
            }
        }
        node.gone.retain(|_, gone| at.duration_since(*gone) < grace);
        for number in round.gone {
            let cell = node.services.remove(&number);
            let known = cell.and_then(|cell| find(&self.shapes, &node.own, cell.digest));
            if let Some(known) = known {
                node.gone.insert(known.key, at);
            }
        }
        for (number, counts) in round.counts {
            let Some(cell) = node.services.get_mut(&number) else {
                continue;
            };
            cell.resolve(&self.shapes, &node.own);
            if let Some(known) = cell
                .known
                .as_ref()
                .filter(|_| cell.is_counted || !node.is_baseline)
            {
                let total = &mut self.totals[known.key];
                for (sum, (new, old)) in total.iter_mut().zip(counts.2.iter().zip(cell.counts.2)) {
                    // A count that decreased has restarted.
                    let more = new.checked_sub(old).unwrap_or(*new);
                    *sum = sum.saturating_add(more);
                }
            }
            (cell.counts, cell.is_counted) = (counts, true);
        }
        node.is_baseline &= round.more;
        unknown
    }

    /// Takes in shapes of a node that was asked for these digests, and for no other.
    ///
    /// A shape stands for all nodes only if its digest is right, so that a node cannot lie about
    /// another node's Services.
    pub(crate) fn take_shapes(&mut self, name: &str, asked: &[Digest], shapes: Vec<Shaped>) {
        for digest in asked {
            self.asked.0.remove(digest);
        }
        let asked: HashSet<_> = asked.iter().collect();
        let shapes = shapes
            .into_iter()
            .filter(|shaped| asked.contains(&shaped.digest));
        for Shaped {
            digest: named,
            shape,
        } in shapes
        {
            let digest = Digest::of(&shape);
            let (keys, totals) = (&mut self.keys, &mut self.totals);
            let key = (shape.namespace.clone(), shape.name.clone());
            let key = *keys.entry(key).or_insert_with(|| {
                totals.push([0; COUNTERS]);
                totals.len() - 1
            });
            let known = self
                .shapes
                .entry(digest)
                .or_insert_with(|| Arc::new(Known { shape, digest, key }));
            if named != digest
                && let Some(node) = self.nodes.get_mut(name)
            {
                node.own.insert(named, Arc::clone(known));
            }
        }
    }

    /// Returns the digests of this node that have no shape: another node, which was asked for them,
    /// has failed or is slow.
    pub(crate) fn missing(&mut self, name: &str, at: Instant) -> Vec<Digest> {
        let Some(node) = self.nodes.get_mut(name) else {
            return Vec::new();
        };
        let mut missing = Vec::new();
        for cell in node.services.values_mut() {
            cell.resolve(&self.shapes, &node.own);
            if cell.known.is_none() && self.asked.claim(cell.digest, name, at) {
                missing.push(cell.digest);
            }
        }
        missing
    }

    /// Returns the Services of all nodes that answer, by namespace and name.
    pub(crate) fn rows(&mut self, now: Instant) -> Vec<ClusterRow> {
        let mut of_key: Vec<Vec<Here<'_>>> = Vec::new();
        of_key.resize_with(self.totals.len(), Vec::new);
        self.resolve();
        let grace = self.grace();
        let answering = self.answering(now);
        for Answering { name, node, .. } in &answering {
            for cell in node.services.values() {
                if let Some(known) = &cell.known {
                    of_key[known.key].push(Here {
                        name,
                        node,
                        cell,
                        known,
                    });
                }
            }
        }
        let mut rows: Vec<_> = of_key
            .iter()
            .zip(&self.totals)
            .filter(|(cells, _)| !cells.is_empty())
            .map(|(cells, totals)| row(cells, &answering, *totals, settled(now, grace)))
            .collect();
        rows.sort_by(|ClusterRow { row: a, .. }, ClusterRow { row: b, .. }| {
            let names = (&a.shape.namespace, &a.shape.name);
            names.cmp(&(&b.shape.namespace, &b.shape.name))
        });
        // Rollouts leave shapes behind.
        if self.shapes.len() > 2 * self.keys.len() + 1_024 {
            self.shapes.retain(|_, known| Arc::strong_count(known) > 1);
        }
        rows
    }

    /// Returns the nodes that differ in a Service or whose clients fail there.
    pub(crate) fn apart(
        &mut self,
        namespace: &str,
        name: &str,
        now: Instant,
    ) -> BTreeMap<String, Apart> {
        let Some(key) = self.keys.get(&(namespace.to_owned(), name.to_owned())) else {
            return BTreeMap::new();
        };
        let key = *key;
        self.resolve();
        let answering = self.answering(now);
        let mut cells = Vec::new();
        for Answering { name, node, .. } in &answering {
            let here = node.services.values().filter_map(|cell| {
                let known = cell.known.as_ref().filter(|known| known.key == key)?;
                Some(Here {
                    name,
                    node,
                    cell,
                    known,
                })
            });
            cells.extend(here);
        }
        let mut apart: BTreeMap<String, Apart> = BTreeMap::new();
        if cells.is_empty() {
            return apart;
        }
        let Compared {
            differ, failing, ..
        } = compared(&cells, &answering, settled(now, self.grace()));
        for Differs { node, what } in differ {
            apart.entry(node).or_default().differs = Some(what);
        }
        for Failing { node, failures } in failing {
            apart.entry(node).or_default().failures = failures;
        }
        apart
    }

    fn resolve(&mut self) {
        for node in self.nodes.values_mut() {
            for cell in node.services.values_mut() {
                cell.resolve(&self.shapes, &node.own);
            }
        }
    }

    fn grace(&self) -> Duration {
        GRACE + 2 * Duration::from_secs(super::period(self.nodes.len()) as u64)
    }

    fn answering(&self, now: Instant) -> Vec<Answering<'_>> {
        let is_settled = settled(now, self.grace());
        self.nodes
            .iter()
            .filter(|(_, node)| node.link == LinkState::Answers && node.first_round.is_some())
            .map(|(name, node)| Answering {
                name,
                node,
                is_whole: node.is_whole(is_settled),
            })
            .collect()
    }

    pub(crate) fn status(&self, cluster: String, names_missing: Option<String>) -> ClusterStatus {
        let nodes: Vec<_> = self
            .nodes
            .iter()
            .map(|(name, node)| node.view(name))
            .collect();
        let mut versions: Vec<_> = nodes
            .iter()
            .filter_map(|node| node.version.clone())
            .collect();
        versions.sort_unstable();
        versions.dedup();
        ClusterStatus {
            node_name: cluster,
            healthy: nodes.iter().all(|node| node.healthy),
            complete: nodes.iter().all(|node| node.state != "connecting"),
            version: versions.join(", "),
            reasons: self.reasons.clone(),
            events: self.events.clone(),
            nodes,
            names_missing,
        }
    }

    /// Returns true once every known node has sent its first round or failed. Stays true when nodes
    /// join.
    pub(crate) fn has_begun(&mut self) -> bool {
        let has_answered = |node: &Node| match node.link {
            LinkState::Connecting => false,
            LinkState::Answers => node.first_round.is_some(),
            LinkState::Silent(..) => true,
        };
        self.has_begun |= !self.nodes.is_empty() && self.nodes.values().all(has_answered);
        self.has_begun
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.nodes.keys().map(String::as_str)
    }

    /// Returns the difference of a node's clock to this machine's.
    pub(crate) fn skew(&self, name: &str) -> Option<Skew> {
        self.nodes.get(name)?.skew
    }

    /// Returns the node with this address.
    pub(crate) fn node_of(&self, address: std::net::IpAddr) -> Option<&str> {
        let has = |node: &Node| {
            let status = node.status.as_ref();
            status.is_some_and(|status| status.node_addresses.contains(&address))
        };
        let found = self.nodes.iter().find(|(_, node)| has(node));
        found.map(|(name, _)| name.as_str())
    }
}

type Shapes = HashMap<Digest, Arc<Known>>;

/// Returns the shape of a node's digest. What the node said of it counts first.
fn find(shapes: &Shapes, own: &Shapes, digest: Digest) -> Option<Arc<Known>> {
    own.get(&digest).or_else(|| shapes.get(&digest)).cloned()
}

impl Asked {
    /// Returns true if this node must be asked, and remembers that it is.
    fn claim(&mut self, digest: Digest, node: &str, at: Instant) -> bool {
        let asked = self.0.get(&digest);
        let is_free = asked.is_none_or(|(_, since)| at.duration_since(*since) >= PATIENCE);
        if is_free {
            self.0.insert(digest, (node.to_owned(), at));
        }
        is_free
    }

    /// Lets other nodes be asked for what this node will not answer.
    fn release(&mut self, node: &str) {
        self.0.retain(|_, (asked, _)| asked != node);
    }
}

impl Cell {
    fn resolve(&mut self, shapes: &Shapes, own: &Shapes) {
        if self.known.is_none() {
            self.known = find(shapes, own, self.digest);
        }
    }
}

impl Node {
    /// Returns true if all Services of the node have been known for a while.
    fn is_whole(&self, is_settled: impl Fn(Instant) -> bool + Copy) -> bool {
        !self.is_cut
            && self.first_round.is_some_and(is_settled)
            && self.services.values().all(|cell| cell.known.is_some())
    }

    fn hears(&self) -> bool {
        let status = self.status.as_ref();
        status.is_some_and(|status| status.unheard.is_none())
    }

    fn view(&self, name: &str) -> NodeView {
        let status = self.status.as_ref();
        let state = match self.link {
            LinkState::Connecting => "connecting",
            LinkState::Answers => "answers",
            LinkState::Silent(..) => "silent",
        };
        let problems = self.problems();
        let flows = status.iter().flat_map(|status| status.flows.values());
        NodeView {
            name: name.to_owned(),
            state,
            last_answer: self.last_answer,
            version: status.map(|status| status.version.clone()),
            healthy: self.link == LinkState::Answers
                && problems.is_empty()
                && status.is_some_and(|status| status.healthy),
            problems,
            skew: self.skew,
            services: self.services.len(),
            flows: flows.fold(0_usize, |sum, flows| sum.saturating_add(flows.flows)),
            unserved_per_sec: self.unserved_per_sec,
            bytes: self.bytes.total,
            bytes_per_sec: self.bytes.per_sec,
        }
    }

    /// Returns what makes the node differ from the others as a whole.
    fn problems(&self) -> Vec<ProblemStatus> {
        let problem = |what: &str, why: String, since: Timestamp| ProblemStatus {
            what: what.to_owned(),
            why,
            since,
        };
        if let LinkState::Silent(why, since) = &self.link {
            return vec![problem("out of reach", why.clone(), *since)];
        }
        let Some(status) = &self.status else {
            return Vec::new();
        };
        let mut problems = status.problems.clone();
        if status.complete && !has_programs(status) {
            let why = "no device has kpx's programs, so no Service is served here".to_owned();
            problems.push(problem("no programs", why, status.started));
        }
        if !status.complete {
            let why = "the API server's first lists have not arrived".to_owned();
            problems.push(problem("waiting", why, status.started));
        }
        if let Some(unheard) = &status.unheard {
            let why = format!("no changes of {} arrive", unheard.kinds.join(", "));
            problems.push(problem("lagging", why, unheard.since));
        }
        if self.is_cut {
            let why = format!("the page leaves out Services beyond {MOST_SERVICES}");
            problems.push(problem("too many Services", why, status.started));
        }
        if let (Some(skew), Some(since)) = (self.skew, self.skewed) {
            problems.push(problem("clock", skew.to_string(), since));
        }
        problems
    }
}

fn has_programs(status: &Status) -> bool {
    !status.programs.is_empty() && !status.devices.is_empty()
}

/// Adds the growth of counts to sums, and returns that of unserved packets.
fn added(
    sums: &mut BTreeMap<String, u64>,
    before: &BTreeMap<String, u64>,
    now: &BTreeMap<String, u64>,
) -> u64 {
    let is_unserved = |name: &str| {
        let mut reasons = Reason::ALL.into_iter();
        reasons.any(|reason| reason.name() == name && reason.verdict() != Verdict::Pass)
    };
    let mut all = 0_u64;
    for (name, count) in now {
        let more = count.saturating_sub(before.get(name).copied().unwrap_or(0));
        let sum = sums.entry(name.clone()).or_default();
        *sum = sum.saturating_add(more);
        if more > 0 && is_unserved(name) {
            all = all.saturating_add(more);
        }
    }
    all
}

/// Returns whether a change of that time has had time to reach all nodes.
fn settled(now: Instant, grace: Duration) -> impl Fn(Instant) -> bool + Copy {
    move |since| now.duration_since(since) >= grace
}

fn row(
    cells: &[Here<'_>],
    answering: &[Answering<'_>],
    totals: [u64; COUNTERS],
    is_settled: impl Fn(Instant) -> bool + Copy,
) -> ClusterRow {
    let Compared {
        major,
        differ,
        failing,
    } = compared(cells, answering, is_settled);
    let sum = failing
        .iter()
        .fold(RowFailures::default(), |sum, one| RowFailures {
            unserved: sum.unserved + one.failures.unserved,
            failed: sum.failed + one.failures.failed,
        });
    let number = |of: fn(&RowCounts) -> u64| {
        let numbers = cells.iter().map(|here| of(&here.cell.counts));
        numbers.fold(0_u64, u64::saturating_add)
    };
    let serves = |node: &Node| node.status.as_ref().is_some_and(has_programs);
    let nodes = |of: fn(&RowFailures) -> f64| {
        let failing = failing.iter().filter(|one| of(&one.failures) > FAILS);
        failing.count()
    };
    ClusterRow {
        row: Row {
            flows: number(|counts| counts.0),
            open_flows: number(|counts| counts.1),
            counts: totals,
            failures: (!failing.is_empty()).then_some(sum),
            shape: major.shape.clone(),
        },
        serving: cells
            .iter()
            .filter(|here| here.known.digest == major.digest && serves(here.node))
            .count(),
        differing: differ.len(),
        differ: first(differ),
        failing_nodes: FailingNodes {
            unserved: nodes(|failures| failures.unserved),
            failed: nodes(|failures| failures.failed),
        },
        failing: first(failing),
    }
}

fn compared<'a>(
    cells: &[Here<'a>],
    answering: &[Answering<'_>],
    is_settled: impl Fn(Instant) -> bool + Copy,
) -> Compared<'a> {
    let mut absent = Vec::new();
    if cells.len() < answering.len() {
        let having: HashSet<_> = cells.iter().map(|here| here.name).collect();
        let key = cells[0].known.key;
        let has_settled = |node: &Node| node.gone.get(&key).is_none_or(|gone| is_settled(*gone));
        absent.extend(
            answering
                .iter()
                .filter(|one| one.is_whole && !having.contains(one.name) && has_settled(one.node)),
        );
    }
    let (votes, major) = major(cells);
    let without = absent.iter().fold(Votes::default(), |votes, one| Votes {
        hearing: votes.hearing + usize::from(one.node.hears()),
        count: votes.count + 1,
        latest: None,
    });
    let is_gone = (without.hearing, without.count) > (votes.hearing, votes.count);
    let is_major = |here: &&Here<'_>| here.known.digest == major.digest;
    let adopted = cells.iter().filter(is_major).map(|here| here.cell.changed);
    let differs = |node: &str, what: String| Differs {
        node: node.to_owned(),
        what,
    };
    let settled = cells.iter().filter(|here| is_settled(here.cell.changed));
    let mut differ: Vec<_> = if is_gone {
        settled
            .map(|here| differs(here.name, "still has this Service".to_owned()))
            .collect()
    } else if adopted.min().is_some_and(is_settled) {
        // The first node that follows a change is ahead, and does not differ.
        let others = settled.filter(|here| !is_major(here));
        let others =
            others.map(|here| differs(here.name, difference(&major.shape, &here.known.shape)));
        let absent = absent
            .iter()
            .map(|one| differs(one.name, "does not have this Service".to_owned()));
        others.chain(absent).collect()
    } else {
        Vec::new()
    };
    differ.sort_by(|a, b| a.node.cmp(&b.node));
    let mut failing: Vec<_> = cells
        .iter()
        .filter(|here| here.cell.counts.3 != RowFailures::default())
        .map(|here| Failing {
            node: here.name.to_owned(),
            failures: here.cell.counts.3,
        })
        .collect();
    let size = |failing: &Failing| failing.failures.unserved + failing.failures.failed;
    failing.sort_by(|a, b| size(b).total_cmp(&size(a)));
    Compared {
        major,
        differ,
        failing,
    }
}

/// Returns the shape of most nodes that hear of changes, then of most nodes, then the latest.
fn major<'a>(cells: &[Here<'a>]) -> (Votes, &'a Arc<Known>) {
    // Few, mostly one: a search is faster than a map.
    let mut all: Vec<(Votes, &Arc<Known>)> = Vec::new();
    for here in cells {
        let is_here = |(_, known): &(Votes, &Arc<Known>)| known.digest == here.known.digest;
        let at = all.iter().position(is_here).unwrap_or_else(|| {
            all.push((Votes::default(), here.known));
            all.len() - 1
        });
        let (votes, _) = &mut all[at];
        votes.hearing += usize::from(here.node.hears());
        votes.count += 1;
        votes.latest = votes.latest.max(Some(here.cell.changed));
    }
    let most = all.into_iter().max_by_key(|(votes, _)| *votes);
    most.unwrap_or((Votes::default(), cells[0].known))
}

fn difference(major: &Shape, other: &Shape) -> String {
    let mut parts = Vec::new();
    if (other.ready, other.total) != (major.ready, major.total) {
        parts.push(format!("{}/{} ready", other.ready, other.total));
    } else if other.endpoints != major.endpoints {
        parts.push("other endpoints".to_owned());
    }
    if other.conflicts > major.conflicts {
        parts.push("another Service has one of its addresses".to_owned());
    }
    if other.ports != major.ports {
        parts.push("other ports".to_owned());
    }
    if other.addresses != major.addresses {
        parts.push("other addresses".to_owned());
    }
    if parts.is_empty() {
        parts.push("another state".to_owned());
    }
    parts.join(", ")
}

fn first<T>(mut all: Vec<T>) -> Vec<T> {
    all.truncate(NAMED);
    all
}

#[cfg(test)]
mod tests;
