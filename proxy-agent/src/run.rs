//! `kpx run`: wires source, node and loop together, and takes them apart again.

pub(crate) mod options;

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use ipnet::IpNet;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tracing::info;

use crate::agent::{Agent, Inbox, Kernel};
use crate::control::Asker;
use crate::datapath::{Datapath, Mechanism, Options};
use crate::desired::Desired;
use crate::health::Health;
use crate::model::{ModelOptions, Reach};
use crate::node::{Node, NodeOptions, PodRouting};
use crate::settings::{Conntrack, Mode, Settings};
use crate::source::{Source, kubernetes};
use crate::{control, net, object};

/// Where the agent answers `kpx status`.
pub const RUN_DIR: &str = "/run/kpx";

/// Inputs and device events that may wait for the loop.
const QUEUE: usize = 4_096;

#[derive(Args, Debug)]
pub struct RunArgs {
    /// What this host is to the cluster.
    #[arg(long, value_name = "MODE", default_value = "node")]
    mode: Mode,
    /// In mode host: on what to rely to reach pods, beside routes that are for them (default: off).
    #[arg(long, value_name = "WHAT")]
    pod_routes: Option<PodRouting>,
    /// Read Services, EndpointSlices, Nodes and ServiceCIDRs from the YAML files of a folder instead of an API server.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["kubeconfig", "context", "master"])]
    manifests: Option<PathBuf>,
    /// Kubeconfig to use; without it the pod's service account, else $KUBECONFIG or ~/.kube/config.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig, instead of its current one.
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// Address of the API server, instead of the kubeconfig's.
    #[arg(long, value_name = "URL")]
    master: Option<String>,
    /// Name of this node's Node object; without it the host name.
    #[arg(long, visible_alias = "hostname-override", value_name = "NAME")]
    node_name: Option<String>,
    /// This node's addresses, one per family, instead of the Node object's.
    #[arg(long = "node-ip", value_name = "IP", value_delimiter = ',')]
    node_ips: Vec<IpAddr>,
    /// The ranges of ClusterIPs, instead of the ServiceCIDR objects'.
    #[arg(long = "service-cidr", value_name = "CIDR", value_delimiter = ',')]
    service_cidrs: Vec<IpNet>,
    #[command(flatten)]
    services: options::ServiceArgs,
    /// How to attach programs; without it TCX where the kernel takes it, else clsact.
    #[arg(long, value_name = "HOW")]
    attach: Option<Mechanism>,
    /// Folder for the socket that `kpx status` asks.
    #[arg(long, value_name = "DIR", default_value = RUN_DIR)]
    run_dir: PathBuf,
}

impl RunArgs {
    /// Errors name the flag.
    pub fn settings(&self) -> Result<Settings> {
        let (node_ips, service_cidrs) = (self.node_ips.clone(), self.service_cidrs.clone());
        let outside = self.outside()?;
        let node = self.services.apply(NodeOptions { node_ips, service_cidrs, outside, ..NodeOptions::default() })?;
        Ok(Settings {
            node_name: self.node_name()?,
            mode: self.mode,
            source: self.source(),
            node,
            model: ModelOptions {
                algorithm: self.services.algorithm(),
                node_ips: self.node_ips.clone(),
                reach: self.reach(),
            },
            attach: self.attach,
            run_dir: self.run_dir.clone(),
            healthz_address: None,
            metrics_address: None,
            bind_address_hard_fail: false,
            ui: false,
            sync_period: Duration::from_secs(30),
            min_sync_period: Duration::ZERO,
            conntrack: Conntrack::default(),
            oom_score_adj: None,
            configz: serde_json::Value::Null,
        })
    }

    fn outside(&self) -> Result<Option<PodRouting>> {
        match (self.mode, self.pod_routes) {
            (Mode::Host, routing) => Ok(Some(routing.unwrap_or_default())),
            (Mode::Node, None) => Ok(None),
            (Mode::Node, Some(_)) => bail!("--pod-routes is for --mode host: a node's pod network has its routes"),
        }
    }

    fn reach(&self) -> Option<Arc<Reach>> {
        let default_leads_to_pods = self.pod_routes == Some(PodRouting::Default);
        (self.mode == Mode::Host).then(|| Arc::new(Reach { default_leads_to_pods, ..Reach::default() }))
    }

    fn source(&self) -> Source {
        match &self.manifests {
            Some(dir) => Source::Manifests(dir.clone()),
            None => Source::Kubernetes(kubernetes::Options {
                kubeconfig: self.kubeconfig.clone(),
                context: self.context.clone(),
                master: self.master.clone(),
            }),
        }
    }

    /// As kube-proxy has it: trimmed, in lower case.
    fn node_name(&self) -> Result<String> {
        let name = match &self.node_name {
            Some(name) => name.clone(),
            None => nix::unistd::gethostname().context("read the host name")?.to_string_lossy().into_owned(),
        };
        let name = name.trim().to_lowercase();
        if name.is_empty() {
            bail!("the node's name is empty: set --node-name");
        }
        Ok(name)
    }
}

/// Runs until a signal asks to stop, or something fails that a restart may mend.
pub async fn run(settings: Settings) -> Result<()> {
    let Settings { node_name, node: options, .. } = settings;
    let mut signals = Signals::listen()?;
    let _lock = control::lock()?;
    raise_file_limit()?;
    let socket = control::listen(&settings.run_dir)?;
    let (asker, asks) = Asker::new();
    let datapath = Datapath::load(object::embedded()?, Options { mechanism: settings.attach, ..Options::default() })?;
    let (netlink, handle) = net::connect()?;
    let source_health = Health::default();
    let (input_sender, inputs) = mpsc::channel(QUEUE);
    let (link_sender, links) = mpsc::channel(QUEUE);
    let (route_sender, routes) = mpsc::channel(1);
    let mut inbox = Inbox { inputs, links, routes, asks, source_health: source_health.clone() };
    info!(version = env!("CARGO_PKG_VERSION"), node = node_name, "started");

    let source = settings.source;
    let work = async {
        let started = Node::start(options, handle.clone(), datapath.attachments, datapath.node).await;
        let node = match started {
            Ok(node) => node,
            Err(error) => return Node::clean(&handle).await.and(Err(error)),
        };
        // Outside of the cluster no Node is this host's, whatever its name.
        let node_of_ours = (settings.mode == Mode::Node).then(|| node_name.clone());
        let desired = Desired::with_options(node_of_ours.clone().unwrap_or_default(), settings.model);
        let kernel = Kernel {
            tables: datapath.tables,
            flows: datapath.flows,
            counters: datapath.counters,
            loaded: datapath.loaded,
        };
        let mut agent = Agent::new(node_name.clone(), desired, kernel, node);
        // When any of these ends, so does the agent: whoever started it starts it anew.
        let end = tokio::select! {
            result = agent.run(&mut inbox) => result.context("the loop"),
            result = source.run(node_of_ours, input_sender, source_health) => result.context("the source").and_then(|()| bail!("the source has ended")),
            result = net::watch(link_sender) => result.context("the watch on devices").and_then(|()| bail!("the watch on devices has ended")),
            result = watch_routes(settings.mode, route_sender) => result.context("the watch on routes").and_then(|()| bail!("the watch on routes has ended")),
            () = control::serve(socket, asker) => bail!("the server of the run directory's socket has ended"),
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

/// On a node nobody asks for routes.
async fn watch_routes(mode: Mode, changes: mpsc::Sender<()>) -> Result<()> {
    match mode {
        Mode::Host => net::watch_routes(changes).await,
        Mode::Node => std::future::pending().await,
    }
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
