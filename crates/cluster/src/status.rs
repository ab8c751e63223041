//! `kubectl kpx status`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use comfy_table::Cell;
use proxy_common::counter::{Reason, Verdict};
use proxy_view::age;
use proxy_view::list::Listed;
use proxy_view::output::{Form, Narrow, OutputArgs, cell, green, red, yellow};
use proxy_view::status::Status;
use serde::{Deserialize, Serialize};

use crate::answers::{Answers, ask};
use crate::connect::ConnectArgs;
use crate::pods::Cluster;
use crate::watch::{WatchArgs, watch};

/// Show the state of every node's agent. Exits with 1 if an agent is unhealthy or does not answer.
///
/// With --watch a node's row follows when its health, its problems or its version change; times and
/// counts alone are no change.
#[derive(Args, Debug)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    watch: WatchArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// The state of an agent, as a row for `--watch`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
struct Watched(Status);

pub(crate) async fn status(connect: &ConnectArgs, args: &StatusArgs) -> Result<ExitCode> {
    let arguments = ["status".to_owned()];
    if args.watch.watch {
        return watch(
            connect,
            args.output.kind(),
            &arguments,
            |status: Watched| vec![status],
        )
        .await;
    }
    let cluster = Cluster::find(connect).await?;
    let answers: Answers<Status> = ask(&cluster, connect, &arguments).await;
    answers.print(&args.output, "nothing found", |form| text(&answers, form))
}

pub(crate) fn text(answers: &Answers<Status>, form: Form) -> String {
    let header = header(form.wide)
        .into_iter()
        .chain(["PROBLEMS"])
        .collect::<Vec<_>>();
    let rows = answers.answered().map(|(node, status)| {
        let problems = match status.problems.len() {
            0 => cell(0),
            problems => red(problems),
        };
        [cell(node)]
            .into_iter()
            .chain(cells(status, form.wide))
            .chain([problems])
            .collect()
    });
    let narrow = Narrow {
        sentence: None,
        ..Watched::NARROW
    };
    let table = form.narrowed(&[&["NODE"], &header[..]].concat(), narrow, rows);
    let problems = answers.answered().flat_map(|(node, status)| {
        status
            .problems
            .iter()
            .map(move |problem| vec![cell(node), red(&problem.what), cell(&problem.why)])
    });
    let problems = form.sentences(&["NODE", "PROBLEM", "WHY"], problems);
    if problems.is_empty() {
        table
    } else {
        format!("{table}\n{problems}")
    }
}

impl Listed for Watched {
    const NO_NEWS: &'static [&'static str] = &["UP", "SERVICES", "FLOWS", "UNSERVED"];
    const NARROW: Narrow<'static> = Narrow {
        optional: &[
            "SERVICES",
            "FAST-PATH",
            "UP",
            "FLOWS",
            "UNSERVED",
            "VERSION",
        ],
        sentence: Some("PROBLEMS"),
    };

    fn header(wide: bool) -> Vec<&'static str> {
        header(wide).into_iter().chain(["PROBLEMS"]).collect()
    }

    /// Returns the cells; the last cell lists the problems.
    fn cells(&self, wide: bool) -> Vec<Cell> {
        let Self(status) = self;
        let problems = status
            .problems
            .iter()
            .map(|problem| format!("{}: {}", problem.what, problem.why));
        let problems: Vec<_> = problems.collect();
        let last = if problems.is_empty() {
            cell("")
        } else {
            red(problems.join("; "))
        };
        cells(status, wide).into_iter().chain([last]).collect()
    }

    fn key(&self) -> String {
        String::new()
    }

    fn name(&self) -> String {
        self.0.node_name.clone()
    }
}

fn header(wide: bool) -> Vec<&'static str> {
    let header = vec![
        "HEALTH",
        "VERSION",
        "UP",
        "SERVICES",
        "FLOWS",
        "UNSERVED",
        "FAST-PATH",
    ];
    if wide {
        [
            header,
            vec!["MODE", "ADDRESSES", "MASQUERADE", "SOCKETS", "KEPT-BY"],
        ]
        .concat()
    } else {
        header
    }
}

fn cells(status: &Status, wide: bool) -> Vec<Cell> {
    let health = match (status.healthy, status.complete) {
        (true, _) => green("healthy"),
        (false, true) => red("unhealthy"),
        (false, false) => yellow("waiting"),
    };
    let flows = status
        .flows
        .values()
        .fold(0_usize, |sum, flows| sum.saturating_add(flows.flows));
    let services = status
        .tables
        .values()
        .map(|tables| tables.services)
        .max()
        .unwrap_or(0);
    // Both texts begin with the setting; a reason follows.
    let first = |text: &str| text.split([':', ' ']).next().unwrap_or_default().to_owned();
    let mut cells = vec![
        health,
        cell(&status.version),
        cell(age::since(status.started)),
        cell(services),
        cell(flows),
        cell(unserved(status)),
        cell(first(&status.options.fast_path)),
    ];
    if wide {
        cells.extend([
            cell(&status.mode),
            cell(proxy_view::output::list(&status.node_addresses)),
            cell(&status.options.masquerade),
            cell(first(&status.options.socket_lb)),
            cell(&status.kept_by),
        ]);
    }
    cells
}

/// Returns the number of packets that were dropped or rejected.
fn unserved(status: &Status) -> u64 {
    let reasons = Reason::ALL
        .into_iter()
        .filter(|reason| reason.verdict() != Verdict::Pass);
    reasons
        .filter_map(|reason| status.reasons.get(reason.name()))
        .fold(0, |sum, packets| sum.saturating_add(*packets))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_and_clocks_of_a_watched_node_are_no_news() {
        let reports: Vec<_> = Watched::header(true)
            .into_iter()
            .filter(|column| !Watched::NO_NEWS.contains(column))
            .collect();
        let settings = [
            "FAST-PATH",
            "MODE",
            "ADDRESSES",
            "MASQUERADE",
            "SOCKETS",
            "KEPT-BY",
        ];
        assert_eq!(
            reports,
            [&["HEALTH", "VERSION"], &settings[..], &["PROBLEMS"]].concat()
        );
    }
}
