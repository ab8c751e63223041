//! `kpx run`: connects source, node and agent, and disconnects them at the end.

mod fast_path;
mod outside;
mod prepare;
mod ready;
mod servers;

use std::cell::Cell;
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Error, Result, anyhow, bail};
use axum::Router;
use aya::sys::{Stats, enable_stats};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rtnetlink::Handle;
use tokio::net::UnixListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::{info, warn};

use crate::agent::{Agent, Inbox, Kernel, PassSchedule, Reports, Setup};
use crate::choices::Mode;
use crate::cli::cleanup::kube_proxy_sysctls::kube_proxys_sysctls;
use crate::control::{AgentHandle, Query};
use crate::liveness::Liveness;
use crate::lost_nodes::LostNodesTask;
use crate::metrics_server::{configz_router, scrape_router};
use crate::monitor::Watchers;
use crate::node::lifecycle::Lifecycle;
use crate::node::{FastPath, Node};
use crate::pod_sockets::PodSocketsTask;
use crate::run::fast_path::FastPathWatch;
use crate::run::outside::{Outside, OutsideOptions};
use crate::run::servers::Servers;
use crate::settings::{Conntrack, Settings};
use crate::ui::Sources;
use crate::{conntrack, control, history, leftovers, lost_nodes, pod_sockets, ui};
use proxy_core::desired::Desired;
use proxy_core::model::ModelOptions;
use proxy_core::shares::Room;
use proxy_datapath::{
    Cgroup, Datapath, Loaded, Mechanism, Options, Persistence, PersistenceKind, StaleSockets,
};
use proxy_metrics::Metrics;
use proxy_net::changes::{Changes, Undo};
use proxy_net::{self as net, WatchedNets, tunnel};
use proxy_source::Source;
use proxy_source::events::{self, Events};
use proxy_source::health::Health;
use proxy_source::journal::Journal;
use proxy_source::peers::{self, PeerList};

pub use outside::OutsideStates;
pub use prepare::{Prepared, prepare};

/// The maximum number of inputs, and of device events, that wait for the agent.
const QUEUE: usize = 4_096;
/// The time for the withdrawal of this node's Lease before the programs end.
const WITHDRAWAL: Duration = Duration::from_secs(5);

/// Runs until a stop signal, or until a failure that a restart may fix.
///
/// ```text
/// prepared ─▶ take_over ─▶ Datapath ─┐
/// settings ─▶ Reporting ─────────────┼─▶ work: source ─▶ agent ─▶ maps, node ─▶ leave ─▶ clean_up
/// netlink ─▶ Host ───────────────────┘   in parallel: watches, servers, tasks, signals
/// ```
pub async fn run(settings: Settings, object: &[u8], prepared: Prepared) -> Result<()> {
    let reporting = Reporting::new(&settings);
    let signals = Signals::listen()?;
    raise_file_limit()?;
    let Prepared {
        lock: _lock,
        pins,
        cgroup,
        socket,
    } = prepared;
    let socket = UnixListener::from_std(socket).context("listen in the run directory")?;
    let (netlink, handle) = net::connect()?;
    let host = Host {
        netlink: handle,
        changes: Changes::new(&settings.run_dir),
        run_dir: settings.run_dir.clone(),
        bpf_dir: settings.bpf_dir.clone(),
        cleans_up: Cell::new(settings.cleanup_on_exit),
    };
    let persistence = Persistence::new(pins, host.changes.clone());
    let datapath = take_over(&settings, object, persistence, cgroup)?;
    let _stats = settings.bpf_stats.then(measure_programs);
    info!(
        version = env!("CARGO_PKG_VERSION"),
        node = settings.node_name,
        "started"
    );
    set_parameters(&settings.conntrack, &host.changes, &reporting.events);
    let serve_and_leave = async {
        let worked = work(settings, reporting, datapath, &host, socket, signals).await;
        let cleaned = clean_up(&host).await;
        worked.and(cleaned)
    };
    let netlink = net::on_own_thread(netlink);
    let end = tokio::select! {
        end = serve_and_leave => end,
        ended = netlink => ended.and_then(|()| bail!("the netlink socket has failed")),
    };
    let unlistened = control::unlisten(&host.run_dir);
    end.and(unlistened)?;
    info!("stopped");
    Ok(())
}

/// Returns true if this host is a node of an API server's cluster.
fn is_cluster_node(settings: &Settings) -> bool {
    settings.mode == Mode::Node && matches!(settings.source, Source::Kubernetes(_))
}

