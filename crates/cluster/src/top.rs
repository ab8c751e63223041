//! `kubectl kpx top`: the traffic of each Service on all nodes together, from two samples of the
//! nodes' counts.

use std::collections::BTreeMap;
use std::io::{IsTerminal, stdout};
use std::pin::pin;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::{Args, ValueEnum};
use comfy_table::Cell;
use proxy_view::output::{Form, cell, print_on, red};
use proxy_view::{Selector, ServiceView};

use crate::answers::{Answers, ask};
use crate::connect::ConnectArgs;
use crate::pods::Cluster;

/// The escape sequence that clears a terminal.
const CLEAR: &str = "\u{1b}[H\u{1b}[2J";

/// Show the traffic of each Service on all nodes together, per second.
///
/// In a terminal the table is updated until Ctrl-C. Elsewhere, or with --once, one table is
/// printed. Packets and bytes count both directions. A Service is served by the nodes of its
/// clients, so their sum is its traffic.
#[derive(Args, Debug)]
pub(crate) struct TopArgs {
    /// Seconds between two samples.
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// The column to sort by.
    #[arg(long, value_enum, default_value_t, value_name = "COLUMN")]
    sort: Sort,
    /// Show only Services that have this text in their namespace or name.
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// Show only Services with these labels, in kubectl's form: app=web,tier!=db,env in (a,b),!old.
    #[arg(long, value_name = "LABELS")]
    service_selector: Option<Selector>,
    /// Show a row for each node of a Service.
    #[arg(long)]
    by_node: bool,
    /// Print one table of the traffic within one interval, and end.
    #[arg(long)]
    once: bool,
    /// Print a table after each interval, until stopped, where no terminal is as well.
    #[arg(long, short, conflicts_with = "once")]
    watch: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Sort {
    /// Flows opened.
    #[default]
    Opened,
    Packets,
    Bytes,
    Unserved,
    /// Open flows.
    Flows,
}

/// The counts of a Service on a node, or their change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counts {
    opened: u64,
    packets: u64,
    bytes: u64,
    unserved: u64,
    flows: u64,
}

/// The counts by node and Service.
type Sample = BTreeMap<(String, String), Counts>;

pub(crate) async fn top(connect: &ConnectArgs, args: &TopArgs) -> Result<ExitCode> {
    let cluster = Cluster::find(connect).await?;
    let period = Duration::from_secs(args.interval);
    let is_live = stdout().is_terminal() && !args.watch;
    let once = args.once || !stdout().is_terminal() && !args.watch;
    // One for the whole loop: a signal between two waits counts too.
    let mut stopped = pin!(tokio::signal::ctrl_c());
    let mut before = tokio::select! {
        _ = &mut stopped => return Ok(ExitCode::SUCCESS),
        first = sample(&cluster, connect, args) => first,
    };
    loop {
        let since = Instant::now();
        let next = async {
            tokio::time::sleep(period).await;
            sample(&cluster, connect, args).await
        };
        let now = tokio::select! {
            _ = &mut stopped => return Ok(ExitCode::SUCCESS),
            now = next => now,
        };
        let seconds = since.elapsed().as_secs_f64();
        let table = text(&changes(&before.0, &now.0), seconds, args);
        if !print_on(&if is_live && !once {
            format!("{CLEAR}{table}")
        } else {
            table
        })? {
            return Ok(ExitCode::SUCCESS);
        }
        let end = now.1.end()?;
        if once {
            return Ok(end);
        }
        before = now;
    }
}

async fn sample(
    cluster: &Cluster,
    connect: &ConnectArgs,
    args: &TopArgs,
) -> (Sample, Answers<Vec<ServiceView>>) {
    let mut arguments = vec!["services".to_owned()];
    arguments.extend(
        args.service_selector
            .iter()
            .map(|selector| format!("--selector={selector}")),
    );
    let answers: Answers<Vec<ServiceView>> = ask(cluster, connect, &arguments).await;
    let counted = answers.answered().flat_map(|(node, services)| {
        services.iter().map(move |service| {
            let name = format!("{}/{}", service.namespace, service.name);
            ((node.to_owned(), name), Counts::of(service))
        })
    });
    (counted.collect(), answers)
}

