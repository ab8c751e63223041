//! The tables at the end of a run.

use std::collections::{BTreeMap, BTreeSet};

use comfy_table::CellAlignment;
use tools::bench::{EVENTS, Key, Latency, Mode, Sample, Spread, Summary, Variant, summarise};
use tools::scale::{By, Figure, Found, What};

use crate::record::{Record, Table};

/// In the section `icount`, a nanosecond is an instruction.
const INSTRUCTIONS_A_SECOND: f64 = 1e9;

/// Returns the machine of a section's last run, its notes, and its tables.
pub(crate) fn text(section: &str, records: &[Record]) -> String {
    let run = records
        .chunk_by(|_, next| !matches!(next, Record::Machine(_)))
        .next_back()
        .unwrap_or_default();
    let mut parts: Vec<String> = run.iter().filter_map(line).collect();
    let samples: Vec<Sample> = run.iter().filter_map(sample).cloned().collect();
    if section == "icount" {
        parts.extend(instructions(&samples));
    } else {
        parts.extend(cells(&samples));
        if samples.iter().any(|sample| sample.counted.is_some()) {
            parts.push(format!("The last three of a cell: {}.", EVENTS.join(", ")));
        }
    }
    parts.extend(figures(run));
    parts.join("\n\n")
}

fn line(record: &Record) -> Option<String> {
    match record {
        Record::Machine(machine) => Some(machine.to_string()),
        Record::Run(run) => Some(format!("{run}.")),
        Record::Skipped(skipped) => Some(format!("Not run: {}: {}", skipped.variant, skipped.why)),
        Record::Note(note) => Some(note.clone()),
        Record::Table(table) => Some(drawn(table)),
        Record::Sample(_) | Record::Figure(_) => None,
    }
}

fn sample(record: &Record) -> Option<&Sample> {
    match record {
        Record::Sample(sample) => Some(sample),
        _ => None,
    }
}

/// Returns a table per number of Services and path: variants by modes.
fn cells(samples: &[Sample]) -> Vec<String> {
    let mut tables: BTreeMap<_, Grid<Variant, Mode>> = BTreeMap::new();
    for (key, cell) in summarise(samples) {
        let Key {
            services,
            path,
            mode,
            variant,
        } = key;
        let table = tables.entry((path, services)).or_default();
        table.insert((variant, mode), figure(variant, mode, &cell));
    }
    tables
        .iter()
        .map(|((path, services), grid)| titled(&format!("{path}, {services} Services"), grid))
        .collect()
}

/// Formats the rate of direct, or another variant's ratio to it; then CPU time, duration and
/// hardware events of an operation.
fn figure(variant: Variant, mode: Mode, cell: &Summary) -> String {
    let Spread { low, median, high } = cell.ratio;
    let rate = match variant {
        Variant::Direct => rate(mode, cell.rate.median),
        _ => format!("{median:.2} ({low:.2}–{high:.2})"),
    };
    let counted = cell
        .counted
        .map(|events| events.map(|count| format!("{count:.0}")).join("/"));
    [
        Some(rate),
        Some(cost(mode, cell.cpu)),
        latency(&cell.latency),
        counted,
    ]
    .into_iter()
    .flatten()
    .collect::<Vec<_>>()
    .join(" · ")
}

fn rate(mode: Mode, per_second: f64) -> String {
    match mode.unit() {
        "bytes" => format!("{:.1} Gbit/s", per_second * 8.0 / 1e9),
        _ => format!("{per_second:.0}/s"),
    }
}

/// Formats the CPU time of an operation, or of a mebibyte.
fn cost(mode: Mode, seconds: f64) -> String {
    match mode.unit() {
        "bytes" => format!("{:.0} µs/MiB", seconds * 1e6 * f64::from(1 << 20)),
        _ => format!("{:.1} µs", seconds * 1e6),
    }
}

/// Formats the median and the 99th percentile of an operation; `None` for streams.
fn latency(latency: &Latency) -> Option<String> {
    let micros = |share| latency.quantile(share).map(|time| time.as_secs_f64() * 1e6);
    Some(format!("{:.1}/{:.1} µs", micros(0.5)?, micros(0.99)?))
}

/// Returns a table per number of Services: the ratio to direct, the instructions of an operation,
/// and the spread of the rounds.
fn instructions(samples: &[Sample]) -> Vec<String> {
    let mut counts: BTreeMap<_, Vec<f64>> = BTreeMap::new();
    for sample in samples {
        let count = sample.seconds * INSTRUCTIONS_A_SECOND / sample.amount as f64;
        let cell = (sample.services, sample.variant, sample.mode);
        counts.entry(cell).or_default().push(count);
    }
    let counts: BTreeMap<_, Spread> = counts
        .into_iter()
        .filter_map(|(cell, counts)| Some((cell, Spread::of(counts)?)))
        .collect();
    let mut tables: BTreeMap<_, Grid<Variant, Mode>> = BTreeMap::new();
    for (&(services, variant, mode), count) in &counts {
        let direct = counts
            .get(&(services, Variant::Direct, mode))
            .filter(|_| variant != Variant::Direct);
        let ratio = direct.map_or_else(String::new, |direct| {
            format!("{:.2} · ", count.median / direct.median)
        });
        let apart = (count.high - count.low) / count.median * 50.0;
        let text = format!("{ratio}{:.0} ± {apart:.1} %", count.median);
        let table = tables.entry(services).or_default();
        table.insert((variant, mode), text);
    }
    tables
        .iter()
        .map(|(services, grid)| titled(&format!("Instructions, {services} Services"), grid))
        .collect()
}

