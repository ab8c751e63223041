//! The agent's only loop: takes in events, and makes the kernel's maps match the desired state.

mod backend_health;
mod events;
mod follow;
mod node_part;
mod notices;
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
use std::time::Duration;

use anyhow::{Context, Result, bail};
use jiff::Timestamp;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tracing::{debug, info};

use crate::agent::backend_health::BackendHealth;
use crate::agent::follow::Following;
use crate::agent::node_part::NodePart;
use crate::agent::notices::Notices;
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
use crate::node::Node;
use crate::node::lifecycle::Lifecycle;
use crate::pod_sockets::LedPods;
use crate::run::OutsideStates;
use proxy_core::desired::{Desired, Sync};
use proxy_core::input::Input;
use proxy_core::model::Skipped;
use proxy_datapath::{Counters, FlowMaps, KernelTables, Loaded, PersistenceKind, VoteReader};
use proxy_metrics::Phase;
use proxy_net::LinkEvent;
use proxy_source::health::{Health, Problem};

/// The number of inputs taken in before the maps are written: a burst costs one pass.
const BATCH: usize = 4_096;
/// The same limit for changes of devices. The limit is small, because the first of many pods must
/// not wait for the last.
const LINK_BATCH: usize = 64;
/// The rows of the tables that a pass is for in each family, about. A new Service of one namespace
/// waits for one such pass.
const PASS: usize = 1 << 16;
/// The first wait between attempts to write what the kernel refused. The longest wait is the sync
/// period.
const RETRY_MIN: Duration = Duration::from_secs(1);

/// The channels by which other tasks reach the agent.
pub struct Inbox {
    pub inputs: mpsc::Receiver<Input>,
    pub links: mpsc::Receiver<LinkEvent>,
    /// The signal that routes or rules have changed.
    pub routes: mpsc::Receiver<()>,
    /// The signal that rules of netfilter have changed. Silent without the fast path.
    pub rules: mpsc::Receiver<()>,
    pub queries: mpsc::Receiver<Query>,
    /// The problems of the source.
    pub source_health: Health,
}

/// The agent's handles on the datapath, except for the node's.
pub struct Kernel {
    pub tables: KernelTables,
    pub flows: FlowMaps,
    pub votes: VoteReader,
    pub counters: Counters,
    pub loaded: Loaded,
}

/// The agent's state.
pub struct Agent {
    node_name: String,
    mode: Mode,
    schedule: PassSchedule,
    started: Timestamp,
    desired: Desired,
    writer: Writer<KernelTables>,
    node: NodePart,
    counters: Counters,
    loaded: Loaded,
    /// The problems of the agent's own work.
    health: Health,
    reports: Reports,
    health_checks: HealthChecks,
    lifecycle: Lifecycle,
    sweeper: Sweeper,
    backend_health: BackendHealth,
    reconciler: Reconciler,
    port_conflicts: PortConflicts,
    undetected_pods: UndetectedPods,
    notices: Notices,
    /// The time of the next write of what the kernel refused, and the length of the last wait.
    retry: Option<(Instant, Duration)>,
    /// The time of the next attempt to update the node, after a failed one.
    node_retry: Option<Instant>,
    /// Set if a pass had to leave out the node's part, which was away.
    node_due: bool,
    /// The pass whose routes and rules the node is away for.
    following: Option<Following>,
    /// The node is away to look which packets may skip the stack.
    judging: bool,
    /// The node is away to put routes and rules back.
    repairing: bool,
    /// The queries that wait until the node is back.
    waiting: Vec<Query>,
    /// The parts that this node leaves out and Services were told of.
    told_left_out: BTreeSet<Skipped>,
    /// The pods whose sockets are led, where pods are chosen.
    led_pods: Option<LedPods>,
    /// The API server, and the states of names and tunnel, where there are any.
    outside: OutsideStates,
    /// Annotations of Pods that mean nothing.
    bad_pods: BTreeSet<Skipped>,
    /// Set if the last pass has left Services to the next one.
    is_behind: bool,
    /// Set by the first sync. Before it, the maps may hold what a predecessor left.
    synced: bool,
    syncs: u64,
    last_sync: Option<Timestamp>,
}

