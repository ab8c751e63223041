//! The observations, and the broken promises.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use anyhow::{Result, bail};
use comfy_table::{CellAlignment, Table, presets};

use super::fixture::Seen;
use crate::load::{Kind, Results, StreamResults};

/// TCP retransmits a lost packet after 200 ms at the earliest, and a lost SYN after a second.
const SLOW: Duration = Duration::from_millis(150);
/// The maximum delay of a packet by kpx, in addition to a round trip.
const GAP: Duration = Duration::from_millis(1);

#[derive(Clone, Debug)]
pub struct Report {
    scenario: &'static str,
    what: String,
    tables: Vec<String>,
    notes: Vec<String>,
    /// The broken promises about counts, which hold on any machine.
    broken: Vec<String>,
    /// The broken promises about times, which hold on an idle machine.
    late: Vec<String>,
}

impl Report {
    pub(super) fn new(scenario: &'static str, what: String, seen: &Seen) -> Self {
        let mut report = Self {
            scenario,
            what,
            tables: Vec::new(),
            notes: Vec::new(),
            broken: Vec::new(),
            late: Vec::new(),
        };
        report.connections(&seen.connections);
        report.streams(&seen.streams, round_trip(&seen.connections));
        report
    }

    /// Makes a report of connections of several kinds, without streams.
    pub(super) fn of(scenario: &'static str, what: String, seen: &[(&str, Results)]) -> Self {
        let tables = Vec::new();
        let notes = Vec::new();
        let broken = Vec::new();
        let late = Vec::new();
        let mut report = Self {
            scenario,
            what,
            tables,
            notes,
            broken,
            late,
        };
        for (kind, results) in seen {
            report.note(format!("{kind}:"));
            report.connections(results);
        }
        report
    }

    /// Adds a promise about counts.
    pub(super) fn promise(&mut self, kept: bool, otherwise: String) {
        if !kept {
            self.broken.push(otherwise);
        }
    }

    /// Adds a promise that a busy machine may break.
    pub(super) fn in_time(&mut self, kept: bool, otherwise: String) {
        if !kept {
            self.late.push(otherwise);
        }
    }

    /// Adds a table of the scenario.
    pub(super) fn table(&mut self, header: &[&str], lines: Vec<Vec<String>>) {
        let mut table = table(header);
        table.add_rows(lines);
        self.tables.push(table.to_string());
    }

    pub(super) fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    /// Fails if anything failed or was late.
    pub fn check(&self) -> Result<()> {
        let broken: Vec<&str> = self
            .broken
            .iter()
            .chain(&self.late)
            .map(String::as_str)
            .collect();
        if !broken.is_empty() {
            bail!("{}: {}", self.scenario, broken.join("; "));
        }
        Ok(())
    }

    /// Fails if anything failed, and ignores delays: for a busy machine.
    pub fn check_counts(&self) -> Result<()> {
        if !self.broken.is_empty() {
            bail!("{self}");
        }
        Ok(())
    }

    fn connections(&mut self, results: &Results) {
        let slow = results.slow(SLOW);
        let failures = results.failures();
        let others = failures - results.resets();
        let mut table = table(&[
            "NEW CONNECTIONS",
            "OK",
            "RESET",
            "FAILED",
            "SLOW",
            "WRONG",
            "MEDIAN",
            "99.9 %",
            "MAX",
        ]);
        let times = [0.5, 0.999, 1.0].map(|part| milliseconds(results.time(part)));
        let counts = [
            results.dialled,
            results.ok,
            results.resets(),
            others,
            slow,
            results.wrong,
        ]
        .map(|n| n.to_string());
        table.add_row(counts.into_iter().chain(times));
        self.tables.push(table.to_string());
        let rate = results.dialled as f64 / results.lasted.as_secs_f64();
        self.note(format!(
            "{rate:.0} connections a second, {} behind at worst",
            milliseconds(results.behind)
        ));
        for (reason, count) in &results.failed {
            self.note(format!("{count} × {reason}"));
        }
        self.notes.extend(results.reported.iter().cloned());
        self.promise(failures == 0, format!("{failures} connections failed"));
        self.promise(
            results.wrong == 0,
            format!("{} connections went to a wrong backend", results.wrong),
        );
        self.in_time(slow == 0, format!("{slow} connections were slow"));
    }

