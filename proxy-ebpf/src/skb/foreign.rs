//! The mark and other programs: the values that they leave in its bits, and its removal before they
//! see it.

use proxy_common::device::{Device, Node};
use proxy_macros::global_fn;

use super::mark::{CLASS, MADE_HERE, MARKS};
use super::{PacketMark, Skb, is_kept_in_mark};
use crate::maps;

/// Returns `mark`, or a lost mark if another program may have overwritten it. Then the
/// addresses and ports alone identify the flow. A masqueraded flow shares its tuples with no
/// other flow, so they suffice.
///
/// A clsact filter that ends with `TC_ACT_OK` writes its class to `tc_index`, or 0 without a
/// class (`tc_run` in net/core/dev.c). Only the agent can find such filters; a packet does not
/// show them. Most filters preserve the mark, so a valid mark without other bits counts there
/// as well.
///
/// A fragment that the host has made from a forwarded packet no longer has that packet's
/// ingress device, so its mark counts as lost.
#[global_fn(kpx_weigh)]
fn weighed(skb: Skb, mark: PacketMark, is_fragment: bool) -> PacketMark {
    let is_believed = mark.is_ours() && !skb.has_class();
    if is_believed || maps::node().is_none_or(|node| !node.has(Node::FILTERED)) {
        return mark;
    }
    let may_be_lost = if mark.is_made_here() {
        is_fragment
    } else {
        maps::place_of(skb.ingress_ifindex()).0 & Device::FILTERED != 0
    };
    if may_be_lost { mark.lost() } else { mark }
}

impl Skb {
    /// Returns `mark`, or a lost mark: see [`weighed`].
    #[inline(always)]
    pub fn weigh(self, mark: PacketMark, is_fragment: bool) -> PacketMark {
        weighed(self, mark, is_fragment)
    }

    /// Returns true if a hook must weigh this packet's mark before it leaves the packet alone
    /// because of the mark.
    #[inline(always)]
    pub fn may_be_class(self) -> bool {
        self.has_class() && maps::node().is_some_and(|node| node.has(Node::FILTERED))
    }

    /// Returns true if another ingress hook of this host has already rewritten the packet.
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

    /// Removes the bits that the packet brings from a pod or another host, before any hook of this
    /// host.
    #[inline(always)]
    pub fn clear_foreign_mark(self) {
        if self.noted() & (MARKS | CLASS) != 0 {
            let (flags, _) = maps::place_of(self.ifindex());
            if flags & Device::EDGE != 0 {
                // A class from inside a pod has no meaning on the node. On other devices a program
                // of the node may have set the class.
                self.clear(if flags & Device::POD != 0 {
                    MARKS | CLASS
                } else {
                    MARKS
                });
            }
        }
    }

    /// Marks the packet as done where another egress hook follows (a bridge's port), which must not
    /// treat the packet as another program's. Elsewhere, removes the mark.
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
