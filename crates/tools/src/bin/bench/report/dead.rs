//! The table of the section `dead-backends` in docs/backend-health.md.

use std::collections::BTreeMap;

use tools::dead_backends::{Means, Place, Row};

use super::figures::{machine, markdown};
use crate::record::{Record, Table};

const HEADER: [&str; 10] = [
    "",
    "clients",
    "slower than 1.2 s",
    "failed",
    "one SYN more",
    "in the first second, began at dead backends",
    "in the second",
    "in the third to sixth",
    "each dead one avoided",
    "all",
];

/// Returns where it was measured, and the table.
pub(super) fn text(records: &[Record]) -> String {
    let row = |record: &Record| {
        if let Record::DeadBackends(row) = record {
            Some(row.clone())
        } else {
            None
        }
    };
    let table = table(&records.iter().filter_map(row).collect::<Vec<_>>());
    format!(
        "{}\n\n{}",
        machine(records),
        markdown(&table.header, &table.rows)
    )
}

/// What a row of the table has been measured with, but for the number of clients.
type Case = (Means, Option<Place>);

/// Returns a row for each case and number of clients. A cell has the figures of all runs where they
/// differ.
pub(crate) fn table(rows: &[Row]) -> Table {
    let mut cells: BTreeMap<(Case, u8), Vec<&Row>> = BTreeMap::new();
    for row in rows {
        cells
            .entry(((row.means, row.place), row.clients))
            .or_default()
            .push(row);
    }
    let mut before = None;
    let line = |((case, clients), runs): (&(Case, u8), &Vec<&Row>)| {
        let name = if before.replace(*case) == Some(*case) {
            String::new()
        } else {
            name(*case)
        };
        [name, clients.to_string()]
            .into_iter()
            .chain(figures(runs))
            .collect()
    };
    Table {
        header: HEADER.map(str::to_owned).into(),
        rows: cells.iter().map(line).collect(),
    }
}

fn name((means, place): Case) -> String {
    let place = match place {
        Some(Place::OneNode) => ": all ten on one node",
        Some(Place::EachNode) => ": one on each of ten nodes",
        None => "",
    };
    format!("{means}{place}")
}

fn figures(runs: &[&Row]) -> [String; 8] {
    let each = |of: &dyn Fn(&Row) -> String| runs.iter().map(|row| of(row)).collect::<Vec<_>>();
    let of_all =
        |count: usize, row: &Row| percent(count as f64 * 100.0 / row.connections.max(1) as f64);
    let second = |nth: usize| {
        differing(
            &each(&|row| {
                row.dead_percent
                    .get(nth)
                    .map_or("–".to_owned(), |share| percent(*share))
            }),
            " %",
        )
    };
    let failed = match runs
        .iter()
        .all(|row| row.failed == row.slower && row.failed > 0)
    {
        true => "all of these".to_owned(),
        false => differing(&each(&|row| of_all(row.failed, row)), " %"),
    };
    let avoided = |nth: usize| {
        differing(
            &each(&|row| {
                row.avoided
                    .map_or("never".to_owned(), |times| format!("{:.2}", times[nth]))
            }),
            " s",
        )
    };
    let median = match runs.iter().any(|row| row.avoided.is_some()) {
        true => format!("median {}", avoided(0)),
        false => avoided(0),
    };
    [
        differing(&each(&|row| of_all(row.slower, row)), " %"),
        failed,
        differing(&each(&|row| of_all(row.one_syn_more, row)), " %"),
        second(0),
        second(1),
        later(runs),
        median,
        avoided(1),
    ]
}

/// Returns the least and the most of the third second to the sixth, in all runs.
fn later(runs: &[&Row]) -> String {
    let shares = || {
        runs.iter()
            .flat_map(|row| row.dead_percent.iter().take(6).skip(2))
            .copied()
    };
    match (shares().reduce(f64::min), shares().reduce(f64::max)) {
        (Some(least), Some(most)) if least < most => {
            format!("{} to {} %", percent(least), percent(most))
        }
        (Some(least), _) => differing(&[percent(least)], " %"),
        _ => "–".to_owned(),
    }
}

/// Returns what the runs have, once if it is the same, and the unit unless all of it is zero or a
/// word.
fn differing(of_runs: &[String], unit: &str) -> String {
    let mut texts = of_runs.to_vec();
    texts.dedup();
    let has_number = texts
        .iter()
        .any(|text| text != "0" && text.parse::<f64>().is_ok());
    texts.join(", ") + if has_number { unit } else { "" }
}

fn percent(share: f64) -> String {
    match share {
        0.0 => "0".to_owned(),
        ..2.0 => format!("{share:.2}"),
        _ => format!("{share:.1}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cell_has_the_figures_of_all_runs_where_they_differ() {
        let of = |means, slower, one_syn_more, avoided, dead_percent: [f64; 6]| Row {
            means,
            place: (means == Means::KpxOn).then_some(Place::OneNode),
            clients: 2,
            connections: 5_000,
            slower,
            failed: if means == Means::Nftables { slower } else { 0 },
            one_syn_more,
            p99: 1.0,
            slowest: 2.0,
            avoided,
            since_two: None,
            dead_percent: dead_percent.into(),
        };
        let rows = [
            of(
                Means::Nftables,
                505,
                0,
                None,
                [9.56, 11.7, 10.45, 10.0, 8.96, 12.24],
            ),
            of(
                Means::KpxOn,
                0,
                62,
                Some([0.64, 1.61]),
                [7.57, 0.4, 0.0, 0.0, 0.0, 0.0],
            ),
            of(
                Means::Nftables,
                510,
                0,
                None,
                [7.8, 8.6, 10.2, 10.4, 11.4, 11.6],
            ),
            of(
                Means::KpxOn,
                1,
                62,
                Some([0.77, 1.78]),
                [8.4, 0.4, 0.0, 0.0, 0.0, 0.0],
            ),
        ];
        let table: Vec<_> = table(&rows)
            .rows
            .iter()
            .map(|row| row.join(" | "))
            .collect();
        let expected = [
            "nftables, as kube-proxy writes it | 2 | 10.1, 10.2 % | all of these | 0 | 9.6, 7.8 % | 11.7, 8.6 % | 9.0 to 12.2 % | never | never",
            "kpx, `on`: all ten on one node | 2 | 0, 0.02 % | 0 | 1.24 % | 7.6, 8.4 % | 0.40 % | 0 | median 0.64, 0.77 s | 1.61, 1.78 s",
        ];
        assert_eq!(table, expected);
    }
}
