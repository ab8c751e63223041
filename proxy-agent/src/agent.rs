//! The agent's loop: processes events, and makes the kernel's maps match the desired state.

mod backend_health;
mod finished_work;
mod follow;
mod node_part;
mod notices;
mod passes;
mod pods;
mod port_conflicts;
mod readings;
mod reports;
mod schedule;
mod skipped;
mod status;
mod sweeper;
mod undetected_pods;
mod writer;

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail};
use jiff::Timestamp;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::{debug, info};

use crate::agent::backend_health::BackendHealth;
use crate::agent::node_part::NodePart;
use crate::agent::notices::Notices;
use crate::agent::passes::Passes;
use crate::agent::pods::Pods;
use crate::agent::port_conflicts::PortConflicts;
use crate::agent::reports::Pass;
pub use crate::agent::reports::Reports;
pub use crate::agent::schedule::PassSchedule;
use crate::agent::schedule::sleep_until;
use crate::agent::sweeper::Sweeper;
use crate::agent::undetected_pods::UndetectedPods;
use crate::agent::writer::Writer;
use crate::choices::Mode;
use crate::conntrack::{self, Reconciler};
use crate::control::Query;
use crate::health_check::HealthChecks;
use crate::lost_nodes::EndpointPlaces;
use crate::node::Node;
use crate::node::lifecycle::Lifecycle;
use crate::pod_sockets::SelectedPods;
use crate::run::OutsideStates;
use proxy_core::desired::{Desired, Sync};
use proxy_core::input::Input;
use proxy_core::model::Skipped;
use proxy_datapath::{Counters, FlowMaps, KernelTables, Loaded, PersistenceKind, VoteReader};
use proxy_metrics::Phase;
use proxy_net::LinkEvent;
use proxy_source::health::{Health, Problem};
use proxy_source::peers::{PeerList, Peers};

/// The maximum number of inputs for one pass.
const BATCH: usize = 4_096;
/// The maximum number of device events per task of the node. It is small, so that the first of many
/// new pods does not wait for the last.
const LINK_BATCH: usize = 64;
/// The approximate number of table rows, per family, that one pass covers. A new Service of one
/// namespace waits for one such pass.
const PASS: usize = 1 << 16;
/// The channels from other tasks to the agent.
pub struct Inbox {
    pub inputs: mpsc::Receiver<Input>,
    pub links: mpsc::Receiver<LinkEvent>,
    /// Signals a change of routes or rules.
    pub routes: mpsc::Receiver<()>,
    /// Signals a change of netfilter's rules. Never signals if there is no fast path.
    pub rules: mpsc::Receiver<()>,
    pub queries: mpsc::Receiver<Query>,
    /// The other nodes, and what this node offers to them. Without `--external-forwarding dsr`, no
    /// source is at the other end.
    pub peers: PeerList,
    pub source_health: Health,
}

/// The loop's handles on the datapath. [`Node`] has handles of its own.
pub struct Kernel {
    pub tables: KernelTables,
    pub flows: FlowMaps,
    pub votes: VoteReader,
    pub counters: Counters,
    pub loaded: Loaded,
}

/// The settings of an agent, and handles on the tasks that it reports on.
pub struct Setup {
    pub node_name: String,
    pub mode: Mode,
    pub schedule: PassSchedule,
    /// The pods with socket load balancing, if pods are selected.
    pub selected_pods: Option<SelectedPods>,
    /// The places of endpoints, if the agent ends connections to lost nodes.
    pub places: Option<EndpointPlaces>,
    pub outside: OutsideStates,
}

pub struct Agent {
    node_name: String,
    mode: Mode,
    started: Timestamp,
    desired: Desired,
    passes: Passes,
    writer: Writer<KernelTables>,
    counters: Counters,
    loaded: Loaded,
    sweeper: Sweeper,
    node: NodePart,
    lifecycle: Lifecycle,
    pods: Pods,
    backend_health: BackendHealth,
    health_checks: HealthChecks,
    reconciler: Reconciler,
    reports: Reports,
    port_conflicts: PortConflicts,
    undetected_pods: UndetectedPods,
    notices: Notices,
    /// The parts of Services without effect on this node that Events have reported.
    left_out: BTreeSet<Skipped>,
    outside: OutsideStates,
}

impl Agent {
    pub fn new(
        setup: Setup,
        desired: Desired,
        kernel: Kernel,
        node: Node,
        lifecycle: Lifecycle,
        reports: Reports,
    ) -> Self {
        Self {
            node_name: setup.node_name,
            mode: setup.mode,
            started: Timestamp::now(),
            desired,
            passes: Passes::new(setup.schedule),
            writer: Writer::new(kernel.tables),
            counters: kernel.counters,
            loaded: kernel.loaded,
            sweeper: Sweeper::new(kernel.flows),
            node: NodePart::new(node),
            lifecycle,
            pods: Pods {
                selected: setup.selected_pods,
                bad: BTreeSet::new(),
            },
            backend_health: BackendHealth::new(kernel.votes, setup.places),
            health_checks: HealthChecks::new(
                reports.health.clone(),
                reports.liveness.clone(),
                reports.events.clone(),
            ),
            reconciler: Reconciler::default(),
            reports,
            port_conflicts: PortConflicts::default(),
            undetected_pods: UndetectedPods::default(),
            notices: Notices::default(),
            left_out: BTreeSet::new(),
            outside: setup.outside,
        }
    }