/// The host's side of a run: handles for changes, and whether the changes end with kpx.
struct Host {
    netlink: Handle,
    changes: Changes,
    run_dir: PathBuf,
    bpf_dir: PathBuf,
    cleans_up: Cell<bool>,
}

/// The outputs of a run's state: for commands, servers and the cluster.
struct Reporting {
    journal: Journal,
    watchers: Watchers,
    metrics: Metrics,
    liveness: Liveness,
    /// The problems of the agent's own work, and of its source.
    health: Health,
    source_health: Health,
    agent: AgentHandle,
    queries: mpsc::Receiver<Query>,
    events: Events,
    event_queue: events::Queue,
}

impl Reporting {
    fn new(settings: &Settings) -> Self {
        let journal = Journal::default();
        let (agent, queries) = AgentHandle::reporting(settings.service_metrics);
        let (events, event_queue) = Events::reporting(&settings.node_name, &journal);
        Self {
            watchers: Watchers::keeping(settings.monitor_history),
            metrics: Metrics::new(),
            liveness: Liveness::new(settings.sync_period, settings.mode),
            health: Health::reporting(&journal),
            source_health: Health::reporting(&journal),
            journal,
            agent,
            queries,
            events,
            event_queue: event_queue.only_if(is_cluster_node(settings)),
        }
    }

    fn reports(&self) -> Reports {
        Reports::new(
            self.health.clone(),
            self.liveness.clone(),
            self.metrics.clone(),
            self.events.clone(),
        )
    }

    fn more_paths(&self, configz: serde_json::Value, host: &Host) -> Router {
        let page = Sources::new(&self.agent, &self.watchers, &host.run_dir);
        scrape_router(self.agent.clone(), self.metrics.clone())
            .merge(configz_router(configz))
            .merge(control::pins_router(&host.bpf_dir))
            .merge(self.watchers.router())
            .merge(control::events_router(self.journal.clone()))
            .merge(ui::local_router(page))
    }
}

