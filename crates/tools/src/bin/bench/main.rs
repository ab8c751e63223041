//! Measures kpx: `kpx-bench` runs all sections and reports; `kpx-bench SECTION` runs one.

mod control;
mod data;
mod dead_backends;
mod icount;
mod machine;
mod openers;
mod programs;
mod record;
mod report;
mod scale;
mod tunnel;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "kpx-bench")]
struct Cli {
    /// Where results are kept, one file a section. A section that is run again replaces its own,
    /// and `scale` the parts that it measures
    #[arg(
        long,
        global = true,
        env = "KPX_BENCH_RESULTS",
        default_value = "target/bench"
    )]
    results: PathBuf,
    #[command(subcommand)]
    section: Option<Section>,
}

#[derive(Subcommand)]
enum Section {
    /// Measure the cost of Services on the way of packets
    Data(data::Args),
    /// Measure the cost of a packet in each program
    Programs(programs::Args),
    /// Measure whether openers of flows on two CPUs hinder each other
    Openers(openers::Args),
    /// Measure the cost of a large cluster for the agent
    Control(control::Args),
    /// Measure very large clusters, beside kube-proxy's rules
    Scale(scale::Args),
    /// Measure what connections to dead backends cost, with kpx and with nftables
    DeadBackends(dead_backends::Args),
    /// Measure the ways of a host outside of the cluster to a Service, with kpx and with kubectl
    /// port-forward
    Tunnel(tunnel::Args),
    /// Count the instructions that Services cost, where the clock counts them:
    /// `cargo xtask bench icount` runs it in a virtual machine
    #[command(hide = true)]
    Icount(icount::Args),
    /// Writes what was found into docs/performance.md, docs/scale.md, docs/host-mode.md and
    /// docs/backend-health.md
    Report(report::Args),
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    match cli.section {
        Some(Section::Data(args)) => data::run(&args, &cli.results),
        Some(Section::Programs(args)) => programs::run(&args, &cli.results),
        Some(Section::Openers(args)) => openers::run(&args, &cli.results),
        Some(Section::Control(args)) => control::run(&args, &cli.results),
        Some(Section::Scale(args)) => scale::run(&args, &cli.results),
        Some(Section::DeadBackends(args)) => dead_backends::run(&args, &cli.results),
        Some(Section::Tunnel(args)) => tunnel::run(&args, &cli.results),
        Some(Section::Icount(args)) => icount::run(&args),
        Some(Section::Report(args)) => report::run(&args, &cli.results),
        None => {
            data::run(&data::Args::parse_from([""]), &cli.results)?;
            programs::run(&programs::Args::parse_from([""]), &cli.results)?;
            openers::run(&openers::Args::parse_from([""]), &cli.results)?;
            control::run(&control::Args::parse_from([""]), &cli.results)?;
            report::run(&report::Args::parse_from([""]), &cli.results)
        }
    }
}
