//! `kpx check`: is this host fit for kpx? What was found out ([`facts`]) and what it means ([`judge`]) are apart.

mod facts;
mod judge;
mod probe;
mod processes;
mod rules;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use comfy_table::Cell;
use serde::Serialize;

use super::output::{Form, OutputArgs, cell, green, red, yellow};

pub(super) use facts::KUBE_IPVS0;
pub(super) use processes::{holds_lock, kube_proxies};
pub(super) use rules::{Chains, KubeProxyRules};

/// Say whether this host is fit for kpx, and how to mend it. Needs root.
///
/// Loads the kernel programs and attaches them in a network namespace of its own; the host is only looked at. Ends with
/// 1 if something is in kpx's way.
#[derive(Args, Debug)]
pub(super) struct CheckArgs {
    /// Can kpx use this kubeconfig? It is read, and nothing is asked of the API server.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    #[command(flatten)]
    output: OutputArgs,
}

/// The form is kept: fields may be added, none is renamed or taken away.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    /// Nothing is in kpx's way.
    fit: bool,
    findings: Vec<Finding>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Finding {
    level: Level,
    /// What was looked at.
    what: &'static str,
    found: String,
    /// How to mend it; null if there is nothing to mend.
    fix: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
enum Level {
    Ok,
    /// kpx works, but somebody should look.
    Warn,
    /// kpx does not work here, or not as it should.
    Fail,
}

pub(super) async fn check(args: &CheckArgs) -> Result<ExitCode> {
    let findings = judge::judge(&facts::gather(args.kubeconfig.clone()).await?);
    let report = Report { fit: findings.iter().all(|finding| finding.level != Level::Fail), findings };
    args.output.print(&report, |form| text(&report, form))?;
    Ok(if report.fit { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn text(report: &Report, form: Form) -> String {
    form.table(&["LEVEL", "WHAT", "FOUND"], report.findings.iter().map(row))
}

fn row(finding: &Finding) -> Vec<Cell> {
    let level = match finding.level {
        Level::Ok => green("ok"),
        Level::Warn => yellow("warn"),
        Level::Fail => red("fail"),
    };
    let fix = finding.fix.as_ref().map(|fix| format!(" — {fix}")).unwrap_or_default();
    vec![level, cell(finding.what), cell(finding.found.clone() + &fix)]
}
