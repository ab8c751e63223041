//! The state that each CPU keeps for its programs. A single map, because Linux allows a program 64
//! maps.

use crate::assert_size;

/// A CPU's value of `CPUS`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cpu {
    /// The kernel's jiffies at the CPU's last clock read, and the seconds since boot read then.
    pub jiffies: u64,
    pub secs: u32,
    /// The second (since boot) of the CPU's last `MONITOR` record, and the records written in that
    /// second.
    pub second: u32,
    pub written: u32,
    pad: u32,
    /// The packets without a record, because of the limit per second or a full `MONITOR`.
    pub lost: u64,
}
assert_size!(Cpu = 8 + 4 * 4 + 8);
