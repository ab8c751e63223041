//! The cached routing decision of an entry's packets that bypass the stack: the device of their
//! sender, and the device at which they leave.

use super::Flow;
use crate::addr::Addr;

/// The ingress and egress devices of an entry's packets, and the term of that routing decision.
///
/// Stored in the spare bytes of the flow's four addresses, where older programs leave 0.
///
/// From the lowest bit: 24 bits for the sender's interface index, 24 bits for the pod's (0 if each
/// packet needs a look-up), 16 bits for the term.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedRoute(u64);

/// The validity of a decision: a second, or less if the agent starts a new epoch, because a route,
/// a neighbour or a device has changed.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term(u16);

impl Term {
    /// Takes the seconds since boot and the number of the epoch; both only increase. Wraps after
    /// 65,536 steps of either.
    #[inline(always)]
    pub const fn new(now_secs: u32, epoch: u32) -> Self {
        Self(now_secs.wrapping_add(epoch) as u16)
    }
}

/// The first interface index that is too large to be stored.
const IFINDEX_END: u32 = 1 << EXIT;
/// The bit offsets of the exit and the term.
const EXIT: u32 = 24;
const TERM: u32 = 48;
/// The bits outside the exit.
const SENDER: u64 = !((IFINDEX_END as u64 - 1) << EXIT);

impl CachedRoute {
    /// No device.
    pub const NONE: Self = Self(0);

    #[inline(always)]
    pub const fn new(ifindex: u32, exit: u32, term: Term) -> Self {
        if ifindex >= IFINDEX_END {
            return Self::NONE;
        }
        let exit = if exit < IFINDEX_END { exit } else { 0 };
        Self(ifindex as u64 | (exit as u64) << EXIT | (term.0 as u64) << TERM)
    }

    /// Returns true if the sender at this device was validated in this term.
    #[inline(always)]
    pub const fn holds(self, ifindex: u32, term: Term) -> bool {
        self.0 & SENDER == (ifindex as u64 | (term.0 as u64) << TERM)
    }

    /// Returns the interface index of the sender's device. 0 if no sender was validated.
    #[inline(always)]
    pub const fn ifindex(self) -> u32 {
        self.0 as u32 & (IFINDEX_END - 1)
    }

    /// Returns the interface index of the pod's device. 0 if each packet needs a look-up.
    #[inline(always)]
    pub const fn exit(self) -> u32 {
        (self.0 >> EXIT) as u32 & (IFINDEX_END - 1)
    }

    /// Returns the spare bytes of the client, the frontend, the backend and the source.
    #[inline(always)]
    pub const fn spares(self) -> [u16; 4] {
        [
            self.0 as u16,
            (self.0 >> 16) as u16,
            (self.0 >> 32) as u16,
            (self.0 >> TERM) as u16,
        ]
    }
}

impl<A: Addr> Flow<A> {
    /// Stores a decision in an entry that is about to be created.
    #[inline(always)]
    pub const fn set_cached_route(&mut self, cached_route: CachedRoute) {
        [
            self.client.spare,
            self.frontend.spare,
            self.backend.spare,
            self.source.spare,
        ] = cached_route.spares();
    }

    #[inline(always)]
    pub const fn cached_route(&self) -> CachedRoute {
        let client = self.client.spare as u64;
        let frontend = self.frontend.spare as u64;
        let backend = self.backend.spare as u64;
        let source = self.source.spare as u64;
        CachedRoute(client | frontend << 16 | backend << 32 | source << TERM)
    }
}

#[cfg(test)]
mod tests {
    use core::net::Ipv4Addr;

    use super::*;
    use crate::addr::{Addr4, Port, SockAddr};

    #[test]
    fn flow_keeps_judgement_in_its_spare_bytes() {
        let at = SockAddr::new(Addr4::from(Ipv4Addr::new(10, 244, 1, 2)), Port::new(80));
        for (ifindex, exit) in [(7, 9), (0x12_3456, 0xab_cdef), (0xff_ffff, 0)] {
            let cached_route = CachedRoute::new(ifindex, exit, Term::new(3, 65_535));
            let mut flow = Flow::new(at, at, at, at, 0, 1);
            [
                flow.client.spare,
                flow.frontend.spare,
                flow.backend.spare,
                flow.source.spare,
            ] = cached_route.spares();
            assert_eq!(
                (flow.cached_route(), flow.cached_route().exit()),
                (cached_route, exit)
            );
            assert!(flow.cached_route().holds(ifindex, Term::new(2, 0)));
            assert!(!flow.cached_route().holds(ifindex, Term::new(3, 0)));
            assert!(
                !flow
                    .cached_route()
                    .holds(ifindex ^ 1 << 23, Term::new(2, 0))
            );
        }
    }

    #[test]
    fn large_interface_index_is_not_kept() {
        let term = Term::new(1, 0);
        assert_eq!(CachedRoute::new(1 << 24, 9, term), CachedRoute::NONE);
        assert_eq!(
            CachedRoute::new(7, 1 << 24, term),
            CachedRoute::new(7, 0, term)
        );
    }
}
