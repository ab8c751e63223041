//! `kpx version`.

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use super::agent_args::AgentArgs;
use proxy_view::output::{Data, json, print, yaml};

/// Print the versions of this program and of the running agent.
#[derive(Args, Debug)]
pub(super) struct VersionArgs {
    #[command(flatten)]
    agent: AgentArgs,
    /// Output format.
    #[arg(long, short, value_enum, default_value_t, value_name = "FORM")]
    output: Data,
}

/// The versions. The form is stable: fields may be added, and no field is renamed or removed.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Versions {
    kpx: &'static str,
    /// The version of the running agent; null if no agent answers.
    agent: Option<String>,
    /// Why no agent answers; null if an agent answers.
    why_no_agent: Option<String>,
}

pub(super) async fn version(args: &VersionArgs) -> Result<()> {
    let (agent, why_no_agent) = match args.agent.client().status().await {
        Ok(status) => (Some(status.version), None),
        Err(error) => (None, Some(format!("{error:#}"))),
    };
    let versions = Versions {
        kpx: env!("CARGO_PKG_VERSION"),
        agent,
        why_no_agent,
    };
    print(&match args.output {
        Data::Text => text(&versions),
        Data::Json => json(&versions)?,
        Data::Yaml => yaml(&versions)?,
    })
}

fn text(versions: &Versions) -> String {
    let agent = match (&versions.agent, &versions.why_no_agent) {
        (Some(version), _) => version,
        (None, why) => &format!("unknown: {}", why.as_deref().unwrap_or_default()),
    };
    format!("kpx    {}\nagent  {agent}\n", versions.kpx)
}
