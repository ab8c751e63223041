//! The section `data`: the packets' cost of Services.

use std::path::{Path as FilePath, PathBuf};
use std::time::Duration;

use anyhow::Result;
use tools::bench::{self, Listener, Mode, Options, Path, Sample, Selection, Skipped, Variant};

use crate::record::{self, Record, Run, Writer};

const ROUNDS: usize = 41;
const QUICK_ROUNDS: usize = 31;
/// kpx checks a connection after its first second, and applies the result from a later second on.
const AGE: Duration = Duration::from_secs(5);

#[derive(clap::Parser)]
pub(crate) struct Args {
    /// Rounds; each measures every variant once in every mode [default: 41, 31 with --quick]
    #[arg(long)]
    rounds: Option<usize>,
    /// How long each is measured in each round, in milliseconds
    #[arg(long, default_value_t = 20)]
    slice: u64,
    /// Only the cells of the first table, in fewer rounds
    #[arg(long)]
    quick: bool,
    /// Decides in which order variants take their turns
    #[arg(long, default_value_t = 1)]
    seed: u64,
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
    /// A kube-proxy, to be measured as well; 1.31 or later has the mode nftables
    #[arg(long)]
    kube_proxy: Option<PathBuf>,
}

pub(crate) fn run(args: &Args, results: &FilePath) -> Result<()> {
    let selection = Selection {
        is_quick: args.quick,
        services: args.services.clone(),
        paths: args.path.clone(),
        modes: args.mode.clone(),
        variants: args.variant.clone(),
    };
    let rounds = args
        .rounds
        .unwrap_or(if args.quick { QUICK_ROUNDS } else { ROUNDS });
    let run = Run {
        is_quick: args.quick,
        rounds,
        slice_ms: args.slice,
        seed: args.seed,
    };
    let slice = Duration::from_millis(args.slice);
    let options = Options {
        selection,
        rounds,
        slice,
        age: AGE,
        seed: args.seed,
        kube_proxy: args.kube_proxy.clone(),
        services_at_most: None,
    };
    let mut writer = Writer::create(results, "data")?;
    eprintln!("{run}");
    writer.write(&Record::Run(run))?;
    let mut keeper = Keeper(writer);
    bench::run(&options, &mut keeper)?;
    keeper.0.finish()?;
    record::show(results, "data")
}

struct Keeper(Writer);

impl Listener for Keeper {
    fn sample(&mut self, sample: Sample) -> Result<()> {
        self.0.write(&Record::Sample(sample))
    }

    fn skipped(&mut self, skipped: Skipped) -> Result<()> {
        eprintln!("not run: {}: {}", skipped.variant, skipped.why);
        self.0.write(&Record::Skipped(skipped))
    }

    fn progress(&mut self, what: &str) {
        eprintln!("{what}");
    }
}
