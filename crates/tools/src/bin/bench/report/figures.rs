//! Tables in Markdown.

use std::collections::BTreeSet;
use std::fmt::Write;

use tools::bench::{EVENTS, Key, Latency, MANY_SERVICES, Mode, Path, Spread, Summary, Variant};

use super::Cells;
use crate::record::Record;

pub(super) fn machine(records: &[Record]) -> String {
    let machines = records.iter().filter_map(|record| match record {
        Record::Machine(machine) => Some(machine.to_string()),
        Record::Run(run) => Some(format!("{run}.")),
        _ => None,
    });
    machines.collect::<Vec<_>>().join("\n\n")
}

pub(super) fn skipped(records: &[Record]) -> String {
    let skipped = records.iter().filter_map(|record| match record {
        Record::Skipped(skipped) => Some(format!("- {}: {}", skipped.variant, skipped.why)),
        _ => None,
    });
    let lines: Vec<_> = skipped.collect();
    if lines.is_empty() {
        "Nothing was left out.".to_owned()
    } else {
        lines.join("\n")
    }
}

/// Returns a link to each drawing, by title and file.
pub(super) fn drawings(drawn: &[(String, String)]) -> String {
    let links = drawn
        .iter()
        .map(|(title, file)| format!("- [{title}](performance/{file})"));
    links.collect::<Vec<_>>().join("\n")
}

/// Returns the tables that a section made by itself.
pub(super) fn tables(records: &[Record]) -> String {
    let table = |record: &Record| match record {
        Record::Machine(machine) => Some(machine.to_string()),
        Record::Table(table) => Some(markdown(&table.header, &table.rows)),
        _ => None,
    };
    records
        .iter()
        .filter_map(table)
        .collect::<Vec<_>>()
        .join("\n\n")
}

/// A table for each path and number of Services: in each mode the ratio to direct, and what one
/// costs.
pub(super) fn cells(cells: &Cells) -> String {
    let tables: BTreeSet<_> = cells.keys().map(|key| (key.path, key.services)).collect();
    let mut text = String::new();
    for (path, services) in tables {
        let here = |key: &&Key| key.path == path && key.services == services;
        let modes: BTreeSet<_> = cells.keys().filter(here).map(|key| key.mode).collect();
        let variants: BTreeSet<_> = cells.keys().filter(here).map(|key| key.variant).collect();
        let row = |&variant: &Variant| {
            let cell = |&mode| {
                let cell = cells.get(&Key {
                    services,
                    path,
                    mode,
                    variant,
                });
                cell.map_or_else(|| "–".to_owned(), |cell| figure(variant, mode, cell))
            };
            [variant.to_string()]
                .into_iter()
                .chain(modes.iter().map(cell))
                .collect()
        };
        let rows: Vec<Vec<String>> = variants.iter().map(row).collect();
        let header: Vec<_> = [String::new()]
            .into_iter()
            .chain(modes.iter().map(Mode::to_string))
            .collect();
        let count = grouped(services as u64);
        let (first, s) = if services == 1 {
            ("the measured Services alone".to_owned(), "")
        } else {
            (count, " Services")
        };
        let _ = write!(
            text,
            "\n### {path}, {first}{s}\n\n{}\n",
            markdown(&header, &rows)
        );
    }
    text
}

/// Writes the rate of direct, or the ratio of another variant to it; then CPU time, then the time
/// of one operation.
fn figure(variant: Variant, mode: Mode, cell: &Summary) -> String {
    let what = if variant == Variant::Direct {
        rate(mode, cell.rate.median)
    } else {
        spread(&cell.ratio)
    };
    let latency = latency(&cell.latency)
        .map(|latency| format!(" · {latency}"))
        .unwrap_or_default();
    format!("{what} · {}{latency}", cost(mode, cell.cpu))
}

/// The median and the 99th percentile of one operation; nothing for streams.
fn latency(latency: &Latency) -> Option<String> {
    let micros = |share| latency.quantile(share).map(|time| time.as_secs_f64() * 1e6);
    Some(format!("{:.1}/{:.1} µs", micros(0.5)?, micros(0.99)?))
}