/// Connects all parts, and serves until a part ends or a signal arrives.
#[expect(
    clippy::too_many_lines,
    reason = "the wiring of all parts: each is made once, from those above it"
)]
async fn work(
    settings: Settings,
    reporting: Reporting,
    mut datapath: Datapath,
    host: &Host,
    socket: UnixListener,
    mut signals: Signals,
) -> Result<()> {
    let is_cluster_node = is_cluster_node(&settings);
    let servers = Servers::new(&settings, &reporting);
    let reports = reporting.reports();
    let paths = reporting.more_paths(settings.configz, host);
    let Reporting {
        watchers,
        source_health,
        agent: agent_handle,
        queries,
        events,
        event_queue,
        ..
    } = reporting;
    let (input_sender, inputs) = mpsc::channel(QUEUE);
    let (link_sender, links) = mpsc::channel(QUEUE);
    let (route_sender, routes) = mpsc::channel(1);
    let (rule_sender, rules) = mpsc::channel(1);
    let (peer_list, peer_source) = peers::peers();
    let withdrawn = peer_list.withdrawn.clone();
    let hands_over = settings.node.hands_over;
    let mut inbox = Inbox {
        inputs,
        links,
        routes,
        rules,
        queries,
        peers: peer_list,
        source_health: source_health.clone(),
    };

    let mode = settings.mode;
    let node_name = settings.node_name;
    let lifecycle = Lifecycle::new(
        node_name.clone(),
        is_cluster_node.then_some(settings.node_timeout),
        &settings.node.node_ips,
        source_health.clone(),
    );
    let (selected_pods, pod_sockets) = pod_sockets::start(&mut datapath, settings.sync_period)?;
    let skips_stack = settings.node.fast_path != FastPath::Off;
    let watched = WatchedNets::default();
    let bypass = datapath.flows.bypass()?;
    // Before the programs draw a port.
    conntrack::foreign_nat::keep(&mut datapath.foreign_nat).await;
    let node = Node::start(
        settings.node,
        host.netlink.clone(),
        datapath.attachments,
        datapath.node,
        bypass,
        watched.clone(),
    )
    .await?;
    let peering = node.peering(peer_source);
    let mut model = settings.model;
    let (outside, outside_states) = outside::start(
        OutsideOptions {
            source: &settings.source,
            names: settings.names,
            tunnel: settings.tunnel,
        },
        &mut model,
        &datapath.flows,
        &agent_handle,
        &host.netlink,
    )
    .await?;
    // Outside the cluster, a Node object with this host's name belongs to another machine.
    let own_node = (mode == Mode::Node).then(|| node_name.clone());
    let desired = desired_in(&datapath.loaded, own_node.clone(), model);
    let fast_path = skips_stack.then(|| FastPathWatch {
        ways: datapath.ways,
        liberal: datapath.liberal,
        judged: node.judged_rules(),
        handle: host.netlink.clone(),
        changes: rule_sender,
    });
    let kernel = Kernel {
        tables: datapath.tables,
        flows: datapath.flows,
        votes: datapath.votes,
        counters: datapath.counters,
        loaded: datapath.loaded,
    };
    let (places, lost_nodes, questions) = lost_nodes::start(&kernel.flows, &events)?;
    let setup = Setup {
        node_name,
        mode,
        schedule: PassSchedule::new(settings.sync_period, settings.min_sync_period),
        selected_pods,
        places: is_cluster_node.then_some(places),
        outside: outside_states,
    };
    let mut agent = Agent::new(setup, desired, kernel, node, lifecycle, reports);

    // The source has its own thread: kube blocks it while a kubeconfig's credential plugin runs.
    let mut sources = JoinSet::from_iter([settings.source.run(
        own_node,
        input_sender,
        source_health,
        event_queue,
        questions,
        peering,
    )]);
    let source = async {
        let ended = sources.join_next().await;
        ended.context("the task that reads the cluster's objects is gone")??
    };
    let devices = net::on_own_thread(net::watch(link_sender, settings.sync_period));
    let routes = net::on_own_thread(net::watch_routes(route_sender, watched));
    let beside = tend(
        datapath.stale_sockets,
        pod_sockets,
        outside,
        lost_nodes,
        ready::announce(mode, &agent_handle),
        history::keep(&agent_handle),
        remove_tunnels(hands_over, withdrawn, &host.netlink),
    );
    let answers = control::serve(socket, agent_handle.clone(), paths);
    // The end of any part ends the agent; its supervisor restarts it.
    let end = tokio::select! {
        result = flushed(agent.run(&mut inbox), &events) => result.context("the agent"),
        error = never("the source", source) => Err(error),
        error = never("the watch on devices", async { devices.await.flatten() }) => Err(error),
        error = never("the watch on routes", async { routes.await.flatten() }) => Err(error),
        error = never("the watch for the fast path", fast_path::watch(fast_path)) => Err(error),
        change = settings.files.changed() => {
            Err(anyhow!("{change}: kpx exits, and its restart applies the change"))
        }
        result = flushed(servers.run(), &events) => result.map(|never| match never {}),
        result = beside => result,
        result = watchers.serve(datapath.monitor) => result.context("the monitor"),
        () = answers => Err(anyhow!("the server of the run directory's socket has ended")),
        signal = signals.next() => {
            info!(signal, "stopping");
            Ok(())
        }
    };
    let left = leave(agent, &host.cleans_up, &mut inbox.peers).await;
    end.and(left)
}

/// Deletes the tunnel devices of an earlier agent with the mode, once its Lease is deleted.
async fn remove_tunnels(
    hands_over: bool,
    mut withdrawn: watch::Receiver<bool>,
    handle: &Handle,
) -> Result<Infallible> {
    if !hands_over && withdrawn.wait_for(|withdrawn| *withdrawn).await.is_ok() {
        tunnel::remove(handle)
            .await
            .context("remove the tunnel devices of another mode")?;
    }
    std::future::pending().await
}

/// Waits for a task that must not end, and returns the error.
async fn never(name: &str, task: impl Future<Output = Result<()>>) -> Error {
    match task.await {
        Ok(()) => anyhow!("{name} has ended"),
        Err(error) => error.context(name.to_owned()),
    }
}

/// Loads the programs and maps, or takes over those of an earlier run.
fn take_over(
    settings: &Settings,
    object: &[u8],
    persistence: Persistence,
    cgroup: Option<Result<Cgroup>>,
) -> Result<Datapath> {
    let mechanism = settings.attach;
    if persistence.pins.is_ours_alone() && mechanism == Some(Mechanism::Tcx) {
        warn!(
            "TCX links end with this container, which has no BPF file system of the node's: every restart is a gap"
        );
    }
    let fast_path = settings.node.fast_path != FastPath::Off;
    let hands_over = settings.node.hands_over;
    let sockets = settings.sockets.filter(|_| matches!(cgroup, Some(Ok(_))));
    let sizes = settings.sizes.of_this_machine();
    let timeouts = conntrack::sysctl::flow_timeouts(&settings.conntrack);
    let loading = Options {
        mechanism,
        sizes,
        sockets,
        fast_path,
        hands_over,
        timeouts,
        ..Options::default()
    };
    let mut datapath = Datapath::take_over(object, loading, persistence)?;
    match (cgroup, sockets) {
        (Some(Ok(cgroup)), Some(options)) => {
            datapath.attachments.attach_sockets(cgroup, options)?
        }
        (Some(Err(error)), _) => datapath.attachments.leave_sockets(format!("{error:#}")),
        _ => {}
    }
    Ok(datapath)
}

