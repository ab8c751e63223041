//! `kubectl kpx status`.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use comfy_table::Cell;
use proxy_common::counter::{Reason, Verdict};
use proxy_view::age;
use proxy_view::output::{Form, OutputArgs, cell, green, red, yellow};
use proxy_view::status::Status;

use crate::answers::{Answers, ask};
use crate::connect::ConnectArgs;
use crate::pods::Cluster;

/// Show the state of every node's agent. Ends with 1 if one is unhealthy or does not answer.
#[derive(Args, Debug)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    output: OutputArgs,
}

pub(crate) async fn status(connect: &ConnectArgs, args: &StatusArgs) -> Result<ExitCode> {
    let cluster = Cluster::find(connect).await?;
    let answers: Answers<Status> = ask(&cluster, connect, &["status".to_owned()]).await;
    answers.print(&args.output, |form| text(&answers, form))
}

fn text(answers: &Answers<Status>, form: Form) -> String {
    let mut header = vec!["NODE", "HEALTH", "VERSION", "UP", "SERVICES", "FLOWS", "UNSERVED", "FAST-PATH", "PROBLEMS"];
    if form.wide {
        header.extend(["MODE", "ADDRESSES", "MASQUERADE", "SOCKETS", "KEPT-BY"]);
    }
    let table = form.table(&header, answers.answered().map(|(node, status)| row(node, status, form.wide)));
    let problems = answers.answered().flat_map(|(node, status)| {
        status.problems.iter().map(move |problem| vec![cell(node), red(&problem.what), cell(&problem.why)])
    });
    let problems = form.sentences(&["NODE", "PROBLEM", "WHY"], problems);
    if problems.is_empty() { table } else { format!("{table}\n{problems}") }
}

fn row(node: &str, status: &Status, wide: bool) -> Vec<Cell> {
    let health = match (status.healthy, status.complete) {
        (true, _) => green("healthy"),
        (false, true) => red("unhealthy"),
        (false, false) => yellow("waiting"),
    };
    let flows = status.flows.values().fold(0_usize, |sum, flows| sum.saturating_add(flows.flows));
    let services = status.tables.values().map(|tables| tables.services).max().unwrap_or(0);
    // Both say why behind a colon.
    let first = |text: &str| text.split([':', ' ']).next().unwrap_or_default().to_owned();
    let mut row = vec![
        cell(node),
        health,
        cell(&status.version),
        cell(age::since(status.started)),
        cell(services),
        cell(flows),
        cell(unserved(status)),
        cell(first(&status.options.fast_path)),
        match status.problems.len() {
            0 => cell(0),
            problems => red(problems),
        },
    ];
    if wide {
        row.extend([
            cell(&status.mode),
            cell(proxy_view::output::list(&status.node_addresses)),
            cell(&status.options.masquerade),
            cell(first(&status.options.socket_lb)),
            cell(&status.kept_by),
        ]);
    }
    row
}

/// Counts the packets that were dropped or rejected.
fn unserved(status: &Status) -> u64 {
    let reasons = Reason::ALL.into_iter().filter(|reason| reason.verdict() != Verdict::Pass);
    reasons.filter_map(|reason| status.reasons.get(reason.name())).fold(0, |sum, packets| sum.saturating_add(*packets))
}
