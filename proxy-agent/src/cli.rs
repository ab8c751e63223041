//! The command line. Each command prints for people or, with `-o json`, in a stable form
//! (docs/cli.md).

mod agent_args;
mod backends;
pub(crate) mod cleanup;
mod complete;
mod devices;
mod events;
mod flows;
mod manual;
mod relay;
mod run;
mod runtime;
mod services;
mod status;
mod top;
mod usage;
mod version;

pub(crate) use status::named_options;

use std::io::{Write, stderr};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::config::{CheckFlags, NodeArgs, RunArgs};
use crate::monitor::{MonitorArgs, monitor};
use crate::ui;

use cleanup::{CleanupArgs, cleanup};
use proxy_check::{CheckArgs, check};
use proxy_cluster::{ClusterArgs, ProbeArgs, SysdumpArgs, cluster, probe, sysdump};
use proxy_trace::{ExplainArgs, TraceArgs, explain, trace};
use runtime::wait_for;

/// Replaces kube-proxy by eBPF programs.
///
/// Exit status: 0 healthy, 1 failure or unhealthy, 2 usage error.
#[derive(Parser, Debug)]
#[command(name = "kpx", version)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Run the agent on this node until stopped. Needs root.
    ///
    /// SIGTERM and SIGINT stop the agent; Services stay reachable in their last known state, unless
    /// --cleanup-on-exit is set. The log goes to standard error; RUST_LOG sets its level (default:
    /// info).
    Run(Box<RunArgs>),
    Status(status::StatusArgs),
    Services(services::ServicesArgs),
    Backends(backends::BackendsArgs),
    Flows(flows::FlowsArgs),
    Devices(devices::DevicesArgs),
    Events(events::EventsArgs),
    Top(top::TopArgs),
    Trace(Box<TraceArgs<NodeArgs>>),
    Monitor(MonitorArgs),
    Explain(ExplainArgs),
    Sysdump(SysdumpArgs),
    Cluster(Box<ClusterArgs>),
    #[command(hide = true)]
    Probe(ProbeArgs),
    #[command(hide = true)]
    Relay(relay::RelayArgs),
    Check(CheckArgs<CheckFlags>),
    Cleanup(CleanupArgs),
    Version(version::VersionArgs),
    Completions(manual::CompletionsArgs),
    Man(manual::ManArgs),
}

impl Cli {
    pub fn execute(self) -> ExitCode {
        let done = |result: Result<()>| result.map(|()| ExitCode::SUCCESS);
        let result = match self.command {
            // The agent drops privileges, which needs a single-threaded process: no runtime runs
            // yet.
            Command::Run(args) => done(run::start(&args)),
            Command::Status(args) => wait_for(status::status(&args)),
            Command::Services(args) => done(wait_for(services::services(&args))),
            Command::Backends(args) => done(wait_for(backends::backends(&args))),
            Command::Flows(args) => done(wait_for(flows::flows(&args))),
            Command::Devices(args) => done(wait_for(devices::devices(&args))),
            Command::Events(args) => done(wait_for(events::events(&args))),
            Command::Top(args) => done(wait_for(top::top(&args))),
            Command::Trace(args) => done(wait_for(trace(*args))),
            Command::Monitor(args) => done(wait_for(monitor(&args))),
            Command::Explain(args) => done(explain(&args)),
            Command::Sysdump(args) => done(wait_for(sysdump(&args))),
            Command::Cluster(args) => {
                wait_for(cluster(*args, proxy_trace::text_of, ui::cluster::serve))
            }
            Command::Probe(args) => wait_for(probe(args)),
            Command::Relay(args) => done(wait_for(relay::relay(&args))),
            Command::Check(args) => wait_for(check(&args)),
            Command::Cleanup(args) => done(wait_for(cleanup(&args))),
            Command::Version(args) => done(wait_for(version::version(&args))),
            Command::Completions(args) => done(manual::completions(&args)),
            Command::Man(args) => done(manual::man(&args)),
        };
        result.unwrap_or_else(|error| {
            // If standard error is closed, a failure cannot be reported.
            let _written = writeln!(stderr(), "kpx: {error:#}");
            ExitCode::FAILURE
        })
    }
}
