//! Computes the table's rows from two samples of an agent. Does no I/O.

use std::collections::BTreeMap;
use std::time::Instant;

use clap::ValueEnum;
use comfy_table::Cell;
use proxy_common::counter::{Reason, Verdict};

use proxy_view::object_name::full_name;
use proxy_view::output::{Form, Narrow, cell};
use proxy_view::rates::{self, Rates, Reading, number, per_second};
use proxy_view::status::Status;
use proxy_view::{Selector, ServiceView};

/// The state of an agent at one time.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) status: Status,
    pub(super) services: Vec<ServiceView>,
    /// The error of the last attempt to sample.
    pub(super) problem: Option<String>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct View {
    pub(super) sort: Sort,
    pub(super) filter: String,
    pub(super) namespace: Option<String>,
    pub(super) selector: Selector,
    /// True while the user types the filter.
    pub(super) typing: bool,
    /// The index of the selected row.
    pub(super) cursor: usize,
    /// The number of rows above the visible rows, as last drawn.
    pub(super) scroll: usize,
    /// The name of the selected Service, as last drawn.
    pub(super) selected: Option<String>,
    /// The Service whose backends are shown.
    pub(super) open: Option<String>,
    /// The selected Service's index while backends are shown.
    pub(super) behind: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Sort {
    #[default]
    #[value(alias = "connections")]
    Opened,
    Packets,
    Bytes,
    #[value(alias = "refused")]
    Unserved,
    Flows,
    Name,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rows {
    pub(super) header: Header,
    pub(super) services: Vec<Row>,
    /// The sum over all Services that match the filter.
    pub(super) total: Rates,
    /// The dropped and rejected packets per second by reason, highest first.
    pub(super) reasons: Vec<(String, f64)>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Header {
    pub(super) node_name: String,
    pub(super) version: String,
    /// The state, worded as in `kpx status`: `healthy`, `unhealthy`, `waiting for the first lists`.
    pub(super) health: &'static str,
    pub(super) problems: Vec<String>,
    pub(super) services: usize,
    /// The seconds between the two samples.
    pub(super) interval: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    /// The name as `namespace/name`.
    pub(super) name: String,
    pub(super) rates: Rates,
    /// The number of backends that take traffic, out of `listed`.
    pub(super) in_use: usize,
    pub(super) listed: usize,
}

impl Row {
    /// Formats the numbers of backends: `2/3`.
    pub(super) fn backends(&self) -> String {
        format!("{}/{}", self.in_use, self.listed)
    }
}

pub(super) fn seconds(before: &Sample, now: &Sample) -> f64 {
    now.at.duration_since(before.at).as_secs_f64()
}

/// Computes the rates of the traffic between two samples.
pub(super) fn rows(before: &Sample, now: &Sample, view: &View) -> Rows {
    let secs = seconds(before, now);
    let old: BTreeMap<_, _> = before
        .services
        .iter()
        .map(|service| (full_name(service), Reading::of(service)))
        .collect();
    let mut all = Reading::default();
    let mut row = |service: &ServiceView| {
        let name = full_name(service);
        // The counts of a new Service began at 0.
        let none = Reading::default();
        let change = Reading::of(service).since(old.get(&name).unwrap_or(&none));
        all = std::mem::take(&mut all).plus(&change);
        let (in_use, listed) = service.backends_in_use();
        Row {
            name,
            rates: Rates::of(&change, secs),
            in_use,
            listed,
        }
    };
    let is_within = |service: &&ServiceView| {
        let is_in_namespace = view
            .namespace
            .as_ref()
            .is_none_or(|wanted| service.namespace == *wanted);
        is_in_namespace && view.selector.selects(&service.labels)
    };
    let shown = now
        .services
        .iter()
        .filter(is_within)
        .filter(|service| full_name(service).contains(&view.filter));
    let mut services: Vec<_> = shown.map(&mut row).collect();
    services.sort_by(|a, b| a.name.cmp(&b.name));
    // Services with equal values are sorted by unserved packets.
    if view.sort != Sort::Name {
        services.sort_by(|a, b| b.rates.unserved().total_cmp(&a.rates.unserved()));
    }
    let key = |rates: &Rates| match view.sort {
        Sort::Opened => rates.opened,
        Sort::Packets => rates.packets,
        Sort::Bytes => rates.bytes,
        Sort::Unserved => rates.unserved(),
        #[expect(clippy::cast_precision_loss, reason = "fewer flows than 2^53")]
        Sort::Flows => rates.flows as f64,
        Sort::Name => 0.0,
    };
    services.sort_by(|a, b| key(&b.rates).total_cmp(&key(&a.rates)));
    Rows {
        header: header(now, secs),
        services,
        total: Rates::of(&all, secs),
        reasons: reasons(&before.status, &now.status, secs),
    }
}

fn header(now: &Sample, secs: f64) -> Header {
    let problems = now
        .status
        .problems
        .iter()
        .map(|problem| format!("{}: {}", problem.what, problem.why));
    Header {
        node_name: now.status.node_name.clone(),
        version: now.status.version.clone(),
        health: match (
            now.status.healthy && now.problem.is_none(),
            now.status.complete || now.problem.is_some(),
        ) {
            (true, _) => "healthy",
            (false, true) => "unhealthy",
            (false, false) => "waiting for the first lists",
        },
        interval: secs,
        problems: now.problem.iter().cloned().chain(problems).collect(),
        services: now.services.len(),
    }
}

fn reasons(before: &Status, now: &Status, secs: f64) -> Vec<(String, f64)> {
    let unserved = Reason::ALL
        .into_iter()
        .filter(|reason| reason.verdict() != Verdict::Pass)
        .map(Reason::name);
    let count = |status: &Status, name| status.reasons.get(name).copied().unwrap_or(0);
    let mut rates: Vec<_> = unserved
        .map(|name| {
            (
                name.to_owned(),
                per_second(count(now, name).saturating_sub(count(before, name)), secs),
            )
        })
        .filter(|(_, rate)| *rate > 0.0)
        .collect();
    rates.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    rates
}

/// Formats the rows for an output that is not a terminal.
pub(super) fn text(rows: &Rows, form: Form) -> String {
    let header: Vec<_> = ["SERVICE"]
        .into_iter()
        .chain(rates::COLUMNS)
        .chain(["BACKENDS"])
        .collect();
    let services = rows.services.iter().map(|row| {
        cells(&row.name, &row.rates, row.backends())
            .map(cell)
            .into()
    });
    let mut total: Vec<_> = cells("total", &rows.total, String::new()).map(cell).into();
    // A sum of backends would count shared backends several times.
    if let Some(backends) = total.last_mut() {
        *backends = Cell::new("");
    }
    let narrow = Narrow {
        optional: &[
            "SILENT/S",
            "REFUSED/S",
            "CONN-P50",
            "CONN-P99",
            "BYTES/S",
            "PACKETS/S",
        ],
        sentence: None,
    };
    let table = form.narrowed(&header, narrow, services.chain([total]));
    match unserved(rows) {
        Some(unserved) => format!("{table}\n{unserved}\n"),
        None => table,
    }
}

/// Returns the cells of a row: the name, the rates, and the numbers of backends.
pub(super) fn cells(name: &str, rates: &Rates, backends: String) -> [String; 11] {
    let [
        opened,
        packets,
        bytes,
        unserved,
        p50,
        p99,
        refused,
        silent,
        flows,
    ] = rates::cells(rates);
    let name = name.to_owned();
    [
        name, opened, packets, bytes, unserved, p50, p99, refused, silent, flows, backends,
    ]
}

/// Lists the reasons with their rates; `None` if everything was served.
pub(super) fn unserved(rows: &Rows) -> Option<String> {
    let reasons: Vec<_> = rows
        .reasons
        .iter()
        .map(|(name, rate)| format!("{name} {}/s", number(*rate)))
        .collect();
    (!reasons.is_empty()).then(|| format!("not served: {}", reasons.join(", ")))
}

#[cfg(test)]
mod tests;
