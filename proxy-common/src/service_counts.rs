//! Counters of service ports: a flow counts for itself while it lives, and `SVC_COUNTS` holds the
//! sums of closed flows.

use crate::assert_size;

/// Packets, and their bytes.
///
/// Packets count as they are on the wire: one that the kernel is yet to cut up, or has put
/// together, is several packets. Bytes as the hooks see them, Ethernet headers included: of such a
/// packet the headers count once.
///
/// Added to without a lock: if two CPUs do so in the same instant, one of the two packets is
/// missing. One direction of a flow seldom is on two CPUs.
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

/// Value of `SERVICE_COUNTS`, keyed by service port.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceCounts {
    /// Flows.
    pub opened: u64,
    /// Packets that would have opened a flow, and were dropped.
    pub dropped: u64,
    /// ... and were answered with a refusal.
    pub rejected: u64,
    /// Towards backends, of flows that are over and that the programs removed themselves.
    pub sent: Passed,
    /// Back to clients, of the same.
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
