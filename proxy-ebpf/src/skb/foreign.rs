//! The mark among other programs: what they left in its place, and what they must not find of it.

use proxy_common::device::{Device, Node};

use super::mark::{CLASS, MADE_HERE, MARKS};
use super::{PacketMark, Skb, is_kept_in_mark};
use crate::{global_fn, maps};

impl Skb {
    /// Returns what `mark`, found on this packet, is worth: nothing where another program may have
    /// written over it. Then the addresses and ports decide alone. A masqueraded flow has all of
    /// its tuples to itself, so that they name no other flow.
    ///
    /// A clsact filter that ends with `TC_ACT_OK` leaves its class in `tc_index`, 0 if it names
    /// none (`tc_run` in net/core/dev.c). The agent says where such filters may be, and no packet
    /// does. Most filters leave the mark as it is, so a mark with nothing beside it is believed
    /// there as well.
    ///
    /// A fragment that the host has cut from a packet that came in says no longer where that was.
    #[inline(always)]
    pub fn weigh(self, mark: PacketMark, is_fragment: bool) -> PacketMark {
        PacketMark(global_fn::kpx_weigh(self.0, mark.0, is_fragment.into()))
    }

    /// Does what [`Self::weigh`] says.
    #[inline(always)]
    pub fn weighed(self, mark: u32, is_fragment: bool) -> u32 {
        let mark = PacketMark(mark);
        let is_believed = mark.is_ours() && !self.has_class();
        if is_believed || maps::node().is_none_or(|node| !node.has(Node::FILTERED)) {
            return mark.0;
        }
        let may_be_lost = if mark.is_made_here() {
            is_fragment
        } else {
            maps::place_of(self.ingress_ifindex()).0 & Device::FILTERED != 0
        };
        if may_be_lost { mark.lost().0 } else { mark.0 }
    }

    /// Returns true if this packet's mark has to be weighed before a hook leaves the packet alone
    /// for it.
    #[inline(always)]
    pub fn may_be_class(self) -> bool {
        self.has_class() && maps::node().is_some_and(|node| node.has(Node::FILTERED))
    }

    /// Returns true if a hook of this host has rewritten the packet where it came in, and this is
    /// another such hook.
    #[inline(always)]
    pub fn is_seen_before(self) -> bool {
        let mark = self.packet_mark();
        mark.is_translated() && self.weigh(mark, true).is_translated()
    }

    #[inline(always)]
    fn has_class(self) -> bool {
        let class = if is_kept_in_mark() {
            CLASS & !MADE_HERE
        } else {
            CLASS
        };
        self.noted() & class != 0
    }

    /// Takes away what others have noted before the packet passed any hook of this host: a pod, or
    /// another host's class.
    #[inline(always)]
    pub fn clear_foreign_mark(self) {
        if self.noted() & (MARKS | CLASS) != 0 {
            let (flags, _) = maps::place_of(self.ifindex());
            if flags & Device::EDGE != 0 {
                // What a pod names a class says nothing here. On other devices a program of the
                // node may have named one.
                self.clear(if flags & Device::POD != 0 {
                    MARKS | CLASS
                } else {
                    MARKS
                });
            }
        }
    }

    /// Marks that nothing is left to do, where another egress hook follows (a bridge's port). That
    /// hook must not take the packet for another program's. Elsewhere, takes the mark away.
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
