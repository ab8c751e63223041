//! A slot of a set.

use crate::addr::{Addr, Addr4, Addr6, Port};
use crate::assert_size;

/// Value of `SLOTS`: a backend's address and port.
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
    /// The endpoint is on this node, so its replies return through kpx whatever the source address.
    pub const LOCAL: u16 = 1 << 0;
    /// In [`Set::DIRECT`](super::Set::DIRECT): the endpoint is on another node, which takes over
    /// packets of external clients.
    pub const TUNNELLED: u16 = 1 << 1;
    /// The offset of the weight's bits.
    const WEIGHT_SHIFT: u16 = 4;

    pub const fn new(addr: A, port: Port, flags: u16) -> Self {
        Self { addr, port, flags }
    }

    /// Sets the weight in a weighted service port, at most 4,095. A weight of 1 is stored as 0.
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

    #[inline(always)]
    pub const fn is_tunnelled(&self) -> bool {
        self.flags & Self::TUNNELLED != 0
    }
}
