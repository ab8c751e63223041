//! Summarises all rounds of a combination.

use std::collections::BTreeMap;

use super::{Latency, Mode, Path, Sample, Variant};

/// The measured combination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    pub services: usize,
    pub path: Path,
    pub mode: Mode,
    pub variant: Variant,
}

/// The median and quartiles of values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    pub low: f64,
    pub median: f64,
    pub high: f64,
}

#[derive(Clone, Debug)]
pub struct Summary {
    pub rounds: usize,
    /// Per second.
    pub rate: Spread,
    /// The ratio to the rate of [`Variant::Direct`] in the same round.
    pub ratio: Spread,
    /// CPU seconds per unit over all rounds: a single slice has few ticks.
    pub cpu: f64,
    /// The durations of operations over all rounds; empty for streams.
    pub latency: Latency,
    /// The hardware events per operation, see [`super::EVENTS`]; `None` if a slice was not counted.
    pub counted: Option<[f64; 3]>,
}

impl Spread {
    /// Returns `None` without values.
    pub fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let last = values.len().checked_sub(1)?;
        let median = f64::midpoint(values[last / 2], values[last.div_ceil(2)]);
        Some(Self {
            low: values[last / 4],
            median,
            high: values[last - last / 4],
        })
    }
}

/// Summarises the samples. Omits cells that lack a direct sample in some round: they have no ratio.
pub fn summarise(samples: &[Sample]) -> BTreeMap<Key, Summary> {
    let rate = |sample: &Sample| sample.amount as f64 / sample.seconds;
    let mut cells: BTreeMap<Key, Vec<&Sample>> = BTreeMap::new();
    let mut direct = BTreeMap::new();
    for sample in samples {
        let &Sample {
            services,
            path,
            mode,
            variant,
            round,
            ..
        } = sample;
        cells
            .entry(Key {
                services,
                path,
                mode,
                variant,
            })
            .or_default()
            .push(sample);
        if variant == Variant::Direct {
            direct.insert((services, path, mode, round), rate(sample));
        }
    }
    let summary = |key: &Key, samples: &[&Sample]| {
        let base = |round| direct.get(&(key.services, key.path, key.mode, round));
        let ratios = samples
            .iter()
            .filter_map(|sample| Some(rate(sample) / base(sample.round)?))
            .collect();
        let amount: u64 = samples.iter().map(|sample| sample.amount).sum();
        Some(Summary {
            rounds: samples.len(),
            rate: Spread::of(samples.iter().map(|sample| rate(sample)).collect())?,
            ratio: Spread::of(ratios)?,
            cpu: samples.iter().map(|sample| sample.cpu_seconds).sum::<f64>() / amount as f64,
            latency: samples.iter().fold(Latency::default(), |mut all, sample| {
                all.add(&sample.latency);
                all
            }),
            counted: counted(samples, amount),
        })
    };
    cells
        .iter()
        .filter_map(|(key, samples)| Some((*key, summary(key, samples)?)))
        .collect()
}

fn counted(samples: &[&Sample], amount: u64) -> Option<[f64; 3]> {
    let all: Vec<[u64; 3]> = samples
        .iter()
        .map(|sample| sample.counted)
        .collect::<Option<_>>()?;
    Some(
        [0, 1, 2].map(|event| {
            all.iter().map(|events| events[event]).sum::<u64>() as f64 / amount as f64
        }),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(variant: Variant, round: usize, amount: u64) -> Sample {
        let path = Path::Local;
        let mode = Mode::TcpRr;
        Sample {
            services: 1,
            path,
            mode,
            variant,
            round,
            amount,
            seconds: 0.5,
            cpu_seconds: 0.25,
            latency: Latency::default(),
            counted: None,
        }
    }

    #[test]
    fn ratios_are_of_the_same_round() {
        // The machine's speed halved, and no ratio changed.
        let speeds = [
            (Variant::Direct, [100, 50, 100]),
            (Variant::Kpx, [90, 45, 80]),
            (Variant::Nftables, [60, 30, 80]),
        ];
        let samples = speeds.map(|(variant, amounts)| {
            (0..)
                .zip(amounts)
                .map(move |(n, amount)| sample(variant, n, amount))
        });
        let cells = summarise(&samples.into_iter().flatten().collect::<Vec<_>>());
        let of = |variant| {
            &cells[&Key {
                services: 1,
                path: Path::Local,
                mode: Mode::TcpRr,
                variant,
            }]
        };
        assert_eq!(
            of(Variant::Direct).ratio,
            Spread {
                low: 1.0,
                median: 1.0,
                high: 1.0
            }
        );
        assert_eq!(
            of(Variant::Kpx).ratio,
            Spread {
                low: 0.8,
                median: 0.9,
                high: 0.9
            }
        );
        assert_eq!(
            of(Variant::Kpx).rate,
            Spread {
                low: 90.0,
                median: 160.0,
                high: 180.0
            }
        );
        assert!((of(Variant::Kpx).cpu - 0.75 / 215.0).abs() < 1e-9);
    }

    #[test]
    fn events_are_told_per_operation() {
        let counted = |counted| Sample {
            counted,
            ..sample(Variant::Direct, 0, 100)
        };
        let samples = [
            counted(Some([1_000, 2_000, 50])),
            counted(Some([3_000, 2_000, 150])),
        ];
        let of = |samples: &[Sample]| summarise(samples).into_values().next().unwrap().counted;
        assert_eq!(of(&samples), Some([20.0, 20.0, 1.0]));
        assert_eq!(of(&[samples[0].clone(), counted(None)]), None);
    }

    #[test]
    fn the_middle_of_an_even_number_lies_between() {
        assert_eq!(
            Spread::of(vec![4.0, 1.0, 2.0, 3.0]),
            Some(Spread {
                low: 1.0,
                median: 2.5,
                high: 4.0
            })
        );
        assert_eq!(Spread::of(vec![]), None);
    }
}
