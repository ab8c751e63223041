//! Gaps in the arrivals of a stream, and the gaps that other streams do not share.
//!
//! On a busy machine every stream pauses now and then, because a thread that sends, answers or
//! forwards did not run. Streams on the same threads pause together. A gap of only some of them has
//! another cause.

use std::cmp::Reverse;
use std::time::Duration;

/// The time between two packets, since the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    pub start: Duration,
    pub end: Duration,
}

impl Gap {
    pub fn length(&self) -> Duration {
        self.end.saturating_sub(self.start)
    }
}

/// The gaps of one stream, in order.
#[derive(Clone, Debug)]
pub struct Gaps {
    /// The interval of packets as sent.
    pub tick: Duration,
    last: Option<Duration>,
    /// The gaps longer than one and a half ticks.
    long: Vec<Gap>,
}

impl Gaps {
    pub fn new(tick: Duration) -> Self {
        Self {
            tick,
            last: None,
            long: Vec::new(),
        }
    }

    /// Records a packet's arrival, in time since the epoch.
    pub fn arrived(&mut self, at: Duration) {
        if let Some(start) = self.last
            && at.saturating_sub(start) > self.tick * 3 / 2
        {
            self.long.push(Gap { start, end: at });
        }
        self.last = self.last.max(Some(at));
    }

    pub fn largest(&self) -> Duration {
        self.long.iter().map(Gap::length).max().unwrap_or(self.tick)
    }

    /// Returns the excess of this stream's gaps over those of every other stream at the same time,
    /// largest first. Other streams always have gaps of a tick.
    pub fn excess<'a>(
        &self,
        others: impl Iterator<Item = &'a Self> + Clone,
    ) -> Vec<(Duration, Gap)> {
        let beyond = |gap: &Gap| {
            let shared = others
                .clone()
                .map(|other| other.longest_during(gap))
                .max()
                .unwrap_or(self.tick);
            (gap.length().saturating_sub(shared.max(self.tick)), *gap)
        };
        let mut all: Vec<_> = self.long.iter().map(beyond).collect();
        all.sort_by_key(|(excess, _)| Reverse(*excess));
        all
    }

    /// Returns the longest gap that overlaps `gap`.
    fn longest_during(&self, gap: &Gap) -> Duration {
        let first = self.long.partition_point(|own| own.end < gap.start);
        let overlapping = self.long[first..]
            .iter()
            .take_while(|own| own.start <= gap.end);
        overlapping.map(Gap::length).max().unwrap_or(self.tick)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn arrivals(at_ms: &[u32]) -> Gaps {
        let mut gaps = Gaps::new(MS);
        at_ms.iter().for_each(|at| gaps.arrived(MS * *at));
        gaps
    }

    fn excess(ours: &[u32], others: &[&[u32]]) -> Vec<u128> {
        let others: Vec<Gaps> = others.iter().map(|other| arrivals(other)).collect();
        arrivals(ours)
            .excess(others.iter())
            .iter()
            .map(|(excess, _)| excess.as_millis())
            .collect()
    }

    #[test]
    fn gap_of_all_streams_counts_for_none() {
        assert_eq!(excess(&[1, 2, 9, 10], &[&[1, 2, 9, 10]]), [0]);
        // The machine paused between the two packets of a tick.
        assert_eq!(excess(&[1, 2, 9, 10], &[&[1, 8, 9, 10]]), [0]);
    }

    #[test]
    fn gap_of_one_stream_counts_for_it() {
        assert_eq!(
            excess(&[1, 2, 9, 10], &[&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]),
            [6]
        );
        assert_eq!(excess(&[1, 2, 9, 10], &[&[1, 2, 5, 6, 7, 8, 9, 10]]), [4]);
        assert_eq!(
            excess(&[1, 2, 9, 10], &[&[1, 2, 5, 6, 7, 8, 9, 10], &[2, 8]]),
            [1]
        );
        // At another time.
        assert_eq!(
            excess(
                &[1, 2, 9, 10, 11, 12, 13],
                &[&[2, 3, 4, 5, 6, 7, 8, 9, 10, 20]]
            ),
            [6]
        );
    }

    #[test]
    fn largest_gap_counts_beside_smaller_ones() {
        assert_eq!(arrivals(&[1, 2, 9, 10, 14]).largest(), MS * 7);
        assert_eq!(arrivals(&[1, 2, 3]).largest(), MS);
        assert_eq!(arrivals(&[]).largest(), MS);
    }
}
