//! Computes the shown rows from two samples of an agent. Pure.

use std::collections::BTreeMap;
use std::time::Instant;

use clap::ValueEnum;
use proxy_common::counter::{Reason, Verdict};

use proxy_view::status::Status;
use proxy_view::{ConnectView, PortCounts, Selector, ServiceView};

/// The state of an agent at one moment.
#[derive(Clone, Debug)]
pub(crate) struct Sample {
    pub(crate) at: Instant,
    pub(crate) status: Status,
    pub(crate) services: Vec<ServiceView>,
    /// The reason why there is no newer sample.
    pub(crate) problem: Option<String>,
}

/// The choices of the user.
#[derive(Clone, Debug, Default)]
pub(crate) struct View {
    pub(crate) sort: Sort,
    pub(crate) filter: String,
    pub(crate) namespace: Option<String>,
    pub(crate) selector: Selector,
    /// True while the user types the filter.
    pub(crate) typing: bool,
    /// The row that Enter opens, by its place.
    pub(crate) cursor: usize,
    /// The number of rows above the first shown row, as they were drawn last.
    pub(crate) scroll: usize,
    /// The name of the Service at the cursor, as it was drawn last.
    pub(crate) selected: Option<String>,
    /// The Service whose backends are shown.
    pub(crate) open: Option<String>,
    /// The cursor among the Services while backends are shown.
    pub(crate) behind: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sort {
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
pub(crate) struct Rows {
    pub(crate) header: Header,
    pub(crate) services: Vec<Row>,
    /// The sum over all Services that match the filter.
    pub(crate) total: Rates,
    /// The dropped and rejected packets per second by reason, the highest rate first.
    pub(crate) reasons: Vec<(String, f64)>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Header {
    pub(crate) node_name: String,
    pub(crate) version: String,
    /// The state in the words of `kpx status`: `healthy`, `unhealthy`,
    /// `waiting for the first lists`.
    pub(crate) health: &'static str,
    pub(crate) problems: Vec<String>,
    pub(crate) services: usize,
    /// The seconds between the two samples.
    pub(crate) interval: f64,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    /// The name as `namespace/name`.
    pub(crate) name: String,
    pub(crate) rates: Rates,
    /// The numbers of backends that take traffic, and of all that are listed.
    pub(crate) in_use: usize,
    pub(crate) listed: usize,
}

impl Row {
    /// Formats the numbers of backends: `2/3`.
    pub(crate) fn backends(&self) -> String {
        format!("{}/{}", self.in_use, self.listed)
    }
}

/// The rates per second; `flows` is the number in the table.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Rates {
    /// The opened flows.
    pub(crate) opened: f64,
    /// The packets of both directions.
    pub(crate) packets: f64,
    pub(crate) bytes: f64,
    /// Packets dropped or rejected.
    pub(crate) unserved: f64,
    pub(crate) flows: u64,
    /// The TCP connections that backends answered, refused, or did not answer.
    pub(crate) connect: Connect,
}

/// The TCP connections between two samples.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Connect {
    /// The answered connections per second.
    pub(crate) per_sec: f64,
    /// Half of them took no longer, in seconds; None without any.
    pub(crate) p50: Option<f64>,
    /// 99 in 100 took no longer.
    pub(crate) p99: Option<f64>,
    /// The connections per second that a backend refused.
    pub(crate) refused: f64,
    /// The connections per second whose wait for an answer ended.
    pub(crate) unanswered: f64,
}

impl Connect {
    pub(crate) fn of(change: &ConnectView, secs: f64) -> Self {
        Self {
            per_sec: per_second(0, change.connects, secs),
            p50: change.connect_p50,
            p99: change.connect_p99,
            refused: per_second(0, change.refused, secs),
            unanswered: per_second(0, change.unanswered, secs),
        }
    }
}

/// Returns the seconds between two samples.
pub(crate) fn seconds(before: &Sample, now: &Sample) -> f64 {
    now.at.duration_since(before.at).as_secs_f64()
}

/// Computes the rates of the traffic between two samples.
pub(crate) fn rows(before: &Sample, now: &Sample, view: &View) -> Rows {
    let secs = seconds(before, now);
    let old: BTreeMap<_, _> = before
        .services
        .iter()
        .map(|service| (name(service), sums(service)))
        .collect();
    let mut all_connects = ConnectView::default();
    let mut row = |service: &ServiceView| {
        let name = name(service);
        // The counts of a new Service started at 0.
        let none = <(PortCounts, ConnectView)>::default();
        let (counts, connects) = sums(service);
        let (old_counts, old_connects) = old.get(&name).unwrap_or(&none);
        let change = connects.since(old_connects);
        all_connects = all_connects.plus(&change);
        let rates = Rates {
            connect: Connect::of(&change, secs),
            ..rates(old_counts, &counts, secs)
        };
        let (in_use, listed) = service.backends_in_use();
        Row {
            name,
            rates,
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
        .filter(|service| name(service).contains(&view.filter));
    let mut services: Vec<_> = shown.map(&mut row).collect();
    services.sort_by(|a, b| a.name.cmp(&b.name));
    // The Services that refuse most come first among equal ones in the column.
    if view.sort != Sort::Name {
        services.sort_by(|a, b| b.rates.unserved.total_cmp(&a.rates.unserved));
    }
    let key = |rates: &Rates| match view.sort {
        Sort::Opened => rates.opened,
        Sort::Packets => rates.packets,
        Sort::Bytes => rates.bytes,
        Sort::Unserved => rates.unserved,
        #[expect(clippy::cast_precision_loss, reason = "fewer flows than 2^53")]
        Sort::Flows => rates.flows as f64,
        Sort::Name => 0.0,
    };
    services.sort_by(|a, b| key(&b.rates).total_cmp(&key(&a.rates)));
    let total = services
        .iter()
        .fold(Rates::default(), |total, row| total.plus(&row.rates));
    let total = Rates {
        connect: Connect::of(&all_connects, secs),
        ..total
    };
    Rows {
        header: header(now, secs),
        services,
        total,
        reasons: reasons(&before.status, &now.status, secs),
    }
}

fn name(service: &ServiceView) -> String {
    format!("{}/{}", service.namespace, service.name)
}

/// Sums the counts and the connections of all ports.
fn sums(service: &ServiceView) -> (PortCounts, ConnectView) {
    service.ports.iter().fold(
        Default::default(),
        |(mut counts, connects): (PortCounts, ConnectView), port| {
            counts.add(&port.counts);
            (counts, connects.plus(&port.connect))
        },
    )
}

fn rates(before: &PortCounts, now: &PortCounts, secs: f64) -> Rates {
    let rate = |count: fn(&PortCounts) -> u64| per_second(count(before), count(now), secs);
    Rates {
        opened: rate(|counts| counts.flows_opened),
        packets: rate(|counts| counts.packets + counts.packets_returned),
        bytes: rate(|counts| counts.bytes + counts.bytes_returned),
        unserved: rate(PortCounts::unserved),
        flows: now.flows,
        connect: Connect::default(),
    }
}

/// Returns the rate; 0 between samples of the same moment, and after a restart of the agent.
#[expect(clippy::cast_precision_loss, reason = "less than 2^53 in any interval")]
fn per_second(before: u64, now: u64, secs: f64) -> f64 {
    if secs > 0.0 {
        now.saturating_sub(before) as f64 / secs
    } else {
        0.0
    }
}

impl Rates {
    /// Adds up everything but the connections, whose times have no sum.
    fn plus(self, other: &Self) -> Self {
        Self {
            opened: self.opened + other.opened,
            packets: self.packets + other.packets,
            bytes: self.bytes + other.bytes,
            unserved: self.unserved + other.unserved,
            flows: self.flows + other.flows,
            connect: self.connect,
        }
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
                per_second(count(before, name), count(now, name), secs),
            )
        })
        .filter(|(_, rate)| *rate > 0.0)
        .collect();
    rates.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    rates
}

/// Formats a number in at most four characters, with a letter for the power of 1000.
pub(crate) fn number(value: f64) -> String {
    const UNITS: [&str; 5] = ["", "k", "M", "G", "T"];
    let mut value = value;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    if value == 0.0 {
        "0".to_owned()
    } else if value < 9.95 {
        format!("{value:.1}{}", UNITS[unit])
    } else {
        format!("{value:.0}{}", UNITS[unit])
    }
}

#[cfg(test)]
mod tests;
