//! `kubectl kpx top`: the traffic of each Service summed over all nodes, from two samples of the
//! nodes' counts.

use std::collections::BTreeMap;
use std::io::{IsTerminal, stdout};
use std::pin::pin;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::{Args, ValueEnum};
use proxy_view::object_name::full_name;
use proxy_view::output::{Form, Narrow, cell, print_on, red};
use proxy_view::rates::{self, Rates, Reading};
use proxy_view::{Selector, ServiceView};

use crate::answers::{Answers, ask};
use crate::connect::ConnectArgs;
use crate::pods::Cluster;

/// The escape sequence that clears a terminal.
const CLEAR: &str = "\u{1b}[H\u{1b}[2J";

/// Show the traffic of each Service on all nodes together, per second.
///
/// A terminal shows a live table until Ctrl-C; otherwise, or with --once, one table is printed.
/// Packets and bytes count both directions, summed over the nodes of the clients.
#[derive(Args, Debug)]
pub(crate) struct TopArgs {
    /// Seconds between samples.
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    interval: u64,
    /// The column to sort by.
    #[arg(long, value_enum, default_value_t, value_name = "COLUMN")]
    sort: Sort,
    /// Show only Services whose namespace or name contains this text.
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
    /// Show only Services with these labels, as in kubectl: app=web,tier!=db,env in (a,b),!old.
    #[arg(long, value_name = "LABELS")]
    service_selector: Option<Selector>,
    /// Show a row for each node of a Service.
    #[arg(long)]
    by_node: bool,
    /// Print one table for one interval, and exit.
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

/// The counts by node and Service, or their differences.
type Sample = BTreeMap<(String, String), Reading>;

pub(crate) async fn top(connect: &ConnectArgs, args: &TopArgs) -> Result<ExitCode> {
    let cluster = Cluster::find(connect).await?;
    let period = Duration::from_secs(args.interval);
    let is_live = stdout().is_terminal() && !args.watch;
    let once = args.once || !stdout().is_terminal() && !args.watch;
    // Created once, so that a signal between two waits is caught too.
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
        let table = text(
            &changes(&before.0, &now.0),
            seconds,
            args,
            Form::of_stdout(false, false),
        );
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
            let key = (node.to_owned(), full_name(service));
            (key, Reading::of(service))
        })
    });
    (counted.collect(), answers)
}

/// Returns the differences of the entries in both samples. A node that failed in one sample has no
/// difference.
fn changes(before: &Sample, now: &Sample) -> Sample {
    let both = now
        .iter()
        .filter_map(|(key, reading)| Some((key.clone(), reading.since(before.get(key)?))));
    both.collect()
}

fn text(changes: &Sample, seconds: f64, args: &TopArgs, form: Form) -> String {
    let mut sums: BTreeMap<Vec<String>, Reading> = BTreeMap::new();
    for ((node, service), change) in changes
        .iter()
        .filter(|((_, service), _)| service.contains(&args.filter))
    {
        let node = args.by_node.then(|| node.clone());
        let names = node.into_iter().chain([service.clone()]).collect();
        let sum = sums.entry(names).or_default();
        *sum = std::mem::take(sum).plus(change);
    }
    let mut rows: Vec<_> = sums
        .into_iter()
        .map(|(names, sum)| (names, Rates::of(&sum, seconds)))
        .collect();
    rows.sort_by(|(_, a), (_, b)| args.sort.of(b).total_cmp(&args.sort.of(a)));
    let names: &[&str] = if args.by_node {
        &["NODE", "SERVICE"]
    } else {
        &["SERVICE"]
    };
    let header = [names, rates::TRAFFIC_COLUMNS.as_slice()].concat();
    let rows = rows.into_iter().map(|(names, rates)| {
        let [opened, packets, bytes, unserved, flows] = rates::traffic_cells(&rates);
        let unserved = if rates.unserved() > 0.0 {
            red(unserved)
        } else {
            cell(unserved)
        };
        let numbers = [
            cell(opened),
            cell(packets),
            cell(bytes),
            unserved,
            cell(flows),
        ];
        names.into_iter().map(cell).chain(numbers).collect()
    });
    let narrow = Narrow {
        optional: &["BYTES/S", "PACKETS/S"],
        sentence: None,
    };
    form.narrowed(&header, narrow, rows)
}

impl Sort {
    fn of(self, rates: &Rates) -> f64 {
        match self {
            Self::Opened => rates.opened,
            Self::Packets => rates.packets,
            Self::Bytes => rates.bytes,
            Self::Unserved => rates.unserved(),
            #[expect(clippy::cast_precision_loss, reason = "fewer flows than 2^53")]
            Self::Flows => rates.flows as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use proxy_view::PortCounts;

    use super::*;

    #[test]
    fn node_that_misses_a_sample_has_no_change() {
        let key = |node: &str| (node.to_owned(), "shop/web".to_owned());
        let reading = |flows_opened| Reading {
            counts: PortCounts {
                flows_opened,
                flows: 7,
                ..PortCounts::default()
            },
            ..Reading::default()
        };
        let before = Sample::from([(key("n1"), reading(10)), (key("n2"), reading(10))]);
        // n2 has restarted, and n3 has no earlier sample.
        let now = Sample::from([
            (key("n1"), reading(15)),
            (key("n2"), reading(2)),
            (key("n3"), reading(1_000)),
        ]);
        let changes: Vec<_> = changes(&before, &now)
            .into_values()
            .map(|change| (change.counts.flows_opened, change.counts.flows))
            .collect();
        assert_eq!(changes, [(5, 7), (0, 7)]);
    }
}
