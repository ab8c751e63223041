//! `kpx check`: checks whether this host is fit for kpx. [`facts`] collects, and [`judge`]
//! evaluates. The agent and `kpx cleanup` share three parts: the needed capabilities, kube-proxy's
//! processes, kube-proxy's rules.
#![forbid(unsafe_code)]

mod facts;
mod finding;
mod judge;
mod needs;
mod orphan;
mod outside_needs;
mod probe;
mod processes;
mod rules;
mod setting;

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use comfy_table::Cell;
use serde::Serialize;

use proxy_view::Mode;
use proxy_view::output::{Form, OutputArgs, cell, green, red, yellow};

use finding::{Finding, Level};

pub use judge::{past_ipsec, unheard_probes};
pub use needs::{NEEDED, Need, is_part_of_sys_admin, missing};
pub use orphan::{ORPHANED, is_orphaned};
pub use processes::{holds_lock, kube_proxies};
pub use rules::{Chains, KubeProxyRules};
pub use setting::{RunFlags, Setting};

/// Preflight check with a fix for every finding. Needs root.
///
/// Loads the kernel programs and attaches them in a separate network namespace; the host stays
/// unchanged. Pass the flags of kpx run to check that configuration. On a node it parses the
/// kubeconfig; host mode also checks permissions at the API server and compares this host's
/// networks with the Services'. Exits with 1 if kpx cannot work here.
#[derive(Args, Debug)]
pub struct CheckArgs<R: RunFlags> {
    #[command(flatten)]
    run: R,
    #[command(flatten)]
    output: OutputArgs,
}

/// The report. Its form is stable: fields may be added, and no field is renamed or removed.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Report {
    /// True if kpx works here: no finding has the level `fail`.
    fit: bool,
    findings: Vec<Finding>,
}

pub async fn check<R: RunFlags>(args: &CheckArgs<R>) -> Result<ExitCode> {
    let setting = args.run.setting()?;
    let facts = facts::gather(&setting).await?;
    let findings = match setting.mode {
        Mode::Node => judge::judge(&facts),
        Mode::Host => {
            let outside = outside_needs::gather(&setting, &facts::links().await?).await?;
            judge::of_host(&facts)
                .into_iter()
                .chain(outside_needs::judge(&setting, &outside))
                .collect()
        }
    };
    let report = Report {
        fit: findings.iter().all(|finding| finding.level != Level::Fail),
        findings,
    };
    args.output.print(&report, |form| text(&report, form))?;
    Ok(if report.fit {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn text(report: &Report, form: Form) -> String {
    form.sentences(&["LEVEL", "WHAT", "FOUND"], report.findings.iter().map(row))
}

fn row(finding: &Finding) -> Vec<Cell> {
    let level = match finding.level {
        Level::Ok => green("ok"),
        Level::Warn => yellow("warn"),
        Level::Fail => red("fail"),
    };
    let fix = finding
        .fix
        .as_ref()
        .map(|fix| format!(" — {fix}"))
        .unwrap_or_default();
    vec![
        level,
        cell(finding.what),
        cell(finding.found.clone() + &fix),
    ]
}
