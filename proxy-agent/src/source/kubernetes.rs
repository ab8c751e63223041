//! Objects from an API server.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, bail};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use tokio::sync::mpsc::Sender;
use tower::limit::RateLimitLayer;
use tower::service_fn;
use tower::util::option_layer;
use tracing::info;

use self::watch::{Ended, Watch};
use crate::health::Health;
use crate::input::Input;
use crate::metrics::Requests;

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

/// How many requests may be made in how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    requests: u64,
    per: Duration,
}

impl Rate {
    /// `qps` requests a second, of which `burst` may come at once; none for less than nothing. Zero means the default,
    /// as everywhere in Kubernetes.
    pub fn new(qps: f32, burst: i32) -> Option<Self> {
        let qps = if qps == 0.0 { 5.0 } else { qps };
        let requests = u64::try_from(burst).ok().filter(|burst| *burst > 0).unwrap_or(10);
        let per = Duration::try_from_secs_f64(f64::from(u32::try_from(requests).ok()?) / f64::from(qps)).ok()?;
        (qps > 0.0).then_some(Self { requests, per })
    }
}

/// A watch that is silent for this long is taken for dead and resumed: API servers send a bookmark every minute.
const READ_TIMEOUT: Duration = Duration::from_secs(100);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

pub(super) async fn run(
    options: &Options,
    node_name: &str,
    inputs: &Sender<Input>,
    health: &Health,
) -> anyhow::Result<()> {
    // What cannot be read at the start is a mistake of whoever started us.
    let mut client = options.client().await?;
    loop {
        let until = client.valid_until().as_ref().copied();
        tokio::select! {
            () = inputs.closed() => return Ok(()),
            ended = watch_all(&client, node_name, inputs, health) => match ended {
                Ended::ReceiverGone => return Ok(()),
                Ended::Unauthorized => info!("credentials are refused, reading them again"),
            },
            () = passed(until) => info!("credentials expire, asking for new ones"),
        }
        client = tokio::select! {
            () = inputs.closed() => return Ok(()),
            client = options.client_again(health) => client,
        };
    }
}

/// Between attempts to read credentials that could be read before.
const CREDENTIALS_RETRY: Duration = Duration::from_secs(5);

impl Options {
    /// A client with the credentials as they are now. They were good once, so this goes on until they are again: the
    /// last state stays in force meanwhile.
    async fn client_again(&self, health: &Health) -> Client {
        loop {
            match self.client().await {
                Ok(client) => {
                    health.end(CREDENTIALS);
                    return client;
                }
                Err(error) => health.begin(CREDENTIALS, format!("{error:#}")),
            }
            tokio::time::sleep(CREDENTIALS_RETRY).await;
        }
    }
}

const CREDENTIALS: &str = "credentials";

/// Runs until one of the watches ends. The selectors are kube-proxy's.
async fn watch_all(client: &Client, node_name: &str, inputs: &Sender<Input>, health: &Health) -> Ended {
    let services =
        Watch::new(Input::Service).labels("!service.kubernetes.io/service-proxy-name").fields("spec.clusterIP!=None");
    let slices = Watch::new(Input::EndpointSlice).labels("!service.kubernetes.io/headless");
    let node =
        Watch::new(Input::Node).fields(&format!("metadata.name={node_name}")).dispensable().slimmed_by(slim_node);
    let service_cidrs = Watch::new(Input::ServiceCidr).dispensable();
    tokio::select! {
        ended = services.run(client, inputs, health) => ended,
        ended = slices.run(client, inputs, health) => ended,
        ended = node.run(client, inputs, health) => ended,
        ended = service_cidrs.run(client, inputs, health) => ended,
    }
}

/// A node's images alone are tens of kilobytes, and every heartbeat sends them again.
fn slim_node(node: &mut Node) {
    if let Some(status) = &mut node.status {
        status.images = None;
        status.conditions = None;
        status.volumes_attached = None;
        status.volumes_in_use = None;
    }
}

async fn passed(until: Option<Timestamp>) {
    let Some(until) = until else { return std::future::pending().await };
    let left = Duration::try_from(until.duration_since(Timestamp::now())).unwrap_or_default();
    // A credential that is already over would otherwise be renewed in a tight loop.
    tokio::time::sleep(left.max(Duration::from_secs(10))).await;
}

