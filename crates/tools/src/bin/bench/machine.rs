//! The machine and the kpx of a run.

use std::fmt;
use std::fs;
use std::process::Command;
use std::thread::available_parallelism;

use anyhow::{Context, Result};
use nix::sys::utsname::uname;
use serde::{Deserialize, Serialize};
use testbed::agent::binary;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Machine {
    processor: String,
    cpus: usize,
    memory_gib: u64,
    kernel: String,
    kpx: String,
    iptables: String,
    nft: String,
    date: String,
}

impl Machine {
    pub(crate) fn read() -> Result<Self> {
        let memory = field("/proc/meminfo", "MemTotal")?;
        let kib: u64 = memory
            .split_whitespace()
            .next()
            .unwrap_or_default()
            .parse()
            .context("read the memory's size")?;
        let kpx = binary()?;
        Ok(Self {
            processor: field("/proc/cpuinfo", "model name")
                .unwrap_or_else(|_| std::env::consts::ARCH.to_owned()),
            cpus: available_parallelism().context("count CPUs")?.get(),
            memory_gib: (kib + (1 << 19)) >> 20,
            kernel: uname()
                .context("ask for the kernel's name")?
                .release()
                .to_string_lossy()
                .into_owned(),
            kpx: version(&mut Command::new(kpx))?,
            iptables: version(&mut Command::new("iptables-nft"))?,
            nft: version(&mut Command::new("nft"))?,
            date: jiff::Zoned::now().date().to_string(),
        })
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            processor,
            cpus,
            memory_gib,
            kernel,
            kpx,
            iptables,
            nft,
            date,
        } = self;
        write!(
            f,
            "{date}: {processor}, {cpus} CPUs, {memory_gib} GiB; Linux {kernel}; {kpx}; {iptables}; {nft}"
        )
    }
}

fn field(path: &str, name: &str) -> Result<String> {
    let text = fs::read_to_string(path).with_context(|| format!("read {path}"))?;
    let value = text
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == name);
    Ok(value
        .with_context(|| format!("no {name} in {path}"))?
        .1
        .trim()
        .to_owned())
}

/// Returns the first line of `--version`.
fn version(command: &mut Command) -> Result<String> {
    let output = command
        .arg("--version")
        .output()
        .with_context(|| format!("run {command:?}"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text
        .lines()
        .next()
        .with_context(|| format!("{command:?} printed nothing"))?
        .trim()
        .to_owned())
}