    /// Runs until an error that a restart may fix. A cancelled run leaves everything in place.
    pub async fn run(&mut self, inbox: &mut Inbox) -> Result<()> {
        let mut batch = Vec::with_capacity(BATCH);
        let mut link_batch = Vec::with_capacity(LINK_BATCH);
        loop {
            let next_pass = self.next_pass();
            tokio::select! {
                taken = inbox.inputs.recv_many(&mut batch, BATCH) => {
                    if taken == 0 {
                        // The source reports why it ended.
                        return std::future::pending().await;
                    }
                    let _work = self.reports.liveness.work();
                    self.on_inputs(batch.drain(..)).await?;
                }
                taken = inbox.links.recv_many(&mut link_batch, LINK_BATCH),
                    if self.node.is_here() =>
                {
                    if taken == 0 {
                        bail!("the watch on devices has ended");
                    }
                    self.take_in(std::mem::take(&mut link_batch));
                }
                back = self.node.back() => {
                    let _work = self.reports.liveness.work();
                    let (errand, result) = back?;
                    self.publish_handover(&inbox.peers);
                    self.on_node_back(errand, result).await?;
                    for query in self.node.take_waiting() {
                        self.answer(query, &inbox.source_health.problems());
                    }
                    // In host mode a pass looks up all routes, once for all pending events. On a
                    // node, the first pass may have waited for devices.
                    let is_due = self.mode == Mode::Host || !self.passes.has_synced;
                    if is_due && inbox.links.is_empty() && self.passes.schedule.request() {
                        self.sync().await?;
                    }
                }
                Some(()) = inbox.routes.recv(), if self.node.is_here() => self.on_routes(),
                Ok(()) = inbox.peers.peers.changed(), if self.node.is_here() => {
                    let peers = inbox.peers.peers.borrow_and_update().clone();
                    self.take_peers(peers);
                }
                Some(()) = inbox.rules.recv(), if self.node.is_here() => {
                    self.node.judge(self.reports.liveness.work());
                }
                () = sleep_until(next_pass) => {
                    let _work = self.reports.liveness.work();
                    self.sync().await?;
                }
                swept = self.sweeper.next() => self.on_swept(swept),
                () = self.backend_health.due() => self.judge_backends().await?,
                reconciled = self.reconciler.next() => {
                    let reconciled =
                        reconciled.map(|reconciled| self.reports.reconciled(&reconciled));
                    self.record(&Problem::Conntrack, reconciled);
                }
                () = self.notices.next(
                    self.passes.schedule.sync_period,
                    !self.health_checks.is_empty(),
                ) => {}
                error = self.lifecycle.give_up(&self.reports.health) => return Err(error),
                query = inbox.queries.recv() => {
                    let query = query.context("the query channel is closed")?;
                    let _work = self.reports.liveness.work();
                    self.answer(query, &inbox.source_health.problems());
                }
            }
        }
    }

    /// Returns the time of the next pass that needs no event.
    fn next_pass(&self) -> Option<Instant> {
        let is_here = self.node.is_here();
        let maps = self
            .passes
            .due()
            .filter(|_| is_here || self.passes.has_synced && self.mode == Mode::Node);
        let node = self.node.retry.into_iter().chain(self.lifecycle.due());
        maps.into_iter().chain(node.filter(|_| is_here)).min()
    }

    /// Sends the node away to accept the packets of other nodes.
    fn take_peers(&mut self, peers: Option<Peers>) {
        if let Some(peers) = peers {
            let work = self.reports.liveness.work();
            self.node.take_peers(peers, work);
        }
    }

    /// Publishes whether this node takes packets over, and updates the nodes that it hands packets
    /// over to.
    fn publish_handover(&mut self, peers: &PeerList) {
        let Some(node) = self.node.here() else {
            return;
        };
        node.report_handover(&self.reports.health);
        if !node.knows_handover() {
            return;
        }
        let offer = node.offer();
        peers.offer.send_if_modified(|known| {
            let is_change = *known != offer;
            *known = offer;
            is_change
        });
        if self.desired.set_able_nodes(node.able_nodes()) {
            self.passes.schedule.ask_again();
        }
    }

    /// Sends the node away to process device events.
    fn take_in(&mut self, events: Vec<LinkEvent>) {
        let health = self.reports.health.clone();
        let work = self.reports.liveness.work();
        self.node.take_in(events, health, work);
    }

    /// Sends the node away to restore routes and rules.
    fn on_routes(&mut self) {
        self.node.here_mut().into_iter().for_each(Node::on_routes);
        let health = self.reports.health.clone();
        let work = self.reports.liveness.work();
        self.node.repair_routes(health, work);
    }

