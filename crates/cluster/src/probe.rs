//! `kpx probe`: the servers and clients of a connectivity test, inside its pods. kpx's image
//! contains only this program.

mod dial;
mod forward;
mod serve;

use std::fmt;
use std::process::ExitCode;
use std::str::FromStr;

use anyhow::{Context, Error, Result, bail, ensure};
use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};

pub(crate) use dial::{Outcome, Reply, dial_all};
pub(crate) use forward::Forwarded;

/// Maximum size of a message in bytes.
const LONGEST: usize = 256 << 10;
/// Minimum size of a message in bytes: an answer has the size of its question, and the answer's
/// text must fit.
const SHORTEST: usize = 200;
/// The first byte of a question. No answer begins with it, so a server never answers an answer.
const QUESTION: u8 = b'k';

/// Serve or send packets for a connectivity test. The test runs this in its pods.
#[derive(Args, Debug)]
pub struct ProbeArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Serve(serve::ServeArgs),
    Dial(dial::DialArgs),
    Forward(forward::ForwardArgs),
}

/// Serves until it is stopped, or sends packets and prints the replies.
pub async fn probe(args: ProbeArgs) -> Result<ExitCode> {
    match args.command {
        Command::Serve(args) => serve::serve(args).await,
        Command::Dial(args) => dial::dial(args).await,
        Command::Forward(args) => forward::forward(args).await,
    }
}

/// The answer of a server, padded to the length of the client's message.
#[derive(Debug, Deserialize, Serialize)]
struct Answer {
    name: String,
    /// The client's address as the server sees it.
    client: std::net::IpAddr,
    bytes: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Protocol {
    Tcp,
    Udp,
}

impl Protocol {
    pub(crate) const ALL: [Self; 2] = [Self::Tcp, Self::Udp];
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        })
    }
}

/// A destination in the notation `PROTOCOL/HOST:PORT/BYTES/TIMES`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    pub(crate) protocol: Protocol,
    /// An address or a name, with a port.
    pub(crate) to: String,
    /// The length of the message in bytes.
    pub(crate) bytes: usize,
    /// The number of connections, made in sequence.
    pub(crate) times: usize,
}

impl Target {
    pub(crate) fn new(protocol: Protocol, to: impl ToString) -> Self {
        Self {
            protocol,
            to: to.to_string(),
            bytes: SHORTEST,
            times: 1,
        }
    }

    pub(crate) fn bytes(self, bytes: usize) -> Self {
        Self { bytes, ..self }
    }

    /// Returns the address; `None` for a name.
    pub(crate) fn ip(&self) -> Option<std::net::IpAddr> {
        self.to.parse().ok().map(|at: std::net::SocketAddr| at.ip())
    }

    pub(crate) fn times(self, times: usize) -> Self {
        Self { times, ..self }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}/{}/{}/{}",
            self.protocol, self.to, self.bytes, self.times
        )
    }
}

impl FromStr for Target {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parts: Vec<_> = text.split('/').collect();
        let [protocol, to, bytes, times] = parts[..] else {
            bail!("{text:?} is not PROTOCOL/HOST:PORT/BYTES/TIMES")
        };
        let protocol = Protocol::ALL
            .into_iter()
            .find(|known| known.to_string() == protocol);
        let protocol = protocol.with_context(|| format!("{text:?} has an unknown protocol"))?;
        let bytes = bytes.parse().context("read BYTES")?;
        let times = times.parse().context("read TIMES")?;
        ensure!(
            (SHORTEST..=LONGEST).contains(&bytes),
            "BYTES are {SHORTEST} to {LONGEST}"
        );
        ensure!((1..=1_000).contains(&times), "TIMES are 1 to 1000");
        Ok(Self {
            protocol,
            to: to.to_owned(),
            bytes,
            times,
        })
    }
}

#[cfg(test)]
mod tests;