impl Options {
    /// A client with these options, for watches or for single requests.
    pub async fn client(&self) -> anyhow::Result<Client> {
        let mut config = self.config().await?;
        if let Some(master) = &self.master {
            config.cluster_url = parse_master(master)?;
        }
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        config.read_timeout = Some(READ_TIMEOUT);
        // Else the time that a pooled connection lay idle would count as silence of the server.
        config.reset_reader_on_write = true;
        // Watches back off by themselves, and say so.
        config.default_retry = false;
        let server = config.cluster_url.clone();
        info!(%server, "API server");
        let layers = ClientBuilder::try_from(config).with_context(|| format!("client for the API server {server}"))?;
        let rate = self.rate.map(|rate| RateLimitLayer::new(rate.requests, rate.per));
        Ok(counted(layers.with_layer(&option_layer(rate)).build(), &server))
    }

    async fn config(&self) -> anyhow::Result<Config> {
        let context = KubeConfigOptions { context: self.context.clone(), ..KubeConfigOptions::default() };
        if let Some(path) = &self.kubeconfig {
            let kubeconfig = Kubeconfig::read_from(path).with_context(|| format!("read {}", path.display()))?;
            return Config::from_custom_kubeconfig(kubeconfig, &context)
                .await
                .with_context(|| format!("use {}", path.display()));
        }
        // A context can only mean one of a kubeconfig.
        let in_cluster = match &self.context {
            None => Config::incluster().map_err(|error| error.to_string()),
            Some(_) => Err("not asked, as a context is given".to_owned()),
        };
        let in_cluster = match in_cluster {
            Ok(config) => return Ok(config),
            Err(error) => error,
        };
        let inferred = match Config::from_kubeconfig(&context).await {
            Ok(config) => return Ok(config),
            Err(error) => error,
        };
        if let (Some(master), None) = (&self.master, &self.context) {
            return Ok(Config::new(parse_master(master)?));
        }
        bail!(
            "found no API server: no kubeconfig given; service account of a pod: {in_cluster}; \
             KUBECONFIG or ~/.kube/config: {inferred}"
        )
    }
}

/// A client that counts what it asks of `server`.
fn counted(client: Client, server: &http::Uri) -> Client {
    let requests = Requests::of_process();
    let host = server.authority().map(ToString::to_string).unwrap_or_default();
    let (namespace, valid_until) = (client.default_namespace().to_owned(), *client.valid_until());
    let service = service_fn(move |request: http::Request<kube::client::Body>| {
        let (client, host, method) = (client.clone(), host.clone(), request.method().clone());
        async move {
            let result = client.send(request).await;
            requests.count(result.as_ref().ok().map(http::Response::status), &method, &host);
            result
        }
    });
    Client::new(service, namespace).with_valid_until(valid_until)
}

fn parse_master(master: &str) -> anyhow::Result<http::Uri> {
    let url: http::Uri = master.parse().with_context(|| format!("URL of the API server {master}"))?;
    if !matches!(url.scheme_str(), Some("http" | "https")) {
        bail!("URL of the API server {master}: begins with neither https:// nor http://");
    }
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KUBECONFIG: &str = "
apiVersion: v1
kind: Config
current-context: one
contexts: [{name: one, context: {cluster: one, user: me}}, {name: two, context: {cluster: two, user: me}}]
clusters: [{name: one, cluster: {server: 'https://one:6443'}}, {name: two, cluster: {server: 'https://two:6443'}}]
users: [{name: me, user: {token: secret}}]
";

    #[tokio::test]
    async fn the_kubeconfig_names_the_server_and_master_overrides_it() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), KUBECONFIG).unwrap();
        let options = Options { kubeconfig: Some(file.path().to_owned()), ..Options::default() };
        assert_eq!(options.config().await.unwrap().cluster_url, "https://one:6443/");

        let two = Options { context: Some("two".into()), ..options.clone() };
        assert_eq!(two.config().await.unwrap().cluster_url, "https://two:6443/");

        let three = Options { context: Some("three".into()), ..options.clone() };
        let error = format!("{:#}", three.config().await.unwrap_err());
        assert!(error.contains("three"), "{error}");

        let missing = Options { kubeconfig: Some("/nowhere/config".into()), ..options };
        let error = format!("{:#}", missing.config().await.unwrap_err());
        assert!(error.starts_with("read /nowhere/config: "), "{error}");
    }

    #[test]
    fn a_master_is_a_url() {
        assert_eq!(parse_master("https://10.0.0.1:6443").unwrap(), "https://10.0.0.1:6443/");
        assert!(parse_master("10.0.0.1:6443").is_err());
        assert!(parse_master("not a url").is_err());
    }
}
