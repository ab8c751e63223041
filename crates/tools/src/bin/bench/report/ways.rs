//! The table of the section `tunnel` in docs/host-mode.md.

use std::collections::BTreeMap;

use tools::bench::Mode;
use tools::tunnel::{Found, MODES, Summary, Way, summarise};

use super::figures::{grouped, markdown};
use super::with_notes;
use crate::record::{Record, Table};

/// Returns where and how it was measured, and the table.
pub(super) fn text(records: &[Record]) -> String {
    let found = |record: &Record| {
        if let Record::Tunnel(found) = record {
            Some(found.clone())
        } else {
            None
        }
    };
    let found: Vec<_> = records.iter().filter_map(found).collect();
    let kubectl = found.iter().filter_map(|found| match found {
        Found::Kubectl(version) => Some(format!("kubectl {version}.")),
        Found::Sample(_) | Found::Skipped { .. } => None,
    });
    let table = table(&found);
    let parts = [with_notes(records)]
        .into_iter()
        .chain(kubectl)
        .chain([markdown(&table.header, &table.rows)]);
    parts.collect::<Vec<_>>().join("\n\n")
}

/// Returns a row for each way: of each mode the median rate, its ratio to the route's, and the
/// times of one operation.
pub(crate) fn table(found: &[Found]) -> Table {
    let samples: Vec<_> = found.iter().filter_map(Found::sample).cloned().collect();
    let cells = summarise(&samples);
    let header = [String::new()]
        .into_iter()
        .chain(MODES.map(|mode| mode.to_string()))
        .collect();
    Table {
        header,
        rows: Way::ALL.map(|way| row(way, &cells, found)).into(),
    }
}

fn row(way: Way, cells: &BTreeMap<(Way, Mode), Summary>, found: &[Found]) -> Vec<String> {
    let skipped = found.iter().find_map(|found| match found {
        Found::Skipped { way: skipped, why } if *skipped == way => Some(why),
        _ => None,
    });
    let figures = MODES.map(|mode| match (cells.get(&(way, mode)), skipped) {
        (Some(cell), _) => figure(way, mode, cell),
        (None, Some(why)) => format!("not measured: {why}"),
        (None, None) => "–".to_owned(),
    });
    [way.to_string()].into_iter().chain(figures).collect()
}

fn figure(way: Way, mode: Mode, cell: &Summary) -> String {
    let rate = match mode {
        Mode::TcpStream => format!("{:.2} Gbit/s", cell.rate.median * 8.0 / 1e9),
        _ => format!("{}/s", grouped(cell.rate.median as u64)),
    };
    let ratio = match cell.ratio.median {
        _ if way == Way::Route => None,
        ratio if ratio < 0.1 => Some(format!("**{ratio:.3}**")),
        ratio => Some(format!("**{ratio:.2}**")),
    };
    let micros = |share| {
        Some(format!(
            "{:.0}",
            cell.latency.quantile(share)?.as_secs_f64() * 1e6
        ))
    };
    let times = micros(0.5)
        .zip(micros(0.99))
        .map(|(half, most)| match mode {
            Mode::TcpCrr => format!("{half}/{most} µs"),
            _ => format!("{half} µs"),
        });
    [Some(rate), ratio, times]
        .into_iter()
        .flatten()
        .collect::<Vec<_>>()
        .join(" · ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use tools::bench::Latency;
    use tools::tunnel::Sample;

    fn of(way: Way, mode: Mode, amount: u64) -> Found {
        let latency: Latency = serde_json::from_str(r#"{"64":1}"#).unwrap();
        let latency = if mode == Mode::TcpStream {
            Latency::default()
        } else {
            latency
        };
        Found::Sample(Sample {
            way,
            mode,
            round: 0,
            amount,
            seconds: 1.0,
            cpu_seconds: 1.0,
            latency,
        })
    }

    #[test]
    fn table_has_each_way_and_says_why_one_is_missing() {
        let found = [
            of(Way::Route, Mode::TcpCrr, 10_000),
            of(Way::Route, Mode::TcpStream, 1_000_000_000),
            of(Way::Tunnel, Mode::TcpCrr, 500),
            of(Way::Tunnel, Mode::TcpStream, 200_000_000),
            Found::Skipped {
                way: Way::Kubectl,
                why: "no such file".to_owned(),
            },
        ];
        let rows: Vec<_> = table(&found)
            .rows
            .iter()
            .map(|row| row.join(" | "))
            .collect();
        let expected = [
            "kpx, by a route to the pods | 10,000/s · 0/0 µs | – | 8.00 Gbit/s",
            "kpx, by a node port | – | – | –",
            "kpx with `--tunnel tcp` | 500/s · **0.050** · 0/0 µs | – | 1.60 Gbit/s · **0.20**",
            "`kubectl port-forward` | not measured: no such file | not measured: no such file | not measured: no such file",
        ];
        assert_eq!(rows, expected);
    }

    #[test]
    fn text_names_the_machine_and_the_kubectl() {
        let records = [
            Record::Note("21 rounds.".to_owned()),
            Record::Tunnel(Found::Kubectl("v1.32.4".to_owned())),
            Record::Tunnel(of(Way::Route, Mode::TcpRr, 9)),
        ];
        let text = text(&records);
        assert!(
            text.contains("21 rounds.\n\nkubectl v1.32.4.\n\n|  | TCP connect/request/response |"),
            "{text}"
        );
    }
}
