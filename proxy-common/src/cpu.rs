//! What each CPU keeps for its programs, in one map: Linux allows a program 64 of them.

use crate::assert_size;

/// A CPU's value of `CPUS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cpu {
    /// The kernel's tick in which the CPU last asked for the time, and the seconds since boot that
    /// it was told.
    pub jiffies: u64,
    pub secs: u32,
    /// The second of the last record of `MONITOR`, since boot, and the records written in it.
    pub second: u32,
    pub written: u32,
    pad: u32,
    /// The packets without a record: more than may be written in a second, or than `MONITOR` holds.
    pub lost: u64,
}
assert_size!(Cpu = 8 + 4 * 4 + 8);
