//! Measures kpx: `kpx-bench` runs the sections `data` and `control`; `kpx-bench SECTION` runs one.

mod control;
mod data;
mod icount;
mod machine;
mod record;
mod scale;
mod table;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "kpx-bench")]
struct Cli {
    /// Where results are kept, one file a section. A section that is run again replaces its own;
    /// `scale` adds to it
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
    /// Measure the cost of a large cluster for the agent
    Control(control::Args),
    /// Measure very large clusters, beside kube-proxy's rules
    Scale(scale::Args),
    /// Count the instructions that Services cost, where the clock counts them:
    /// `cargo xtask bench icount` runs it in a virtual machine
    #[command(hide = true)]
    Icount(icount::Args),
    /// Print the tables of the last run in a file of results, such as `data` or `scale-6.1`
    Show { name: String },
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    match cli.section {
        Some(Section::Data(args)) => data::run(&args, &cli.results),
        Some(Section::Control(args)) => control::run(&args, &cli.results),
        Some(Section::Scale(args)) => scale::run(&args, &cli.results),
        Some(Section::Icount(args)) => icount::run(&args),
        Some(Section::Show { name }) => record::show(&cli.results, &name),
        None => {
            data::run(&data::Args::parse_from([""]), &cli.results)?;
            control::run(&control::Args::parse_from([""]), &cli.results)
        }
    }
}
