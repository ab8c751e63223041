//! Records of single packets, which the programs write while `kpx monitor` runs.

use crate::addr::{Addr, Addr4, Addr6, Proto, SockAddr};
use crate::assert_size;
use crate::closed::closed;
use crate::hook::HookId;
use crate::policy::Decision;

/// The fate of a packet.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct What(pub u8);

impl What {
    /// It opened a flow.
    pub const DECIDED: Self = Self(0);
    pub const DROPPED: Self = Self(1);
    pub const REJECTED: Self = Self(2);
}

closed! {
    /// A [`What`], to match on.
    What => Fate { DECIDED => Decided, DROPPED => Dropped, REJECTED => Rejected }
}

/// One packet: an element of `MONITOR`. Its length tells the family.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<A: Addr> {
    pub what: What,
    pub hook_id: HookId,
    /// [`Proto::ANY`] if the packet's addresses and ports were not found out.
    pub proto: Proto,
    /// The reason of a packet that opened no flow: an index into
    /// [`Reason::ALL`](crate::counter::Reason::ALL).
    pub reason: u8,
    /// The device that it was met on.
    pub ifindex: u32,
    pub src: SockAddr<A>,
    pub dst: SockAddr<A>,
    /// The source that the backend sees, of a packet that opened a flow.
    pub source: SockAddr<A>,
    /// Its flags say what of it is of this packet.
    pub decision: Decision<A>,
}
assert_size!(Record<Addr4> = 4 + 4 + 3 * 8 + 28);
assert_size!(Record<Addr6> = 4 + 4 + 3 * 20 + 64);

/// The only value of `WATCHED`: records that a CPU may write in a second. 0 while no operator
/// watches.
pub const WATCHED_PER_SECOND: u32 = 10_000;
