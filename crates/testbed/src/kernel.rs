//! The version of the running kernel.

use std::fs;

use anyhow::{Context, Result};

/// Returns the kernel's major and minor version.
pub fn version() -> Result<(u32, u32)> {
    let release =
        fs::read_to_string("/proc/sys/kernel/osrelease").context("read the kernel's version")?;
    let mut numbers = release.split('.').map(str::parse);
    let mut next = || {
        numbers
            .next()
            .context("the kernel has a version")
            .and_then(|number| Ok(number?))
    };
    Ok((next()?, next()?))
}
