//! What the kernel programs know of this node and its devices.

use crate::addr::{Addr4, Addr6};
use crate::assert_size;

/// The only value of `NODE`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// Primary addresses, the source of what a hairpin's backend sees; unspecified while unknown.
    pub addr4: Addr4,
    pub addr6: Addr6,
    /// Interface index of the anchor, into whose ingress replies to the host's own sockets are injected.
    pub anchor_ifindex: u32,
    /// The anchor's MAC address, which those replies must carry to be taken for the host's.
    pub anchor_mac: [u8; 6],
    pad: u16,
}
assert_size!(Node = 4 + 16 + 4 + 6 + 2);

impl Node {
    pub const fn new(addr4: Addr4, addr6: Addr6, anchor_ifindex: u32, anchor_mac: [u8; 6]) -> Self {
        Self { addr4, addr6, anchor_ifindex, anchor_mac, pad: 0 }
    }
}

/// Value of `DEVICES`, keyed by interface index (`u32`).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    flags: u32,
    /// The addresses with which the host speaks through this device; unspecified if it has none.
    pub addr4: Addr4,
    pub addr6: Addr6,
}
assert_size!(Device = 4 + 4 + 16);

impl Device {
    /// The far end is a pod: what arrives here was sent by the pod itself and passed no other of our hooks before.
    pub const POD: u32 = 1 << 0;

    pub const fn new(flags: u32, addr4: Addr4, addr6: Addr6) -> Self {
        Self { flags, addr4, addr6 }
    }

    #[inline(always)]
    pub const fn is_pod(&self) -> bool {
        self.flags & Self::POD != 0
    }
}
