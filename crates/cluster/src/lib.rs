//! `kubectl kpx`, `kpx cluster`: run kpx commands on every node through the API server. `kpx
//! sysdump`: collects the data of a bug report.
#![forbid(unsafe_code)]

mod answers;
mod backends;
mod connect;
mod connectivity;
mod events;
mod examples;
mod exec;
mod flows;
mod monitor;
mod pods;
mod probe;
mod select;
mod services;
mod status;
mod sum;
mod sysdump;
mod top;
mod trace;
pub mod ui;
mod version;
mod watch;
#[cfg(test)]
mod widths;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Subcommand, ValueEnum};

use connect::ConnectArgs;
pub use examples::EXAMPLES;
pub use probe::{ProbeArgs, probe};
pub use sysdump::{SysdumpArgs, sysdump};

/// The file name by which kubectl finds the plugin.
pub const PLUGIN: &str = "kubectl-kpx";

/// Run a command on the kpx of every node through the API server. Same as `kubectl kpx`.
///
/// Runs `kpx` in the kpx pod of each node with your kubeconfig's credentials. Needs permission to
/// list pods, and to get and create pods/exec, in kpx's namespace.
///
/// Exit status: 0 if all nodes answered and are healthy, 1 if a node is unhealthy or did not
/// answer, 2 usage error. Standard error lists nodes without an answer, with the cause.
#[derive(Args, Debug)]
pub struct ClusterArgs {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    connect: ConnectArgs,
}

#[derive(Subcommand, Debug)]
enum Command {
    Status(status::StatusArgs),
    Services(services::ServicesArgs),
    Backends(backends::BackendsArgs),
    Flows(flows::FlowsArgs),
    Events(events::EventsArgs),
    Top(top::TopArgs),
    Monitor(monitor::MonitorArgs),
    Trace(trace::TraceArgs),
    Ui(ui::UiArgs),
    ConnectivityTest(connectivity::ConnectivityArgs),
    Sysdump(sysdump::ClusterSysdumpArgs),
    Version(version::VersionArgs),
}

/// The form of what commands print that have no table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Output {
    #[default]
    Text,
    Json,
}

/// Runs a command. `render` makes the text of a node's trace; `serve` serves the page of `kubectl
/// kpx ui` until stopped.
pub async fn cluster(
    args: ClusterArgs,
    render: fn(&serde_json::Value) -> Result<String>,
    serve: impl AsyncFnOnce(ui::Page) -> Result<()>,
) -> Result<ExitCode> {
    let ClusterArgs { command, connect } = args;
    match command {
        Command::Status(args) => status::status(&connect, &args).await,
        Command::Services(args) => services::services(&connect, &args).await,
        Command::Backends(args) => backends::backends(&connect, &args).await,
        Command::Flows(args) => flows::flows(&connect, &args).await,
        Command::Events(args) => events::events(&connect, &args).await,
        Command::Top(args) => top::top(&connect, &args).await,
        Command::Monitor(args) => monitor::monitor(&connect, &args).await,
        Command::Trace(args) => trace::trace(&connect, &args, render).await,
        Command::Ui(args) => {
            serve(ui::Page::start(connect, &args).await?).await?;
            Ok(ExitCode::SUCCESS)
        }
        Command::ConnectivityTest(args) => connectivity::connectivity_test(&connect, &args).await,
        Command::Sysdump(args) => sysdump::of_cluster(&connect, &args).await,
        Command::Version(args) => version::version(&connect, &args).await,
    }
}
