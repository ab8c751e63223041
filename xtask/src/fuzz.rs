//! Runs the fuzzer: random packets through the kernel programs, compared with a model.

use anyhow::Result;
use clap::Args;

use crate::setup::{self, Need};
use crate::{build, shell, workspace};

#[derive(Args)]
pub(crate) struct Options {
    /// Minutes of random packets
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    minutes: u64,
    /// Start from this seed, as a run printed it
    #[arg(long)]
    seed: Option<u64>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let toolchain = setup::ensure(Need::Lab)?;
    let kpx = build::with(&toolchain, &build::Options::default())?;
    let mut cargo = workspace::cargo();
    cargo.args([
        "test",
        "--package",
        "tools",
        "--test",
        "fuzz",
        "--",
        "--nocapture",
        "random",
    ]);
    cargo
        .env("KPX_BIN", kpx)
        .env("KPX_FUZZ_SECS", (options.minutes * 60).to_string());
    cargo.envs(options.seed.map(|seed| ("KPX_SEED", seed.to_string())));
    workspace::run_as_root(&mut cargo)?;
    shell::run(cargo)
}
