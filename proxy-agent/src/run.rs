//! `kpx run`: connects source, node and agent, and takes them apart at the end.

mod fast_path;
mod outside;
mod prepare;
mod servers;

use std::cell::Cell;
use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use axum::Router;
use aya::sys::{Stats, enable_stats};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use rtnetlink::Handle;
use tokio::net::UnixListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tracing::{info, warn};

use crate::agent::{Agent, Inbox, Kernel, PassSchedule, Reports};
use crate::choices::Mode;
use crate::cli::cleanup::kube_proxy_sysctls::kube_proxys_sysctls;
use crate::control::AgentHandle;
use crate::liveness::Liveness;
use crate::lost_nodes::LostNodesTask;
use crate::metrics_server::{configz_router, scrape_router};
use crate::monitor::Watchers;
use crate::node::lifecycle::Lifecycle;
use crate::node::{FastPath, Node};
use crate::pod_sockets::PodSocketsTask;
use crate::run::fast_path::FastPathWatch;
use crate::run::outside::Outside;
use crate::run::servers::Servers;
use crate::settings::{Conntrack, Settings};
use crate::{conntrack, control, history, leftovers, lost_nodes, pod_sockets};
use proxy_core::desired::Desired;
use proxy_core::model::ModelOptions;
use proxy_core::shares::Room;
use proxy_datapath::{
    Cgroup, Datapath, Loaded, Mechanism, Options, Persistence, PersistenceKind, StaleSockets,
};
use proxy_metrics::Metrics;
use proxy_net::changes::{Changes, Undo};
use proxy_net::{self as net, WatchedNets};
use proxy_source::Source;
use proxy_source::events::Events;
use proxy_source::health::Health;
use proxy_source::journal::Journal;

pub use outside::OutsideStates;
pub use prepare::{Prepared, prepare};

/// The number of inputs and device events that may wait for the agent.
const QUEUE: usize = 4_096;

