//! The flags that select the cluster and its nodes, as in kubectl.

use std::fmt::Display;
use std::future::Future;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use clap::Args;
use kube::{Client, Config};
use tokio::time::timeout;

use proxy_source::kubernetes::{Fault, SourceError, configured, kubeconfig, without_credentials};

/// The cluster to ask, and its nodes.
#[derive(Args, Debug)]
pub(crate) struct ConnectArgs {
    /// Kubeconfig file. Default: $KUBECONFIG or ~/.kube/config.
    #[arg(long, global = true, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Kubeconfig context.
    #[arg(long, global = true, value_name = "NAME")]
    context: Option<String>,
    /// Namespace of kpx's pods.
    #[arg(
        long,
        short,
        global = true,
        value_name = "NAMESPACE",
        default_value = "kube-system"
    )]
    pub(crate) namespace: String,
    /// Labels of kpx's pods; k8s-app=kube-proxy for a kpx in kubeadm's kube-proxy DaemonSet.
    #[arg(
        long,
        short = 'l',
        global = true,
        value_name = "LABELS",
        default_value = "app.kubernetes.io/name=kpx"
    )]
    pub(crate) selector: String,
    /// Run on this node; may be repeated.
    #[arg(long, global = true, value_name = "NODE", conflicts_with = "all_nodes")]
    pub(crate) node: Vec<String>,
    /// Run on all nodes (the default).
    #[arg(long, short = 'A', global = true)]
    pub(crate) all_nodes: bool,
    /// Seconds to wait for each answer of a node or of the API server. Default: 20; trace 60,
    /// connectivity-test 120, sysdump 180.
    #[arg(long, global = true, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: Option<u64>,
    /// Maximum number of nodes at the same time.
    #[arg(long, global = true, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=256))]
    parallel: u16,
    /// The server that is asked, and what names it; set with the client.
    #[arg(skip)]
    server: OnceLock<String>,
}

impl ConnectArgs {
    /// Creates a client with the kubeconfig's credentials, or in a pod with its ServiceAccount's.
    pub(crate) async fn client(&self) -> Result<Client> {
        let config = match kubeconfig(self.kubeconfig.as_deref()).context("use the kubeconfig") {
            Ok(read) => {
                let context = self
                    .context
                    .clone()
                    .or_else(|| read.current_context.clone())
                    .unwrap_or_default();
                let from = format!("context {context:?} of {}", self.files());
                let config = configured(read, self.context.as_deref()).await;
                config
                    .map(|config| (config, from))
                    .with_context(|| format!("use {}", self.files()))
            }
            Err(error) => Err(error),
        };
        let (mut config, from) = match config {
            Err(_)
                if self.kubeconfig.is_none()
                    && self.context.is_none()
                    && Config::incluster().is_ok() =>
            {
                (Config::incluster()?, "the pod's service account".to_owned())
            }
            config => config?,
        };
        let server = self
            .server
            .get_or_init(|| format!("{} ({from})", without_credentials(&config.cluster_url)));
        // A stream of `monitor` may be silent for long; each call has its own limit.
        config.read_timeout = None;
        Client::try_from(config)
            .map_err(SourceError::from)
            .with_context(|| format!("make a client of {server}"))
    }

    /// Returns the names of the kubeconfig's files.
    fn files(&self) -> String {
        match (&self.kubeconfig, std::env::var("KUBECONFIG")) {
            (Some(path), _) => path.display().to_string(),
            (None, Ok(paths)) if !paths.is_empty() => paths,
            (None, _) => "~/.kube/config".to_owned(),
        }
    }

    /// Returns the name of the cluster: the server that is asked.
    pub(crate) fn title(&self) -> String {
        let server = self.server.get().map(String::as_str).unwrap_or_default();
        let address = server.split(' ').next().unwrap_or_default();
        let host = address.split_once("://").map_or(address, |(_, host)| host);
        host.trim_end_matches('/').to_owned()
    }

    pub(crate) fn timeout(&self, default_secs: u64) -> Duration {
        Duration::from_secs(self.timeout.unwrap_or(default_secs))
    }

