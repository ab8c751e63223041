//! The marks of ends that have flows. Many ends share a mark: see [`proxy_common::ways`].

use proxy_common::addr::{Addr, SockAddr};
use proxy_common::flow::{Flow, FlowKey, Hook, may_be_drawn};
use proxy_common::ways::{ROUND, cell_row, counts};

use super::Find;
use super::exits::WAYS;
use super::live::part;

/// The marked ends of a packet, in a register.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Marked(u32);

impl Marked {
    /// No entry of a device's hook has the packet's tuple, or the tuple of its reply.
    pub const NONE: Self = Self(0);
    /// The first end is marked; the second may be.
    pub const FIRST: Self = Self(1);
    /// Only the second end is marked.
    const SECOND: Self = Self(2);

    /// Looks up the marks of a packet's ends: the second only if the first has no mark.
    #[inline(always)]
    pub fn of<A: Addr>(first: SockAddr<A>, second: SockAddr<A>) -> Self {
        let oldest = WAYS
            .find_here(&ROUND)
            .map_or(0, |round| round.read(|round| round.second));
        if is_marked(first, oldest) {
            return Self::FIRST;
        }
        if is_marked(second, oldest) {
            Self::SECOND
        } else {
            Self::NONE
        }
    }

    /// Returns true if no entry of an ingress hook has the tuple of a packet to this port. The
    /// first end must be the packet's source.
    #[inline(always)]
    pub fn is_answer_to_client(self, dport: u16) -> bool {
        self == Self::SECOND && !may_be_drawn(dport)
    }
}

#[inline(always)]
fn is_marked<A: Addr>(end: SockAddr<A>, oldest: u32) -> bool {
    WAYS.find_here(&cell_row(&end))
        .is_none_or(|cell| counts(cell.read(|cell| cell.first), oldest))
}

/// Marks the end of an entry that is about to be created.
#[inline(always)]
pub(super) fn mark<A: Addr>(key: &FlowKey<A>, flow: &Flow<A>) {
    if key.hook() == Hook::ANCHOR {
        return;
    }
    let Some(round) = WAYS.find_here(&ROUND) else {
        return;
    };
    let round = round.read(|round| round.first);
    // Written only if it changes, because other CPUs read the cell all the time.
    if let Some(cell) = WAYS.find_here(&cell_row(&flow.marked_end(key)))
        && cell.read(|cell| cell.first) != round
    {
        part!(cell.first).set_in_order(round);
    }
}
