//! Prints one table where there is no terminal.

use std::fmt::Write as _;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};

use proxy_view::latency;

use crate::rows::{Connect, Rates, Rows, number};

pub(crate) const COLUMNS: [&str; 11] = [
    "SERVICE",
    "OPENED/S",
    "PACKETS/S",
    "BYTES/S",
    "UNSERVED/S",
    "CONN-P50",
    "CONN-P99",
    "REFUSED/S",
    "SILENT/S",
    "FLOWS",
    "BACKENDS",
];

pub(crate) fn cells(name: &str, rates: &Rates, backends: String) -> [String; 11] {
    let [p50, p99, refused, silent] = connect_cells(&rates.connect);
    [
        name.to_owned(),
        number(rates.opened),
        number(rates.packets),
        number(rates.bytes),
        number(rates.unserved),
        p50,
        p99,
        refused,
        silent,
        rates.flows.to_string(),
        backends,
    ]
}

/// Formats the two times, and the rates of refused and unanswered connections.
pub(crate) fn connect_cells(connect: &Connect) -> [String; 4] {
    let time = |secs: Option<f64>| {
        if secs.is_some() {
            latency(secs)
        } else {
            "-".to_owned()
        }
    };
    [
        time(connect.p50),
        time(connect.p99),
        number(connect.refused),
        number(connect.unanswered),
    ]
}

/// Aligns rows: names to the left, and from the column `numbers` on to the right.
pub(crate) fn aligned_table(
    header: &[&str],
    numbers: usize,
    rows: impl Iterator<Item = Vec<String>>,
) -> String {
    let mut table = Table::new();
    table
        .load_preset(NOTHING)
        .force_no_tty()
        .set_header(header.to_vec())
        .add_rows(rows);
    table
        .column_iter_mut()
        .skip(numbers)
        .for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
        .lines()
        .map(|line| line.trim_end().to_owned() + "\n")
        .collect()
}

pub(crate) fn text(rows: &Rows) -> String {
    let services = rows
        .services
        .iter()
        .map(|row| cells(&row.name, &row.rates, row.backends()).into());
    let total = cells("total", &rows.total, String::new()).into();
    let mut text = aligned_table(&COLUMNS, 1, services.chain([total]));
    if !rows.reasons.is_empty() {
        let reasons: Vec<_> = rows
            .reasons
            .iter()
            .map(|(name, rate)| format!("{name} {}/s", number(*rate)))
            .collect();
        // Writing to a string cannot fail.
        let _written = writeln!(text, "\nnot served: {}", reasons.join(", "));
    }
    text
}