/// Returns a table per size of cluster: figures by variants. A later figure replaces an earlier
/// figure.
fn figures(run: &[Record]) -> Vec<String> {
    let mut tables: BTreeMap<_, Grid<What, By>> = BTreeMap::new();
    for record in run {
        if let Record::Figure(figure) = record {
            let size = (figure.services, figure.endpoints);
            let cell = (figure.what, figure.by);
            tables.entry(size).or_default().insert(cell, found(figure));
        }
    }
    tables
        .iter()
        .map(|((services, endpoints), grid)| {
            titled(
                &format!("{services} Services × {endpoints} endpoints"),
                grid,
            )
        })
        .collect()
}

pub(crate) fn found(figure: &Figure) -> String {
    match &figure.found {
        Found::Value(value) => format!("{value:.3} {}", figure.what.unit()),
        Found::NotWithin(seconds) => format!("not within {seconds} s"),
        Found::Unfinished => "not finished".to_owned(),
        Found::Failed(why) => format!("failed: {why}"),
    }
}

/// Cells by row and column.
type Grid<Row, Column> = BTreeMap<(Row, Column), String>;

fn titled<Row, Column>(title: &str, grid: &Grid<Row, Column>) -> String
where
    Row: Clone + Ord + ToString,
    Column: Clone + Ord + ToString,
{
    let (rows, columns): (BTreeSet<_>, BTreeSet<_>) = grid.keys().cloned().unzip();
    let row = |row: &Row| {
        let cell = |column: &Column| {
            let cell = grid.get(&(row.clone(), column.clone()));
            cell.map_or("–", String::as_str).to_owned()
        };
        [vec![row.to_string()], columns.iter().map(cell).collect()].concat()
    };
    let header = [
        vec![title.to_owned()],
        columns.iter().map(Column::to_string).collect(),
    ];
    drawn(&Table {
        header: header.concat(),
        rows: rows.iter().map(row).collect(),
    })
}

fn drawn(figures: &Table) -> String {
    let mut table = comfy_table::Table::new();
    table.set_header(&figures.header).add_rows(&figures.rows);
    table
        .column_iter_mut()
        .skip(1)
        .for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tools::bench::{Path, Skipped};

    fn sample(variant: Variant, round: usize, amount: u64) -> Record {
        Record::Sample(Sample {
            services: 1,
            path: Path::Local,
            mode: Mode::TcpRr,
            variant,
            round,
            amount,
            seconds: 0.1,
            cpu_seconds: 0.1,
            latency: Latency::default(),
            counted: Some([amount * 3; 3]),
        })
    }

    #[test]
    fn packets_are_shown_as_ratios_to_direct() {
        let records = [
            sample(Variant::Direct, 0, 10_000),
            sample(Variant::Kpx, 0, 12_000),
        ];
        let text = text("data", &records);
        for part in [
            "pod → pod of the same node, tracked, 1 Services",
            "TCP request/response",
            "100000/s · 10.0 µs · 3/3/3",
            "1.20 (1.20–1.20) · 8.3 µs · 3/3/3",
        ] {
            assert!(text.contains(part), "no {part} in {text}");
        }
        assert_eq!(rate(Mode::TcpStream, 2.5e9), "20.0 Gbit/s");
        assert_eq!(cost(Mode::TcpStream, 2e-10), "210 µs/MiB");
    }

    #[test]
    fn instructions_are_those_of_one_operation() {
        let skipped = Skipped {
            variant: Variant::Kpx,
            why: "1,000 Services: no".into(),
        };
        let records = [
            Record::Note("A note.".to_owned()),
            sample(Variant::Direct, 0, 10_000),
            sample(Variant::Direct, 1, 10_000),
            sample(Variant::Ipvs, 0, 5_000),
            sample(Variant::Ipvs, 1, 4_000),
            Record::Skipped(skipped),
        ];
        let text = text("icount", &records);
        for part in [
            "A note.\n\nNot run: kpx: 1,000 Services: no",
            " 10000 ± 0.0 % ",
            " 2.25 · 22500 ± 11.1 % ",
        ] {
            assert!(text.contains(part), "no {part} in {text}");
        }
    }

    #[test]
    fn last_run_shows_what_it_found_last() {
        let machine = r#"{"machine":{"processor":"P","cpus":1,"memory_gib":4,"kernel":"K","kpx":"","iptables":"","nft":"","date":"D"}}"#;
        let machine: Record = serde_json::from_str(machine).unwrap();
        let figure = |what, found| {
            Record::Figure(Figure {
                by: By::Kpx,
                services: 9,
                endpoints: 1,
                what,
                found,
            })
        };
        let records = [
            machine.clone(),
            figure(What::Resident, Found::Value(3.0)),
            machine,
            figure(What::Programmed, Found::Unfinished),
            figure(What::Programmed, Found::Value(7.0)),
            figure(What::Restart, Found::Failed("no answer".to_owned())),
        ];
        let text = text("scale", &records);
        assert!(text.starts_with("D: P, 1 CPUs, 4 GiB; Linux K"), "{text}");
        for part in ["9 Services × 1 endpoints", "7.000 ms", "failed: no answer"] {
            assert!(text.contains(part), "no {part} in {text}");
        }
        assert!(
            !text.contains("not finished") && !text.contains("3.000"),
            "{text}"
        );
    }
}
