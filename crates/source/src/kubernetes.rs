//! Reads objects from an API server.

use std::future::pending;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use leaky_bucket::RateLimiter;
use tokio::sync::mpsc::Sender;
use tracing::info;

use self::client::{Clients, Connection};
use self::credentials::Files;
use self::handover::Handover;
use self::outage::Outage;
use self::recorder::Recorder;
use self::watch::{Watch, WatchExit};
use crate::events;
use crate::health::{Health, Problem};
use crate::nodes::NodeQuestions;
use crate::peers::Peering;
use proxy_core::compact::{EndpointSlice, LocalPod, LocalRedirect, Service};
use proxy_core::input::Input;

mod api_server_addrs;
mod caller;
mod client;
mod cluster_identity;
mod context;
mod credentials;
mod errors;
mod forward;
mod forward_stream;
mod granted;
mod handover;
mod node_states;
mod outage;
mod recorder;
mod watch;

pub use caller::ForeignHome;
pub use client::without_credentials;
pub use context::{configured, kubeconfig};
pub use errors::{Fault, SourceError};
pub use forward::Forwarder;
pub use forward_stream::PodStream;
pub use granted::{Granted, NotGranted, Streams};

/// The options for the API server. If no kubeconfig is given, kpx uses its pod's ServiceAccount,
/// else `kubectl`'s files (`KUBECONFIG`, `~/.kube/config`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    pub kubeconfig: Option<PathBuf>,
    /// A kubeconfig context, in place of the current context.
    pub context: Option<String>,
    /// The URL of the API server, in place of the configured URL.
    pub master: Option<String>,
    /// The limit on requests; `None`: unlimited.
    pub rate: Option<Rate>,
    /// Set to watch the node's Pods.
    pub pods: bool,
    pub redirects: bool,
    /// Set to watch headless Services, for their names.
    pub headless: bool,
}

impl Options {
    /// Returns the kubeconfigs that may be read, if they exist.
    pub fn kubeconfigs(&self) -> Vec<PathBuf> {
        let named =
            std::env::var_os("KUBECONFIG").map(|paths| std::env::split_paths(&paths).collect());
        let usual = || {
            std::env::home_dir()
                .into_iter()
                .map(|home| home.join(".kube/config"))
                .collect()
        };
        self.kubeconfig
            .clone()
            .map(|path| vec![path])
            .or(named)
            .unwrap_or_else(usual)
    }
}

/// The rate limit on requests: a token bucket, as in client-go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// The number of requests that may come at once.
    burst: usize,
    /// The time after which one more request may come.
    every: Duration,
}

impl Rate {
    /// Allows `qps` requests a second, and `burst` at once. Returns `None` for a negative `qps`.
    /// Zero means the default, as everywhere in Kubernetes.
    pub fn new(qps: f32, burst: i32) -> Option<Self> {
        let qps = if qps == 0.0 { 5.0 } else { qps };
        let burst = usize::try_from(burst)
            .ok()
            .filter(|burst| *burst > 0)
            .unwrap_or(10);
        let every = Duration::try_from_secs_f32(1.0 / qps).ok()?;
        Some(Self { burst, every })
    }

    fn bucket(self) -> RateLimiter {
        RateLimiter::builder()
            .max(self.burst)
            .initial(self.burst)
            .interval(self.every)
            .build()
    }
}

#[expect(
    clippy::cognitive_complexity,
    reason = "two waits; the lint counts what `select!` and the log's macros expand to"
)]
pub(super) async fn run(
    options: &Options,
    node_name: Option<&str>,
    inputs: &Sender<Input>,
    health: &Health,
    events: events::Queue,
    mut questions: NodeQuestions,
    peers: Peering,
) -> anyhow::Result<()> {
    let mut recorder = Recorder::new(node_name.unwrap_or_default(), events);
    let mut watches = Watches::new(node_name, options);
    let own_name = node_name.unwrap_or_default();
    let (mut handover, mut withdraws) = match peers {
        Peering::On(link) => (Some(Handover::new(own_name, link)), None),
        Peering::Withdraw(link) => (None, Some(link)),
        Peering::Off => (None, None),
    };
    let outage = Outage::new();
    // At the start, an unreadable file is the operator's mistake.
    let mut files = options.files();
    let Connection {
        mut clients,
        mut addrs,
        mut cluster,
    } = options.connect(&outage).await?;
    loop {
        let until = clients.limited.valid_until().as_ref().copied();
        // The addresses precede any Service, so that no Service can claim them.
        addrs.send_new(inputs).await;
        let handed_over = async {
            match &mut handover {
                Some(handover) => handover.run(&clients, health, &outage).await,
                None => {
                    if let Some(link) = &withdraws {
                        let is_gone = handover::withdraw(&clients.limited, own_name).await;
                        link.withdrawn.send_replace(is_gone);
                    }
                    withdraws = None;
                    pending().await
                }
            }
        };
        tokio::select! {
            () = inputs.closed() => return Ok(()),
            ended = handed_over => match ended {
                WatchExit::ReceiverGone => return Ok(()),
                WatchExit::Unauthorized => info!("credentials are refused, reading them again"),
            },
            never = addrs.watch(inputs) => never,
            ended = watches.run(&clients, inputs, health, &outage) => match ended {
                WatchExit::ReceiverGone => return Ok(()),
                WatchExit::Unauthorized => info!("credentials are refused, reading them again"),
            },
            never = recorder.run(&clients.limited) => never,
            never = node_states::answer(&mut questions, &clients.limited) => never,
            never = outage.probe(&clients.paced) => never,
            () = files.changed(health) => info!("credentials have changed, reading them again"),
            () = passed(until) => info!("credentials expire, requesting new credentials"),
        }
        let next = tokio::select! {
            () = inputs.closed() => return Ok(()),
            next = options.connect_again(&mut files, &outage, health) => next,
        };
        // In another cluster the stored objects and versions are meaningless. A restart keeps the
        // maps until the new cluster is fully listed.
        if let Some(change) = cluster.change(&next.cluster) {
            bail!(
                "the credentials no longer belong to {cluster}: {change}; kpx exits and must be restarted there"
            );
        }
        Connection {
            clients,
            addrs,
            cluster,
        } = next;
    }
}

