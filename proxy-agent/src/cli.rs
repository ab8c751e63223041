//! The command line. Each command prints for people or, with `-o json`, in a stable form (docs/cli.md).

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

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use tokio::runtime::Runtime;

use crate::config::{RunArgs, start};
use crate::control::client::Client;
use crate::monitor::{MonitorArgs, monitor};
use crate::run::RUN_DIR;
use crate::top::{TopArgs, top};
use crate::trace::{TraceArgs, trace};

pub(crate) use cleanup::{CleanupArgs, cleanup, kube_proxys_sysctls};
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
    /// SIGTERM and SIGINT end the agent; Services then stay reachable in their last known state, unless --cleanup-on-exit is set. The log goes to standard error; RUST_LOG sets its level
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

/// The agent to ask.
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
    /// Executes the command; errors go to standard error.
    pub fn execute(self) -> ExitCode {
        let done = |result: Result<()>| result.map(|()| ExitCode::SUCCESS);
        let result = match self.command {
            // The agent gives up privileges, which must happen before the process has threads.
            Command::Run(args) => done(start(&args)),
            Command::Status(args) => wait_for(status::status(&args)),
            Command::Services(args) => done(wait_for(services::services(&args))),
            Command::Backends(args) => done(wait_for(backends::backends(&args))),
            Command::Flows(args) => done(wait_for(flows::flows(&args))),
            Command::Devices(args) => done(wait_for(devices::devices(&args))),
            Command::Top(args) => done(wait_for(top(&args))),
            Command::Trace(args) => done(wait_for(trace(*args))),
            Command::Monitor(args) => done(wait_for(monitor(&args))),
            Command::Check(args) => wait_for(check::check(&args)),
            Command::Cleanup(args) => done(wait_for(cleanup(&args))),
            Command::Completions(args) => done(manual::completions(&args)),
            Command::Man(args) => done(manual::man(&args)),
        };
        result.unwrap_or_else(|error| {
            // A failure is ignored, because a closed standard error leaves no place to report it.
            let _written = writeln!(stderr(), "kpx: {error:#}");
            ExitCode::FAILURE
        })
    }
}

/// Runs a future to its end on a runtime of its own.
pub(crate) fn wait_for<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = Runtime::new().context("start the runtime")?;
    let result = runtime.block_on(work);
    // A task that still waits for a name server or a credential plugin must not delay the end.
    runtime.shutdown_background();
    result
}
