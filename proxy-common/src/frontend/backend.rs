//! A place of a set of backends.

use crate::addr::{Addr, Addr4, Addr6, Port};
use crate::assert_size;

/// Value of `SLOTS`: address and port of an endpoint that may take traffic.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Backend<A: Addr> {
    pub addr: A,
    pub port: Port,
    flags: u16,
}
assert_size!(Backend<Addr4> = 4 + 2 + 2);
assert_size!(Backend<Addr6> = 16 + 2 + 2);

impl<A: Addr> Backend<A> {
    /// The endpoint is on this node: its replies come back here from any source address.
    pub const LOCAL: u16 = 1 << 0;
    /// Below the bits of the weight.
    const WEIGHT_SHIFT: u16 = 4;

    pub const fn new(addr: A, port: Port, flags: u16) -> Self {
        Self { addr, port, flags }
    }

    /// Sets the share in a weighted service port's flows, of at most 4,095. A weight of 1 is no
    /// bit.
    #[must_use]
    pub const fn with_weight(self, weight: u16) -> Self {
        let bits = if weight > 1 {
            weight << Self::WEIGHT_SHIFT
        } else {
            0
        };
        Self {
            flags: self.flags & !(u16::MAX << Self::WEIGHT_SHIFT) | bits,
            ..self
        }
    }

    /// Returns the weight, which is never 0.
    #[inline(always)]
    pub const fn weight(&self) -> u32 {
        let weight = self.flags >> Self::WEIGHT_SHIFT;
        if weight == 0 { 1 } else { weight as u32 }
    }

    #[inline(always)]
    pub const fn is_local(&self) -> bool {
        self.flags & Self::LOCAL != 0
    }
}
