//! Measures the cost of a large cluster for the agent: the start, the delay of a change, and the
//! memory and CPU time used meanwhile.
//!
//! kpx runs as it is shipped, in a network namespace of its own, against the tests' API server over
//! TLS in the same one. A time begins when the server has made an answer or an event. It ends when
//! the kernel's map holds the result, as read from outside. So it contains what the server needs to
//! encrypt and send it.

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

/// The time after which a start has no more effects: freed memory is returned, watches have begun.
const SETTLED: Duration = Duration::from_secs(5);

/// The size of it.
#[derive(Clone, Debug)]
pub struct Options {
    pub services: u32,
    /// The number of endpoints of each service.
    pub endpoints: u32,
    /// Changes a second, each for `duration`.
    pub rates: Vec<u32>,
    pub duration: Duration,
    /// For how long nothing happens.
    pub idle: Duration,
    /// More arguments for kpx.
    pub args: Vec<String>,
}

/// The figures found. Times in milliseconds, sizes in bytes.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub services: u32,
    pub endpoints: u32,
    pub start: Start,
    pub changes: Vec<Changes>,
    pub idle: Idle,
    /// At the end of it all.
    pub memory: Memory,
}

#[derive(Clone, Debug, Serialize)]
pub struct Start {
    /// From the start of the process until the server had made the last page or line of the last
    /// list.
    pub lists_ms: f64,
    /// From then on until all rows were in the kernel's maps.
    pub programmed_ms: f64,
    /// The CPU time of the agent, in all.
    pub cpu_ms: f64,
    /// The bytes that the server sent, with TLS's own.
    pub bytes_sent: u64,
    /// A few seconds later.
    pub memory: Memory,
}

#[derive(Clone, Debug, Serialize)]
pub struct Idle {
    pub seconds: f64,
    /// The share of one core.
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
