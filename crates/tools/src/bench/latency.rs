//! The durations of single operations, counted in buckets.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Buckets per doubling of the time: a bucket is 3 % wide.
const PARTS: u64 = 32;
/// The doublings up to the longest time, which exceeds a client's timeout.
const DOUBLINGS: usize = 30;

/// The number of operations by the bucket of their time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Latency(BTreeMap<u16, u32>);

/// A count in progress, in preallocated memory.
pub(super) struct Recorder(Vec<u32>);

impl Recorder {
    pub(super) fn new() -> Self {
        Self(vec![0; PARTS as usize * DOUBLINGS])
    }

    pub(super) fn note(&mut self, time: Duration) {
        let last = self.0.len() - 1;
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.0[bucket(nanos).min(last)] += 1;
    }

    pub(super) fn finish(self) -> Latency {
        let counts = self
            .0
            .into_iter()
            .enumerate()
            .filter(|(_, count)| *count > 0);
        Latency(
            counts
                .filter_map(|(bucket, count)| Some((u16::try_from(bucket).ok()?, count)))
                .collect(),
        )
    }
}

impl Latency {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn add(&mut self, other: &Self) {
        for (bucket, count) in &other.0 {
            *self.0.entry(*bucket).or_default() += count;
        }
    }

    /// Returns the time within which `share` of all operations ended; `None` without operations.
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let all: u64 = self.0.values().map(|count| u64::from(*count)).sum();
        let rank = ((all as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        let found = self.0.iter().find(|(_, count)| {
            seen += u64::from(**count);
            seen >= rank
        });
        found.map(|(bucket, _)| Duration::from_nanos(middle(usize::from(*bucket))))
    }
}

/// Times below [`PARTS`] have a bucket each; above, each doubling has [`PARTS`] buckets.
fn bucket(nanos: u64) -> usize {
    let doubling = (nanos / PARTS).checked_ilog2().map_or(0, |log| log + 1);
    let within = nanos >> doubling.saturating_sub(1);
    usize::try_from(u64::from(doubling) * PARTS + within % PARTS).unwrap_or(usize::MAX)
}

fn middle(bucket: usize) -> u64 {
    let doubling = bucket as u64 / PARTS;
    let within = bucket as u64 % PARTS;
    match doubling {
        0 => within,
        _ => ((PARTS + within) << (doubling - 1)) + (1 << (doubling - 1)) / 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn latency(nanos: impl IntoIterator<Item = u64>) -> Latency {
        let mut recorder = Recorder::new();
        nanos
            .into_iter()
            .for_each(|nanos| recorder.note(Duration::from_nanos(nanos)));
        recorder.finish()
    }

    #[test]
    fn bucket_is_as_narrow_as_promised() {
        for nanos in [
            0,
            1,
            31,
            32,
            33,
            63,
            64,
            100,
            8_100,
            45_000,
            1_234_567,
            2_000_000_000,
        ] {
            let middle = middle(bucket(nanos));
            assert!(middle.abs_diff(nanos) * 60 <= nanos, "{nanos}: {middle}");
        }
        assert!((1..100_000).all(|nanos| bucket(nanos) >= bucket(nanos - 1)));
        assert!(bucket(2_000_000_000) < PARTS as usize * DOUBLINGS);
    }

    #[test]
    fn quantiles_count_operations() {
        let times = latency((1..=100).map(|n| n * 1_000));
        let micros = |share| times.quantile(share).unwrap().as_secs_f64() * 1e6;
        assert!((micros(0.5) - 50.0).abs() < 1.0, "{}", micros(0.5));
        assert!((micros(0.99) - 99.0).abs() < 2.0, "{}", micros(0.99));
        assert!((micros(1.0) - 100.0).abs() < 2.0);
        assert_eq!(latency([7]).quantile(0.99), Some(Duration::from_nanos(7)));
        assert_eq!(Latency::default().quantile(0.5), None);
    }

    #[test]
    fn rounds_add_up() {
        let mut all = latency([10, 10]);
        all.add(&latency([10, 20]));
        assert_eq!(all, latency([10, 10, 10, 20]));
        let text = serde_json::to_string(&all).unwrap();
        assert_eq!(serde_json::from_str::<Latency>(&text).unwrap(), all);
    }
}
