//! The clock that the programs use.

use anyhow::{Context, Result};
use nix::sys::time::{TimeSpec, TimeValLike};
use nix::time::{ClockId, clock_gettime};

/// Returns the seconds since boot, including suspended time.
pub fn boot_secs() -> Result<u32> {
    u32::try_from(boot()?.tv_sec()).context("the boot clock is past 2^32 s")
}

/// Returns the nanoseconds since boot, including suspended time.
pub(crate) fn boot_ns() -> Result<u64> {
    u64::try_from(boot()?.num_nanoseconds()).context("the boot clock goes backwards")
}

fn boot() -> Result<TimeSpec> {
    clock_gettime(ClockId::CLOCK_BOOTTIME).context("read the boot clock")
}
