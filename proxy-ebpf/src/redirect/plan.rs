//! What becomes of a packet that skips the stack. One function decides it, another does it, so that
//! neither needs much stack.

use proxy_common::addr::{Addr, SockAddr};

/// The addresses and ports that [`Net::rewrite_packet`](crate::net::Net::rewrite_packet) gives to a
/// packet. In map memory, as a
/// [`Packet`](crate::packet::Packet) is.
#[derive(Clone, Copy)]
pub struct Becomes<A: Addr> {
    pub src: SockAddr<A>,
    pub dst: SockAddr<A>,
    /// The client is behind an uplink, unless this is 0.
    pub is_far: u32,
    /// The number of the [`Plan`]. On the short way, not 0 if the packet has news.
    pub plan: u32,
}

impl<A: Addr> Becomes<A> {
    #[inline(always)]
    pub fn set(&mut self, src: SockAddr<A>, dst: SockAddr<A>, is_far: bool) {
        self.src = src;
        self.dst = dst;
        self.is_far = is_far.into();
    }
}

/// The way of a packet whose route is in `scratch.route`, in one register.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Plan {
    /// Through the stack, as it came.
    Stack,
    /// Nowhere: see [`Delivery::SPOOFED`](super::Delivery).
    Spoofed,
    /// To the backend, past all hooks.
    ToPod,
    /// To the backend, past the stack to the egress hook of another device, ...
    ToDevice,
    /// ... which changes its source as well.
    ToDeviceAsNode,
    /// To the client, past all hooks.
    BackToPod,
    /// To the client, as it came, past the stack to the egress hook of another device.
    BackToDevice,
    /// The same of a packet to an address of the node's in the client's place.
    BackFromNode,
}