impl Counts {
    fn of(service: &ServiceView) -> Self {
        let of_ports = service
            .ports
            .iter()
            .map(|port| port.counts)
            .map(|counts| Self {
                opened: counts.flows_opened,
                packets: counts.packets.saturating_add(counts.packets_returned),
                bytes: counts.bytes.saturating_add(counts.bytes_returned),
                unserved: counts.unserved(),
                flows: counts.flows,
            });
        of_ports.fold(Self::default(), Self::plus)
    }

    /// Adds counts. Those of a node may be any numbers.
    fn plus(self, other: Self) -> Self {
        Self {
            opened: self.opened.saturating_add(other.opened),
            packets: self.packets.saturating_add(other.packets),
            bytes: self.bytes.saturating_add(other.bytes),
            unserved: self.unserved.saturating_add(other.unserved),
            flows: self.flows.saturating_add(other.flows),
        }
    }

    /// Returns the change since `before`. An agent that started again counts from zero.
    fn since(self, before: Self) -> Self {
        let change = |now: u64, before: u64| now.checked_sub(before).unwrap_or(now);
        Self {
            opened: change(self.opened, before.opened),
            packets: change(self.packets, before.packets),
            bytes: change(self.bytes, before.bytes),
            unserved: change(self.unserved, before.unserved),
            flows: self.flows,
        }
    }

    fn by(self, sort: Sort) -> u64 {
        match sort {
            Sort::Opened => self.opened,
            Sort::Packets => self.packets,
            Sort::Bytes => self.bytes,
            Sort::Unserved => self.unserved,
            Sort::Flows => self.flows,
        }
    }
}

/// Returns the changes of what both samples have: a node that did not answer has none.
fn changes(before: &Sample, now: &Sample) -> Sample {
    let both = now
        .iter()
        .filter_map(|(key, counts)| Some((key.clone(), counts.since(*before.get(key)?))));
    both.collect()
}

fn text(changes: &Sample, seconds: f64, args: &TopArgs) -> String {
    let mut rows: BTreeMap<(String, String), Counts> = BTreeMap::new();
    for ((node, service), counts) in changes
        .iter()
        .filter(|((_, service), _)| service.contains(&args.filter))
    {
        let node = if args.by_node {
            node.clone()
        } else {
            String::new()
        };
        let sum = rows.entry((node, service.clone())).or_default();
        *sum = sum.plus(*counts);
    }
    let mut rows: Vec<_> = rows.into_iter().collect();
    rows.sort_by_key(|(_, counts)| std::cmp::Reverse(counts.by(args.sort)));
    let form = Form::of_stdout(false, false);
    let mut header = vec![
        "SERVICE",
        "OPENED/S",
        "PACKETS/S",
        "BYTES/S",
        "UNSERVED/S",
        "FLOWS",
    ];
    if args.by_node {
        header.insert(0, "NODE");
    }
    form.table(
        &header,
        rows.into_iter().map(|((node, service), counts)| {
            let mut row = row(&service, counts, seconds);
            if args.by_node {
                row.insert(0, cell(node));
            }
            row
        }),
    )
}

fn row(service: &str, counts: Counts, seconds: f64) -> Vec<Cell> {
    let rate = |count: u64| format!("{:.1}", count as f64 / seconds);
    vec![
        cell(service),
        cell(rate(counts.opened)),
        cell(rate(counts.packets)),
        cell(rate(counts.bytes)),
        if counts.unserved > 0 {
            red(rate(counts.unserved))
        } else {
            cell(rate(0))
        },
        cell(counts.flows),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_that_misses_a_sample_has_no_change() {
        let key = |node: &str| (node.to_owned(), "shop/web".to_owned());
        let counts = |opened| Counts {
            opened,
            flows: 7,
            ..Counts::default()
        };
        let before = Sample::from([(key("n1"), counts(10)), (key("n2"), counts(10))]);
        // n2 has started again, and n3 did not answer before.
        let now = Sample::from([
            (key("n1"), counts(15)),
            (key("n2"), counts(2)),
            (key("n3"), counts(1_000)),
        ]);
        let changes: Vec<_> = changes(&before, &now)
            .into_values()
            .map(|counts| (counts.opened, counts.flows))
            .collect();
        assert_eq!(changes, [(5, 7), (2, 7)]);
    }

    #[test]
    fn counts_of_a_node_that_lies_end_no_command() {
        let most = Counts {
            opened: u64::MAX,
            packets: u64::MAX,
            bytes: u64::MAX,
            unserved: u64::MAX,
            flows: u64::MAX,
        };
        assert_eq!(most.plus(most), most);
    }
}
