//! The tables of docs/scale.md.

use std::collections::BTreeSet;

use tools::scale::{By, Figure, Found, What};

use super::figures::{grouped, markdown};
use super::runs::Run;

/// The cluster for which there are goals: Services, and endpoints of each.
const LARGE: (u32, u32) = (5_000, 50);
/// What a goal is about, its limit in the unit of the figure, and the words for it.
const GOALS: [(What, f64, &str); 5] = [
    (What::Programmed, 1_500.0, "lists in → programmed"),
    (What::Resident, 220.0, "memory of the agent"),
    (
        What::Change100P99,
        5.0,
        "one change → map, 99th percentile at 100 changes a second",
    ),
    (What::RestartLost, 0.0, "connections lost by a restart"),
    (
        What::FirstRatio,
        1.05,
        "first packet, up to 100,000 Services against 1,000: the worst median",
    ),
];

/// The numbers of Services that the goal for first packets compares.
const FEW: u32 = 1_000;
const MANY: u32 = 100_000;

/// The rows of a table: what each shows, and the figures of it.
type Rows = &'static [(&'static str, &'static [What])];

const START: Rows = &[
    (
        "lists in, or tool started → programmed",
        &[What::Programmed],
    ),
    ("CPU time", &[What::StartCpu]),
    (
        "share of a core while nothing changes, with 1,000 quiet connections",
        &[What::IdleCpu],
    ),
    (
        "memory of the agent or tool: after the start, peak",
        &[What::Resident, What::PeakResident],
    ),
    (
        "memory of the kernel for maps or rules",
        &[What::KernelMemory],
    ),
    (
        "longest wait of a packet meanwhile; on loopback",
        &[What::StartWait, What::StartWaitBeside],
    ),
    (
        "one endpoint's change → first packet that follows, median, longest",
        &[What::FirstFollowsP50, What::FirstFollowsMax],
    ),
    ("sent by the API server for the start", &[What::StartBytes]),
];
const CHANGES: Rows = &[
    (
        "100 changes/s: event → map, median, 99th percentile",
        &[What::Change100P50, What::Change100P99],
    ),
    (
        "1,000 changes/s: event → map, median, 99th percentile",
        &[What::Change1000P50, What::Change1000P99],
    ),
    ("1,000 changes/s: CPU time of one", &[What::Change1000Cpu]),
    ("sent by the API server for one", &[What::ChangeBytes]),
    (
        "longest wait of a packet meanwhile; on loopback",
        &[What::ChangeWait, What::ChangeWaitBeside],
    ),
    (
        "`network_programming_duration`: mean; bucket of the 99th percentile ends at",
        &[What::SliMean, What::SliP99],
    ),
];
const RESTART: Rows = &[
    ("killed → healthy again", &[What::Restart]),
    (
        "connections dialled meanwhile; lost",
        &[What::RestartDialled, What::RestartLost],
    ),
    ("longest time of a connection", &[What::RestartLongest]),
    (
        "longest wait of a packet of an open connection; on loopback",
        &[What::RestartWait, What::RestartWaitBeside],
    ),
];

pub(super) struct Figures<'a>(pub(super) Vec<&'a Figure>);

