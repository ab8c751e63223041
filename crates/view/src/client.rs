//! A client of the running agent's socket, for other processes.

use std::collections::BTreeMap;
use std::io::{BufRead, ErrorKind};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use bytes::{Bytes, BytesMut};
use http::{Method, Request};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;

use crate::status::Status;
use crate::{Names, ServiceView, socket};

/// The message while the agent waits for the first lists of objects.
pub const WAITS: &str = "the agent waits for the API server's first lists (see kpx status)";

/// Time limit for an answer: the agent may be in the middle of a sync.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit for a line of a long answer: the agent may read a large table between two lines.
const LINE_TIMEOUT: Duration = Duration::from_secs(60);

type Connection = http1::Connection<TokioIo<UnixStream>, Empty<Bytes>>;

/// The client of the agent that uses this run directory.
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

    /// Returns the Services, for a look-up by name. Fails while the agent waits for its first
    /// lists.
    pub async fn services_to_name(&self) -> Result<Vec<ServiceView>> {
        let services = self.services().await?;
        ensure!(
            !(services.is_empty() && self.waits().await),
            "no Services yet: {WAITS}"
        );
        Ok(services)
    }

    /// Returns true while the agent waits for its first lists; false if the agent does not answer.
    pub async fn waits(&self) -> bool {
        self.status().await.is_ok_and(|status| !status.complete)
    }

    pub async fn names(&self) -> Result<Names> {
        Ok(Names::new(self.get::<Vec<_>>("/names").await?))
    }

    /// Returns the kernel's ids of the agent's maps, by map name.
    pub async fn maps(&self) -> Result<BTreeMap<String, u32>> {
        self.get("/maps").await
    }

    /// Returns the agent's answer to a GET of `path`, unparsed.
    pub async fn text(&self, path: &str) -> Result<Bytes> {
        let asked = tokio::time::timeout(TIMEOUT, self.bytes(Method::GET, path)).await;
        asked.with_context(|| {
            format!(
                "kpx at {} does not answer within {TIMEOUT:?}",
                self.0.display()
            )
        })?
    }

    /// Returns the agent's parsed answer to a GET of `path`. Fails if an agent of another version
    /// answers in another form.
    pub async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        serde_json::from_slice(&self.text(path).await?).with_context(|| {
            format!("the running kpx has another version: its {path} has another form")
        })
    }

    /// Sends a DELETE of `path`, and returns the agent's answer.
    pub async fn delete<T: DeserializeOwned>(&self, path: &str) -> Result<T> {
        let asked = tokio::time::timeout(LINE_TIMEOUT, self.bytes(Method::DELETE, path)).await;
        let answer = asked.with_context(|| {
            format!(
                "kpx at {} does not answer within {LINE_TIMEOUT:?}",
                self.0.display()
            )
        })?;
        serde_json::from_slice(&answer?).context("the running kpx has another version")
    }

    /// Sends a GET of `path`, and returns the answer line by line as the lines arrive.
    pub async fn lines(&self, path: &str) -> Result<Lines> {
        let asked = tokio::time::timeout(TIMEOUT, self.open_lines(path)).await;
        asked.with_context(|| {
            format!(
                "kpx at {} does not answer within {TIMEOUT:?}",
                self.0.display()
            )
        })?
    }

    async fn open_lines(&self, path: &str) -> Result<Lines> {
        let (mut sender, connection) = self.connect().await?;
        let mut connection = Box::pin(connection);
        let request = Request::get(path)
            .header("host", "kpx")
            .body(Empty::new())?;
        let response = tokio::select! {
            response = sender.send_request(request) => response.map(Some),
            ended = &mut connection => ended.map(|()| None),
        };
        let response = response.with_context(|| format!("read from {}", self.0.display()))?;
        let response = response.with_context(|| format!("kpx at {} hung up", self.0.display()))?;
        let status = response.status();
        let mut lines = Lines {
            body: response.into_body(),
            connection: Some(connection),
            _sender: sender,
            read: BytesMut::new(),
        };
        if !status.is_success() {
            let why = lines.rest().await?;
            bail!(
                "kpx at {} answered {status}: {}",
                self.0.display(),
                String::from_utf8_lossy(&why)
            );
        }
        Ok(lines)
    }

    async fn connect(&self) -> Result<(http1::SendRequest<Empty<Bytes>>, Connection)> {
        let stream = self.stream().await?;
        http1::handshake(TokioIo::new(stream))
            .await
            .context("speak HTTP with kpx")
    }

    /// Connects to the agent's socket.
    pub async fn stream(&self) -> Result<UnixStream> {
        let stream = UnixStream::connect(&self.0).await;
        let socket = self.0.display();
        match stream.map_err(|error| (error.kind(), error)) {
            Ok(stream) => Ok(stream),
            Err((ErrorKind::PermissionDenied, _)) => {
                bail!("permission denied at {socket}: run as root (sudo)")
            }
            Err((ErrorKind::NotFound | ErrorKind::ConnectionRefused, _)) => {
                bail!("no kpx answers at {socket}: is `kpx run` running?")
            }
            Err((_, error)) => Err(error).with_context(|| format!("connect to {socket}")),
        }
    }

    async fn bytes(&self, method: Method, path: &str) -> Result<Bytes> {
        let (mut sender, connection) = self.connect().await?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "kpx")
            .body(Empty::new())?;
        // The connection ends when the sender is dropped or the agent closes.
        let answer = async move {
            let response = sender.send_request(request).await?;
            let status = response.status();
            hyper::Result::Ok((status, response.into_body().collect().await?.to_bytes()))
        };
        let (answer, _ended) = tokio::join!(answer, connection);
        let (status, body) = answer.with_context(|| format!("read from {}", self.0.display()))?;
        ensure!(
            status.is_success(),
            "kpx at {} answered {status}: {}",
            self.0.display(),
            String::from_utf8_lossy(&body)
        );
        Ok(body)
    }
}

