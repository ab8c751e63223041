//! What becomes of a packet that skips the stack: decided in one function, done in another, so that neither needs much stack.

use proxy_common::addr::{Addr, SockAddr};
use proxy_common::counter::{Event, Reason};

use super::Forward;
use super::fib::leave;
use crate::Action;
use crate::maps::{self, Scratch};
use crate::skb::{PacketMark, Skb};

/// The addresses and ports that a packet gets. In map memory, as a [`Packet`](crate::packet::Packet) is.
#[derive(Clone, Copy)]
pub struct Becomes<A: Addr> {
    pub src: SockAddr<A>,
    pub dst: SockAddr<A>,
    /// The client is behind an uplink, unless this is 0.
    pub is_far: u32,
}

/// The way of a packet whose route is in `scratch.route`, in one register.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Plan {
    /// Through the stack, as it came.
    Stack,
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

/// Does what was planned for a packet that does not take the stack.
#[inline(always)]
pub fn carry_out<A: Forward>(skb: Skb, plan: Plan, scratch: &mut Scratch<A>) -> Result<Action, Reason> {
    let Scratch { packet, becomes, route, .. } = scratch;
    if plan != Plan::BackToDevice {
        packet.rewrite(skb, &becomes.src, &becomes.dst, becomes.is_far != 0)?;
    }
    match plan {
        Plan::ToPod => maps::count(Event::Forwarded),
        Plan::ToDevice | Plan::ToDeviceAsNode => {
            maps::count(Event::Forwarded);
            skb.set_packet_mark(PacketMark::forward(plan == Plan::ToDeviceAsNode, false));
        }
        Plan::BackToPod => maps::count(Event::Returned),
        Plan::BackFromNode => skb.set_packet_mark(PacketMark::BACK),
        Plan::BackToDevice | Plan::Stack => {}
    }
    leave::<A>(skb, route)
}
