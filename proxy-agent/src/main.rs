//! kpx: reaches Kubernetes Services by eBPF, in place of kube-proxy.
#![forbid(unsafe_code)]

use std::io::{Write, stderr, stdout};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand, ValueEnum};
use proxy_agent::config::{RunArgs, arguments, start};
use proxy_agent::control::client::Client;
use proxy_agent::run::RUN_DIR;
use proxy_agent::status::render;
use proxy_agent::trace::{TraceArgs, trace};

/// Reaches Kubernetes Services by eBPF, in place of kube-proxy.
#[derive(Parser)]
#[command(name = "kpx", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve this node until stopped. Needs root.
    ///
    /// SIGTERM and SIGINT take everything off the node again. The log goes to standard error; RUST_LOG sets what of it
    /// (default: info).
    Run(Box<RunArgs>),
    /// Show how the running agent does. Ends with 1 if it is not healthy or does not answer.
    Status(StatusArgs),
    Trace(Box<TraceArgs>),
}

#[derive(Args)]
struct StatusArgs {
    /// The run directory of the agent to ask.
    #[arg(long, value_name = "DIR", default_value = RUN_DIR)]
    run_dir: PathBuf,
    #[arg(long, short, value_enum, default_value_t = Output::Text)]
    output: Output,
}

#[derive(Clone, Copy, ValueEnum)]
enum Output {
    Text,
    Json,
}

#[tokio::main]
async fn main() -> ExitCode {
    let result = match Cli::parse_from(arguments(std::env::args_os())).command {
        Command::Run(args) => start(&args).await.map(|()| ExitCode::SUCCESS),
        Command::Status(args) => status(args).await,
        Command::Trace(args) => trace(*args).await.map(|()| ExitCode::SUCCESS),
    };
    result.unwrap_or_else(|error| {
        // Nobody is left to tell if standard error is closed.
        let _told = writeln!(stderr(), "kpx: {error:#}");
        ExitCode::FAILURE
    })
}

async fn status(args: StatusArgs) -> Result<ExitCode> {
    let status = Client::new(&args.run_dir).status().await?;
    let text = match args.output {
        Output::Text => render(&status)?,
        Output::Json => serde_json::to_string_pretty(&status)? + "\n",
    };
    stdout().write_all(text.as_bytes()).context("write to standard output")?;
    Ok(if status.healthy { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