/// The time between attempts to read credentials that were readable before.
const CREDENTIALS_RETRY: Duration = Duration::from_secs(1);

impl Options {
    /// Creates clients with the current credentials. Retries without limit, because earlier
    /// credentials were valid; the last state stays in use meanwhile.
    async fn connect_again(
        &self,
        files: &mut Files,
        outage: &Outage,
        health: &Health,
    ) -> Connection {
        loop {
            *files = self.files();
            match self.connect(outage).await {
                Ok(connection) => {
                    health.end(&Problem::Credentials);
                    return connection;
                }
                Err(error) => {
                    health.begin(&Problem::Credentials, format!("{error:#}"));
                }
            }
            tokio::time::sleep(CREDENTIALS_RETRY).await;
        }
    }
}

/// The watches. They outlive clients, so new credentials need no new lists.
struct Watches {
    services: Watch<Service>,
    slices: Watch<EndpointSlice>,
    node: Watch<Node>,
    service_cidrs: Watch<ServiceCIDR>,
    pods: Option<Watch<LocalPod>>,
    redirects: Option<Watch<LocalRedirect>>,
}

impl Watches {
    /// Creates the watches with kube-proxy's selectors, except that Services of other service
    /// proxies are included for their ClusterIPs.
    fn new(node_name: Option<&str>, options: &Options) -> Self {
        let services = Watch::new(Input::Service);
        let slices = Watch::new(Input::EndpointSlice);
        let (services, slices) = match options.headless {
            false => (
                services.fields("spec.clusterIP!=None"),
                slices.labels("!service.kubernetes.io/headless"),
            ),
            true => (services, slices),
        };
        let node = Watch::new(Input::Node).dispensable();
        let node = match node_name {
            Some(name) => node.named(name),
            None => node,
        };
        // API servers index Pods by node only in their caches.
        let pods_of = |name: &str| {
            Watch::new(Input::Pod)
                .fields(&format!("spec.nodeName={name}"))
                .cached()
                .optional()
        };
        let pods = node_name.filter(|_| options.pods).map(pods_of);
        let redirects = options
            .redirects
            .then(|| Watch::new(Input::LocalRedirect).cached().optional());
        Self {
            services,
            slices,
            node,
            service_cidrs: Watch::new(Input::ServiceCidr).dispensable(),
            pods,
            redirects,
        }
    }

    async fn run(
        &mut self,
        clients: &Clients,
        inputs: &Sender<Input>,
        health: &Health,
        outage: &Outage,
    ) -> WatchExit {
        let pods = async {
            match &mut self.pods {
                Some(pods) => pods.run(clients, inputs, health, outage).await,
                None => pending().await,
            }
        };
        let redirects = async {
            match &mut self.redirects {
                Some(redirects) => redirects.run(clients, inputs, health, outage).await,
                None => pending().await,
            }
        };
        tokio::select! {
            ended = self.services.run(clients, inputs, health, outage) => ended,
            ended = self.slices.run(clients, inputs, health, outage) => ended,
            ended = self.node.run(clients, inputs, health, outage) => ended,
            ended = self.service_cidrs.run(clients, inputs, health, outage) => ended,
            ended = pods => ended,
            ended = redirects => ended,
        }
    }
}

async fn passed(until: Option<Timestamp>) {
    let Some(until) = until else {
        return std::future::pending().await;
    };
    let left = Duration::try_from(until.duration_since(Timestamp::now())).unwrap_or_default();
    // Without a minimum, an expired credential would be renewed in a tight loop.
    tokio::time::sleep(left.max(Duration::from_secs(10))).await;
}
