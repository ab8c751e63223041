//! Creates clients of an API server that detect a vanished server.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use http_body_util::{Either, Limited};
use hyper_timeout::TimeoutConnector;
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::client::{Body, ClientBuilder, ConfigExt as _};
use kube::{Client, Config};
use leaky_bucket::RateLimiter;
use tower::{BoxError, ServiceBuilder, service_fn};
use tracing::info;

use super::Options;
use super::api_server_addrs::ApiServerAddrs;
use super::caller::{self, ForeignHome};
use super::cluster_identity::Cluster;
use super::context::{configured, kubeconfig};
use super::errors::SourceError;
use super::outage::Outage;
use crate::requests::Requests;

/// The time for name resolution, TCP and TLS. TLS may take long when all nodes return at once.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The time until a dead connection is detected after the server or the network vanished silently.
/// TCP keepalive covers an idle connection, the TCP user timeout unacknowledged data (kernel
/// defaults: two hours and fifteen minutes). client-go's HTTP/2 pings take 45 s.
const DEAD_AFTER: Duration = Duration::from_secs(20);
const KEEPALIVE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// The time without data after which a watch is replaced although its host, or a load balancer,
/// still acknowledges. API servers send a bookmark every minute.
pub(super) const READ_TIMEOUT: Duration = Duration::from_secs(100);

/// The maximum size of an error body in bytes: kpx needs its code and a line of text.
const LONGEST_REFUSAL: usize = 1 << 20;

pub(super) struct Connection {
    pub(super) clients: Clients,
    pub(super) addrs: ApiServerAddrs,
    pub(super) cluster: Cluster,
}

/// The clients, with shared connections and credentials.
pub(super) struct Clients {
    /// The client with the operator's rate limit, for lists of objects and for Events.
    pub(super) limited: Client,
    /// The client without a rate limit, for small requests with their own pace: watches,
    /// comparisons, health probes.
    pub(super) paced: Client,
}

impl Options {
    /// Checks that the options make a client.
    pub(crate) async fn check(&self) -> Result<()> {
        let config = self.directed().await?;
        if config.auth_info.exec.is_some() {
            return Ok(());
        }
        let server = config.cluster_url.clone();
        connected(config)
            .map(drop)
            .with_context(|| self.client_for(&server))
    }

    /// Returns the server's URL for reports. It does not change while kpx runs.
    pub(crate) async fn server(&self) -> Result<String> {
        Ok(without_credentials(&self.directed().await?.cluster_url)
            .trim_end_matches('/')
            .to_owned())
    }

    /// Returns the kubeconfig's credential plugin, if its home directory belongs to another user.
    pub async fn foreign_home(&self) -> Option<ForeignHome> {
        ForeignHome::of(&self.directed().await.ok()?)
    }

    /// Returns the description of an attempt to make a client.
    fn client_for(&self, server: &http::Uri) -> String {
        let from = self
            .kubeconfig
            .as_ref()
            .map(|path| format!(" of {}", path.display()))
            .unwrap_or_default();
        format!(
            "client for the API server {}{from}",
            without_credentials(server)
        )
    }

    /// Returns the configuration, with the operator's URL in place of the configured URL.
    pub(super) async fn directed(&self) -> Result<Config> {
        let mut config = self.config().await?;
        if let Some(master) = &self.master {
            config.cluster_url = parse_master(master)?;
        }
        Ok(config)
    }

    /// Creates the clients, and finds the server's addresses.
    pub(super) async fn connect(&self, outage: &Outage) -> Result<Connection> {
        let mut config = self.directed().await?;
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        config.read_timeout = Some(READ_TIMEOUT);
        // Otherwise the idle time of a pooled connection would count as silence of the server.
        config.reset_reader_on_write = true;
        // Watches back off by themselves, and report it.
        config.default_retry = false;
        let server = config.cluster_url.clone();
        let cluster = Cluster::of(&config);
        info!(server = without_credentials(&server), "API server");
        let addrs = ApiServerAddrs::of(
            [Some(&server), config.proxy_url.as_ref()]
                .into_iter()
                .flatten(),
        );
        let client = connected(config).with_context(|| self.client_for(&server))?;
        let paced = counted(client, &server, outage.clone());
        let limited = match self.rate {
            Some(rate) => limited(&paced, rate.bucket()),
            None => paced.clone(),
        };
        Ok(Connection {
            clients: Clients { limited, paced },
            addrs,
            cluster,
        })
    }

