//! The clock that the programs use.

use anyhow::{Context, Result};
use nix::time::{ClockId, clock_gettime};

/// Returns the seconds since boot, including suspended time.
pub fn boot_secs() -> Result<u32> {
    let boot = clock_gettime(ClockId::CLOCK_BOOTTIME).context("read the boot clock")?;
    u32::try_from(boot.tv_sec()).context("the boot clock is past 2^32 s")
}
