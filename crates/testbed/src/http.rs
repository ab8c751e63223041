//! Queries HTTP servers: one request, connection and answer.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::agent::DEADLINE;
use crate::exposition::{self, Exposition};
use crate::netns::NetNs;

/// The default addresses of an agent's health check and metrics.
pub const HEALTH: &str = "127.0.0.1:10256";
pub const METRICS: &str = "127.0.0.1:10249";

/// An HTTP answer.
#[derive(Debug)]
pub struct Answer {
    pub code: u16,
    /// The headers as sent, without `Date`.
    pub headers: Vec<String>,
    pub body: String,
}

/// Sends a request to `at`, an address and a port, from inside a namespace.
pub fn ask(ns: &NetNs, at: &str, method: &str, path: &str) -> Result<Answer> {
    let to: SocketAddr = at.parse().with_context(|| at.to_owned())?;
    let stream = ns
        .run(|| TcpStream::connect_timeout(&to, DEADLINE))
        .with_context(|| at.to_owned())?;
    stream.set_read_timeout(Some(DEADLINE))?;
    converse(stream, method, path).with_context(|| format!("{method} {at}{path}"))
}

/// Gets a path at a Unix socket.
pub fn get_at_socket(socket: &Path, path: &str) -> Result<Answer> {
    let stream = UnixStream::connect(socket).with_context(|| socket.display().to_string())?;
    stream.set_read_timeout(Some(DEADLINE))?;
    converse(stream, "GET", path).with_context(|| format!("GET {path} of {}", socket.display()))
}

/// Returns the metrics of the agent in a namespace.
pub fn scrape(ns: &NetNs) -> Result<Exposition> {
    let answer = ask(ns, METRICS, "GET", "/metrics")?;
    ensure!(answer.code == 200, "{answer:?}");
    exposition::parse(&answer.body)
}

fn converse(mut stream: impl Read + Write, method: &str, path: &str) -> Result<Answer> {
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer
        .split_once("\r\n\r\n")
        .with_context(|| format!("no end of the header: {answer}"))?;
    let mut lines = head.split("\r\n");
    let status = lines
        .next()
        .and_then(|line| line.split(' ').nth(1))
        .context("no status line")?;
    let headers = lines
        .filter(|line| !line.starts_with("Date: "))
        .map(str::to_owned)
        .collect();
    Ok(Answer {
        code: status.parse()?,
        headers,
        body: body.to_owned(),
    })
}
