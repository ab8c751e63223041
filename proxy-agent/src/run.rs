//! `kpx run`: wires source, node and loop together, and takes them apart again.

mod servers;

use anyhow::{Context, Result, bail};
use aya::sys::{Stats, enable_stats};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tracing::info;

use crate::agent::{Agent, Inbox, Kernel, Pace, Reports};
use crate::control::Asker;
use crate::datapath::{Datapath, Options};
use crate::desired::Desired;
use crate::health::Health;
use crate::liveness::Liveness;
use crate::metrics::Metrics;
use crate::metrics_server::scrape_router;
use crate::monitor::Watchers;
use crate::node::Node;
use crate::run::servers::Servers;
use crate::settings::Settings;
use crate::{control, net, object};

/// Where the agent answers `kpx status`.
pub const RUN_DIR: &str = "/run/kpx";

/// Inputs and device events that may wait for the loop.
const QUEUE: usize = 4_096;

/// Runs until a signal asks to stop, or something fails that a restart may mend.
pub async fn run(settings: Settings) -> Result<()> {
    let (health, metrics) = (Health::default(), Metrics::new());
    let liveness = Liveness::new(settings.sync_period, settings.mode);
    let (asker, asks) = Asker::new();
    let servers = Servers::new(&settings, &asker, &metrics, liveness.clone(), health.clone());
    let reports = Reports::new(health, liveness, metrics.clone());
    let Settings { node_name, mode, node: options, .. } = settings;
    let mut signals = Signals::listen()?;
    let _lock = control::lock()?;
    raise_file_limit()?;
    let socket = control::listen(&settings.run_dir)?;
    let loading = Options { mechanism: settings.attach, flow_entries: settings.flow_entries, ..Options::default() };
    let datapath = Datapath::load(object::embedded()?, loading)?;
    // The kernel measures for as long as this is open.
    let _stats =
        if settings.bpf_stats { Some(enable_stats(Stats::RunTime).context("measure programs")?) } else { None };
    let (netlink, handle) = net::connect()?;
    let source_health = Health::default();
    let (input_sender, inputs) = mpsc::channel(QUEUE);
    let (link_sender, links) = mpsc::channel(QUEUE);
    let mut inbox = Inbox { inputs, links, asks, source_health: source_health.clone() };
    info!(version = env!("CARGO_PKG_VERSION"), node = node_name, "started");

    let source = settings.source;
    let watchers = Watchers::default();
    let work = async {
        let started = Node::start(options, handle.clone(), datapath.attachments, datapath.node).await;
        let node = match started {
            Ok(node) => node,
            Err(error) => return Node::clean(&handle).await.and(Err(error)),
        };
        let desired = Desired::with_options(node_name.clone(), settings.model);
        let kernel = Kernel {
            tables: datapath.tables,
            flows: datapath.flows,
            counters: datapath.counters,
            loaded: datapath.loaded,
        };
        let mut agent = Agent::new(node_name.clone(), desired, kernel, node, reports);
        agent.mode = mode;
        agent.pace = Pace::new(settings.min_sync_period);
        // When any of these ends, so does the agent: whoever started it starts it anew.
        let end = tokio::select! {
            result = agent.run(&mut inbox) => result.context("the loop"),
            result = source.run(node_name, input_sender, source_health) => result.context("the source").and_then(|()| bail!("the source has ended")),
            result = net::watch(link_sender) => result.context("the watch on devices").and_then(|()| bail!("the watch on devices has ended")),
            changed = settings.files.changed() => changed.and_then(|change| bail!("{change}: to be started anew with it")),
            result = servers.run() => result.map(|never| match never {}),
            result = watchers.serve(datapath.monitor) => result.context("the monitor"),
            () = control::serve(socket, asker.clone(), scrape_router(asker, metrics).merge(watchers.router())) => bail!("the server of the run directory's socket has ended"),
            signal = signals.next() => {
                info!(signal, "stopping");
                Ok(())
            }
        };
        let stopped = agent.stop().await;
        end.and(stopped)
    };
    let end = tokio::select! {
        end = work => end,
        () = netlink => bail!("the netlink socket has failed"),
    };
    end.and(control::unlisten(&settings.run_dir))?;
    info!("stopped");
    Ok(())
}

/// The signals that ask to stop, caught from the start: until then one of them would leave behind what was made.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn listen() -> Result<Self> {
        let terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
        let interrupt = signal(SignalKind::interrupt()).context("listen for SIGINT")?;
        Ok(Self { terminate, interrupt })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// Two links a device are two open files, and the usual limit is 1,024.
fn raise_file_limit() -> Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).context("read the limit on open files")?;
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).context("raise the limit on open files")
}
