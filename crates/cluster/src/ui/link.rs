//! The connection with a node's agent: HTTP/2 through `kpx relay` in the node's pod of kpx. All
//! answers of a node share it, so a node has one stream.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use bytes::{Bytes, BytesMut};
use http::Request;
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use kube::Client;
use kube::api::AttachedProcess;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf, join};
use tokio::time::timeout;

use crate::exec::{self, BROKEN};
use crate::pods::NodePod;

/// The command that connects to the agent's socket.
const RELAY: &str = "relay";
/// The time after which a silent connection is asked for a sign of life, and the time for it.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// The time for the words of a relay whose connection has ended.
pub(crate) const WORDS: Duration = Duration::from_secs(1);
/// Maximum size of the kept standard error in bytes.
const LONGEST_STDERR: u64 = 4_096;
/// Maximum size of an answer in bytes, and of a line of a stream.
pub(crate) const LONGEST: usize = 16 << 20;
pub(crate) const LONGEST_LINE: usize = 4 << 20;

/// Asks one node. Clones share the connection.
#[derive(Clone)]
pub(crate) struct Link {
    sender: SendRequest<Empty<Bytes>>,
    bytes: Arc<AtomicU64>,
}

/// Starts the relay, and returns the link with the work that keeps it open. The work returns the
/// cause of the end.
pub(crate) async fn open(
    client: &Client,
    at: &NodePod,
) -> Result<(Link, impl Future<Output = anyhow::Error> + Send + use<>)> {
    let mut process = exec::start_with_input(client, at, &[RELAY.to_owned()]).await?;
    let stdin = process.stdin().context("kpx has no input")?;
    let bytes = Arc::new(AtomicU64::new(0));
    let stdout = Counted {
        from: process.stdout().context("kpx has no output")?,
        bytes: Arc::clone(&bytes),
    };
    let (link, connection) = shake(join(stdout, stdin), bytes).await?;
    let work = async move {
        // Dropping the process ends the relay.
        let mut process = process;
        let mut ended = std::pin::pin!(ended(&mut process));
        let broken = tokio::select! {
            why = &mut ended => return why,
            end = connection => match end {
                Ok(()) => anyhow!(BROKEN),
                Err(error) => error.context(BROKEN),
            },
        };
        // The relay's words say more, and may follow.
        timeout(WORDS, ended).await.unwrap_or(broken)
    };
    Ok((link, work))
}

/// Speaks HTTP/2 by a stream whose bytes are counted. Returns the link with the work that keeps it
/// open.
pub(super) async fn shake(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    bytes: Arc<AtomicU64>,
) -> Result<(Link, impl Future<Output = Result<()>> + Send)> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE);
    let shaken = builder.handshake(TokioIo::new(stream)).await;
    let (sender, connection) = shaken.context("speak HTTP/2")?;
    Ok((Link { sender, bytes }, async { Ok(connection.await?) }))
}

/// Waits for the end of the relay, and returns its words.
async fn ended(process: &mut AttachedProcess) -> anyhow::Error {
    let work = async {
        let status = process.take_status().context("kpx has no status")?;
        let stderr = process.stderr().context("kpx has no standard error")?;
        let status = async { status.await.context(BROKEN) };
        let words = exec::first_bytes(stderr, LONGEST_STDERR);
        let (status, words) = tokio::try_join!(status, words)?;
        let words = String::from_utf8_lossy(&words).trim().to_owned();
        bail!("{}", said(exec::code(&status)?, &words))
    };
    let ended: Result<()> = work.await;
    ended.err().unwrap_or_else(|| anyhow!(BROKEN))
}

/// Returns the reason of a relay that has ended.
fn said(code: i32, words: &str) -> String {
    // clap's words for a subcommand that it lacks.
    if code == 2 && words.contains("unrecognized subcommand") {
        return "this node runs an older kpx, without the page of the cluster".to_owned();
    }
    match words.trim_start_matches("kpx: ") {
        "" => format!("kpx has ended with {code}"),
        words => words.to_owned(),
    }
}

impl Link {
    /// Returns the number of bytes that the node has sent.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Returns the parsed answer of the page's data at `what`.
    pub(crate) async fn ask<T: DeserializeOwned>(&self, what: &str, limit: Duration) -> Result<T> {
        let whole = timeout(limit, async {
            let mut body = self.open(what).await?;
            let mut whole = BytesMut::new();
            while let Some(piece) = next_piece(&mut body).await? {
                whole.extend_from_slice(&piece);
                ensure!(
                    whole.len() <= LONGEST,
                    "the answer is longer than {} MiB",
                    LONGEST >> 20
                );
            }
            Ok(whole)
        });
        let whole = whole
            .await
            .map_err(|_| anyhow!("no answer within {} s", limit.as_secs()))??;
        serde_json::from_slice(&whole).context("this node runs another version of kpx")
    }

