//! The section `data`: what Services cost on the way of packets.

use std::path::{Path as FilePath, PathBuf};
use std::time::Duration;

use anyhow::Result;
use lab_tools::bench::{self, Listener, Mode, Options, Path, Sample, Selection, Skipped, Variant, summarise};

use crate::record::{Record, Writer};

#[derive(clap::Parser)]
pub(crate) struct Args {
    /// Rounds; each measures every variant once in every mode
    #[arg(long, default_value_t = 101)]
    rounds: usize,
    /// How long each is measured in each round, in milliseconds
    #[arg(long, default_value_t = 20)]
    slice: u64,
    /// One short round: whether it works, not how fast
    #[arg(long)]
    quick: bool,
    /// Only with so many Services
    #[arg(long, value_delimiter = ',')]
    services: Vec<usize>,
    /// Only these paths
    #[arg(long, value_delimiter = ',')]
    path: Vec<Path>,
    /// Only these modes
    #[arg(long, value_delimiter = ',')]
    mode: Vec<Mode>,
    /// Only these variants, beside direct
    #[arg(long, value_delimiter = ',')]
    variant: Vec<Variant>,
    /// A kube-proxy 1.31 or later, to be measured as well
    #[arg(long)]
    kube_proxy: Option<PathBuf>,
}

pub(crate) fn run(args: &Args, results: &FilePath) -> Result<()> {
    let selection = Selection {
        services: args.services.clone(),
        paths: args.path.clone(),
        modes: args.mode.clone(),
        variants: args.variant.clone(),
    };
    let (rounds, slice) = if args.quick { (1, 20) } else { (args.rounds, args.slice) };
    let options =
        Options { selection, rounds, slice: Duration::from_millis(slice), kube_proxy: args.kube_proxy.clone() };
    let mut listener = Keeper { writer: Writer::create(results, "data")?, samples: Vec::new() };
    bench::run(&options, &mut listener)?;
    listener.writer.finish()?;
    print(&listener.samples);
    Ok(())
}

struct Keeper {
    writer: Writer,
    samples: Vec<Sample>,
}

impl Listener for Keeper {
    fn sample(&mut self, sample: Sample) -> Result<()> {
        self.samples.push(sample.clone());
        self.writer.write(&Record::Sample(sample))
    }

    fn skipped(&mut self, skipped: Skipped) -> Result<()> {
        eprintln!("not run: {}: {}", skipped.variant, skipped.why);
        self.writer.write(&Record::Skipped(skipped))
    }

    fn progress(&mut self, what: &str) {
        eprintln!("{what}");
    }
}

fn print(samples: &[Sample]) {
    for (key, cell) in summarise(samples) {
        println!(
            "{:>6} {:<28} {:<29} {:<20} {:>12.0}/s  {:.3} ({:.3}..{:.3})  {:>9.2} us",
            key.services,
            key.path,
            key.mode,
            key.variant,
            cell.rate.median,
            cell.ratio.median,
            cell.ratio.low,
            cell.ratio.high,
            cell.cpu * 1e6
        );
    }
}
