//! The history: what is kept of it, and the form of `/history`, which has the last minutes of the
//! busiest Services.
//!
//! The form is stable: fields may be added, and no field is renamed or removed.

mod chosen;
mod kept;

use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

pub use chosen::Chosen;
pub use kept::{Kept, Traffic};

/// The time between two points.
pub const STEP: Duration = Duration::from_secs(10);

/// The last minutes in points of equal distance. Each array of a series has one element a point,
/// the oldest first.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HistoryView {
    /// The seconds between two points.
    pub step_secs: u64,
    /// The time of the last point; None before the first one.
    pub end: Option<Timestamp>,
    /// The number of points.
    pub points: usize,
    /// The number of Services that are kept at most: the busiest.
    pub limit: usize,
    /// The number of Services with traffic in the last step that are not kept.
    pub left_out: usize,
    /// The sum over all Services, with those that are not kept.
    pub total: SeriesView,
    /// The Services with traffic in this time, by namespace and name.
    pub services: Vec<ServiceSeriesView>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceSeriesView {
    pub namespace: String,
    pub name: String,
    #[serde(flatten)]
    pub series: SeriesView,
}

/// The numbers of each point; None where nothing is known of a step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SeriesView {
    /// The flows opened per second.
    pub opened: Vec<Option<f64>>,
    /// The packets of both directions per second, and their bytes.
    pub packets: Vec<Option<f64>>,
    pub bytes: Vec<Option<f64>>,
    /// The packets per second that would have opened a flow and were dropped.
    pub dropped: Vec<Option<f64>>,
    /// The packets per second that would have opened a flow and were rejected, with an answer to
    /// the client.
    pub rejected: Vec<Option<f64>>,
    /// The open flows at the end of the step.
    pub flows: Vec<Option<f64>>,
    /// The TCP connections per second that a backend answered.
    pub connects: Vec<Option<f64>>,
    /// The seconds from the first SYN to its answer: half of the step's connections took no longer;
    /// None without connections.
    pub connect_p50: Vec<Option<f64>>,
    /// The same of 99 in 100 connections.
    pub connect_p99: Vec<Option<f64>>,
    /// The TCP connections per second that the backend refused, or never answered.
    pub failed: Vec<Option<f64>>,
    /// The SYNs per second that a client sent again before it had an answer.
    pub retransmitted: Vec<Option<f64>>,
}
