//! Measures the agent's cost of a large cluster: the start, the delay of a change, and the memory
//! and CPU time.
//!
//! The released kpx runs in a network namespace with the tests' API server, over TLS. A time begins
//! when the server has made an answer or an event. It ends when the kernel's map holds the result,
//! as read from outside. So it includes the server's encrypting and sending.

pub(crate) mod cluster;
pub(crate) mod events;
pub(crate) mod fixture;
pub(crate) mod process;

use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use self::cluster::Cluster;
pub use self::events::Changes;
use self::fixture::Fixture;
pub use self::process::Memory;
use self::process::Process;

/// Time after which a start has no more effects: memory is returned, watches have begun.
const SETTLED: Duration = Duration::from_secs(5);

/// The size of the cluster and of the run.
#[derive(Clone, Debug)]
pub struct Options {
    pub services: u32,
    /// The number of endpoints of each service.
    pub endpoints: u32,
    /// Rates of changes per second, each for `duration`.
    pub rates: Vec<u32>,
    pub duration: Duration,
    /// The duration of the idle phase.
    pub idle: Duration,
    /// Additional arguments for kpx.
    pub args: Vec<String>,
}

/// The results. Times in milliseconds, sizes in bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub services: u32,
    pub endpoints: u32,
    pub start: Start,
    pub changes: Vec<Changes>,
    pub idle: Idle,
    /// At the end of the run.
    pub memory: Memory,
}

#[derive(Clone, Debug, Serialize)]
pub struct Start {
    /// From the start of the process until the server has made the last page or line of the last
    /// list.
    pub lists_ms: f64,
    /// From then until all rows are in the kernel's maps.
    pub programmed_ms: f64,
    /// The total CPU time of the agent.
    pub cpu_ms: f64,
    /// The bytes that the server sent, including TLS.
    pub bytes_sent: u64,
    /// A few seconds later.
    pub memory: Memory,
}

#[derive(Clone, Debug, Serialize)]
pub struct Idle {
    pub seconds: f64,
    /// The share of a core.
    pub cpu_percent: f64,
    pub bytes_sent: u64,
}

/// Measures one agent from its start to its end. Needs root.
pub fn run(options: &Options) -> Result<Report> {
    let cluster = Cluster {
        services: options.services,
        endpoints: options.endpoints,
    };
    let fixture = Fixture::new(&cluster)?;
    let (kpx, start) = fixture.start(&cluster, &options.args, SETTLED)?;
    let rate = |rate: &u32| events::measure(&fixture, &kpx, &cluster, *rate, options.duration);
    let changes = options.rates.iter().map(rate).collect::<Result<_>>()?;
    let idle = fixture.idle(&kpx, options.idle)?;
    let memory = Process(kpx.pid()).memory()?;
    fixture::end(kpx)?;
    Ok(Report {
        services: options.services,
        endpoints: options.services * options.endpoints,
        start,
        changes,
        idle,
        memory,
    })
}
