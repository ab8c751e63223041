//! What is measured, by whom it is served, and what was found.

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// One figure of one size of cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    pub by: By,
    pub services: u32,
    /// The number of endpoints of each Service.
    pub endpoints: u32,
    pub what: What,
    pub found: Found,
}

/// The means that serve the Services.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum By {
    Kpx,
    /// kube-proxy's rules, loaded by `nft`.
    Nftables,
    IptablesLegacy,
    IptablesNft,
    /// kube-proxy itself.
    KubeProxyIptables,
    KubeProxyNftables,
}

/// A value in the unit of its [`What`], or the reason why there is none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Found {
    Value(f64),
    /// It took longer than so many seconds, and was ended.
    NotWithin(f64),
    /// The run began it, and was ended from outside before it was found.
    Unfinished,
    Failed(String),
}

/// Times are in milliseconds, sizes in MiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    /// From the start of the process until the server had made the last line of the last list.
    Lists,
    /// From the last list, or from the start of the tool, until all is programmed.
    Programmed,
    /// The CPU time until then.
    StartCpu,
    /// The bytes that the API server sent until then.
    StartBytes,
    /// The memory of the agent after the start, and at its peak; of a tool only that.
    Resident,
    PeakResident,
    /// The memory of the kernel for maps or rules.
    KernelMemory,
    /// The share of a core that the agent takes while nothing changes, with 1,000 quiet
    /// connections.
    IdleCpu,
    /// The longest wait of a packet of an open connection meanwhile, and of one that no node
    /// forwards.
    StartWait,
    StartWaitBeside,
    /// From the event to the map, at 100 and at 1,000 changes a second.
    Change100P50,
    Change100P99,
    Change1000P50,
    Change1000P99,
    /// The CPU time of one change, in microseconds, and its bytes.
    Change1000Cpu,
    ChangeBytes,
    ChangeWait,
    ChangeWaitBeside,
    /// From the trigger time in the EndpointSlice until it is in force, as the agent's own metric
    /// has it.
    SliMean,
    /// The upper bound of the metric's bucket that holds the 99th percentile.
    SliP99,
    /// From one endpoint's change to the first packet of a connection that follows it.
    FirstFollowsP50,
    FirstFollowsMax,
    /// The whole restart, and what became of connections meanwhile: a count of new ones, of lost
    /// ones, and the longest time of one.
    Restart,
    RestartDialled,
    RestartLost,
    /// The reason of the first loss; missing if there was none.
    RestartLostWhy,
    RestartLongest,
    RestartWait,
    RestartWaitBeside,
    /// The handshake of a connection through a Service, and the ratios of both percentiles to those
    /// without one.
    FirstP50,
    FirstP99,
    FirstRatio,
    FirstRatioP99,
    /// The bytes that the API server sends for one change, and the events, by the number of agents
    /// that watch.
    Fan1,
    Fan1Events,
    Fan2,
    Fan2Events,
    Fan4,
    Fan4Events,
    /// The same for a slice of a headless Service, with all agents.
    FanHeadless,
    FanHeadlessEvents,
    /// The same for one client that watches without a filter.
    FanUnfiltered,
    FanUnfilteredEvents,
    FanUnfilteredHeadless,
    FanUnfilteredHeadlessEvents,
}

impl Figure {
    pub(super) fn new(by: By, size: (u32, u32), what: What, found: Found) -> Self {
        Self {
            by,
            services: size.0,
            endpoints: size.1,
            what,
            found,
        }
    }

    pub fn value(&self) -> Option<f64> {
        match self.found {
            Found::Value(value) => Some(value),
            _ => None,
        }
    }
}

impl What {
    /// Returns the unit of a value.
    pub fn unit(self) -> &'static str {
        use What::*;
        match self {
            StartBytes | Resident | PeakResident | KernelMemory => "MiB",
            Change1000Cpu => "µs",
            ChangeBytes
            | Fan1
            | Fan2
            | Fan4
            | FanHeadless
            | FanUnfiltered
            | FanUnfilteredHeadless => "bytes",
            Fan1Events | Fan2Events | Fan4Events | FanHeadlessEvents => "events",
            FanUnfilteredEvents | FanUnfilteredHeadlessEvents => "events",
            IdleCpu => "%",
            RestartDialled | RestartLost | RestartLostWhy => "",
            FirstP50 | FirstP99 => "µs",
            FirstRatio | FirstRatioP99 => "×",
            _ => "ms",
        }
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{self:?}"))
    }
}

impl fmt::Display for By {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Kpx => "kpx",
            Self::Nftables => "nftables",
            Self::IptablesLegacy => "iptables-legacy",
            Self::IptablesNft => "iptables-nft",
            Self::KubeProxyIptables => "kube-proxy, iptables",
            Self::KubeProxyNftables => "kube-proxy, nftables",
        })
    }
}

impl Found {
    pub(super) fn mebibytes(bytes: u64) -> Self {
        Self::Value(bytes as f64 / f64::from(1 << 20))
    }
}

impl From<Duration> for Found {
    fn from(time: Duration) -> Self {
        Self::Value(time.as_secs_f64() * 1e3)
    }
}

impl From<f64> for Found {
    fn from(value: f64) -> Self {
        Self::Value(value)
    }
}
