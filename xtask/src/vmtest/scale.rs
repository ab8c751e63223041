//! Measures large clusters on other kernels: `cargo xtask bench scale --kernel`.
//!
//! Guests run the benchmark's section `scale`. By default they omit the latency of first packets
//! and the API server's counts.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use serde_json::json;

use super::icount::{self, Guest};
use super::qemu::{Accelerator, MEMORY_GIB};
use crate::arch::Arch;
use crate::step::step;

#[derive(Parser)]
#[command(
    name = "cargo xtask bench scale",
    about = "Measure large clusters on other kernels, in virtual machines"
)]
pub(crate) struct Options {
    /// Series of Debian's kernels
    #[arg(long = "kernel", value_delimiter = ',')]
    kernels: Vec<String>,
    /// Sizes of clusters: Services, an x, endpoints of each
    #[arg(long, default_value = "1000x50")]
    sizes: String,
    /// The means beside kpx
    #[arg(long, default_value = "nftables")]
    beside: String,
    /// The parts to measure: clusters, first (packets)
    #[arg(long, default_value = "clusters", value_delimiter = ',', value_parser = ["clusters", "first"])]
    only: Vec<String>,
    /// Numbers of Services for the latency of first packets
    #[arg(long, default_value = "1000,10000")]
    first: String,
    /// Connections for each of them
    #[arg(long, default_value_t = 2_000)]
    connections: u32,
    /// New connections a second during a restart: an emulated processor opens no 2,000
    #[arg(long, default_value_t = 200)]
    rate: u32,
    /// Seconds that a guest may take, as this machine counts them
    #[arg(long, default_value_t = 900)]
    limit: u64,
    /// Seconds that a tool may take to load its rules, as the guest counts them
    #[arg(long, default_value_t = 300)]
    tool_limit: u64,
    /// The memory of a guest, in GiB: for 5000x50 kpx needs 16 to have room
    #[arg(long = "memory", default_value_t = MEMORY_GIB, value_parser = clap::value_parser!(u32).range(1..))]
    memory_gib: u32,
    /// Use the programs of the last run
    #[arg(long)]
    no_build: bool,
    /// The accelerator of the guests; by default KVM if the processor has it
    #[arg(long)]
    accel: Option<Accelerator>,
}

/// A kernel's records, one per line.
pub(crate) struct Measured {
    pub(crate) series: String,
    pub(crate) lines: Vec<String>,
}

/// Runs the guests. `keep` gets each kernel's records when its guest ends, because the next guest
/// takes long.
pub(crate) fn run(options: &Options, mut keep: impl FnMut(Measured) -> Result<()>) -> Result<()> {
    let programs = icount::programs(options.no_build, true)?;
    let accelerator = options
        .accel
        .unwrap_or(Accelerator::best(Arch::of_this_machine()?));
    let mut measure = |series: &String| {
        let (kernel, tools) = icount::fetch(series)?;
        let Options {
            sizes,
            beside,
            only,
            first,
            connections,
            rate,
            tool_limit,
            ..
        } = options;
        let &Options {
            limit, memory_gib, ..
        } = options;
        let only = only.join(",");
        let suite = format!(
            "scale - /bin/bench scale --guest --only {only} --sizes {sizes} --beside {beside} --first {first} \
             --connections {connections} --rate {rate} --limit {tool_limit}\n"
        );
        let programs = programs.clone();
        let name = format!("scale-{series}");
        let guest = Guest {
            kernel,
            tools,
            programs,
            suite,
            name,
            memory_gib,
        };
        let report = step(
            &format!("measure large clusters on {}", guest.kernel.release),
            || guest.boot(accelerator, Duration::from_secs(limit)),
        )?;
        let mut lines: Vec<String> = report
            .suites
            .iter()
            .flat_map(|suite| suite.results.clone())
            .collect();
        ensure!(!lines.is_empty(), "nothing was measured: {report}");
        if accelerator == Accelerator::Tcg {
            let note = "The guest ran in software emulation: its clock counts an instruction as a nanosecond.";
            lines.push(json!({ "note": note }).to_string());
        }
        if !report.is_good() {
            eprintln!("{report}");
            let note =
                format!("The guest was ended at its limit of {limit} s, or its kernel complained.");
            lines.push(json!({ "note": note }).to_string());
        }
        keep(Measured {
            series: series.clone(),
            lines,
        })
    };
    options
        .kernels
        .iter()
        .try_for_each(|series| measure(series).with_context(|| format!("kernel {series}")))
}
