//! Runs fuzzers: packets for the kernel programs, text for the parsers.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};

use crate::setup::{self, Need};
use crate::step::step;
use crate::{build, shell, workspace};

/// The folder of libFuzzer's targets, which are outside of the workspace.
const PARSERS: &str = "crates/tools/fuzz/parsers";
pub(crate) const PARSERS_MANIFEST: &str = "crates/tools/fuzz/parsers/Cargo.toml";
/// The runner of libFuzzer's targets, which needs only a compiler for C++.
const CARGO_FUZZ: &str = "cargo-fuzz";

#[derive(Args)]
pub(crate) struct Options {
    /// Minutes for each target
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    minutes: u64,
    /// Start from this seed, as a run printed it
    #[arg(long)]
    seed: Option<u64>,
    /// Run only this target; all by default
    target: Option<Target>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Target {
    /// The kernel programs against a plain model
    Packets,
    /// The reader of manifests
    Manifests,
    /// The reader of configuration files
    Config,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    for target in Target::value_variants()
        .iter()
        .filter(|target| options.target.is_none_or(|only| only == **target))
    {
        let name = target
            .to_possible_value()
            .context("every target has a name")?;
        step(&format!("fuzz {}", name.get_name()), || match target {
            Target::Packets => packets(options),
            Target::Manifests | Target::Config => parser(name.get_name(), options),
        })?;
    }
    Ok(())
}

fn packets(options: &Options) -> Result<()> {
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

/// Runs a target of libFuzzer. Findings are kept below `target/fuzz-findings`; a crash is an error
/// that names its file.
fn parser(name: &str, options: &Options) -> Result<()> {
    let target = workspace::target_dir()?;
    let tools = target.join("tools");
    let cargo_fuzz = tools.join("bin").join(CARGO_FUZZ);
    if !cargo_fuzz.is_file() {
        let mut install = workspace::cargo();
        install
            .args(["install", "--locked", CARGO_FUZZ, "--root"])
            .arg(&tools);
        shell::run(install)?;
    }
    let toolchain = setup::ensure(Need::Lab)?;
    build::with(&toolchain, &build::Options::default())?;
    let object = target.join("kpx.bpf.o");
    ensure!(object.is_file(), "{} is missing", object.display());
    let corpus = target.join("fuzz-corpus").join(name);
    let findings = target.join("fuzz-findings").join(name);
    for folder in [&corpus, &findings] {
        std::fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    }
    let seeds = workspace::root().join(PARSERS).join("corpus").join(name);
    let mut fuzz = Command::new(cargo_fuzz);
    fuzz.current_dir(workspace::root())
        .args(["fuzz", "run", "--fuzz-dir", PARSERS]);
    fuzz.args(["--sanitizer", "none", "--target-dir"])
        .arg(target.join("fuzz"))
        .arg(name)
        .arg(&corpus)
        .arg(seeds)
        .arg("--");
    fuzz.arg(format!("-max_total_time={}", options.minutes * 60));
    fuzz.arg(format!("-artifact_prefix={}/", findings.display()));
    fuzz.args([
        "-max_len=16384",
        "-timeout=10",
        "-rss_limit_mb=4096",
        "-print_final_stats=1",
    ]);
    fuzz.args(options.seed.map(|seed| format!("-seed={seed}")));
    // The parsers have no unsafe code, so they need no sanitizer. Only a sanitizer's
    // instrumentation is missing in stable Rust.
    fuzz.env("RUSTC_BOOTSTRAP", "1")
        .env("KPX_BPF_OBJECT", object);
    workspace::forget_xtask(&mut fuzz);
    shell::run(fuzz)
}
