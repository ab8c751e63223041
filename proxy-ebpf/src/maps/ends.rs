//! The ends that have flows, by marks that many of them share: see [`proxy_common::ways`].

use proxy_common::addr::{Addr, SockAddr};
use proxy_common::flow::{Flow, FlowKey, Hook, may_be_drawn};
use proxy_common::ways::{ROUND, cell_row, counts};

use super::Find;
use super::exits::WAYS;
use super::live::part;

/// The ends of a packet that may have flows, in a register.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Marked(u32);

impl Marked {
    /// No entry of a device's hook has this packet's tuple, nor that of its answer.
    pub const NONE: Self = Self(0);
    /// The first one may, or both.
    pub const FIRST: Self = Self(1);
    /// The second one alone.
    const SECOND: Self = Self(2);

    /// Asks about a packet's ends. The second one is not asked about where the first one has a
    /// mark.
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

    /// Returns true if no entry of an ingress hook has the tuple of a packet to this port. Its
    /// source is the first end.
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

/// Marks the end of an entry that is about to be made.
#[inline(always)]
pub(super) fn mark<A: Addr>(key: &FlowKey<A>, flow: &Flow<A>) {
    if key.hook() == Hook::ANCHOR {
        return;
    }
    let Some(round) = WAYS.find_here(&ROUND) else {
        return;
    };
    let round = round.read(|round| round.first);
    // Other CPUs read the cell all the time.
    if let Some(cell) = WAYS.find_here(&cell_row(&flow.marked_end(key)))
        && cell.read(|cell| cell.first) != round
    {
        part!(cell.first).set_in_order(round);
    }
}
