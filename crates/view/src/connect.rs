//! The view of TCP connections: connect times and failures.

use proxy_common::connect::{Connects, UNIT_NANOS, bound_units};
use serde::{Deserialize, Serialize};

/// The TCP connections to a Service port or a backend, as this node saw them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConnectView {
    /// The number of connections that a backend answered.
    pub connects: u64,
    /// The sum of seconds from the client's first SYN to the backend's SYN with ACK.
    pub connect_secs: f64,
    /// The median of the connect times, in seconds; `None` if `connects` is 0.
    pub connect_p50: Option<f64>,
    /// The 99th percentile of the connect times, in seconds.
    pub connect_p99: Option<f64>,
    /// The number of connections that the backend refused by a RST or left unanswered.
    pub failed: u64,
    /// The part of `failed` that the backend refused. For UDP: datagrams of unanswered flows that
    /// the backend refused by an ICMP "port unreachable".
    #[serde(default)]
    pub refused: u64,
    /// The part of `failed` that the backend left unanswered.
    #[serde(default)]
    pub unanswered: u64,
    /// The number of SYNs that clients retransmitted before an answer.
    pub retransmitted: u64,
    /// The answered connections by connect time. The first bucket ends at 66 µs, each further
    /// bucket at twice the end of its predecessor. Empty buckets at the end are omitted.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub buckets: Vec<u64>,
}

impl From<&Connects> for ConnectView {
    fn from(connects: &Connects) -> Self {
        Self {
            connects: connects.answered(),
            connect_secs: secs(connects.units),
            connect_p50: quantile(connects, 0.5),
            connect_p99: quantile(connects, 0.99),
            failed: connects.failed(),
            refused: connects.refused,
            unanswered: connects.unanswered,
            retransmitted: connects.retransmitted,
            buckets: without_empty_end(connects.buckets.to_vec()),
        }
    }
}

impl ConnectView {
    /// Returns the counts since `before`. A count that decreased, because the agent restarted, is
    /// 0.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let old = |bucket: usize| before.buckets.get(bucket).copied().unwrap_or(0);
        let buckets = self
            .buckets
            .iter()
            .enumerate()
            .map(|(bucket, now)| now.saturating_sub(old(bucket)));
        Self {
            connects: self.connects.saturating_sub(before.connects),
            connect_secs: (self.connect_secs - before.connect_secs).max(0.0),
            failed: self.failed.saturating_sub(before.failed),
            refused: self.refused.saturating_sub(before.refused),
            unanswered: self.unanswered.saturating_sub(before.unanswered),
            retransmitted: self.retransmitted.saturating_sub(before.retransmitted),
            buckets: without_empty_end(buckets.collect()),
            ..Self::default()
        }
        .with_quantiles()
    }

    /// Returns the sum of both.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        let bucket = |of: &Self, at: usize| of.buckets.get(at).copied().unwrap_or(0);
        let buckets = 0..self.buckets.len().max(other.buckets.len());
        Self {
            connects: self.connects.saturating_add(other.connects),
            connect_secs: self.connect_secs + other.connect_secs,
            failed: self.failed.saturating_add(other.failed),
            refused: self.refused.saturating_add(other.refused),
            unanswered: self.unanswered.saturating_add(other.unanswered),
            retransmitted: self.retransmitted.saturating_add(other.retransmitted),
            buckets: buckets
                .map(|at| bucket(self, at).saturating_add(bucket(other, at)))
                .collect(),
            ..Self::default()
        }
        .with_quantiles()
    }

    fn with_quantiles(self) -> Self {
        Self {
            connect_p50: quantile_of(&self.buckets, 0.5),
            connect_p99: quantile_of(&self.buckets, 0.99),
            ..self
        }
    }
}

fn without_empty_end(mut buckets: Vec<u64>) -> Vec<u64> {
    buckets.truncate(
        buckets
            .iter()
            .rposition(|bucket| *bucket > 0)
            .map_or(0, |last| last + 1),
    );
    buckets
}

/// Converts the maps' time units (`UNIT_NANOS`) to seconds.
#[expect(clippy::cast_precision_loss, reason = "no more precise than a clock")]
pub fn secs(units: u64) -> f64 {
    units as f64 * UNIT_NANOS as f64 / 1e9
}

/// Returns the upper bound of each bucket in seconds, except the last bucket, which is unbounded.
pub fn bucket_bounds() -> impl Iterator<Item = f64> {
    (0..).map_while(bound_units).map(secs)
}

/// Returns the quantile `part` (0 to 1) of the connect times in seconds, with times spread evenly
/// within a bucket; in the last bucket, its lower bound.
pub fn quantile(connects: &Connects, part: f64) -> Option<f64> {
    quantile_of(&connects.buckets, part)
}

#[expect(clippy::cast_precision_loss, reason = "an estimate")]
fn quantile_of(buckets: &[u64], part: f64) -> Option<f64> {
    let all = buckets
        .iter()
        .fold(0_u64, |sum, bucket| sum.wrapping_add(*bucket));
    let rank = part * all as f64;
    let mut below = 0.0;
    let mut from = 0.0;
    for (bucket, to) in buckets.iter().zip(bucket_bounds()) {
        let inside = *bucket as f64;
        if inside > 0.0 && below + inside >= rank {
            return Some(from + (to - from) * (rank - below) / inside);
        }
        (below, from) = (below + inside, to);
    }
    (all > 0).then_some(from)
}

/// Formats a time in two digits and a unit; empty for `None`.
pub fn latency(secs: Option<f64>) -> String {
    let Some(secs) = secs else {
        return String::new();
    };
    let (value, unit) = if secs < 0.000_995 {
        (secs * 1e6, "us")
    } else if secs < 0.995 {
        (secs * 1e3, "ms")
    } else {
        (secs, "s")
    };
    if value < 9.95 {
        format!("{value:.1}{unit}")
    } else {
        format!("{value:.0}{unit}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_two_digits_and_unit() {
        let shown = [0.000_033, 0.000_999, 0.004_2, 0.051, 1.07].map(|secs| latency(Some(secs)));
        assert_eq!(shown, ["33us", "1.0ms", "4.2ms", "51ms", "1.1s"]);
        assert_eq!(latency(None), "");
    }

    #[test]
    fn quantile_lies_in_its_bucket() {
        let mut connects = Connects::NOTHING;
        assert_eq!(quantile(&connects, 0.5), None);
        (connects.buckets[0], connects.buckets[4]) = (98, 2);
        let bounds: Vec<_> = bucket_bounds().collect();
        let p50 = quantile(&connects, 0.5).unwrap();
        assert!(p50 > 0.0 && p50 < bounds[0], "{p50}");
        let p99 = quantile(&connects, 0.99).unwrap();
        assert!(p99 > bounds[3] && p99 < bounds[4], "{p99}");
        let before = ConnectView::from(&connects);
        connects.buckets[4] += 100;
        let since = ConnectView::from(&connects).since(&before);
        assert!(
            since.connect_p50.is_some_and(|p50| p50 > bounds[3]),
            "{since:?}"
        );
        assert_eq!(
            (since.buckets.len(), before.since(&before).connect_p50),
            (5, None)
        );
        assert_eq!(
            before.plus(&since),
            ConnectView::from(&connects),
            "what was before and what came since"
        );
        connects.buckets[4] -= 100;
        connects.buckets[17] = 1_000;
        assert_eq!(quantile(&connects, 0.99), bounds.last().copied());
        assert!((4.2..4.4).contains(bounds.last().unwrap()), "{bounds:?}");
    }
}
