//! The memory of kpx.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;

use anyhow::{Context, Result};
use nix::unistd::Pid;

/// In bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Memory {
    /// The process' resident memory.
    pub(super) agent: u64,
    /// The kernel's memory of its maps.
    pub(super) maps: u64,
}

impl Memory {
    pub(super) fn of(pid: Pid) -> Result<Self> {
        let status = format!("/proc/{pid}/status");
        let text = fs::read_to_string(&status).with_context(|| format!("read {status}"))?;
        let kilobytes = field(&text, "VmRSS:").with_context(|| format!("no VmRSS in {status}"))?;
        let dir = format!("/proc/{pid}/fdinfo");
        let mut maps = BTreeMap::new();
        for entry in fs::read_dir(&dir).with_context(|| format!("list {dir}"))? {
            // A descriptor may be closed while it is read.
            let Ok(text) = fs::read_to_string(entry?.path()) else {
                continue;
            };
            if let (Some(id), Some(bytes)) = (field(&text, "map_id:"), field(&text, "memlock:")) {
                maps.insert(id, bytes);
            }
        }
        Ok(Self {
            agent: kilobytes << 10,
            maps: maps.values().sum(),
        })
    }

    /// Returns the larger value of each.
    pub(super) fn max(self, other: Self) -> Self {
        Self {
            agent: self.agent.max(other.agent),
            maps: self.maps.max(other.maps),
        }
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        write!(
            f,
            "{:.1} MiB of the agent, {:.1} MiB of its maps",
            mebibytes(self.agent),
            mebibytes(self.maps)
        )
    }
}

fn field(text: &str, name: &str) -> Option<u64> {
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    value.split_whitespace().next()?.parse().ok()
}
