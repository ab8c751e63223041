//! Counters of service ports. An open flow has its own counters; `SVC_COUNTS` holds the sums of
//! closed flows.

use crate::assert_size;

/// Packets and bytes.
///
/// Packets count as on the wire: a GSO or GRO packet counts as its segments. Bytes count as at the
/// hooks, with Ethernet headers, so a GSO packet's headers count once.
///
/// Additions are not atomic: of two simultaneous additions on different CPUs one may be lost. One
/// direction of a flow is rarely on two CPUs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Passed {
    pub packets: u64,
    pub bytes: u64,
}
assert_size!(Passed = 8 + 8);

impl Passed {
    pub const NOTHING: Self = Self {
        packets: 0,
        bytes: 0,
    };
}

impl core::ops::AddAssign for Passed {
    fn add_assign(&mut self, other: Self) {
        self.packets = self.packets.wrapping_add(other.packets);
        self.bytes = self.bytes.wrapping_add(other.bytes);
    }
}

/// Value of `SVC_COUNTS`, keyed by service port.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceCounts {
    pub opened: u64,
    /// Opening packets that were dropped.
    pub dropped: u64,
    /// Opening packets that were rejected.
    pub rejected: u64,
    /// The packets towards backends, of closed flows that the programs removed themselves.
    pub sent: Passed,
    /// The packets towards clients, of closed flows that the programs removed themselves.
    pub returned: Passed,
}
assert_size!(ServiceCounts = 3 * 8 + 2 * 16);

impl ServiceCounts {
    pub const NOTHING: Self = Self {
        opened: 0,
        dropped: 0,
        rejected: 0,
        sent: Passed::NOTHING,
        returned: Passed::NOTHING,
    };
}
