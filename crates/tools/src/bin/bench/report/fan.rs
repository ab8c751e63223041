//! The tables of what one API server sends for a change.

use tools::scale::{By, What};

use super::figures::{grouped, markdown};
use super::scale::Figures;

/// The nodes for which the API server's work is computed, and the changes a second.
const NODES: f64 = 5_000.0;
const RATES: [f64; 3] = [1.0, 10.0, 100.0];
/// The numbers of nodes that were counted, with the names of the bytes and the events.
const COUNTED: [(f64, [What; 2]); 3] = [
    (1.0, [What::Fan1, What::Fan1Events]),
    (2.0, [What::Fan2, What::Fan2Events]),
    (4.0, [What::Fan4, What::Fan4Events]),
];
const UNFILTERED: [(&str, [What; 2]); 2] = [
    (SERVED, [What::FanUnfiltered, What::FanUnfilteredEvents]),
    (
        HEADLESS,
        [
            What::FanUnfilteredHeadless,
            What::FanUnfilteredHeadlessEvents,
        ],
    ),
];
/// The slices that change.
const SERVED: &str = "a slice that proxies serve";
const HEADLESS: &str = "a headless Service's slice";

/// A count: who watches what, on how many nodes, and the bytes and events of one change.
struct Row {
    watch: &'static str,
    slice: &'static str,
    nodes: f64,
    sent: [f64; 2],
}

/// Returns what was counted, and what that makes for 5,000 nodes; nothing if it was not measured.
pub(super) fn tables(figures: &Figures<'_>) -> String {
    let rows = rows(figures);
    let cells = |row: &Row| {
        let [bytes, events] = row.sent;
        let about = format!("{}: {}", row.watch, row.slice);
        vec![about, whole(row.nodes), whole(events), whole(bytes)]
    };
    let header = ["a change", "nodes, counted", "events", "bytes"].map(str::to_owned);
    let counted = markdown(&header, &rows.iter().map(cells).collect::<Vec<_>>());
    // The row with the most nodes of each watch and slice.
    let is_last = |nth: &usize| {
        rows.get(nth + 1)
            .is_none_or(|next| (next.watch, next.slice) != (rows[*nth].watch, rows[*nth].slice))
    };
    let last: Vec<_> = (0..rows.len())
        .filter(is_last)
        .map(|nth| &rows[nth])
        .collect();
    if last.is_empty() {
        return String::new();
    }
    let a_second = |row: &&Row| {
        let cell = |rate: f64| {
            let [bytes, events] = row.sent.map(|all| all / row.nodes * NODES * rate);
            format!("{} objects, {} MB", whole(events), megabytes(bytes))
        };
        [format!("{}: {}", row.watch, row.slice)]
            .into_iter()
            .chain(RATES.map(cell))
            .collect()
    };
    let header = [format!(
        "{} nodes, computed: sent a second, by changes a second",
        whole(NODES)
    )];
    let header = header.into_iter().chain(RATES.map(whole));
    let computed = markdown(
        &header.collect::<Vec<_>>(),
        &last.iter().map(a_second).collect::<Vec<Vec<_>>>(),
    );
    format!("{counted}\n\n{computed}")
}

fn rows(figures: &Figures<'_>) -> Vec<Row> {
    let Some(size) = figures.sizes(What::Fan1).into_iter().next() else {
        return Vec::new();
    };
    let sent = |[bytes, events]: [What; 2]| {
        let value = |what| figures.value(By::Kpx, size, what);
        Some([value(bytes)?, value(events)?])
    };
    let mut rows = Vec::new();
    for (nodes, names) in COUNTED {
        rows.extend(sent(names).map(|sent| Row {
            watch: "kpx's filters",
            slice: SERVED,
            nodes,
            sent,
        }));
    }
    let nodes = rows.last().map_or(1.0, |row| row.nodes);
    let headless = sent([What::FanHeadless, What::FanHeadlessEvents]);
    rows.extend(headless.map(|sent| Row {
        watch: "kpx's filters",
        slice: HEADLESS,
        nodes,
        sent,
    }));
    for (slice, names) in UNFILTERED {
        rows.extend(sent(names).map(|sent| Row {
            watch: "no filter",
            slice,
            nodes: 1.0,
            sent,
        }));
    }
    rows
}

fn whole(value: f64) -> String {
    grouped(value.round() as u64)
}

/// Returns megabytes, with a digit after the point below 100.
fn megabytes(bytes: f64) -> String {
    match bytes / 1e6 {
        megabytes @ 0.1..100.0 => format!("{megabytes:.1}"),
        megabytes => whole(megabytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Record;
    use crate::report::runs;
    use tools::scale::{Figure, Found};

    #[test]
    fn rates_are_computed_from_what_was_counted() {
        let figure = |(what, value)| {
            Record::Figure(Figure {
                by: By::Kpx,
                services: 200,
                endpoints: 50,
                what,
                found: Found::Value(value),
            })
        };
        let records = [
            (What::Fan1, 15_000.0),
            (What::Fan1Events, 1.0),
            (What::Fan4, 60_000.0),
            (What::Fan4Events, 4.0),
            (What::FanHeadless, 0.0),
            (What::FanHeadlessEvents, 0.0),
            (What::FanUnfilteredHeadless, 15_100.0),
            (What::FanUnfilteredHeadlessEvents, 1.0),
        ]
        .map(figure);
        let expected = "\
| a change | nodes, counted | events | bytes |
|---|---:|---:|---:|
| kpx's filters: a slice that proxies serve | 1 | 1 | 15,000 |
| kpx's filters: a slice that proxies serve | 4 | 4 | 60,000 |
| kpx's filters: a headless Service's slice | 4 | 0 | 0 |
| no filter: a headless Service's slice | 1 | 1 | 15,100 |

| 5,000 nodes, computed: sent a second, by changes a second | 1 | 10 | 100 |
|---|---:|---:|---:|
| kpx's filters: a slice that proxies serve | 5,000 objects, 75.0 MB | 50,000 objects, 750 MB | 500,000 objects, 7,500 MB |
| kpx's filters: a headless Service's slice | 0 objects, 0 MB | 0 objects, 0 MB | 0 objects, 0 MB |
| no filter: a headless Service's slice | 5,000 objects, 75.5 MB | 50,000 objects, 755 MB | 500,000 objects, 7,550 MB |";
        assert_eq!(tables(&Figures::of(&runs::left(&records))), expected);
        assert_eq!(tables(&Figures(Vec::new())), "");
    }
}