    /// Creates a client for streams, which may be silent without limit.
    pub(super) async fn stream_client(&self) -> Result<Client> {
        let mut config = self.directed().await?;
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        config.read_timeout = None;
        config.default_retry = false;
        let server = config.cluster_url.clone();
        connected(config).with_context(|| self.client_for(&server))
    }

    async fn config(&self) -> Result<Config> {
        let context = self.context.as_deref();
        if let Some(path) = &self.kubeconfig {
            return configured(kubeconfig(Some(path))?, context)
                .await
                .with_context(|| format!("use {}", path.display()));
        }
        // A context always belongs to a kubeconfig.
        let in_cluster = match context {
            None => Config::incluster().map_err(|error| error.to_string()),
            Some(_) => Err("skipped, because --context is set".to_owned()),
        };
        let in_cluster = match in_cluster {
            Ok(config) => return Ok(config),
            Err(error) => error,
        };
        let inferred = match kubeconfig(None) {
            Ok(read) => configured(read, context).await,
            Err(error) => Err(error),
        };
        match (inferred, &self.master, context) {
            (Ok(config), ..) => Ok(config),
            (Err(_), Some(master), None) => Ok(Config::new(parse_master(master)?)),
            (Err(error), ..) => {
                let fault = error.fault;
                let text = format!(
                    "found no API server: no kubeconfig given; service account of a pod: {in_cluster}; \
                     KUBECONFIG or ~/.kube/config: {error}{}",
                    caller::advice()
                );
                Err(SourceError::new(fault, text).into())
            }
        }
    }
}

/// Creates a client that detects dead connections. With a proxy or plugin it is kube's own client,
/// which relies on [`READ_TIMEOUT`] alone.
fn connected(config: Config) -> Result<Client> {
    let runs_plugin = config.auth_info.exec.is_some();
    if config.proxy_url.is_some() || runs_plugin {
        // Only kube's own client tracks how long a plugin's credentials are valid.
        let builder = ClientBuilder::try_from(config).map_err(SourceError::from)?;
        return Ok(builder.build());
    }
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_keepalive(Some(KEEPALIVE));
    tcp.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    tcp.set_tcp_user_timeout(Some(DEAD_AFTER));
    let mut connector = TimeoutConnector::new(
        config
            .rustls_https_connector_with_connector(tcp)
            .map_err(SourceError::from)?,
    );
    connector.set_connect_timeout(config.connect_timeout);
    connector.set_read_timeout(config.read_timeout);
    connector.set_reset_reader_on_write(config.reset_reader_on_write);
    let http: HttpClient<_, Body> = HttpClient::builder(TokioExecutor::new()).build(connector);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer().map_err(SourceError::from)?)
        .layer(config.extra_headers_layer().map_err(SourceError::from)?)
        .map_err(BoxError::from)
        .service(http);
    Ok(Client::new(service, config.default_namespace))
}

/// Creates a client that counts its requests to `server`, obeys Retry-After, and bounds error
/// bodies.
fn counted(client: Client, server: &http::Uri, outage: Outage) -> Client {
    let requests = Requests::of_process();
    let host = server
        .authority()
        .map(ToString::to_string)
        .unwrap_or_default();
    let namespace = client.default_namespace().to_owned();
    let valid_until = *client.valid_until();
    let service = service_fn(move |request: http::Request<Body>| {
        let client = client.clone();
        let host = host.clone();
        let method = request.method().clone();
        let outage = outage.clone();
        async move {
            let result = client.send(request).await;
            requests.count(
                result.as_ref().ok().map(http::Response::status),
                &method,
                &host,
            );
            result
                .inspect(|response| outage.heed(response))
                .map(cut_refusal)
        }
    });
    Client::new(service, namespace).with_valid_until(valid_until)
}

/// Bounds the body of an error, which kube reads as a whole. Other bodies are unbounded.
fn cut_refusal(response: http::Response<Body>) -> http::Response<Either<Limited<Body>, Body>> {
    let is_refusal = response.status().is_client_error() || response.status().is_server_error();
    response.map(|body| match is_refusal {
        true => Either::Left(Limited::new(body, LONGEST_REFUSAL)),
        false => Either::Right(body),
    })
}

