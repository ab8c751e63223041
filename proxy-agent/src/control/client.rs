//! Asks a running agent from another process.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use super::socket;
use crate::status::Status;
use crate::view::{Names, ServiceView};

/// How long an agent may take over an answer: its loop may be in the middle of a sync.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The agent that runs with a run directory.
#[derive(Clone, Debug)]
pub struct Client(PathBuf);

impl Client {
    pub fn new(run_dir: &Path) -> Self {
        Self(socket(run_dir))
    }

    pub async fn status(&self) -> Result<Status> {
        self.get("/status").await
    }

    pub async fn services(&self) -> Result<Vec<ServiceView>> {
        self.get("/services").await
    }

    pub async fn names(&self) -> Result<Names> {
        Ok(Names::new(self.get::<Vec<_>>("/names").await?))
    }

    /// What it answers at `path`, of a form that a kpx of another version may not have.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let asked = tokio::time::timeout(TIMEOUT, self.bytes(path)).await;
        let body =
            asked.with_context(|| format!("kpx at {} does not answer within {TIMEOUT:?}", self.0.display()))??;
        serde_json::from_slice(&body)
            .with_context(|| format!("the running kpx is of another version: its {path} has another form"))
    }

    async fn bytes(&self, path: &str) -> Result<Bytes> {
        let stream = UnixStream::connect(&self.0).await;
        let stream =
            stream.with_context(|| format!("no kpx answers at {}: is `kpx run` running?", self.0.display()))?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.context("speak HTTP with kpx")?;
        let request = Request::get(path).header("host", "kpx").body(Empty::<Bytes>::new())?;
        // The connection ends once the sender is dropped, whichever side hangs up first.
        let answer = async move {
            let response = sender.send_request(request).await?;
            let status = response.status();
            hyper::Result::Ok((status, response.into_body().collect().await?.to_bytes()))
        };
        let (answer, _ended) = tokio::join!(answer, connection);
        let (status, body) = answer.with_context(|| format!("read from {}", self.0.display()))?;
        ensure!(status.is_success(), "kpx at {} says {status}: {}", self.0.display(), String::from_utf8_lossy(&body));
        Ok(body)
    }
}