impl<'a> Figures<'a> {
    /// Returns the figures of all runs that no later run replaces.
    pub(super) fn of(runs: &[Run<'a>]) -> Self {
        Self(
            runs.iter()
                .flat_map(|run| run.figures.0.iter().copied())
                .collect(),
        )
    }

    fn get(&self, by: By, size: (u32, u32), what: What) -> Option<&Figure> {
        let is_it = |figure: &&&Figure| {
            figure.by == by && (figure.services, figure.endpoints) == size && figure.what == what
        };
        // A later figure replaces an earlier one.
        self.0.iter().rev().find(is_it).copied()
    }

    pub(super) fn value(&self, by: By, size: (u32, u32), what: What) -> Option<f64> {
        self.get(by, size, what)?.value()
    }

    fn cell(&self, by: By, size: (u32, u32), all: &[What]) -> String {
        let cells: Vec<_> = all
            .iter()
            .filter_map(|what| Some(shown(*what, &self.get(by, size, *what)?.found)))
            .collect();
        if cells.is_empty() {
            "–".to_owned()
        } else {
            cells.join(", ")
        }
    }

    /// Returns the sizes of clusters with a figure of that kind.
    pub(super) fn sizes(&self, what: What) -> BTreeSet<(u32, u32)> {
        let of = self.0.iter().filter(|figure| figure.what == what);
        of.map(|figure| (figure.services, figure.endpoints))
            .collect()
    }

    pub(super) fn by(&self, what: What) -> BTreeSet<By> {
        self.0
            .iter()
            .filter(|figure| figure.what == what)
            .map(|figure| figure.by)
            .collect()
    }

    /// Returns a table for each size, with a column for each means.
    pub(super) fn starts(&self) -> String {
        let table = |size: (u32, u32)| {
            let by: Vec<_> = self.by(What::Programmed).into_iter().collect();
            let header = [String::new()]
                .into_iter()
                .chain(by.iter().map(By::to_string))
                .collect::<Vec<_>>();
            let row = |(words, all): &(&str, &[What])| {
                [(*words).to_owned()]
                    .into_iter()
                    .chain(by.iter().map(|by| self.cell(*by, size, all)))
                    .collect()
            };
            let rows: Vec<Vec<String>> = START.iter().map(row).collect();
            format!("{}\n\n{}", words(size), markdown(&header, &rows))
        };
        self.sizes(What::Programmed)
            .into_iter()
            .map(table)
            .collect::<Vec<_>>()
            .join("\n\n")
    }

    /// Returns all tables of clusters and of first packets that have a row, for a kernel in a
    /// guest.
    pub(super) fn of_guest(&self) -> String {
        let has = |what| !self.sizes(what).is_empty();
        let failures = self
            .0
            .iter()
            .any(|figure| matches!(figure.found, Found::Failed(_)))
            .then(|| self.failures());
        let tables = [
            has(What::Programmed).then(|| self.starts()),
            has(What::Change100P50).then(|| self.changes()),
            has(What::Restart).then(|| self.restarts()),
            has(What::FirstP50).then(|| self.first()),
            failures,
        ];
        tables
            .into_iter()
            .flatten()
            .collect::<Vec<_>>()
            .join("\n\n")
    }

    pub(super) fn changes(&self) -> String {
        self.of_kpx(CHANGES, What::Change100P50)
    }

    pub(super) fn restarts(&self) -> String {
        self.of_kpx(RESTART, What::Restart)
    }

    /// Returns a table of kpx, with a column for each size.
    fn of_kpx(&self, rows: Rows, what: What) -> String {
        let sizes = self.sizes(what);
        let header = [String::new()]
            .into_iter()
            .chain(sizes.iter().map(|size| words(*size)))
            .collect::<Vec<_>>();
        let row = |(words, all): &(&str, &[What])| {
            [(*words).to_owned()]
                .into_iter()
                .chain(sizes.iter().map(|size| self.cell(By::Kpx, *size, all)))
                .collect()
        };
        markdown(&header, &rows.iter().map(row).collect::<Vec<Vec<String>>>())
    }

    /// Returns the handshakes by number of Services: median, 99th percentile, and the ratios of
    /// both to direct ones.
    pub(super) fn first(&self) -> String {
        let by: Vec<_> = self.by(What::FirstP50).into_iter().collect();
        let header = ["Services".to_owned()]
            .into_iter()
            .chain(by.iter().map(By::to_string))
            .collect::<Vec<_>>();
        let row = |size: (u32, u32)| {
            let all = [
                What::FirstP50,
                What::FirstP99,
                What::FirstRatio,
                What::FirstRatioP99,
            ];
            let cell = |by: &By| self.cell(*by, size, &all);
            [grouped(size.0.into())]
                .into_iter()
                .chain(by.iter().map(cell))
                .collect()
        };
        markdown(
            &header,
            &self
                .sizes(What::FirstP50)
                .into_iter()
                .map(row)
                .collect::<Vec<Vec<String>>>(),
        )
    }

    /// Returns the goals with what was found.
    pub(super) fn goals(&self) -> String {
        let found = |what| match what {
            What::FirstRatio => {
                // The sizes took turns, so their medians can be compared.
                let sizes: Vec<_> = self.sizes(What::FirstP50).into_iter().collect();
                let [(FEW, _), .., (MANY, _)] = sizes[..] else {
                    return None;
                };
                let medians = sizes
                    .into_iter()
                    .map(|size| self.value(By::Kpx, size, What::FirstP50));
                let medians: Vec<_> = medians.collect::<Option<_>>()?;
                Some(Found::Value(
                    medians.iter().copied().reduce(f64::max)? / medians[0],
                ))
            }
            _ => Some(self.get(By::Kpx, LARGE, what)?.found.clone()),
        };
        let row = |(what, limit, words): (What, f64, &str)| {
            let found = found(what);
            let verdict = match &found {
                None => "not measured",
                Some(Found::Value(value)) if *value <= limit => "yes",
                Some(_) => "**no**",
            };
            let cell = found.map_or("–".to_owned(), |found| shown(what, &found));
            vec![
                words.to_owned(),
                format!("≤ {}", number(what, limit)),
                cell,
                verdict.to_owned(),
            ]
        };
        markdown(
            &["", "goal", "found", "reached"].map(str::to_owned),
            &GOALS.map(row),
        )
    }

    /// Returns why a figure is missing, one line each.
    pub(super) fn failures(&self) -> String {
        let line = |figure: &&Figure| match &figure.found {
            Found::Failed(why) => Some(format!(
                "- {}, {}: {why}",
                figure.by,
                words((figure.services, figure.endpoints))
            )),
            _ => None,
        };
        let lines: Vec<_> = self.0.iter().filter_map(line).collect();
        if lines.is_empty() {
            "Nothing failed.".to_owned()
        } else {
            lines.join("\n")
        }
    }
}

/// Returns the words for a size.
pub(super) fn words((services, endpoints): (u32, u32)) -> String {
    let all = grouped(u64::from(services) * u64::from(endpoints));
    format!(
        "{} Services × {endpoints} = {all} endpoints",
        grouped(services.into())
    )
}

fn shown(what: What, found: &Found) -> String {
    match found {
        Found::Value(value) => number(what, *value),
        Found::NotWithin(seconds) => format!("not within {seconds:.0} s"),
        Found::Unfinished => "not finished".to_owned(),
        Found::Failed(_) => "failed".to_owned(),
    }
}

fn number(what: What, value: f64) -> String {
    match what.unit() {
        "ms" if value >= 1_000.0 => format!("{:.2} s", value / 1e3),
        "ms" if value >= 10.0 => format!("{value:.0} ms"),
        "ms" => format!("{value:.2} ms"),
        "bytes" => format!("{} bytes", grouped(value.round() as u64)),
        "" => grouped(value.round() as u64),
        unit @ ("×" | "%") => format!("{value:.2} {unit}"),
        unit => format!("{value:.0} {unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Record;
    use crate::report::runs;

    fn record(by: By, size: (u32, u32), what: What, found: Found) -> Record {
        Record::Figure(Figure {
            by,
            services: size.0,
            endpoints: size.1,
            what,
            found,
        })
    }

    #[test]
    fn tables_tell_what_was_found_and_what_was_not() {
        let records = [
            record(By::Kpx, LARGE, What::Programmed, Found::Value(1_234.5)),
            record(By::Kpx, LARGE, What::Resident, Found::Value(230.0)),
            record(
                By::Nftables,
                LARGE,
                What::Programmed,
                Found::NotWithin(60.0),
            ),
            record(
                By::IptablesNft,
                LARGE,
                What::Programmed,
                Found::Failed("no memory".to_owned()),
            ),
            record(By::Kpx, (1_000, 1), What::FirstRatio, Found::Value(1.5)),
            record(By::Kpx, (1_000, 1), What::FirstRatioP99, Found::Value(1.25)),
            record(By::Kpx, (1_000, 1), What::FirstP50, Found::Value(41.0)),
            record(By::Kpx, (10_000, 1), What::FirstP50, Found::Value(41.8)),
            record(By::Kpx, (100_000, 1), What::FirstP50, Found::Value(40.0)),
        ];
        let figures = Figures::of(&runs::left(&records));
        let starts = figures.starts();
        assert!(
            starts.contains(
                "| lists in, or tool started → programmed | 1.23 s | not within 60 s | failed |"
            ),
            "{starts}"
        );
        let goals = figures.goals();
        assert!(
            goals.contains("| memory of the agent | ≤ 220 MiB | 230 MiB | **no** |"),
            "{goals}"
        );
        assert!(
            goals.contains("| 1.02 × | yes |") && goals.contains("| – | not measured |"),
            "{goals}"
        );
        assert!(
            figures
                .first()
                .contains("| 1,000 | 41 µs, 1.50 ×, 1.25 × |"),
            "{}",
            figures.first()
        );
        let not_all = Figures::of(&runs::left(&records[..8])).goals();
        assert!(
            not_all.contains("the worst median | ≤ 1.05 × | – | not measured |"),
            "{not_all}"
        );
        let why = "- iptables-nft, 5,000 Services × 50 = 250,000 endpoints: no memory";
        assert_eq!(figures.failures(), why);
    }

    #[test]
    fn goals_are_missed_by_lost_connections_and_by_what_failed() {
        let records = [
            record(By::Kpx, LARGE, What::Programmed, Found::NotWithin(180.0)),
            record(
                By::Kpx,
                LARGE,
                What::Resident,
                Found::Failed("no memory".to_owned()),
            ),
            record(By::Kpx, LARGE, What::RestartLost, Found::Value(3.0)),
            record(
                By::Kpx,
                LARGE,
                What::RestartLostWhy,
                Found::Failed("3 of 1000 lost".to_owned()),
            ),
        ];
        let figures = Figures::of(&runs::left(&records));
        let goals = figures.goals();
        assert!(
            goals.contains("| connections lost by a restart | ≤ 0 | 3 | **no** |"),
            "{goals}"
        );
        assert!(
            goals.contains("| not within 180 s | **no** |")
                && goals.contains("| failed | **no** |"),
            "{goals}"
        );
        assert!(
            figures.failures().contains("endpoints: 3 of 1000 lost"),
            "{}",
            figures.failures()
        );
    }
}
