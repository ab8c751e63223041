//! Counts the instructions that Services cost: `cargo xtask bench icount`.
//!
//! A guest runs the benchmark's labs (`crates/tools/src/bin/bench/icount.rs`) and prints the
//! results. Software emulation advances the guest's clock by a nanosecond per instruction.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Parser;

use super::debian::{Debian, Kernel};
use super::initramfs::Userland;
use super::modules::{self, Modules};
use super::qemu::{self, Accelerator, MEMORY_GIB};
use super::report::Report;
use super::{Program, link};
use crate::arch::Arch;
use crate::setup::{self, Need};
use crate::step::step;
use crate::{build, workspace};

/// The guest's programs, optimised, because the client's instructions count too.
const PROGRAMS: &[Program] = &[
    ("init", "tools", "", "--bin", "kpx-guest"),
    ("bin/kpx", "proxy-agent", "", "--bin", "kpx"),
    ("bin/bench", "tools", "bench", "--bin", "kpx-bench"),
];
const SUITE: &str = "icount";

#[derive(Parser)]
#[command(
    name = "cargo xtask bench icount",
    about = "Count what Services cost in instructions, in a virtual machine"
)]
pub(crate) struct Options {
    /// Series of Debian's kernel, or `newest`
    #[arg(long, default_value = "6.12")]
    kernel: String,
    /// Numbers of Services to measure with
    #[arg(long, value_delimiter = ',', default_values_t = [1, 10_000])]
    services: Vec<usize>,
    /// Only these variants
    #[arg(long, value_delimiter = ',')]
    variants: Vec<String>,
    /// Another way of the packets, such as `host`; prints what it counts, and keeps nothing of it
    #[arg(long)]
    path: Option<String>,
    /// Put a flowtable of netfilter on the node; prints what it counts, and keeps nothing of it
    #[arg(long)]
    flowtable: bool,
    /// How kpx judges backends; prints what it counts, and keeps nothing of it
    #[arg(long, value_parser = ["off", "observe", "on"])]
    backend_health: Option<String>,
    /// Rounds; each measures every mode once
    #[arg(long, default_value_t = 2)]
    rounds: usize,
    /// Length of each measurement, in millions of instructions
    #[arg(long, default_value_t = 100)]
    slice: u64,
    /// Seconds that the guest may take
    #[arg(long, default_value_t = 3600)]
    limit: u64,
    /// Do not optimise: builds sooner, and counts more
    #[arg(long)]
    debug: bool,
    /// Use the programs of the last run
    #[arg(long)]
    no_build: bool,
}

pub(crate) enum Outcome {
    /// The guest's output, one record per line.
    Counted(Vec<String>),
    /// The tools or the kernel are unavailable, for this reason.
    NotRun(String),
}

pub(crate) fn run(options: &Options) -> Result<Outcome> {
    let (kernel, tools) = match fetch(&options.kernel) {
        Ok(fetched) => fetched,
        Err(error) => return Ok(Outcome::NotRun(format!("{error:#}"))),
    };
    let programs = programs(options.no_build, options.release())?;
    let guest = Guest {
        kernel,
        tools,
        programs,
        suite: options.suite(),
        name: SUITE.to_owned(),
        memory_gib: MEMORY_GIB,
    };
    let report = step(
        &format!("count instructions on {}", guest.kernel.release),
        || {
            // Only software emulation has a clock that counts instructions.
            guest.boot(Accelerator::Tcg, Duration::from_secs(options.limit))
        },
    )?;
    if !report.is_good() {
        bail!("{report}");
    }
    Ok(Outcome::Counted(
        report
            .suites
            .into_iter()
            .flat_map(|suite| suite.results)
            .collect(),
    ))
}

/// A guest for the benchmark, with kube-proxy's tools.
pub(super) struct Guest {
    pub(super) kernel: Kernel,
    /// The root directory of the tools.
    pub(super) tools: PathBuf,
    pub(super) programs: Vec<(&'static str, PathBuf)>,
    /// The line that selects the guest's suites.
    pub(super) suite: String,
    /// The name of the guest's files.
    pub(super) name: String,
    pub(super) memory_gib: u32,
}

impl Guest {
    pub(super) fn boot(&self, accelerator: Accelerator, limit: Duration) -> Result<Report> {
        let folder = folder()?;
        let userland = Userland::new(&self.programs, &self.tools, &self.suite)?;
        let plan = Modules::find(&self.kernel.modules)?
            .plan(&[modules::WANTED, modules::FOR_IPTABLES, modules::FOR_RULES].concat())?;
        let [initramfs, log] =
            ["cpio", "log"].map(|ending| folder.join(format!("{}.{ending}", self.name)));
        fs::write(&initramfs, userland.pack(&plan)?)
            .with_context(|| format!("write {}", initramfs.display()))?;
        qemu::boot(
            accelerator,
            self.memory_gib,
            &self.kernel,
            &initramfs,
            &log,
            limit,
        )
    }
}

fn folder() -> Result<PathBuf> {
    let folder = workspace::target_dir()?.join("vmtest");
    fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
    Ok(folder)
}

/// Returns the guest's programs: path in the guest, path on this machine.
pub(super) fn programs(no_build: bool, release: bool) -> Result<Vec<(&'static str, PathBuf)>> {
    let folder = folder()?;
    if !no_build {
        build::object(&setup::ensure(Need::Bench)?, &build::Options::default())?;
    }
    let program = |(at, package, features, kind, name): &Program| {
        // Other builds overwrite cargo's own copy.
        let kept = folder.join(format!("{SUITE}-{name}"));
        if !no_build {
            let built = step(&format!("build {name}"), || {
                link(package, features, kind, name, release, None)
            })?;
            fs::copy(&built, &kept).with_context(|| format!("copy {}", built.display()))?;
        }
        Ok((*at, kept))
    };
    PROGRAMS.iter().map(program).collect()
}

/// Returns the kernel, and the root directory of the tools.
pub(super) fn fetch(series: &str) -> Result<(Kernel, PathBuf)> {
    let debian = Debian::new(Arch::of_this_machine()?)?;
    debian.ensure_qemu()?;
    let kernel = debian
        .kernel(series, false)
        .with_context(|| format!("kernel {series}"))?;
    Ok((kernel, debian.tools(false)?))
}

impl Options {
    pub(crate) fn release(&self) -> bool {
        !self.debug
    }

    /// Returns true if the counts belong to an experiment.
    pub(crate) fn is_trial(&self) -> bool {
        self.flowtable || self.path.is_some() || self.backend_health.is_some()
    }

    fn suite(&self) -> String {
        let Self { rounds, slice, .. } = self;
        let services = self
            .services
            .iter()
            .map(usize::to_string)
            .collect::<Vec<_>>()
            .join(",");
        let only: String = self
            .variants
            .iter()
            .map(|variant| format!(" --variants {variant}"))
            .collect();
        let path: String = self
            .path
            .iter()
            .map(|path| format!(" --path {path}"))
            .collect();
        let flowtable = if self.flowtable { " --flowtable" } else { "" };
        let health: String = self
            .backend_health
            .iter()
            .map(|mode| format!(" --backend-health {mode}"))
            .collect();
        let options = format!(
            "--services {services} --rounds {rounds} --slice {slice}{only}{path}{flowtable}{health}"
        );
        format!("{SUITE} - /bin/bench icount {options}\n")
    }
}
