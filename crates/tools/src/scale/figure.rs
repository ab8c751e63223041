//! The figures: measured quantity, variant, result.

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// A figure of a cluster size.
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

/// A value in the unit of its [`What`], or the reason for a missing value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Found {
    Value(f64),
    /// It took longer than this number of seconds, and was ended.
    NotWithin(f64),
    /// The run was ended from outside before the result.
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
    /// The memory of the agent after the start. The peak follows, which is the only memory figure
    /// of a tool.
    Resident,
    PeakResident,
    /// The kernel's memory for maps or rules.
    KernelMemory,
    /// The idle agent's share of a core, with 1,000 quiet connections.
    IdleCpu,
    /// The longest wait of a packet of an open connection during the start, and of a connection
    /// without a node.
    StartWait,
    StartWaitBeside,
    /// From the event to the map, at 100 and at 1,000 changes a second.
    Change100P50,
    Change100P99,
    Change1000P50,
    Change1000P99,
    /// The CPU time per change in microseconds. The bytes per change follow.
    Change1000Cpu,
    ChangeBytes,
    ChangeWait,
    ChangeWaitBeside,
    /// From the trigger time in the EndpointSlice until it is programmed, from the agent's own
    /// metric.
    SliMean,
    /// The upper bound of the metric's bucket with the 99th percentile.
    SliP99,
    /// From an endpoint's change to the first packet of a connection that follows it.
    FirstFollowsP50,
    FirstFollowsMax,
    /// The duration of the restart, and the connections during it: new, lost, and the longest
    /// duration.
    Restart,
    RestartDialled,
    RestartLost,
    /// The reason of the first loss; missing without a loss.
    RestartLostWhy,
    RestartLongest,
    RestartWait,
    RestartWaitBeside,
    /// The handshake of a connection through a Service, and the ratios of both percentiles to those
    /// without a Service.
    FirstP50,
    FirstP99,
    FirstRatio,
    FirstRatioP99,
    /// The bytes and events that the API server sends per change, by the number of watching agents.
    Fan1,
    Fan1Events,
    Fan2,
    Fan2Events,
    Fan4,
    Fan4Events,
    /// Bytes and events of the API server for a change of a headless Service's EndpointSlice, with
    /// all agents watching.
    FanHeadless,
    FanHeadlessEvents,
    /// The same for a client that watches without a filter.
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
