//! Packet records, written while `kpx monitor` runs.

use crate::addr::{Addr, Addr4, Addr6, Proto, SockAddr};
use crate::assert_size;
use crate::closed::closed;
use crate::hook::HookId;
use crate::policy::Decision;

/// What happened to a packet.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct What(pub u8);

impl What {
    /// The packet opened a flow.
    pub const DECIDED: Self = Self(0);
    pub const DROPPED: Self = Self(1);
    pub const REJECTED: Self = Self(2);
}

closed! {
    /// A [`What`], for `match`.
    What => Fate { DECIDED => Decided, DROPPED => Dropped, REJECTED => Rejected }
}

/// One packet: an element of `MONITOR`. The length identifies the family.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<A: Addr> {
    pub what: What,
    pub hook_id: HookId,
    /// [`Proto::ANY`] if the packet's addresses and ports are unknown.
    pub proto: Proto,
    /// The reason of a packet without a flow: an index into
    /// [`Reason::ALL`](crate::counter::Reason::ALL).
    pub reason: u8,
    /// The device of the hook.
    pub ifindex: u32,
    pub src: SockAddr<A>,
    pub dst: SockAddr<A>,
    /// The source that the backend sees, if the packet opened a flow.
    pub source: SockAddr<A>,
    /// The flags mark the valid fields.
    pub decision: Decision<A>,
}
assert_size!(Record<Addr4> = 4 + 4 + 3 * 8 + 28);
assert_size!(Record<Addr6> = 4 + 4 + 3 * 20 + 64);

/// The records that a CPU may write in a second: the only value of `WATCHED` while `kpx monitor`
/// runs, else 0.
pub const WATCHED_PER_SECOND: u32 = 10_000;
