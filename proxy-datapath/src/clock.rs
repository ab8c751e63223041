//! The clock of the programs.

use anyhow::{Context, Result};
use nix::time::{ClockId, clock_gettime};

/// Returns the seconds since boot, sleep included.
pub(crate) fn boot_secs() -> Result<u32> {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).context("read the boot clock")?;
    u32::try_from(now.tv_sec()).context("the boot clock is past 2^32 s")
}
