//! Measures the ways by which a host outside of the cluster reaches a Service over TCP, side by
//! side in one lab.
//!
//! Every figure is a ratio to [`Way::Route`] of the same round, because a machine is never as fast
//! as a moment ago.

mod fixture;
mod kubectl;
mod server;
mod summary;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use testbed::lab::{Lab, Layout};

use self::fixture::Fixture;
pub use self::summary::{Summary, summarise};
use crate::bench::{Latency, Mode, Order, Work};

/// The way of a connection from the host to the pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// kpx sends packets to the pod's address, for which the host has a route.
    Route,
    /// kpx sends packets to a node port.
    NodePort,
    /// kpx leads the connection through the API server.
    Tunnel,
    /// The host dials a port at which `kubectl port-forward` listens. kpx has no part in it.
    Kubectl,
}

impl Way {
    pub const ALL: [Self; 4] = [Self::Route, Self::NodePort, Self::Tunnel, Self::Kubectl];
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Route => "kpx, by a route to the pods",
            Self::NodePort => "kpx, by a node port",
            Self::Tunnel => "kpx with `--tunnel tcp`",
            Self::Kubectl => "`kubectl port-forward`",
        })
    }
}

/// The actions that are measured.
pub const MODES: [Mode; 3] = [Mode::TcpCrr, Mode::TcpRr, Mode::TcpStream];

#[derive(Clone, Debug)]
pub struct Options {
    pub rounds: usize,
    /// How long each way is measured in each mode of a round.
    pub slice: Duration,
    /// Decides in which order ways take their turns.
    pub seed: u64,
    pub kubectl: PathBuf,
}

/// The yield of one slice of time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    pub way: Way,
    pub mode: Mode,
    pub round: usize,
    /// In the mode's unit. Of a stream, the bytes that the pod has read.
    pub amount: u64,
    pub seconds: f64,
    /// The time of all CPUs.
    pub cpu_seconds: f64,
    /// The times of single operations; empty for streams.
    pub latency: Latency,
}

impl Sample {
    fn of((way, mode, round): (Way, Mode, usize), work: Work) -> Self {
        let Work {
            amount,
            time,
            cpu,
            latency,
            ..
        } = work;
        let latency = if mode == Mode::TcpStream {
            Latency::default()
        } else {
            latency
        };
        Self {
            way,
            mode,
            round,
            amount,
            seconds: time.as_secs_f64(),
            cpu_seconds: cpu.as_secs_f64(),
            latency,
        }
    }
}

/// A piece of what a run has to tell.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Found {
    Sample(Sample),
    /// The version of the kubectl that is measured.
    Kubectl(String),
    /// A way that could not be measured.
    Skipped {
        way: Way,
        why: String,
    },
}

impl Found {
    /// Returns the sample, if this is one.
    pub const fn sample(&self) -> Option<&Sample> {
        if let Self::Sample(sample) = self {
            Some(sample)
        } else {
            None
        }
    }
}

/// Measures all ways in all modes, and tells each piece as it is found.
pub fn run(options: &Options, tell: &mut impl FnMut(Found) -> Result<()>) -> Result<()> {
    let lab = Lab::start(Layout::Routed)?;
    let fixture = Fixture::start(&lab)?;
    let kubectl = match kubectl::version(&fixture, &options.kubectl) {
        Ok(version) => {
            tell(Found::Kubectl(version))?;
            Some(kubectl::Forward::start(&fixture, &options.kubectl)?)
        }
        Err(error) => {
            let why = format!("{}: {}", options.kubectl.display(), error.root_cause());
            tell(Found::Skipped {
                way: Way::Kubectl,
                why,
            })?;
            None
        }
    };
    let mut clients = fixture.clients(kubectl.as_ref())?;
    let mut order = Order::new(options.seed);
    let turns: Vec<usize> = (0..clients.len()).collect();
    for round in 0..options.rounds {
        for mode in MODES {
            for &turn in order.shuffled(&turns) {
                let client = &mut clients[turn];
                let work = client.run(mode, options.slice);
                let work =
                    work.with_context(|| format!("{mode}, {}, round {round}", client.way))?;
                tell(Found::Sample(Sample::of((client.way, mode, round), work)))?;
            }
        }
    }
    fixture.check(&clients, kubectl.as_ref())
}
