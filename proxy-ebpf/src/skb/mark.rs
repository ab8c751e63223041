//! The mark by which kpx's hooks recognise a packet that an earlier hook has rewritten.

// kpx's bits of `tc_index`. Other programs use the lower bits (Cilium among them).
const TRANSLATED: u32 = 1 << 15;
const FORWARD: u32 = 1 << 14;
const DONE: u32 = 1 << 13;
pub(super) const MARKS: u32 = TRANSLATED | FORWARD | DONE;
/// The other bits of `tc_index`, where another program's filter leaves its class.
pub(super) const CLASS: u32 = DONE - 1;
/// The host has made the packet. Stored only in `mark`, and only if `EXPOSES_PACKET_MARK` is set.
pub(super) const MADE_HERE: u32 = 1 << 0;
/// The mark is lost: another program has, or may have, overwritten it. Never stored in a packet.
const LOST: u32 = 1 << 1;

/// The state of a packet between kpx's hooks. A rewritten packet may have the tuple of another
/// flow, to which a later hook must not assign it. Hooks set the bits only on rewritten packets:
/// the bits survive decapsulation, and hooks have not seen the packet inside a tunnel.
#[derive(Clone, Copy)]
pub struct PacketMark(pub u32);

impl PacketMark {
    /// No hook has rewritten the packet.
    pub const NONE: Self = Self(0);
    /// Rewritten, on the way to a client.
    pub const BACK: Self = Self(TRANSLATED);
    /// Rewritten, on the way to a backend. The egress hook still changes the source.
    pub const FORWARD: Self = Self(TRANSLATED | FORWARD);
    /// Rewritten, on the way to a backend, with its final source.
    pub const DONE: Self = Self(MARKS);
    /// The same, but if netfilter masquerades the packet, the egress hook records its port.
    pub const PORT_SHOWS: Self = Self(TRANSLATED | DONE);

    /// Returns the mark of a packet to a backend. `source_changes`: the egress hook still changes
    /// its source. `port_shows`: if another program masquerades the packet, its port is a foreign
    /// NAT port to be recorded.
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

    /// Returns true if the egress hook still changes the packet's source.
    #[inline(always)]
    pub fn source_changes(self) -> bool {
        self.0 & MARKS == Self::FORWARD.0
    }

    /// Returns true if another program may have given the packet a foreign NAT port to be recorded.
    #[inline(always)]
    pub fn port_shows(self) -> bool {
        self.0 & MARKS == Self::PORT_SHOWS.0
    }

    /// Returns true if no hook has anything left to do.
    #[inline(always)]
    pub fn is_done(self) -> bool {
        self.0 & MARKS == MARKS
    }

    /// Returns true if the mark does not show whether a hook has rewritten the packet: see
    /// [`Skb::weigh`](super::Skb::weigh).
    #[inline(always)]
    pub fn is_lost(self) -> bool {
        self.0 & LOST != 0
    }

    #[inline(always)]
    pub(super) fn lost(self) -> Self {
        Self(self.0 & MADE_HERE | LOST)
    }

    /// Returns true for exactly the combinations of bits that kpx's hooks write.
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

    /// Returns true if the packet came in through a device and no kpx hook has rewritten it. Such a
    /// packet cannot be a reply of a masqueraded flow, because an ingress hook rewrites those.
    /// Returns false if the mark is lost.
    ///
    /// For a fragment, only the second condition counts: when the host fragments a packet that
    /// conntrack has reassembled, the fragments look as if the host had made them.
    #[inline(always)]
    pub fn is_unmarked_ingress(self, is_fragment: bool) -> bool {
        self.0 & (TRANSLATED | LOST) == 0 && (is_fragment || !self.is_made_here())
    }
}