fn desired_in(loaded: &Loaded, node_name: Option<String>, options: ModelOptions) -> Desired {
    Desired::with_options(node_name.unwrap_or_default(), options)
        .within(Room::of(&loaded.max_entries))
}

/// Detaches the programs if they would end with this process, else leaves them to the next agent.
async fn leave(agent: Agent, cleans_up: &Cell<bool>, peers: &mut PeerList) -> Result<()> {
    if agent.persistence_kind() == PersistenceKind::Nothing {
        cleans_up.set(true);
    }
    if cleans_up.get() {
        // Until the Lease is deleted, other nodes hand clients over to this node.
        if timeout(WITHDRAWAL, peers.withdraw()).await.is_err() {
            warn!("this node's Lease in kpx-handover is not deleted: delete it");
        }
        return agent.detach().await;
    }
    agent.hand_over().await;
    Ok(())
}

/// Removes everything from the host, if requested or if nothing keeps the programs.
async fn clean_up(host: &Host) -> Result<()> {
    if !host.cleans_up.get() {
        return Ok(());
    }
    let mut log = |done| match done {
        Undo::Removed(what) => info!(what, "removed"),
        Undo::Left(what) => info!(what, "left as it is"),
    };
    leftovers::remove(
        &host.netlink,
        &host.changes,
        &host.bpf_dir,
        &kube_proxys_sysctls(),
        &mut log,
    )
    .await
}

/// Runs the optional tasks: aborts stale sockets, translates sockets of pods, ends connections to
/// lost nodes, serves names and the tunnel, announces the end of the start, keeps the history.
async fn tend(
    stale: Option<StaleSockets>,
    pods: Option<PodSocketsTask>,
    outside: Outside,
    lost_nodes: LostNodesTask,
    ready: impl Future<Output = Infallible>,
    history: impl Future<Output = Infallible>,
    tunnels: impl Future<Output = Result<Infallible>>,
) -> Result<()> {
    let abort = async {
        match stale {
            Some(sockets) => sockets.abort().await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        result = abort => result.context("stale sockets"),
        result = pod_sockets::run(pods) => result.context("pods' sockets"),
        never = outside.serve() => match never {},
        result = lost_nodes.run() => result,
        never = ready => match never {},
        never = history => match never {},
        result = tunnels => result.map(|never| match never {}),
    }
}

/// Waits until events are sent, so that an error reaches the cluster before the agent ends.
async fn flushed<T>(work: impl Future<Output = Result<T>>, events: &Events) -> Result<T> {
    let result = work.await;
    events.flushed().await;
    result
}

/// The stop signals. The agent catches them from the start, because an earlier signal would leave
/// its changes behind.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn listen() -> Result<Self> {
        let terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
        let interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
        Ok(Self {
            terminate,
            interrupt,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// Sets conntrack's sysctls and reserves source ports. Only logs a failure: the node is served
/// without them.
fn set_parameters(conntrack: &Conntrack, changes: &Changes, events: &Events) {
    conntrack::sysctl::apply(conntrack, changes, events);
    if let Err(error) = changes.reserve_ports() {
        warn!(
            error = format!("{error:#}"),
            "source ports are not reserved"
        );
    }
}

/// Makes the kernel measure the programs' runs and run times while the result is open. The kernel
/// requires CAP_SYS_ADMIN, which neither the pod nor the systemd unit has. The node is served
/// without these numbers.
fn measure_programs() -> Result<OwnedFd> {
    let stats = enable_stats(Stats::RunTime)
        .context("have the kernel measure programs, which takes CAP_SYS_ADMIN");
    stats.inspect_err(|error| warn!(error = format!("{error:#}"), "programs are not measured"))
}

/// Raises the limit on open files: each device has two links, each an open file, and the usual
/// limit is 1,024.
fn raise_file_limit() -> Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).context("read the limit on open files")?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).context("raise the limit on open files")
}
