//! The command line. Each command prints for people or, with `-o json`, in a form that is kept (docs/cli.md).

mod age;
mod backends;
mod check;
mod cleanup;
mod devices;
mod flows;
mod manual;
mod output;
mod select;
mod services;
mod status;

use std::io::{Write, stderr};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};

use crate::config::{RunArgs, start};
use crate::control::client::Client;
use crate::monitor::{MonitorArgs, monitor};
use crate::run::RUN_DIR;
use crate::top::{TopArgs, top};
use crate::trace::{TraceArgs, trace};

pub(crate) use cleanup::{CleanupArgs, cleanup};
pub use output::print;

/// Reaches Kubernetes Services by eBPF, in place of kube-proxy.
///
/// Ends with 0 if all is well, with 1 if something failed or is not well, with 2 if it was called wrongly.
#[derive(Parser, Debug)]
#[command(name = "kpx", version)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Serve this node until stopped. Needs root.
    ///
    /// SIGTERM and SIGINT take everything off the node again. The log goes to standard error; RUST_LOG sets what of it
    /// (default: info).
    Run(Box<RunArgs>),
    Status(status::StatusArgs),
    Services(services::ServicesArgs),
    Backends(backends::BackendsArgs),
    Flows(flows::FlowsArgs),
    Devices(devices::DevicesArgs),
    Top(TopArgs),
    Trace(Box<TraceArgs>),
    Monitor(MonitorArgs),
    Check(check::CheckArgs),
    Cleanup(CleanupArgs),
    Completions(manual::CompletionsArgs),
    Man(manual::ManArgs),
}

/// Which agent is asked.
#[derive(Args, Debug)]
struct AgentArgs {
    /// The run directory of the agent to ask.
    #[arg(long, value_name = "DIR", default_value = RUN_DIR)]
    run_dir: PathBuf,
}

impl AgentArgs {
    fn client(&self) -> Client {
        Client::new(&self.run_dir)
    }
}

impl Cli {
    /// Does what was asked; errors go to standard error.
    pub async fn execute(self) -> ExitCode {
        let done = |result: Result<()>| result.map(|()| ExitCode::SUCCESS);
        let result = match self.command {
            Command::Run(args) => done(start(&args).await),
            Command::Status(args) => status::status(&args).await,
            Command::Services(args) => done(services::services(&args).await),
            Command::Backends(args) => done(backends::backends(&args).await),
            Command::Flows(args) => done(flows::flows(&args).await),
            Command::Devices(args) => done(devices::devices(&args).await),
            Command::Top(args) => done(top(&args).await),
            Command::Trace(args) => done(trace(*args).await),
            Command::Monitor(args) => done(monitor(&args).await),
            Command::Check(args) => check::check(&args).await,
            Command::Cleanup(args) => done(cleanup(&args).await),
            Command::Completions(args) => done(manual::completions(&args)),
            Command::Man(args) => done(manual::man(&args)),
        };
        result.unwrap_or_else(|error| {
            // Nobody is left to tell if standard error is closed.
            let _told = writeln!(stderr(), "kpx: {error:#}");
            ExitCode::FAILURE
        })
    }
}
