//! The view of TCP connections: how soon backends answered, and how many failed.

use proxy_common::connect::{Connects, UNIT_NANOS, bound_units};
use serde::{Deserialize, Serialize};

/// What became of the TCP connections to a Service port or a backend, as this node saw it. Connections of sockets that got their
/// backend at `connect` are not among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConnectView {
    /// The number of connections that a backend answered.
    pub connects: u64,
    /// The sum of seconds from the client's first SYN to the backend's SYN with ACK.
    pub connect_secs: f64,
    /// Half of the connections took no longer, in seconds; None without connections.
    pub connect_p50: Option<f64>,
    /// 99 in 100 connections took no longer.
    pub connect_p99: Option<f64>,
    /// The number of connections that the backend refused by a RST, or did not answer before the agent forgot them.
    pub failed: u64,
    /// The number of SYNs that a client sent again before it had an answer.
    pub retransmitted: u64,
}

impl From<&Connects> for ConnectView {
    fn from(connects: &Connects) -> Self {
        Self {
            connects: connects.answered(),
            connect_secs: secs(connects.units),
            connect_p50: quantile(connects, 0.5),
            connect_p99: quantile(connects, 0.99),
            failed: connects.failed(),
            retransmitted: connects.retransmitted,
        }
    }
}

/// Returns seconds from units.
#[expect(clippy::cast_precision_loss, reason = "no more precise than a clock")]
pub fn secs(units: u64) -> f64 {
    units as f64 * UNIT_NANOS as f64 / 1e9
}

/// Returns the upper bound of each bucket in seconds, but of the last one, which has none.
pub fn bucket_bounds() -> impl Iterator<Item = f64> {
    (0..).map_while(bound_units).map(secs)
}

/// Returns the time in seconds that this part of the connections did not exceed, as if the times in a bucket were spread evenly. Beyond
/// the last bound it returns that bound.
#[expect(clippy::cast_precision_loss, reason = "an estimate")]
pub fn quantile(connects: &Connects, part: f64) -> Option<f64> {
    let all = connects.answered();
    let rank = part * all as f64;
    let (mut below, mut from) = (0.0, 0.0);
    for (bucket, to) in connects.buckets.iter().zip(bucket_bounds()) {
        let inside = *bucket as f64;
        if inside > 0.0 && below + inside >= rank {
            return Some(from + (to - from) * (rank - below) / inside);
        }
        (below, from) = (below + inside, to);
    }
    (all > 0).then_some(from)
}

/// Formats a time in two digits and a unit; empty if there is none.
pub fn latency(secs: Option<f64>) -> String {
    let Some(secs) = secs else { return String::new() };
    let (value, unit) = if secs < 0.000_995 {
        (secs * 1e6, "us")
    } else if secs < 0.995 {
        (secs * 1e3, "ms")
    } else {
        (secs, "s")
    };
    if value < 9.95 { format!("{value:.1}{unit}") } else { format!("{value:.0}{unit}") }
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
        connects.buckets[17] = 1_000;
        assert_eq!(quantile(&connects, 0.99), bounds.last().copied());
        assert!((4.2..4.4).contains(bounds.last().unwrap()), "{bounds:?}");
    }
}