    async fn on_inputs(&mut self, inputs: impl Iterator<Item = Input>) -> Result<()> {
        let mut has_pods = false;
        let mut has_others = false;
        for input in inputs {
            let is_pod = matches!(input, Input::Pod(_));
            has_pods |= is_pod;
            has_others |= !is_pod;
            self.reports.received(&input);
            self.desired.apply(input);
        }
        if has_pods {
            self.on_pods();
        }
        if !has_others && !self.desired.is_dirty() {
            return Ok(());
        }
        self.reports.know(&self.desired);
        if self.passes.schedule.request() {
            self.sync().await
        } else {
            Ok(())
        }
    }

    /// Returns the kind of object that keeps the programs in the kernel after the agent's end.
    pub fn persistence_kind(&self) -> PersistenceKind {
        self.node.persistence_kind()
    }

    /// Removes the programs from this host. [`Self::hand_over`] keeps them.
    pub async fn detach(self) -> Result<()> {
        self.node.into_node().await?.detach().await
    }

    /// Makes the maps and the node match the desired state. An error means that the agent must
    /// restart.
    async fn sync(&mut self) -> Result<()> {
        self.passes.schedule.begin();
        self.passes.is_behind = false;
        if !self.desired.is_complete() {
            return Ok(());
        }
        // The first pass, and each pass in host mode, needs `self.node`. The pass waits while another
        // task has it.
        if !self.node.is_here() && (!self.passes.has_synced || self.mode == Mode::Host) {
            self.node.owes_pass = true;
            return Ok(());
        }
        if let Some(node) = self.node.here_mut() {
            node.share_networks(&mut self.desired);
            let queried = node
                .query_routes(&mut self.desired, &self.reports.health)
                .await;
            self.record(&Problem::RoutesToBackends, queried);
        }
        let may_write = self.passes.may_write();
        let full = may_write && (!self.passes.has_synced || self.passes.has_refused());
        let asked = self.desired.is_dirty() || full || self.node.retry.is_some();
        if asked {
            self.reports.queued();
        }
        if !self
            .may_serve()
            .inspect_err(|error| self.reports.events.node_changed(error))?
        {
            return Ok(());
        }
        self.passes.schedule.count();
        let mut pass = Pass::begin(asked, full);
        match self.write(&mut pass) {
            Ok(()) if may_write => {
                self.passes.written();
                self.reports.health.end(&Problem::Maps);
            }
            // An earlier refused write still waits.
            Ok(()) => {}
            Err(error) => {
                let health = &self.reports.health;
                health.begin(&Problem::Maps, format!("{error:#}"));
                if may_write {
                    self.passes.refused();
                }
            }
        }
        let written = !self.passes.has_refused();
        self.follow(pass, written).await?;
        if written {
            self.health_checks.set(self.desired.health_checks()).await;
        }
        Ok(())
    }

    /// Returns false while the agent must wait, and an error if it must restart.
    fn may_serve(&mut self) -> Result<bool> {
        let is_known = self.lifecycle.learn(&self.desired, &self.reports.health)?;
        let is_ready = match self.node.here_mut() {
            Some(node) => node.before_sync(&self.desired, &self.reports.health)?,
            None => true, // An absent node was ready before the first pass.
        };
        self.lifecycle.ready(is_ready);
        if !is_known || !is_ready {
            return Ok(false);
        }
        if self.lifecycle.serve() {
            self.reports.events.starting();
        }
        Ok(true)
    }

    /// Writes the changes. A `full` pass compares with the real content of the maps.
    fn write(&mut self, pass: &mut Pass) -> Result<()> {
        let started = Instant::now();
        // The first pass would delete the rows of a Service that is not yet in the model.
        let models = if self.passes.has_synced {
            self.desired.read_in_turn(PASS)
        } else {
            self.desired.read()
        };
        let diff_started = Instant::now();
        pass.passed(Phase::Model, diff_started.duration_since(started));
        let Sync {
            changes,
            skipped,
            triggers,
        } = if pass.full {
            models.sync_from(&self.writer.read().context("read the maps")?)
        } else {
            models.sync()
        };
        self.passes.is_behind = self.desired.is_dirty();
        self.backend_health.changed();
        self.reports.triggered(triggers);
        self.reports.know(&self.desired);
        pass.passed(Phase::Diff, diff_started.elapsed());
        skipped.iter().for_each(|skipped| self.skip(skipped));
        let write_started = Instant::now();
        let written = if pass.full {
            self.writer.write_from_maps(&changes)
        } else {
            self.writer.write(&changes)
        };
        pass.passed(Phase::Write, write_started.elapsed());
        let micros = started.elapsed().as_micros();
        if !changes.is_empty() || !self.passes.has_synced {
            // Later syncs are logged at debug level: there may be a thousand a second.
            match pass.full {
                true => info!(changes = changes.len(), micros, "synced"),
                false => debug!(changes = changes.len(), micros, "synced"),
            }
            self.passes.count_change();
        }
        if !self.passes.has_synced || changes.iter().any(conntrack::concerns) {
            self.reconciler
                .set_due(&self.desired, self.node.own_addresses());
        }
        self.passes.has_synced = true;
        written
    }
}