/// Runs until a signal asks to stop, or until a failure that a restart may mend.
pub async fn run(settings: Settings, object: &[u8], prepared: Prepared) -> Result<()> {
    let journal = Journal::default();
    let watchers = Watchers::keeping(settings.monitor_history);
    let health = Health::telling(&journal);
    let source_health = Health::telling(&journal);
    let metrics = Metrics::new();
    let liveness = Liveness::new(settings.sync_period, settings.mode);
    let (agent_handle, queries) = AgentHandle::telling(settings.service_metrics);
    let (events, queue) = Events::telling(&settings.node_name, &journal);
    let healths = [health.clone(), source_health.clone()];
    let asked = (&agent_handle, &watchers);
    let servers = Servers::new(
        &settings,
        asked,
        &metrics,
        liveness.clone(),
        healths,
        events.clone(),
    );
    let reports = Reports::new(health, liveness, metrics.clone(), events.clone());
    let mut signals = Signals::listen()?;
    let Prepared {
        lock: _lock,
        pins,
        cgroup,
        socket,
    } = prepared;
    raise_file_limit()?;
    let socket = UnixListener::from_std(socket).context("listen in the run directory")?;
    let changes = Changes::new(&settings.run_dir);
    let mut datapath = take_over(
        &settings,
        object,
        Persistence::new(pins, changes.clone()),
        cgroup,
    )?;
    let (led_pods, pod_sockets) = pod_sockets::start(&mut datapath, settings.sync_period)?;
    let takes_all_away = Cell::new(settings.cleanup_on_exit);
    let _stats = settings.bpf_stats.then(measure_programs);
    let Settings {
        node_name,
        mode,
        node: options,
        ..
    } = settings;
    let skips_stack = options.fast_path != FastPath::Off;
    let (netlink, handle) = net::connect()?;
    let (input_sender, inputs) = mpsc::channel(QUEUE);
    let (link_sender, links) = mpsc::channel(QUEUE);
    let (route_sender, routes) = mpsc::channel(1);
    let (rule_sender, rules) = mpsc::channel(1);
    let mut inbox = Inbox {
        inputs,
        links,
        routes,
        rules,
        queries,
        source_health: source_health.clone(),
    };
    info!(
        version = env!("CARGO_PKG_VERSION"),
        node = node_name,
        "started"
    );

    let source = settings.source;
    let has_object = mode == Mode::Node && matches!(source, Source::Kubernetes(_));
    let node_timeout = has_object.then_some(settings.node_timeout);
    let queue = queue.only_if(has_object);
    let lifecycle = Lifecycle::new(
        node_name.clone(),
        node_timeout,
        &options.node_ips,
        source_health.clone(),
    );
    set_parameters(&settings.conntrack, &changes, &events);
    let work = async {
        let watched = WatchedNets::default();
        let whole = datapath.flows.whole()?;
        let node = Node::start(
            options,
            handle.clone(),
            datapath.attachments,
            datapath.node,
            whole,
            watched.clone(),
        )
        .await?;
        // Outside of the cluster no Node object is this host's, even one of the same name.
        let node_of_ours = (mode == Mode::Node).then(|| node_name.clone());
        let mut model = settings.model;
        let ways = (&source, settings.names, settings.tunnel);
        let (outside, states) =
            outside::start(ways, &mut model, &datapath.flows, &agent_handle, &handle).await?;
        let desired = desired_in(&datapath.loaded, node_of_ours.clone(), model);
        let Datapath {
            tables,
            flows,
            votes,
            counters,
            loaded,
            monitor,
            stale_sockets,
            ways,
            tolerated,
            ..
        } = datapath;
        let watch = || {
            FastPathWatch::new(
                (ways, tolerated),
                node.judged_rules(),
                handle.clone(),
                rule_sender,
            )
        };
        let kernel = Kernel {
            tables,
            flows,
            votes,
            counters,
            loaded,
        };
        let fast_path = skips_stack.then(watch);
        let (places, lost_nodes, questions) = lost_nodes::start(&kernel.flows, &events)?;
        let schedule = PassSchedule::new(settings.sync_period, settings.min_sync_period);
        let agent = Agent::new(node_name, desired, kernel, node, lifecycle, reports);
        let mut agent = agent
            .of(mode, schedule, led_pods, states)
            .telling(has_object.then_some(places));
        // The source has a thread of its own: kube blocks it while a kubeconfig's credential plugin
        // runs.
        let mut sources = JoinSet::from_iter([source.run(
            node_of_ours,
            input_sender,
            source_health,
            queue,
            questions,
        )]);
        // The end of any of these ends the agent; its supervisor restarts it.
        let end = tokio::select! {
            result = tell(agent.run(&mut inbox), &events) => result.context("the agent"),
            Some(result) = sources.join_next() => result.map_err(anyhow::Error::from).flatten().context("the source").and_then(|()| bail!("the source has ended")),
            result = net::on_own_thread(net::watch(link_sender, settings.sync_period)) => result.flatten().context("the watch on devices").and_then(|()| bail!("the watch on devices has ended")),
            result = net::on_own_thread(net::watch_routes(route_sender, watched)) => result.flatten().context("the watch on routes").and_then(|()| bail!("the watch on routes has ended")),
            result = fast_path::watch(fast_path) => result.context("the watch for the fast path").and_then(|()| bail!("the watch for the fast path has ended")),
            change = settings.files.changed() => Err(anyhow!("{change}: kpx ends, to be started again with it")),
            result = tell(servers.run(), &events) => result.map(|never| match never {}),
            result = tend(stale_sockets, pod_sockets, outside, lost_nodes, history::keep(&agent_handle)) => result,
            result = watchers.serve(monitor) => result.context("the monitor"),
            () = control::serve(socket, agent_handle.clone(), more_paths(&agent_handle, metrics, settings.configz, &settings.bpf_dir).merge(watchers.router()).merge(control::events_router(journal))) => Err(anyhow!("the server of the run directory's socket has ended")),
            signal = signals.next() => { info!(signal, "stopping"); Ok(()) }
        };
        end.and(leave(agent, &takes_all_away).await)
    };
    let end = tokio::select! {
        end = async { work.await.and(clean_up(takes_all_away.get(), &handle, &changes, &settings.bpf_dir).await) } => end,
        ended = net::on_own_thread(netlink) => ended.and_then(|()| bail!("the netlink socket has failed")),
    };
    end.and(control::unlisten(&settings.run_dir))?;
    info!("stopped");
    Ok(())
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
    let sockets = settings.sockets.filter(|_| matches!(cgroup, Some(Ok(_))));
    let sizes = settings.sizes.of_this_machine();
    let timeouts = conntrack::sysctl::flow_timeouts(&settings.conntrack);
    let loading = Options {
        mechanism,
        sizes,
        sockets,
        fast_path,
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

/// Returns an empty desired state for maps of this room.
fn desired_in(loaded: &Loaded, node_name: Option<String>, options: ModelOptions) -> Desired {
    Desired::with_options(node_name.unwrap_or_default(), options)
        .within(Room::of(&loaded.max_entries))
}

/// Detaches the programs if nothing keeps them: programs that end with this process should end in
/// order.
async fn leave(agent: Agent, takes_all_away: &Cell<bool>) -> Result<()> {
    takes_all_away
        .set(takes_all_away.get() || agent.persistence_kind() == PersistenceKind::Nothing);
    if takes_all_away.get() {
        return agent.detach().await;
    }
    agent.hand_over().await;
    Ok(())
}

async fn clean_up(all: bool, netlink: &Handle, changes: &Changes, bpf_dir: &Path) -> Result<()> {
    if !all {
        return Ok(());
    }
    let say = |done| match done {
        Undo::Removed(what) => info!(what, "removed"),
        Undo::Left(what) => info!(what, "left as it is"),
    };
    leftovers::remove(netlink, changes, bpf_dir, &kube_proxys_sysctls(), &mut {
        say
    })
    .await
}

/// Aborts stale sockets, leads those of pods, ends connections to lost nodes and serves names and
/// the tunnel, each as far as it is asked for, and keeps the history.
async fn tend(
    stale: Option<StaleSockets>,
    pods: Option<PodSocketsTask>,
    outside: Outside,
    lost_nodes: LostNodesTask,
    history: impl Future<Output = Infallible>,
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
        never = history => match never {},
    }
}

/// Waits until events are sent, so that an error reaches the cluster before it ends the agent.
async fn tell<T>(work: impl Future<Output = Result<T>>, events: &Events) -> Result<T> {
    let result = work.await;
    events.flushed().await;
    result
}

/// The signals that ask to stop. The agent catches signals from the start, because an earlier
/// signal would leave its changes behind.
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

/// Sets conntrack's parameters and reserves source ports. A failure is only logged, because the
/// node can be served without it.
fn set_parameters(conntrack: &Conntrack, changes: &Changes, events: &Events) {
    conntrack::sysctl::apply(conntrack, changes, events);
    if let Err(error) = changes.reserve_ports() {
        warn!(
            error = format!("{error:#}"),
            "source ports are not reserved"
        );
    }
}

/// Makes the kernel measure how often and how long programs run, while the result is open. The
/// kernel refuses without CAP_SYS_ADMIN, which neither the pod nor the systemd unit has. The node
/// is served without these numbers.
fn measure_programs() -> Result<OwnedFd> {
    let stats = enable_stats(Stats::RunTime)
        .context("have the kernel measure programs, which takes CAP_SYS_ADMIN");
    stats.inspect_err(|error| warn!(error = format!("{error:#}"), "programs are not measured"))
}

/// Raises the limit on open files: two links per device are two open files, and the usual limit is
/// 1,024.
fn raise_file_limit() -> Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).context("read the limit on open files")?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).context("raise the limit on open files")
}

/// Returns what the run directory's socket answers beside the agent's own state.
fn more_paths(
    agent: &AgentHandle,
    metrics: Metrics,
    configz: serde_json::Value,
    bpf_dir: &Path,
) -> Router {
    scrape_router(agent.clone(), metrics)
        .merge(configz_router(configz))
        .merge(control::pins_router(bpf_dir))
}