    /// Returns the lines of the page's data at `what`, as they arrive.
    pub(crate) async fn lines(&self, what: &str, limit: Duration) -> Result<Lines> {
        let body = timeout(limit, self.open(what)).await;
        let body = body.map_err(|_| anyhow!("no answer within {} s", limit.as_secs()))??;
        Ok(Lines {
            body,
            read: BytesMut::new(),
            searched: 0,
            silence: None,
        })
    }

    async fn open(&self, what: &str) -> Result<Incoming> {
        let request = Request::get(format!("http://kpx/ui/api/{what}"))
            .header("kpx-page", "1")
            .body(Empty::new())?;
        let mut sender = self.sender.clone();
        sender.ready().await.context(BROKEN)?;
        let response = sender.send_request(request).await.context(BROKEN)?;
        let status = response.status();
        let mut body = response.into_body();
        if status.is_success() {
            return Ok(body);
        }
        let mut words = Vec::new();
        while words.len() < 1_024
            && let Some(piece) = next_piece(&mut body).await?
        {
            words.extend_from_slice(&piece);
        }
        let words = String::from_utf8_lossy(&words).trim().to_owned();
        Err(anyhow::Error::new(Refused(status.as_u16())).context(format!("{status}: {words}")))
    }
}

/// An answer without success, by its HTTP status.
#[derive(Debug)]
struct Refused(u16);

/// Returns true if a node has refused a request with this status.
pub(crate) fn is_refused(error: &anyhow::Error, status: u16) -> bool {
    let refused = error.downcast_ref::<Refused>();
    refused.is_some_and(|refused| refused.0 == status)
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "HTTP {}", self.0)
    }
}

impl std::error::Error for Refused {}

/// The lines of an answer that is still arriving.
pub(crate) struct Lines {
    body: Incoming,
    read: BytesMut,
    /// The number of bytes that hold no line end.
    searched: usize,
    /// The longest time without a byte.
    silence: Option<Duration>,
}

impl Lines {
    /// Fails after this time without a byte. A line may take longer on a slow path.
    pub(crate) fn until_silent(self, limit: Duration) -> Self {
        Self {
            silence: Some(limit),
            ..self
        }
    }

    /// Returns the next line without its end; `None` at the end of the answer. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            let end = self.read[self.searched..]
                .iter()
                .position(|byte| *byte == b'\n');
            if let Some(end) = end {
                let line = self.read.split_to(self.searched + end + 1).freeze();
                self.searched = 0;
                return Ok(Some(line.slice(..line.len() - 1)));
            }
            self.searched = self.read.len();
            ensure!(
                self.read.len() <= LONGEST_LINE,
                "a line is longer than {} MiB",
                LONGEST_LINE >> 20
            );
            let piece = next_piece(&mut self.body);
            let piece = match self.silence {
                Some(limit) => timeout(limit, piece)
                    .await
                    .map_err(|_| anyhow!("silent for {} s", limit.as_secs()))?,
                None => piece.await,
            };
            match piece? {
                Some(piece) => self.read.extend_from_slice(&piece),
                None => return Ok(None),
            }
        }
    }
}

async fn next_piece(body: &mut Incoming) -> Result<Option<Bytes>> {
    while let Some(frame) = body.frame().await {
        if let Ok(piece) = frame.context(BROKEN)?.into_data() {
            return Ok(Some(piece));
        }
    }
    Ok(None)
}

/// Counts the bytes that are read.
struct Counted<R> {
    from: R,
    bytes: Arc<AtomicU64>,
}

impl<R: AsyncRead + Unpin> AsyncRead for Counted<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut TaskContext<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.from).poll_read(cx, buffer);
        let read = buffer.filled().len() - before;
        self.bytes.fetch_add(read as u64, Ordering::Relaxed);
        polled
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;
    use futures::stream;

    use super::super::fake;
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn line_may_take_longer_than_the_silence() {
        let link = fake::link(|_| {
            let ticks = tokio::time::interval(Duration::from_millis(150));
            let pieces = ["a", "b", "c", "d\n", "e"].into_iter();
            let pieces = stream::unfold((ticks, pieces), async |(mut ticks, mut pieces)| {
                ticks.tick().await;
                Some((Bytes::from(pieces.next()?), (ticks, pieces)))
            });
            pieces.chain(stream::pending()).boxed()
        });
        let limit = Duration::from_millis(500);
        let lines = link.await.lines("changes", Duration::from_secs(30)).await;
        let mut lines = lines.unwrap().until_silent(limit);
        assert_eq!(lines.next().await.unwrap().unwrap(), "abcd");
        assert_eq!(
            lines.next().await.unwrap_err().to_string(),
            "silent for 0 s"
        );
    }

    #[test]
    fn relay_that_a_node_lacks_is_called_older() {
        let lacks = "error: unrecognized subcommand 'relay'\n\nUsage: kpx [OPTIONS] <COMMAND>";
        let older = "this node runs an older kpx, without the page of the cluster";
        assert_eq!(said(2, lacks), older);
        assert_eq!(
            said(1, "kpx: connect: no such file"),
            "connect: no such file"
        );
        assert_eq!(said(137, ""), "kpx has ended with 137");
    }
}
