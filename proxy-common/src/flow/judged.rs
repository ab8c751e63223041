//! The last judgement of a flow's sender, for packets that skip the stack: the kernel judges none of those.

use super::Flow;
use crate::addr::Addr;

/// The device at which a sender was found to be, and the second in which the routes said so.
///
/// A flow keeps the judgement in the spare bytes of three of its addresses. Programs of an older version leave 0 there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Judged {
    pub ifindex: u32,
    /// The lower half of the seconds since boot.
    pub secs: u16,
}

impl Judged {
    /// No device.
    pub const NONE: Self = Self { ifindex: 0, secs: 0 };

    #[inline(always)]
    pub const fn new(ifindex: u32, now_secs: u32) -> Self {
        Self { ifindex, secs: now_secs as u16 }
    }

    /// Returns the values of the spare bytes: those of the client, of the frontend and of the source.
    #[inline(always)]
    pub const fn spares(self) -> [u16; 3] {
        [self.ifindex as u16, (self.ifindex >> 16) as u16, self.secs]
    }
}

impl<A: Addr> Flow<A> {
    /// Returns the judgement of the sender of this entry's packets.
    #[inline(always)]
    pub const fn judged(&self) -> Judged {
        let ifindex = self.client.spare as u32 | (self.frontend.spare as u32) << 16;
        Judged { ifindex, secs: self.source.spare }
    }
}
