//! Opens streams to ports of pods through the API server, as `kubectl port-forward` does.

use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use http::Request;
use kube::Client;
use tokio::sync::Mutex;
use tokio::time::timeout;

use super::Options;
use super::errors::SourceError;
use super::forward_stream::PodStream;

/// The maximum wait for the API server and the pod's kubelet to open a stream.
const OPEN_TIMEOUT: Duration = Duration::from_secs(15);

/// Opens streams with the credentials of a source. Reads the credentials again after a refusal.
pub struct Forwarder {
    options: Options,
    client: Mutex<Option<Client>>,
}

impl Forwarder {
    pub fn new(options: Options) -> Self {
        Self {
            options,
            client: Mutex::new(None),
        }
    }

    /// Opens a stream to a port of a pod. If nothing listens there, the stream reports that later.
    pub async fn open(&self, namespace: &str, pod: &str, port: u16) -> Result<PodStream> {
        timeout(OPEN_TIMEOUT, self.try_open(namespace, pod, port))
            .await
            .context("the API server does not answer")?
    }

    async fn try_open(&self, namespace: &str, pod: &str, port: u16) -> Result<PodStream> {
        for part in [namespace, pod] {
            // Names come from objects and become part of the URL's path.
            if part.is_empty()
                || !part
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte))
            {
                bail!("{namespace}/{pod} is not a valid pod name");
            }
        }
        let path = format!("/api/v1/namespaces/{namespace}/pods/{pod}/portforward?ports={port}");
        let request = Request::get(path)
            .body(Vec::new())
            .context("make a request")?;
        match self.client().await?.connect(request).await {
            Ok(connection) => Ok(PodStream::new(connection.into_stream(), port)),
            Err(error) => {
                let error = SourceError::from(error);
                if error.code == Some(403) {
                    let what = "the API server refuses: grant the verbs get and create of pods/portforward";
                    return Err(anyhow!(error).context(what));
                }
                // The credentials or the server may have changed.
                if error.code.is_none_or(|code| code == 401) {
                    *self.client.lock().await = None;
                }
                Err(anyhow!(error).context("request a stream from the API server"))
            }
        }
    }

    async fn client(&self) -> Result<Client> {
        let mut client = self.client.lock().await;
        match &*client {
            Some(client) => Ok(client.clone()),
            None => Ok(client.insert(self.options.stream_client().await?).clone()),
        }
    }
}
