//! The mark among other programs: what they left in its place, and what they must not find of it.

use proxy_common::device::{Device, Node};

use super::mark::{CLASS, MADE_HERE, MARKS};
use super::{PacketMark, Skb};
use crate::maps;

impl Skb {
    /// Returns true if `mark`, found on this packet, is none because a filter of another program may have written over it.
    ///
    /// A clsact filter that ends with `TC_ACT_OK` leaves its class in `tc_index` (`tc_run` in net/core/dev.c). Class 0 does not show.
    /// A class from inside a pod does not get here, if the pod's device is known as one: see [`Self::clear_foreign_mark`].
    #[inline(never)]
    pub fn has_lost(self, mark: PacketMark) -> bool {
        mark.0 & (MARKS | MADE_HERE) == 0 && self.noted() & CLASS != 0
    }

    /// Takes away what others have noted before the packet passed any hook of this host: a pod, or another host's class.
    #[inline(always)]
    pub fn clear_foreign_mark(self) {
        if self.noted() & (MARKS | CLASS) != 0 {
            let (flags, _) = maps::place_of(self.ifindex());
            if flags & Device::EDGE != 0 {
                // What a pod names a class says nothing here. On other devices a program of the node may have named one.
                self.clear(if flags & Device::POD != 0 { MARKS | CLASS } else { MARKS });
            }
        }
    }

    /// Marks that nothing is left to do, where another egress hook follows (a bridge's port). That hook must not take the
    /// packet for another program's. Elsewhere, takes the mark away.
    #[inline(always)]
    pub fn settle_packet_mark(self) {
        let is_stacked = maps::node().is_some_and(|node| node.has(Node::STACKED));
        if is_stacked && maps::is_stacked(self.ifindex()) {
            self.set_packet_mark(PacketMark::DONE);
        } else {
            self.clear_packet_mark();
        }
    }
}
