//! `kubectl kpx version`: the version of each node's agent, compared with this program's.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use comfy_table::Cell;
use proxy_view::output::{Form, OutputArgs, cell, red, yellow};
use serde::Deserialize;

use crate::answers::{Answers, ask};
use crate::connect::ConnectArgs;
use crate::pods::Cluster;

const OWN: &str = env!("CARGO_PKG_VERSION");

/// Print the versions of this program and of every node's agent.
///
/// SKEW is `yes` where the agent's version differs from this program's. Exits with 1 if a node does
/// not answer.
#[derive(Args, Debug)]
pub(crate) struct VersionArgs {
    #[command(flatten)]
    output: OutputArgs,
}

/// The output of `kpx version` on a node.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Versions {
    kpx: String,
    /// The version of the running agent; `None` if no agent runs.
    agent: Option<String>,
}

pub(crate) async fn version(connect: &ConnectArgs, args: &VersionArgs) -> Result<ExitCode> {
    let cluster = Cluster::find(connect).await?;
    let answers: Answers<Versions> = ask(&cluster, connect, &["version".to_owned()]).await;
    answers.print(&args.output, "nothing found", |form| {
        format!("kubectl-kpx {OWN}\n\n{}", text(answers.answered(), form))
    })
}

fn text<'a>(answers: impl Iterator<Item = (&'a str, &'a Versions)>, form: Form) -> String {
    form.table(
        &["NODE", "AGENT", "PROGRAM", "SKEW"],
        answers.map(|(node, versions)| row(node, versions)),
    )
}

fn row(node: &str, Versions { kpx, agent }: &Versions) -> Vec<Cell> {
    let (agent, skew) = match agent {
        Some(agent) if agent == OWN => (cell(agent), cell("no")),
        Some(agent) => (yellow(agent), yellow("yes")),
        None => (red("no agent"), cell("unknown")),
    };
    vec![cell(node), agent, cell(kpx), skew]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agent_of_another_version_is_a_skew() {
        let versions = |agent: Option<&str>| Versions {
            kpx: OWN.to_owned(),
            agent: agent.map(str::to_owned),
        };
        let [own, old, gone] = [Some(OWN), Some("0.0.1"), None].map(versions);
        let form = Form {
            headers: true,
            ..Form::default()
        };
        let text = text(
            [("n1", &own), ("n2", &old), ("n3", &gone)].into_iter(),
            form,
        );
        let rows: Vec<Vec<_>> = text
            .lines()
            .map(|line| {
                line.split("   ")
                    .map(str::trim)
                    .filter(|word| !word.is_empty())
                    .collect()
            })
            .collect();
        assert_eq!(
            rows,
            [
                ["NODE", "AGENT", "PROGRAM", "SKEW"],
                ["n1", OWN, OWN, "no"],
                ["n2", "0.0.1", OWN, "yes"],
                ["n3", "no agent", OWN, "unknown"],
            ]
        );
    }
}
