//! The section `tunnel`: the ways of a host outside of the cluster, see `tools::tunnel`.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use tools::tunnel::{self, Found, Options};

use crate::record::{Record, Writer, show};
use crate::report::ways;

#[derive(clap::Parser)]
pub(crate) struct Args {
    /// Rounds; each measures every way once in every mode
    #[arg(long, default_value_t = 21)]
    rounds: usize,
    /// How long each is measured in each round, in milliseconds
    #[arg(long, default_value_t = 250)]
    slice: u64,
    /// Decides in which order ways take their turns
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The kubectl to measure
    #[arg(long, default_value = "kubectl")]
    kubectl: PathBuf,
}

pub(crate) fn run(args: &Args, results: &Path) -> Result<()> {
    let Args {
        rounds,
        slice,
        seed,
        kubectl,
    } = args;
    let mut writer = Writer::create(results, "tunnel")?;
    let load = load()?;
    let run = format!(
        "{rounds} rounds, slices of {slice} ms, seed {seed}. Before the run the machine's load was {load}."
    );
    writer.write(&Record::Note(run))?;
    if cfg!(debug_assertions) {
        writer.write(&Record::Note(
            "No program was optimised in this run.".to_owned(),
        ))?;
    }
    let slice = Duration::from_millis(*slice);
    let options = Options {
        rounds: *rounds,
        slice,
        seed: *seed,
        kubectl: kubectl.clone(),
    };
    let mut all = Vec::new();
    let mut begun = 0;
    tunnel::run(&options, &mut |found| {
        match &found {
            Found::Sample(sample) if sample.round < begun => {}
            Found::Sample(sample) => {
                begun = sample.round + 1;
                eprintln!("round {begun} of {rounds}");
            }
            Found::Kubectl(version) => eprintln!("kubectl {version}"),
            Found::Skipped { way, why } => eprintln!("not run: {way}: {why}"),
        }
        all.push(found.clone());
        writer.write(&Record::Tunnel(found))
    })?;
    writer.finish()?;
    show(&ways::table(&all));
    Ok(())
}

/// Returns the mean number of tasks that wanted a CPU in the last minute.
fn load() -> Result<String> {
    const PATH: &str = "/proc/loadavg";
    let text = fs::read_to_string(PATH).with_context(|| format!("read {PATH}"))?;
    Ok(text.split(' ').next().unwrap_or_default().to_owned())
}