impl Agent {
    pub fn new(
        node_name: String,
        desired: Desired,
        kernel: Kernel,
        node: Node,
        lifecycle: Lifecycle,
        reports: Reports,
    ) -> Self {
        Self {
            node_name,
            mode: Mode::default(),
            schedule: PassSchedule::default(),
            started: Timestamp::now(),
            desired,
            writer: Writer::new(kernel.tables),
            node: NodePart::new(node),
            counters: kernel.counters,
            loaded: kernel.loaded,
            health_checks: HealthChecks::new(
                reports.health.clone(),
                reports.liveness.clone(),
                reports.events.clone(),
            ),
            health: reports.health.clone(),
            reports,
            lifecycle,
            sweeper: Sweeper::new(kernel.flows),
            backend_health: BackendHealth::new(kernel.votes),
            reconciler: Reconciler::default(),
            port_conflicts: PortConflicts::default(),
            undetected_pods: UndetectedPods::default(),
            notices: Notices::default(),
            retry: None,
            node_retry: None,
            node_due: false,
            following: None,
            judging: false,
            repairing: false,
            waiting: Vec::new(),
            told_left_out: BTreeSet::new(),
            led_pods: None,
            outside: OutsideStates::default(),
            bad_pods: BTreeSet::new(),
            is_behind: false,
            synced: false,
            syncs: 0,
            last_sync: None,
        }
    }

    /// Sets a mode other than node mode, a pace other than immediate, pods to lead, or states to
    /// report.
    pub fn of(
        self,
        mode: Mode,
        schedule: PassSchedule,
        led_pods: Option<LedPods>,
        outside: OutsideStates,
    ) -> Self {
        Self {
            mode,
            schedule,
            led_pods,
            outside,
            ..self
        }
    }

    /// Runs until an error that a restart may repair. A cancelled run leaves everything in place.
    pub async fn run(&mut self, inbox: &mut Inbox) -> Result<()> {
        let mut batch = Vec::with_capacity(BATCH);
        let mut link_batch = Vec::with_capacity(LINK_BATCH);
        loop {
            let next_pass = self.next_pass();
            tokio::select! {
                taken = inbox.inputs.recv_many(&mut batch, BATCH) => {
                    if taken == 0 {
                        // The source itself reports why it ended.
                        return std::future::pending().await;
                    }
                    let _work = self.reports.liveness.work();
                    self.on_inputs(batch.drain(..)).await?;
                }
                taken = inbox.links.recv_many(&mut link_batch, LINK_BATCH), if self.node.is_here() => {
                    if taken == 0 {
                        bail!("the watch on devices has ended");
                    }
                    self.node.take_in(std::mem::take(&mut link_batch), self.health.clone(), self.reports.liveness.work());
                }
                result = self.node.back() => {
                    let _work = self.reports.liveness.work();
                    self.on_node_back(result?).await?;
                    for query in std::mem::take(&mut self.waiting) {
                        self.answer(query, &inbox.source_health.problems());
                    }
                    // Each pass asks for all routes, once for all pending events. The first pass
                    // may have waited for devices.
                    let is_due = self.mode == Mode::Host || !self.synced;
                    if is_due && inbox.links.is_empty() && self.schedule.request() {
                        self.sync().await?;
                    }
                }
                Some(()) = inbox.routes.recv(), if self.node.is_here() => {
                    self.node.here_mut().into_iter().for_each(Node::on_routes);
                    self.repairing = true;
                    self.node.repair_routes(self.health.clone(), self.reports.liveness.work());
                }
                Some(()) = inbox.rules.recv(), if self.node.is_here() => {
                    self.judging = true;
                    self.node.judge(self.reports.liveness.work());
                }
                () = sleep_until(next_pass) => {
                    let _work = self.reports.liveness.work();
                    self.sync().await?;
                }
                swept = self.sweeper.next() => self.on_swept(swept),
                () = self.backend_health.due() => self.judge_backends().await?,
                reconciled = self.reconciler.next() => {
                    let reconciled = reconciled.map(|reconciled| self.reports.reconciled(&reconciled));
                    self.record(&Problem::Conntrack, reconciled);
                }
                () = self.notices.next(self.schedule.sync_period, !self.health_checks.is_empty()) => {}
                error = self.lifecycle.give_up(&self.health) => return Err(error),
                query = inbox.queries.recv() => {
                    let query = query.context("the query channel is closed")?;
                    let _work = self.reports.liveness.work();
                    self.answer(query, &inbox.source_health.problems());
                }
            }
        }
    }

