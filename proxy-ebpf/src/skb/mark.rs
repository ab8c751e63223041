//! The mark by which our hooks know a packet that one of them has rewritten.

// Our bits of `tc_index`. The lower ones have meanings for others (Cilium's programs among them).
const TRANSLATED: u32 = 1 << 15;
const FORWARD: u32 = 1 << 14;
const DONE: u32 = 1 << 13;
pub(super) const MARKS: u32 = TRANSLATED | FORWARD | DONE;
/// The bits of `tc_index` where another's filter leaves a class, beside ours.
pub(super) const CLASS: u32 = DONE - 1;
/// The host has made the packet. A bit of no field but `mark`, where the packet mark is kept there.
pub(super) const MADE_HERE: u32 = 1 << 0;
/// The mark is lost: another program has, or may have, written over it. A bit of no field.
const LOST: u32 = 1 << 1;

/// The bits by which our hooks tell each other of a packet. A rewritten packet may look like a
/// packet of another flow, for which a later hook must not take it. The bits are set only on
/// rewritten packets: they survive decapsulation, and no hook has seen the packet inside a tunnel.
#[derive(Clone, Copy)]
pub struct PacketMark(pub u32);

impl PacketMark {
    /// No hook has rewritten the packet.
    pub const NONE: Self = Self(0);
    /// It was rewritten, and is on its way to a client, ...
    pub const BACK: Self = Self(TRANSLATED);
    /// ... or to a backend, ...
    pub const FORWARD: Self = Self(TRANSLATED | FORWARD);
    /// ... with the source address with which it has to leave, ...
    pub const DONE: Self = Self(MARKS);
    /// ... unless netfilter masquerades it. Then the hook where it leaves learns its port.
    pub const PORT_SHOWS: Self = Self(TRANSLATED | DONE);

    /// Returns the mark on the way to a backend. `source_changes`: a hook where the packet leaves
    /// still changes its source. `port_shows`: the packet is one that a connection of another
    /// program is known by.
    #[inline(always)]
    pub fn forward(source_changes: bool, port_shows: bool) -> Self {
        if source_changes {
            Self::FORWARD
        } else if port_shows {
            Self::PORT_SHOWS
        } else {
            Self::DONE
        }
    }

    #[inline(always)]
    pub fn is_translated(self) -> bool {
        self.0 & TRANSLATED != 0
    }

    /// Returns true if the packet is on its way to a backend.
    #[inline(always)]
    pub fn is_forward(self) -> bool {
        self.0 & FORWARD != 0 || self.port_shows()
    }

    /// Returns true if a hook where the packet leaves still changes its source.
    #[inline(always)]
    pub fn source_changes(self) -> bool {
        self.0 & MARKS == Self::FORWARD.0
    }

    /// Returns true if another program may have given the packet a port that counts.
    #[inline(always)]
    pub fn port_shows(self) -> bool {
        self.0 & MARKS == Self::PORT_SHOWS.0
    }

    /// Returns true if no hook has anything left to do.
    #[inline(always)]
    pub fn is_done(self) -> bool {
        self.0 & MARKS == MARKS
    }

    /// Returns true if the mark does not tell whether a hook has rewritten the packet: see
    /// [`Skb::weigh`](super::Skb::weigh).
    #[inline(always)]
    pub fn is_lost(self) -> bool {
        self.0 & LOST != 0
    }

    #[inline(always)]
    pub(super) fn lost(self) -> Self {
        Self(self.0 & MADE_HERE | LOST)
    }

    /// Returns true if a hook of ours writes just this.
    #[inline(always)]
    pub(super) fn is_ours(self) -> bool {
        [Self::BACK, Self::FORWARD, Self::DONE, Self::PORT_SHOWS]
            .iter()
            .any(|ours| ours.0 == self.0 & MARKS)
    }

    #[inline(always)]
    pub(super) fn is_made_here(self) -> bool {
        self.0 & MADE_HERE != 0
    }

    /// Returns true if the packet came in through a device, and no hook of ours has rewritten it.
    /// Such a packet belongs to no masqueraded flow, because an ingress hook rewrites the replies
    /// of those. A lost mark does not tell.
    ///
    /// A fragment counts by the second condition alone. If the host cuts a packet again that
    /// conntrack has put together, the pieces look as if the host had made them.
    #[inline(always)]
    pub fn is_unmarked_ingress(self, is_fragment: bool) -> bool {
        self.0 & (TRANSLATED | LOST) == 0 && (is_fragment || !self.is_made_here())
    }
}