/// The lines of an answer that is still arriving.
pub struct Lines {
    body: Incoming,
    /// The connection; `None` after its end.
    connection: Option<Pin<Box<Connection>>>,
    /// Keeps the connection open.
    _sender: http1::SendRequest<Empty<Bytes>>,
    /// The bytes read after the last line.
    read: BytesMut,
}

impl Lines {
    /// Returns the next line without its line end, or `None` at the end of the answer. Cancel safe.
    pub async fn next(&mut self) -> Result<Option<Bytes>> {
        let next = tokio::time::timeout(LINE_TIMEOUT, self.wait()).await;
        next.with_context(|| format!("kpx sent nothing for {LINE_TIMEOUT:?}"))?
    }

    async fn rest(&mut self) -> Result<Bytes> {
        let mut rest = BytesMut::new();
        while let Some(line) = self.next().await? {
            rest.extend(line);
        }
        rest.extend(self.read.split());
        Ok(rest.freeze())
    }

    async fn wait(&mut self) -> Result<Option<Bytes>> {
        loop {
            let length = (&self.read[..])
                .skip_until(b'\n')
                .context("look for the end of a line")?;
            if let Some(end) = length.checked_sub(1).filter(|end| self.read[*end] == b'\n') {
                let line = self.read.split_to(length).freeze();
                return Ok(Some(line.slice(..end)));
            }
            tokio::select! {
                frame = self.body.frame() => match frame {
                    Some(frame) => self.read.extend(frame.context("read from kpx")?.into_data().ok()),
                    None => return Ok(None),
                },
                ended = end(&mut self.connection) => {
                    self.connection = None;
                    ended.context("read from kpx")?;
                }
            }
        }
    }
}

async fn end(connection: &mut Option<Pin<Box<Connection>>>) -> hyper::Result<()> {
    match connection {
        Some(connection) => connection.await,
        None => std::future::pending().await,
    }
}
