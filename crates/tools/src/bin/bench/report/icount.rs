//! Instructions, by way of a clock that counts them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use tools::bench::{Mode, Sample, Spread, Variant};

use super::figures::{grouped, machine, markdown};
use crate::record::Record;

/// The clock counts one instruction a nanosecond.
const A_SECOND: f64 = 1e9;

/// Instructions for one, in all rounds: by number of Services, variant and mode.
type Counts = BTreeMap<(usize, Variant, Mode), Spread>;

/// A table for each number of Services, then what could not be run.
pub(super) fn tables(records: &[Record]) -> String {
    let counts = counts(records);
    let mut text = machine(records);
    for services in counts
        .keys()
        .map(|(services, ..)| *services)
        .collect::<BTreeSet<_>>()
    {
        let among = if services == 1 {
            "The measured Services alone".into()
        } else {
            grouped(services as u64) + " Services"
        };
        let _ = write!(text, "\n\n{among}:\n\n{}", table(&counts, services));
    }
    for record in records {
        let _ = match record {
            Record::Skipped(skipped) => {
                write!(text, "\n\nNot run: {}: {}", skipped.variant, skipped.why)
            }
            Record::Note(note) => write!(text, "\n\n{note}"),
            _ => Ok(()),
        };
    }
    text
}

fn counts(records: &[Record]) -> Counts {
    let mut rounds: BTreeMap<_, Vec<f64>> = BTreeMap::new();
    for record in records {
        if let Record::Sample(Sample {
            services,
            variant,
            mode,
            amount,
            seconds,
            ..
        }) = record
        {
            let count = seconds * A_SECOND / *amount as f64;
            rounds
                .entry((*services, *variant, *mode))
                .or_default()
                .push(count);
        }
    }
    rounds
        .into_iter()
        .filter_map(|(cell, counts)| Some((cell, Spread::of(counts)?)))
        .collect()
}

fn table(counts: &Counts, services: usize) -> String {
    let here = counts.keys().filter(|(among, ..)| *among == services);
    let (variants, modes): (BTreeSet<_>, BTreeSet<_>) =
        here.map(|(_, variant, mode)| (*variant, *mode)).unzip();
    let cell = |variant, mode| {
        let Some(count) = counts.get(&(services, variant, mode)) else {
            return "–".to_owned();
        };
        figure(
            count,
            counts
                .get(&(services, Variant::Direct, mode))
                .filter(|_| variant != Variant::Direct),
        )
    };
    let row = |variant: &Variant| {
        [variant.to_string()]
            .into_iter()
            .chain(modes.iter().map(|mode| cell(*variant, *mode)))
            .collect()
    };
    let rows: Vec<Vec<String>> = variants.iter().map(row).collect();
    let header: Vec<_> = [String::new()]
        .into_iter()
        .chain(modes.iter().map(Mode::to_string))
        .collect();
    markdown(&header, &rows)
}

/// How many times as many as with direct; how many; how far rounds lie apart.
fn figure(count: &Spread, direct: Option<&Spread>) -> String {
    let times = direct
        .map(|direct| format!("**{:.2}** · ", count.median / direct.median))
        .unwrap_or_default();
    let apart = (count.high - count.low) / count.median * 100.0;
    format!(
        "{times}{} ± {:.1} %",
        grouped(count.median.round() as u64),
        apart / 2.0
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use tools::bench::{Latency, Path, Skipped};

    fn sample(variant: Variant, round: usize, amount: u64) -> Record {
        let path = Path::Local;
        let mode = Mode::TcpRr;
        let seconds = 0.1;
        let cpu_seconds = 0.1;
        Record::Sample(Sample {
            services: 1,
            path,
            mode,
            variant,
            round,
            amount,
            seconds,
            cpu_seconds,
            latency: Latency::default(),
            counted: None,
        })
    }

    #[test]
    fn instructions_are_told_per_turn() {
        let skipped = Skipped {
            variant: Variant::Kpx,
            why: "1,000 Services: no".into(),
        };
        let records = [
            sample(Variant::Direct, 0, 10_000),
            sample(Variant::Direct, 1, 10_000),
            sample(Variant::Ipvs, 0, 5_000),
            sample(Variant::Ipvs, 1, 4_000),
            Record::Skipped(skipped),
        ];
        let expected = "\n\nThe measured Services alone:\n\n\
             |  | TCP request/response |\n|---|---:|\n\
             | direct | 10,000 ± 0.0 % |\n| IPVS | **2.25** · 22,500 ± 11.1 % |\n\n\
             Not run: kpx: 1,000 Services: no";
        assert_eq!(tables(&records), expected);
    }

    #[test]
    fn notes_are_told() {
        assert_eq!(
            tables(&[Record::Note("Not run: no QEMU".into())]).trim(),
            "Not run: no QEMU"
        );
    }
}
