//! The command line. Each command prints for people or, with `-o json`, in a form that is kept (docs/cli.md).

mod age;
mod agent_args;
mod backends;
pub(crate) mod check;
pub(crate) mod cleanup;
mod devices;
mod flows;
mod manual;
pub(crate) mod output;
mod run;
mod runtime;
mod select;
mod services;
mod status;

use std::io::{Write, stderr};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::config::RunArgs;
use crate::monitor::{MonitorArgs, monitor};
use crate::top::{TopArgs, top};
use crate::trace::{TraceArgs, trace};

use cleanup::{CleanupArgs, cleanup};
use runtime::wait_for;

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
    /// SIGTERM and SIGINT end it; services stay reachable as it last knew them, unless it is told --cleanup-on-exit. The log goes to standard error; RUST_LOG sets what of it
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

impl Cli {
    /// Does what was asked; errors go to standard error.
    pub fn execute(self) -> ExitCode {
        let done = |result: Result<()>| result.map(|()| ExitCode::SUCCESS);
        let result = match self.command {
            // It gives up privileges, and that is to be done before there are threads.
            Command::Run(args) => done(run::start(&args)),
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
            // Nobody is left to tell if standard error is closed.
            let _told = writeln!(stderr(), "kpx: {error:#}");
            ExitCode::FAILURE
        })
    }
}