    /// Returns the time of the next pass that no event asks for.
    fn next_pass(&self) -> Option<Instant> {
        let is_here = self.node.is_here();
        let of_maps = self
            .retry
            .map(|(at, _)| at)
            .into_iter()
            .chain(self.schedule.due());
        let of_maps = of_maps
            .chain(self.is_behind.then(Instant::now))
            .filter(|_| is_here || self.synced && self.mode == Mode::Node);
        let of_node = self
            .node_retry
            .into_iter()
            .chain(self.lifecycle.due())
            .filter(|_| is_here);
        of_maps.chain(of_node).min()
    }

    /// Takes in changes of objects.
    async fn on_inputs(&mut self, inputs: impl Iterator<Item = Input>) -> Result<()> {
        let mut has_pods = false;
        let mut has_others = false;
        for input in inputs {
            let is_pod = matches!(input, Input::Pod(_));
            (has_pods, has_others) = (has_pods || is_pod, has_others || !is_pod);
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
        if self.schedule.request() {
            self.sync().await
        } else {
            Ok(())
        }
    }

    /// Returns what keeps the programs in the kernel after the agent's end.
    pub fn persistence_kind(&self) -> PersistenceKind {
        self.node.persistence_kind()
    }

    /// Takes the programs off this host. Otherwise the programs go on: see [`Self::hand_over`].
    pub async fn detach(self) -> Result<()> {
        self.node.into_node().await.map(Node::detach)
    }

    /// Makes the maps and the node match the desired state. Returns an error if the agent must
    /// restart.
    async fn sync(&mut self) -> Result<()> {
        self.schedule.begin();
        self.is_behind = false;
        if !self.desired.is_complete() {
            return Ok(());
        }
        // The first pass needs the node, and so does each pass in host mode.
        if !self.node.is_here() && (!self.synced || self.mode == Mode::Host) {
            self.node_due = true;
            return Ok(());
        }
        if let Some(node) = self.node.here_mut() {
            node.share_networks(&mut self.desired);
            let queried = node.query_routes(&mut self.desired, &self.health).await;
            self.record(&Problem::RoutesToBackends, queried);
        }
        let due = self.retry.is_none_or(|(at, _)| at <= Instant::now());
        let full = due && (!self.synced || self.retry.is_some());
        let asked = self.desired.is_dirty() || full || self.node_retry.is_some();
        if asked {
            self.reports.queued();
        }
        if !self
            .may_serve()
            .inspect_err(|error| self.reports.events.node_changed(error))?
        {
            return Ok(());
        }
        self.schedule.count();
        let mut pass = Pass::begin(asked, full);
        match self.write(&mut pass) {
            Ok(()) if due => {
                self.retry = None;
                self.health.end(&Problem::Maps);
            }
            // A write that was refused earlier still waits.
            Ok(()) => {}
            Err(error) => {
                self.health.begin(&Problem::Maps, format!("{error:#}"));
                if due {
                    let wait = self.retry.map_or(RETRY_MIN, |(_, wait)| {
                        (wait * 2).min(self.schedule.sync_period)
                    });
                    self.retry = Some((Instant::now() + wait, wait));
                }
            }
        }
        let written = self.retry.is_none();
        self.follow(pass, written).await?;
        if written {
            self.health_checks.set(self.desired.health_checks()).await;
        }
        Ok(())
    }

    /// Returns false while the agent must wait, and an error if the agent must restart.
    fn may_serve(&mut self) -> Result<bool> {
        let is_known = self.lifecycle.learn(&self.desired, &self.health)?;
        let is_ready = match self.node.here_mut() {
            Some(node) => node.before_sync(&self.desired, &self.health)?,
            None => true, // It was, before the first pass.
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

    /// Writes the changes. A `full` pass compares with what the maps really hold.
    fn write(&mut self, pass: &mut Pass) -> Result<()> {
        let started = Instant::now();
        // To the first pass a Service without a model would be a deleted one.
        let models = if self.synced {
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
        self.is_behind = self.desired.is_dirty();
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
        if !changes.is_empty() || !self.synced {
            // Later syncs are not worth a log line of their own: there may be a thousand a second.
            match pass.full {
                true => info!(changes = changes.len(), micros, "synced"),
                false => debug!(changes = changes.len(), micros, "synced"),
            }
            self.syncs += 1;
            self.last_sync = Some(Timestamp::now());
        }
        if !self.synced || changes.iter().any(conntrack::concerns) {
            self.reconciler
                .set_due(&self.desired, self.node.own_addresses());
        }
        self.synced = true;
        written
    }
}
