//! Objects from an API server.

use std::path::PathBuf;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use leaky_bucket::RateLimiter;
use tokio::sync::mpsc::Sender;
use tracing::info;

use self::client::Clients;
use self::credentials::Files;
use self::outage::Outage;
use self::place::Place;
use self::recorder::Recorder;
use self::watch::failure::failed_plugin;
use self::watch::{Ended, Watch};
use crate::compact::{EndpointSlice, Service};
use crate::events;
use crate::health::{Health, Problem};
use crate::input::Input;

mod client;
mod credentials;
mod outage;
mod place;
mod recorder;
mod watch;

/// How the API server is reached. Without a kubeconfig: the service account of the pod that kpx runs in,
/// else what `kubectl` would use (`KUBECONFIG`, `~/.kube/config`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Options {
    pub kubeconfig: Option<PathBuf>,
    /// A context of the kubeconfig other than its current one.
    pub context: Option<String>,
    /// URL of the API server, over what the configuration says.
    pub master: Option<String>,
    /// None: as many requests as come.
    pub rate: Option<Rate>,
}

impl Options {
    /// Those that may be read, if they exist.
    pub fn kubeconfigs(&self) -> Vec<PathBuf> {
        let named = std::env::var_os("KUBECONFIG").map(|paths| std::env::split_paths(&paths).collect());
        let usual = || std::env::home_dir().into_iter().map(|home| home.join(".kube/config")).collect();
        self.kubeconfig.clone().map(|path| vec![path]).or(named).unwrap_or_else(usual)
    }
}

/// How many requests may be made, as client-go counts them: a bucket of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Requests that may come at once.
    burst: usize,
    /// After which there may be one more.
    every: Duration,
}

impl Rate {
    /// `qps` requests a second, of which `burst` may come at once; none for less than nothing. Zero means the default,
    /// as everywhere in Kubernetes.
    pub fn new(qps: f32, burst: i32) -> Option<Self> {
        let qps = if qps == 0.0 { 5.0 } else { qps };
        let burst = usize::try_from(burst).ok().filter(|burst| *burst > 0).unwrap_or(10);
        let every = Duration::try_from_secs_f32(1.0 / qps).ok()?;
        Some(Self { burst, every })
    }

    fn bucket(self) -> RateLimiter {
        RateLimiter::builder().max(self.burst).initial(self.burst).interval(self.every).build()
    }
}

pub(super) async fn run(
    options: &Options,
    node_name: Option<&str>,
    inputs: &Sender<Input>,
    health: &Health,
    events: events::Queue,
) -> anyhow::Result<()> {
    let mut recorder = Recorder::new(node_name.unwrap_or_default(), events);
    let mut watches = Watches::new(node_name);
    let outage = Outage::new();
    // What cannot be read at the start is a mistake of whoever started us.
    let mut files = options.files();
    let (mut clients, mut place) = options.clients(&outage).await?;
    loop {
        let until = clients.limited.valid_until().as_ref().copied();
        // Before any Service, so that none takes it.
        place.tell(inputs).await;
        tokio::select! {
            () = inputs.closed() => return Ok(()),
            never = place.watch(inputs) => never,
            ended = watches.run(&clients, inputs, health, &outage) => match ended {
                Ended::ReceiverGone => return Ok(()),
                Ended::Unauthorized => info!("credentials are refused, reading them again"),
            },
            never = recorder.run(&clients.limited) => never,
            never = outage.probe(&clients.paced) => never,
            () = files.changed(health) => info!("credentials have changed, reading them again"),
            () = passed(until) => info!("credentials expire, asking for new ones"),
        }
        (clients, place) = tokio::select! {
            () = inputs.closed() => return Ok(()),
            clients = options.clients_again(&mut files, &outage, health) => clients,
        };
    }
}

/// Between attempts to read credentials that could be read before.
const CREDENTIALS_RETRY: Duration = Duration::from_secs(1);

impl Options {
    /// Clients with the credentials as they are now. They were good once, so this goes on until they are again: the
    /// last state stays in force meanwhile.
    async fn clients_again(&self, files: &mut Files, outage: &Outage, health: &Health) -> (Clients, Place) {
        loop {
            *files = self.files();
            match self.clients(outage).await {
                Ok(clients) => {
                    health.end(&Problem::Credentials);
                    return clients;
                }
                Err(error) => {
                    let why = failed_plugin(error.as_ref()).unwrap_or_else(|| format!("{error:#}"));
                    health.begin(&Problem::Credentials, why);
                }
            }
            tokio::time::sleep(CREDENTIALS_RETRY).await;
        }
    }
}

/// All that is watched. Outlives clients, so that new credentials cost no new lists.
struct Watches {
    services: Watch<Service>,
    slices: Watch<EndpointSlice>,
    node: Watch<Node>,
    service_cidrs: Watch<ServiceCIDR>,
}

impl Watches {
    /// The selectors are kube-proxy's, but that ClusterIPs have to be known which are another proxy's to serve.
    fn new(node_name: Option<&str>) -> Self {
        let services = Watch::new(Input::Service).fields("spec.clusterIP!=None");
        let slices = Watch::new(Input::EndpointSlice).labels("!service.kubernetes.io/headless");
        let node = Watch::new(Input::Node).dispensable();
        let node = match node_name {
            Some(name) => node.named(name),
            None => node,
        };
        Self { services, slices, node, service_cidrs: Watch::new(Input::ServiceCidr).dispensable() }
    }

    /// Runs until one of the watches ends.
    async fn run(&mut self, clients: &Clients, inputs: &Sender<Input>, health: &Health, outage: &Outage) -> Ended {
        tokio::select! {
            ended = self.services.run(clients, inputs, health, outage) => ended,
            ended = self.slices.run(clients, inputs, health, outage) => ended,
            ended = self.node.run(clients, inputs, health, outage) => ended,
            ended = self.service_cidrs.run(clients, inputs, health, outage) => ended,
        }
    }
}

async fn passed(until: Option<Timestamp>) {
    let Some(until) = until else { return std::future::pending().await };
    let left = Duration::try_from(until.duration_since(Timestamp::now())).unwrap_or_default();
    // A credential that is already over would otherwise be renewed in a tight loop.
    tokio::time::sleep(left.max(Duration::from_secs(10))).await;
}