    /// Compares streams through kpx with control streams, and the reverse. The second comparison
    /// shows the machine's own share of the difference.
    fn streams(&mut self, streams: &[StreamResults], round_trip: Duration) {
        let columns = [
            "STREAM",
            "TO",
            "SENT",
            "LOST",
            "TWICE",
            "REORDERED",
            "ERRORS",
            "LARGEST GAP",
            "ALONE",
        ];
        let mut table = table(&columns);
        for stream in streams {
            let stood = alone(stream, streams);
            let controls = streams
                .iter()
                .filter(|s| s.kind == Kind::Control && s.protocol == stream.protocol);
            let noise = controls
                .map(|control| alone(control, streams))
                .max()
                .unwrap_or_default();
            if stream.kind == Kind::Service {
                self.judge(stream, stood, round_trip + noise);
            }
            let seen = &stream.seen;
            let kind = if stream.kind == Kind::Service {
                ""
            } else {
                "control "
            };
            table.add_row([
                format!("{kind}{}", stream.protocol),
                stream.to.to_string(),
                seen.sent.to_string(),
                seen.lost().to_string(),
                seen.duplicated.to_string(),
                seen.reordered.to_string(),
                words(&seen.errors),
                milliseconds(seen.gaps.largest()),
                milliseconds(stood),
            ]);
        }
        self.tables.push(table.to_string());
        self.note(
            "ALONE: by how much a stream through kpx stood still longer than every control stream at the time,"
                .to_owned(),
        );
        self.note(
            "and a control stream longer than every one through kpx: what the machine alone does"
                .to_owned(),
        );
    }

    fn judge(&mut self, stream: &StreamResults, alone: Duration, allowance: Duration) {
        let name = format!("{} stream to {}", stream.protocol, stream.to);
        let seen = &stream.seen;
        self.promise(
            seen.errors.is_empty(),
            format!("{name}: {}", words(&seen.errors)),
        );
        self.promise(seen.lost() == 0, format!("{name}: {} lost", seen.lost()));
        self.promise(
            seen.duplicated == 0,
            format!("{name}: {} came twice", seen.duplicated),
        );
        // The interval of the stream's packets limits the precision.
        let limit = GAP.max(seen.gaps.tick) + allowance;
        let otherwise = format!(
            "{name}: a gap {} longer than without kpx",
            milliseconds(alone)
        );
        self.in_time(alone <= limit, otherwise);
    }
}

/// Returns the longest pause of a stream that all streams of the other kind, over the same
/// protocol, did not share.
fn alone(stream: &StreamResults, streams: &[StreamResults]) -> Duration {
    let others = streams
        .iter()
        .filter(|other| other.kind != stream.kind && other.protocol == stream.protocol);
    stream
        .seen
        .gaps
        .excess(others.map(|other| &other.seen.gaps))
        .first()
        .map_or(Duration::ZERO, |(excess, _)| *excess)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}\n", self.scenario, self.what)?;
        self.tables
            .iter()
            .try_for_each(|table| writeln!(f, "{table}\n"))?;
        self.notes
            .iter()
            .try_for_each(|note| writeln!(f, "{note}"))?;
        let broken: Vec<&String> = self.broken.iter().chain(&self.late).collect();
        if broken.is_empty() {
            return writeln!(f, "all promises kept");
        }
        broken
            .into_iter()
            .try_for_each(|promise| writeln!(f, "BROKEN: {promise}"))
    }
}

/// Returns half of the median exchange, which has two round trips: SYN and answer, request and
/// answer.
fn round_trip(results: &Results) -> Duration {
    results.time(0.5) / 2
}

fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    table
        .column_iter_mut()
        .skip(1)
        .for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}

pub(super) fn milliseconds(time: Duration) -> String {
    format!("{:.1} ms", time.as_secs_f64() * 1e3)
}

fn words(errors: &BTreeMap<String, u64>) -> String {
    if errors.is_empty() {
        return "0".to_owned();
    }
    errors
        .iter()
        .map(|(reason, count)| format!("{count} × {reason}"))
        .collect::<Vec<_>>()
        .join(", ")
}
