//! The summary of all rounds.

use std::collections::BTreeMap;

use super::{Sample, Way};
use crate::bench::{Latency, Mode, Spread};

#[derive(Clone, Debug)]
pub struct Summary {
    /// Per second, in the mode's unit.
    pub rate: Spread,
    /// The ratio of the rate to that of [`Way::Route`] in the same round.
    pub ratio: Spread,
    /// The times of single operations, all rounds together; empty for streams.
    pub latency: Latency,
}

/// Returns what all rounds say of each way and mode. One without a round of [`Way::Route`] has no
/// ratio and is left out.
pub fn summarise(samples: &[Sample]) -> BTreeMap<(Way, Mode), Summary> {
    let rate = |sample: &Sample| sample.amount as f64 / sample.seconds;
    let by_route = |sample: &&Sample| sample.way == Way::Route;
    let base: BTreeMap<_, _> = samples
        .iter()
        .filter(by_route)
        .map(|sample| ((sample.mode, sample.round), rate(sample)))
        .collect();
    let mut cells: BTreeMap<_, Vec<&Sample>> = BTreeMap::new();
    for sample in samples {
        cells
            .entry((sample.way, sample.mode))
            .or_default()
            .push(sample);
    }
    let summary = |samples: &[&Sample]| {
        let ratio = |sample: &&Sample| Some(rate(sample) / base.get(&(sample.mode, sample.round))?);
        let mut latency = Latency::default();
        samples
            .iter()
            .for_each(|sample| latency.add(&sample.latency));
        let rates = samples.iter().map(|sample| rate(sample)).collect();
        Some(Summary {
            rate: Spread::of(rates)?,
            ratio: Spread::of(samples.iter().filter_map(ratio).collect())?,
            latency,
        })
    };
    cells
        .into_iter()
        .filter_map(|(key, samples)| Some((key, summary(&samples)?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_to_the_route_of_the_same_round() {
        let sample = |way, round, amount| Sample {
            way,
            mode: Mode::TcpCrr,
            round,
            amount,
            seconds: 0.5,
            cpu_seconds: 0.5,
            latency: Latency::default(),
        };
        let samples = [
            sample(Way::Route, 0, 100),
            sample(Way::Tunnel, 0, 25),
            sample(Way::Route, 1, 400),
            sample(Way::Tunnel, 1, 50),
            sample(Way::Kubectl, 2, 5),
        ];
        let cells = summarise(&samples);
        let tunnel = &cells[&(Way::Tunnel, Mode::TcpCrr)];
        assert_eq!((tunnel.rate.median, tunnel.ratio.median), (75.0, 0.1875));
        assert_eq!(
            cells[&(Way::Route, Mode::TcpCrr)].ratio,
            Spread {
                low: 1.0,
                median: 1.0,
                high: 1.0
            }
        );
        assert!(!cells.contains_key(&(Way::Kubectl, Mode::TcpCrr)));
    }
}
