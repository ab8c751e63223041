//! The section `icount`: the cost of Services in instructions, with IPVS among the variants.
//!
//! Runs in a virtual machine whose clock counts instructions, one per nanosecond. The machine is
//! otherwise idle, so the variants run in sequence, each in its own lab. `cargo xtask bench icount`
//! boots it, and keeps the printed results.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testbed::lab::Lab;
use tools::bench::{Fixture, Latency, Mode, Path, Sample, Skipped, Variant, Work};

use crate::machine::Machine;
use crate::record::Record;

const VARIANTS: [Variant; 9] = [
    Variant::Direct,
    Variant::IptablesLegacy,
    Variant::IptablesNft,
    Variant::Nftables,
    Variant::Ipvs,
    Variant::Kpx,
    Variant::KpxOff,
    Variant::KpxSocketAll,
    Variant::Beside,
];
const MODES: [Mode; 3] = [Mode::TcpCrr, Mode::TcpRr, Mode::UdpRr];
/// The maximum share of idle time in a slice: an idle clock jumps to the next event.
const IDLE: f64 = 0.01;

#[derive(clap::Parser)]
pub(crate) struct Args {
    #[arg(long, value_delimiter = ',')]
    services: Vec<usize>,
    /// Only these variants
    #[arg(long, value_delimiter = ',')]
    variants: Vec<Variant>,
    /// The way of the packets
    #[arg(long, default_value = "local")]
    path: Path,
    /// With a flowtable of netfilter on the node
    #[arg(long)]
    flowtable: bool,
    /// How kpx judges backends
    #[arg(long)]
    backend_health: Option<String>,
    /// Rounds; each measures every mode once
    #[arg(long)]
    rounds: usize,
    /// How long each is measured in each round, in millions of instructions
    #[arg(long)]
    slice: u64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    print(&Record::Machine(Machine::read()?))?;
    for &services in &args.services {
        for variant in VARIANTS
            .into_iter()
            .filter(|variant| is_due(args, *variant))
        {
            if let Err(error) = measure(args, services, variant) {
                let why = format!("{services} Services: {error:#}");
                print(&Record::Skipped(Skipped { variant, why }))?;
            }
        }
    }
    Ok(())
}

fn is_due(args: &Args, variant: Variant) -> bool {
    args.variants.is_empty() || args.variants.contains(&variant)
}

fn measure(args: &Args, services: usize, variant: Variant) -> Result<()> {
    let path = args.path;
    let lab = Lab::start(path.layout())?;
    let health = args
        .backend_health
        .clone()
        .map(|mode| ("--backend-health", mode));
    let fixture = Fixture::start_with(&lab, variant, services, None, health)?;
    if args.flowtable {
        fixture.add_flowtable()?;
    }
    fixture.prepare(path)?;
    fixture.settle()?;
    fixture.prove(path)?;
    let length = Duration::from_millis(args.slice);
    for round in 0..args.rounds {
        for mode in MODES {
            let before = if args.flowtable {
                fixture.past_flowtable()?
            } else {
                0
            };
            let done = fixture.run(path, length, mode)?;
            if args.flowtable && mode != Mode::TcpCrr {
                let slow = fixture.past_flowtable()? - before;
                ensure!(
                    slow < done.amount / 10,
                    "{slow} packets of {} requests passed the flowtable by",
                    done.amount
                );
            }
            let seconds = done.time.as_secs_f64();
            let cpu_seconds = done.cpu.as_secs_f64();
            ensure!(
                seconds - cpu_seconds <= seconds * IDLE,
                "{mode}: {:.3} s of idle time",
                seconds - cpu_seconds
            );
            let done = Work {
                latency: Latency::default(),
                counted: None,
                ..done
            };
            print(&Record::Sample(Sample::of(
                services, path, mode, variant, round, done,
            )))?;
        }
    }
    Ok(())
}

#[expect(
    clippy::print_stdout,
    reason = "the host of the machine reads its console"
)]
fn print(record: &Record) -> Result<()> {
    println!(
        "{}",
        serde_json::to_string(record).context("write a record")?
    );
    Ok(())
}