/// A table of the events that the CPU counted for one operation, for each path with many Services;
/// or that it counts none.
pub(super) fn counted(cells: &Cells) -> String {
    const MODES: [Mode; 3] = [Mode::TcpCrr, Mode::TcpRr, Mode::UdpRr];
    let of = |path, variant, mode| {
        cells
            .get(&Key {
                services: MANY_SERVICES,
                path,
                mode,
                variant,
            })?
            .counted
    };
    let events = |events: [f64; 3]| {
        events
            .map(|count| grouped(count.round() as u64))
            .join(" · ")
    };
    let rows: BTreeSet<_> = cells.keys().map(|key| (key.path, key.variant)).collect();
    let row = |&(path, variant): &(Path, Variant)| {
        let figures = MODES.map(|mode| of(path, variant, mode));
        let is_counted = figures.iter().any(Option::is_some);
        let figures = figures.map(|figure| figure.map_or_else(|| "–".to_owned(), events));
        is_counted.then(|| {
            [
                vec![path.to_string(), variant.to_string()],
                figures.to_vec(),
            ]
            .concat()
        })
    };
    let rows: Vec<_> = rows.iter().filter_map(row).collect();
    let names = EVENTS.join(", ");
    if rows.is_empty() {
        return format!(
            "Not counted here ({names}): the machine has no counters, or its kernel lends none."
        );
    }
    let header = ["", ""]
        .map(str::to_owned)
        .into_iter()
        .chain(MODES.map(|mode| mode.to_string()));
    format!(
        "For one operation ({names}):\n\n{}",
        markdown(&header.collect::<Vec<_>>(), &rows)
    )
}

/// The median, and in brackets the middle half.
pub(super) fn spread(values: &Spread) -> String {
    format!(
        "**{:.2}** ({:.2}–{:.2})",
        values.median, values.low, values.high
    )
}

fn rate(mode: Mode, per_second: f64) -> String {
    match mode.unit() {
        "bytes" => format!("{:.1} Gbit/s", per_second * 8.0 / 1e9),
        _ => format!("{}/s", grouped(per_second as u64)),
    }
}

/// CPU time of one; of bytes, of a mebibyte.
pub(super) fn cost(mode: Mode, seconds: f64) -> String {
    match mode.unit() {
        "bytes" => format!("{:.0} µs/MiB", seconds * 1e6 * f64::from(1 << 20)),
        _ => format!("{:.1} µs", seconds * 1e6),
    }
}

/// With a comma after each third digit from the right.
pub(super) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let comma = |(at, digit): (usize, char)| {
        let comma = at > 0 && (digits.len() - at).is_multiple_of(3);
        comma.then_some(',').into_iter().chain([digit])
    };
    digits.chars().enumerate().flat_map(comma).collect()
}

pub(super) fn markdown(header: &[String], rows: &[Vec<String>]) -> String {
    let line = |cells: &[String]| format!("| {} |", cells.join(" | "));
    let ruler = format!("|---|{}", "---:|".repeat(header.len().saturating_sub(1)));
    [line(header), ruler]
        .into_iter()
        .chain(rows.iter().map(|row| line(row)))
        .collect::<Vec<_>>()
        .join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use tools::bench::{Sample, summarise};

    #[test]
    fn numbers_are_read_at_a_glance() {
        assert_eq!(
            [0, 999, 1_000, 50_000, 1_234_567].map(grouped),
            ["0", "999", "1,000", "50,000", "1,234,567"]
        );
        assert_eq!(rate(Mode::TcpStream, 2.5e9), "20.0 Gbit/s");
        assert_eq!(rate(Mode::TcpRr, 12_345.6), "12,345/s");
        assert_eq!(cost(Mode::TcpRr, 4.2e-5), "42.0 µs");
        assert_eq!(cost(Mode::TcpStream, 2e-10), "210 µs/MiB");
    }

    #[test]
    fn report_tells_what_is_counted() {
        let sample = |counted| Sample {
            services: MANY_SERVICES,
            path: Path::Local,
            mode: Mode::TcpRr,
            variant: Variant::Direct,
            round: 0,
            amount: 10,
            seconds: 1.0,
            cpu_seconds: 1.0,
            latency: Latency::default(),
            counted,
        };
        let text = |events| counted(&summarise(&[sample(events)]));
        assert!(text(None).starts_with("Not counted here (cycles, instructions, cache misses)"));
        let row = "| pod → pod of the same node, tracked | direct | – | 12,000 · 40,000 · 3 | – |";
        assert!(text(Some([120_000, 400_000, 30])).ends_with(row));
    }

    #[test]
    fn tables_are_markdown() {
        let rows = [vec!["kpx".to_owned(), "1".to_owned()]];
        assert_eq!(
            markdown(&["".to_owned(), "rr".to_owned()], &rows),
            "|  | rr |\n|---|---:|\n| kpx | 1 |"
        );
    }
}
