//! Clients: each connection carries one message and one answer.

use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use futures::{StreamExt, stream};
use proxy_view::output::print;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket, lookup_host};
use tokio::time::timeout;

use super::{Answer, LONGEST, Protocol, QUESTION, Target};

/// The maximum number of parallel dials.
const PARALLEL: usize = 64;
/// Time after which a datagram is sent again.
const AGAIN: Duration = Duration::from_millis(400);

/// Dial each destination, and print what came back as JSON: for each a list of its replies.
#[derive(Args, Debug)]
pub(super) struct DialArgs {
    /// A destination.
    #[arg(required = true, value_name = "PROTOCOL/HOST:PORT/BYTES/TIMES")]
    to: Vec<Target>,
    /// The milliseconds in which an answer must be here.
    #[arg(long, value_name = "N", default_value_t = 2_000, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    millis: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Reply {
    pub(crate) outcome: Outcome,
    /// The name of the server that answered.
    pub(crate) server: Option<String>,
    /// The client's address as the server sees it.
    pub(crate) seen: Option<IpAddr>,
    pub(crate) error: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum Outcome {
    Answered,
    Refused,
    Silent,
    /// The connection was established, and the answer did not end.
    Stalled,
    Unresolved,
    /// This machine has no route, or a router reported the destination unreachable.
    Unreachable,
    Failed,
}

impl std::fmt::Display for Reply {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.outcome, &self.server) {
            (Outcome::Answered, server) => write!(
                f,
                "an answer of {}",
                server.as_deref().unwrap_or("a server")
            ),
            (Outcome::Refused, _) => f.write_str("a refusal"),
            (Outcome::Silent, _) => f.write_str("no answer"),
            (Outcome::Stalled, _) => {
                f.write_str("a connection, and then no answer (a hole in the path's MTU?)")
            }
            (Outcome::Unresolved, _) => write!(f, "no address for the name ({})", self.error),
            (Outcome::Unreachable | Outcome::Failed, _) => f.write_str(&self.error),
        }
    }
}

pub(super) async fn dial(args: DialArgs) -> Result<ExitCode> {
    let replies = dial_all(&args.to, Duration::from_millis(args.millis)).await;
    print(&(serde_json::to_string(&replies)? + "\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// Dials all destinations, and returns the replies of each destination.
pub(crate) async fn dial_all(targets: &[Target], limit: Duration) -> Vec<Vec<Reply>> {
    let dials = targets.iter().map(|target| async move {
        let mut replies = Vec::new();
        for _ in 0..target.times {
            replies.push(reply(target, limit).await);
        }
        replies
    });
    stream::iter(dials).buffered(PARALLEL).collect().await
}

async fn reply(target: &Target, limit: Duration) -> Reply {
    let until = Instant::now() + limit;
    let none = |outcome, error: String| Reply {
        outcome,
        server: None,
        seen: None,
        error,
    };
    let addresses = match timeout(limit, lookup_host(&target.to)).await {
        Ok(Ok(addresses)) => addresses.collect::<Vec<_>>(),
        Ok(Err(error)) => return none(Outcome::Unresolved, error.to_string()),
        Err(_) => {
            return none(
                Outcome::Unresolved,
                "no answer of the name's server".to_owned(),
            );
        }
    };
    let Some(at) = addresses.first() else {
        return none(Outcome::Unresolved, "the name has no address".to_owned());
    };
    let left = until.saturating_duration_since(Instant::now());
    let (is_connected, answer) = match target.protocol {
        Protocol::Tcp => match timeout(left, TcpStream::connect(at)).await {
            Ok(Ok(stream)) => {
                let left = until.saturating_duration_since(Instant::now());
                (true, timeout(left, exchange(stream, target.bytes)).await)
            }
            Ok(Err(error)) => (false, Ok(Err(error))),
            Err(late) => (false, Err(late)),
        },
        Protocol::Udp => (
            false,
            timeout(left, ask(at.to_string(), target.bytes)).await,
        ),
    };
    let bytes = match answer {
        Err(_) if is_connected => return none(Outcome::Stalled, String::new()),
        Err(_) => return none(Outcome::Silent, String::new()),
        Ok(Err(error)) => return none(outcome(&error), error.to_string()),
        Ok(Ok(bytes)) => bytes,
    };
    match serde_json::from_slice::<Answer>(&bytes) {
        Ok(answer) if answer.bytes == target.bytes => Reply {
            outcome: Outcome::Answered,
            server: Some(answer.name),
            seen: Some(answer.client),
            error: String::new(),
        },
        Ok(answer) => none(
            Outcome::Failed,
            format!("{} of {} bytes came over", answer.bytes, target.bytes),
        ),
        Err(_) => none(Outcome::Failed, "another server answers".to_owned()),
    }
}

fn outcome(error: &io::Error) -> Outcome {
    match error.kind() {
        ErrorKind::ConnectionRefused => Outcome::Refused,
        ErrorKind::TimedOut => Outcome::Silent,
        ErrorKind::HostUnreachable | ErrorKind::NetworkUnreachable => Outcome::Unreachable,
        _ => Outcome::Failed,
    }
}

/// Sends the message, and reads the answer to its end.
async fn exchange(stream: TcpStream, bytes: usize) -> io::Result<Vec<u8>> {
    let (reader, mut writer) = stream.into_split();
    writer.write_all(&vec![QUESTION; bytes]).await?;
    writer.shutdown().await?;
    let mut answer = Vec::new();
    reader.take(LONGEST as u64).read_to_end(&mut answer).await?;
    Ok(answer)
}

/// Sends the datagram again until an answer arrives: datagrams may be lost.
async fn ask(at: String, bytes: usize) -> io::Result<Vec<u8>> {
    let any = if at.starts_with('[') {
        "[::]:0"
    } else {
        "0.0.0.0:0"
    };
    let socket = UdpSocket::bind(any).await?;
    socket.connect(&at).await?;
    let question = vec![QUESTION; bytes];
    let mut answer = vec![0; 1 << 16];
    loop {
        socket.send(&question).await?;
        if let Ok(length) = timeout(AGAIN, socket.recv(&mut answer)).await {
            answer.truncate(length?);
            return Ok(answer);
        }
    }
}