    /// Awaits a response of the API server. Errors name the call, and the server too if it did not
    /// respond or refused the credentials.
    pub(crate) async fn call<T>(
        &self,
        default_secs: u64,
        what: impl Display,
        call: impl Future<Output = kube::Result<T>>,
    ) -> Result<T> {
        let limit = self.timeout(default_secs);
        let server = self.server.get().map_or_else(
            || "the API server".to_owned(),
            |server| format!("API server {server}"),
        );
        let answer = timeout(limit, call).await;
        let answer = answer.map_err(|_| {
            anyhow!(
                "{what}: {server} did not answer within {} s",
                limit.as_secs()
            )
        })?;
        answer.map_err(|error| match SourceError::from(&error) {
            error if error.code.is_some_and(|code| code != 401) => {
                anyhow::Error::new(error).context(what.to_string())
            }
            // The error of a credential plugin holds the plugin's environment and output.
            error if error.code.is_some() || error.fault == Fault::Plugin => {
                anyhow!("{what}: {server}: {error}")
            }
            // The outer errors repeat the cause.
            _ => anyhow!(
                "{what}: {server}: {}",
                anyhow::Error::new(error).root_cause()
            ),
        })
    }

    pub(crate) fn parallel(&self) -> usize {
        self.parallel.into()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::{ExitStatus, Output};

    use clap::Parser;
    use kube::client::AuthError;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        connect: ConnectArgs,
    }

    #[tokio::test]
    async fn call_of_a_server_that_hangs_ends_and_is_named() {
        let Line { connect } = Line::parse_from(["kpx", "--timeout=1"]);
        let hanging = std::future::pending::<kube::Result<()>>();
        let error = timeout(
            Duration::from_secs(30),
            connect.call(60, "list the pods", hanging),
        )
        .await
        .unwrap();
        assert_eq!(
            error.unwrap_err().to_string(),
            "list the pods: the API server did not answer within 1 s"
        );
    }

    #[tokio::test]
    async fn refusal_is_told_in_the_servers_words() {
        let Line { connect } = Line::parse_from(["kpx"]);
        for (code, reason, says) in [
            (
                403,
                "Forbidden",
                "list the pods: 403 Forbidden: pods is forbidden",
            ),
            (
                401,
                "Unauthorized",
                "list the pods: the API server: 401 Unauthorized: pods is forbidden",
            ),
        ] {
            let status = kube::core::Status {
                code,
                reason: reason.to_owned(),
                ..kube::core::Status::default()
            };
            let status = kube::core::Status {
                message: "pods is forbidden".to_owned(),
                ..status
            };
            let refused = std::future::ready(Err::<(), _>(kube::Error::Api(Box::new(status))));
            let error = connect
                .call(60, "list the pods", refused)
                .await
                .unwrap_err();
            assert_eq!(format!("{error:#}"), says);
        }
    }

    #[tokio::test]
    async fn output_of_a_credential_plugin_is_not_told() {
        let Line { connect } = Line::parse_from(["kpx"]);
        let out = Output {
            status: ExitStatus::from_raw(256),
            stdout: b"s3cret".to_vec(),
            stderr: Vec::new(),
        };
        let failed = AuthError::AuthExecRun {
            cmd: "aws".to_owned(),
            out: Box::new(out),
        };
        let failed = std::future::ready(Err::<(), _>(kube::Error::Auth(failed)));
        let error = connect.call(60, "list the pods", failed).await.unwrap_err();
        let says = "list the pods: the API server: the kubeconfig's credential plugin failed: exit status: 1";
        assert_eq!(format!("{error:#}"), says);
    }

    #[test]
    fn server_is_shown_without_secrets() {
        for (url, want) in [
            ("https://10.0.0.1:6443", "https://10.0.0.1:6443/"),
            (
                "https://admin:s3cret@[fd00::1]/clusters/c?token=s3cret",
                "https://[fd00::1]/clusters/c",
            ),
        ] {
            assert_eq!(without_credentials(&url.parse().unwrap()), want);
        }
    }
}