fn limited(client: &Client, bucket: RateLimiter) -> Client {
    let namespace = client.default_namespace().to_owned();
    let valid_until = *client.valid_until();
    let client = client.clone();
    let bucket = Arc::new(bucket);
    let service = service_fn(move |request: http::Request<Body>| {
        let client = client.clone();
        let bucket = bucket.clone();
        async move {
            bucket.acquire_one().await;
            client.send(request).await
        }
    });
    Client::new(service, namespace).with_valid_until(valid_until)
}

fn parse_master(master: &str) -> Result<http::Uri> {
    let url: http::Uri = master
        .parse()
        .with_context(|| format!("URL of the API server {master}"))?;
    if !matches!(url.scheme_str(), Some("http" | "https")) {
        bail!("URL of the API server {master}: begins with neither https:// nor http://");
    }
    Ok(url)
}

/// Returns the URL of an API server without user, password and query, which may be secrets.
pub fn without_credentials(url: &http::Uri) -> String {
    let host = url.host().unwrap_or_default();
    let port = url
        .port()
        .map(|port| format!(":{port}"))
        .unwrap_or_default();
    format!(
        "{}://{host}{port}{}",
        url.scheme_str().unwrap_or("https"),
        url.path()
    )
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http_body_util::StreamBody;
    use hyper::body::Frame;

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
        let options = Options {
            kubeconfig: Some(file.path().to_owned()),
            ..Options::default()
        };
        assert_eq!(
            options.config().await.unwrap().cluster_url,
            "https://one:6443/"
        );

        let two = Options {
            context: Some("two".into()),
            ..options.clone()
        };
        assert_eq!(two.config().await.unwrap().cluster_url, "https://two:6443/");

        let three = Options {
            context: Some("three".into()),
            ..options.clone()
        };
        let error = format!("{:#}", three.config().await.unwrap_err());
        assert!(
            error.ends_with(": it has no context \"three\"; its contexts: one, two"),
            "{error}"
        );

        let missing = Options {
            kubeconfig: Some("/nowhere/config".into()),
            ..options
        };
        let error = format!("{:#}", missing.config().await.unwrap_err());
        assert!(error.starts_with("read /nowhere/config: "), "{error}");
    }

    #[tokio::test]
    async fn reported_server_has_no_credentials() {
        let server = async |master: &str| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), KUBECONFIG).unwrap();
            let kubeconfig = Some(file.path().to_owned());
            let options = Options {
                kubeconfig,
                master: Some(master.to_owned()),
                ..Options::default()
            };
            options.server().await.unwrap()
        };
        assert_eq!(
            server("https://10.0.0.1:6443").await,
            "https://10.0.0.1:6443"
        );
        assert_eq!(
            server("https://me:secret@[fd00::1]:6443/k8s/c-1/?token=x").await,
            "https://[fd00::1]:6443/k8s/c-1"
        );
        assert_eq!(server("http://me@proxy").await, "http://proxy");
    }

    #[tokio::test]
    async fn endless_refusal_is_cut() {
        let endless = service_fn(async |_: http::Request<Body>| {
            let pieces = futures::stream::repeat_with(|| {
                Ok::<_, BoxError>(Frame::data(Bytes::from_static(&[b'x'; 4096])))
            });
            http::Response::builder()
                .status(500)
                .body(StreamBody::new(pieces))
        });
        let server = http::Uri::from_static("https://one:6443");
        let client = counted(Client::new(endless, "default"), &server, Outage::new());
        let error = client
            .request_text(http::Request::get("/api").body(Vec::new()).unwrap())
            .await
            .unwrap_err();
        assert!(format!("{:#}", anyhow::Error::from(error)).contains("length limit"));
    }

    #[test]
    fn a_master_is_a_url() {
        assert_eq!(
            parse_master("https://10.0.0.1:6443").unwrap(),
            "https://10.0.0.1:6443/"
        );
        assert!(parse_master("10.0.0.1:6443").is_err());
        assert!(parse_master("not a url").is_err());
    }
}
