//! The decision about a flow that is about to be opened.

use proxy_common::addr::{Addr, SockAddr};
use proxy_common::flow::CachedRoute;
use proxy_common::frontend::FrontendKey;

/// A decision about a new flow. In map memory, so that no function's stack holds it while another
/// one opens the flow.
#[derive(Clone, Copy)]
pub struct Opening<A: Addr> {
    pub service: FrontendKey<A>,
    pub backend: SockAddr<A>,
    pub source: Source<A>,
    /// The flags of the flow: see [`Flow`].
    pub flags: u8,
    /// The flags of the device that the client's packet came in by, or 0.
    pub device: u32,
    /// The routes past the stack, if the flow bypasses the stack.
    pub way: Way,
}

/// The cached routes with which a bypass flow starts, for each direction.
#[derive(Clone, Copy)]
pub struct Way {
    pub original: CachedRoute,
    pub reply: CachedRoute,
}

impl Way {
    /// No routes: the flow takes the stack.
    pub const STACK: Self = Self {
        original: CachedRoute::NONE,
        reply: CachedRoute::NONE,
    };

    #[inline(always)]
    pub fn is_known(&self) -> bool {
        self.original != CachedRoute::NONE
    }
}

/// How a new flow changes its client's address.
#[derive(Clone, Copy)]
pub struct Source<A> {
    /// The source address towards the backend. The client's own address if it does not change.
    pub addr: A,
    /// The client's port must not be used, because another connection to this backend has it.
    pub port_taken: bool,
    /// The value of `GENERATION` before the backend was chosen.
    pub generation: u32,
}
