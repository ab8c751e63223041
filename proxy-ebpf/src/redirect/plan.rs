//! The plan for a packet that bypasses the stack. One function makes it and another carries it out,
//! so that neither needs much stack.

use proxy_common::addr::{Addr, SockAddr};

/// The new addresses and ports of a packet. In map memory, as a [`Packet`](crate::packet::Packet)
/// is.
#[derive(Clone, Copy)]
pub struct Becomes<A: Addr> {
    pub src: SockAddr<A>,
    pub dst: SockAddr<A>,
    /// Not 0 if the client is behind an uplink.
    pub is_far: u32,
    /// The number of the [`Plan`]. On the short path: not 0 if the packet changes flow state.
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

/// The path of a packet with the route in `scratch.route`, in one register.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Plan {
    /// Through the stack, unchanged.
    Stack,
    /// Dropped: see [`Delivery::SPOOFED`](super::Delivery).
    Spoofed,
    /// To the backend, past all hooks.
    ToPod,
    /// To the backend, past the stack to the egress hook of another device.
    ToDevice,
    /// The same, where the egress hook changes the source as well.
    ToDeviceAsNode,
    /// To the client, past all hooks.
    BackToPod,
    /// To the client, unchanged, past the stack to the egress hook of another device.
    BackToDevice,
    /// The same for a packet to the node's address, which the client's address replaces.
    BackFromNode,
}
