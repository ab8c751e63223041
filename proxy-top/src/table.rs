//! Prints one table where there is no terminal.

use std::fmt::Write as _;

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};

use crate::rows::{Rates, Rows, number};

pub(crate) const COLUMNS: [&str; 7] =
    ["SERVICE", "OPENED/S", "PACKETS/S", "BYTES/S", "UNSERVED/S", "FLOWS", "BACKENDS"];

pub(crate) fn cells(name: &str, rates: &Rates, backends: String) -> [String; 7] {
    [
        name.to_owned(),
        number(rates.opened),
        number(rates.packets),
        number(rates.bytes),
        number(rates.unserved),
        rates.flows.to_string(),
        backends,
    ]
}

pub(crate) fn text(rows: &Rows) -> String {
    let mut table = Table::new();
    table.load_preset(NOTHING).force_no_tty().set_header(COLUMNS);
    for row in &rows.services {
        table.add_row(cells(&row.name, &row.rates, row.backends()));
    }
    table.add_row(cells("total", &rows.total, String::new()));
    table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    let mut text: String = table.lines().map(|line| line.trim_end().to_owned() + "\n").collect();
    if !rows.reasons.is_empty() {
        let reasons: Vec<_> = rows.reasons.iter().map(|(name, rate)| format!("{name} {}/s", number(*rate))).collect();
        // Writing to a string cannot fail.
        let _written = writeln!(text, "\nnot served: {}", reasons.join(", "));
    }
    text
}
