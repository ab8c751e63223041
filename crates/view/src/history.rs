//! The history: the kept points, and the form of `/history`, which holds the last minutes of the
//! busiest Services.
//!
//! The form is stable.

mod chosen;
mod kept;

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

pub use chosen::Chosen;
pub use kept::{Failures, Kept, Traffic};

/// The time between two points.
pub const STEP: Duration = Duration::from_secs(10);

/// The last minutes, in equidistant points. Each array of a series has one element per point,
/// oldest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HistoryView {
    /// The seconds between two points.
    pub step_secs: u64,
    /// The time of the last point; `None` before the first point.
    pub end: Option<Timestamp>,
    pub points: usize,
    /// The maximum number of Services with a series; the busiest Services have one.
    pub limit: usize,
    /// The number of Services without a series that had traffic in the last step.
    pub left_out: usize,
    /// The sum of all Services, with and without a series.
    pub total: SeriesView,
    /// The Services with a series, by namespace and name.
    pub services: Vec<ServiceSeriesView>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceSeriesView {
    pub namespace: String,
    pub name: String,
    #[serde(flatten)]
    pub series: SeriesView,
    /// The UDP ports with traffic, if they are eight at the most.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub udp_ports: Vec<UdpPortView>,
}

/// The UDP flows to a port per second, as means of the history's time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct UdpPortView {
    pub port: u16,
    pub answered: f64,
    pub unanswered: f64,
}

/// The values of each point; `None` in a gap.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SeriesView {
    /// The flows opened per second.
    pub opened: Vec<Option<f64>>,
    /// The packets of both directions per second; `bytes` likewise.
    pub packets: Vec<Option<f64>>,
    pub bytes: Vec<Option<f64>>,
    /// The packets per second that would have opened a flow and were dropped.
    pub dropped: Vec<Option<f64>>,
    /// The packets per second that would have opened a flow and were rejected: the client got an
    /// answer.
    pub rejected: Vec<Option<f64>>,
    /// The open flows at the end of the step.
    pub flows: Vec<Option<f64>>,
    /// The TCP connections per second that a backend answered.
    pub connects: Vec<Option<f64>>,
    /// The median connect time of the step in seconds, from the first SYN to its answer; `None` if
    /// no connection was answered.
    pub connect_p50: Vec<Option<f64>>,
    /// The 99th percentile of the connect times, in seconds.
    pub connect_p99: Vec<Option<f64>>,
    /// The TCP connections and UDP datagrams per second that the backend refused or left unanswered.
    /// Unanswered UDP counts where a backend has answered UDP, and for DNS.
    pub failed: Vec<Option<f64>>,
    /// The SYNs per second that clients retransmitted before an answer.
    pub retransmitted: Vec<Option<f64>>,
    /// The UDP flows per second that a backend answered.
    #[serde(default)]
    pub udp_answered: Vec<Option<f64>>,
    /// The UDP flows per second that ended without an answer.
    #[serde(default)]
    pub udp_unanswered: Vec<Option<f64>>,
}

/// Returns the first `places` items of a sorted list. What a namespace has beyond a quarter of the
/// places comes behind the items of all other namespaces.
pub fn shared<T>(sorted: Vec<T>, places: usize, namespace: impl Fn(&T) -> &str) -> Vec<T> {
    let mut taken = BTreeMap::<_, usize>::new();
    let within: Vec<_> = sorted
        .iter()
        .map(|item| {
            let taken = taken.entry(namespace(item)).or_default();
            *taken += 1;
            *taken <= places / 4
        })
        .collect();
    let (first, rest): (Vec<_>, Vec<_>) = sorted
        .into_iter()
        .zip(within)
        .partition(|(_, within)| *within);
    let items = first.into_iter().chain(rest).map(|(item, _)| item);
    items.take(places).collect()
}
