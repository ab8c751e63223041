//! The bits that the packets of one direction have shown.

/// The packets seen in one direction of a flow, as bits.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen(pub(super) u8);

impl Seen {
    pub const NOTHING: Self = Self(0);
    pub const PACKET: Self = Self(1 << 0);
    pub const FIN: Self = Self(1 << 1);
    pub const RST: Self = Self(1 << 2);
    /// The client has acknowledged an answer, or a stream backend has continued: the client's
    /// address is not spoofed.
    pub const ASSURED: Self = Self(1 << 3);
    /// This direction may bypass the network stack. Replies may if they leave with the addresses
    /// with which they arrive, so that no other program translates them in between. Either
    /// direction, in both entries.
    pub const DIRECT: Self = Self(1 << 4);
    /// The client has sent a SYN on a long idle flow, and the backend has not confirmed the flow
    /// since. Original direction, in the original entry.
    pub const REDIALLED: Self = Self(1 << 5);
    /// The client's FIN is ahead of the backend's acknowledgements, and counts once the backend has
    /// sent its FIN. Original direction, in the original entry.
    pub const LEAVING: Self = Self(1 << 6);
    /// A SYN arrived on an established flow, and the backend has sent no packet since. Original
    /// direction, in the original entry.
    pub const DIALLED: Self = Self(1 << 7);
    /// The backend's last packets have acknowledged new data. Reply direction, in the reply entry.
    /// Shares its bit with LEAVING.
    pub const ADVANCED: Self = Self(1 << 6);
    /// The backend has not answered this flow, but has sent a packet of another connection that
    /// also uses the client's port. Reply direction, in the original entry. Shares its bit with
    /// ADVANCED in the reply entry.
    pub const CLASHES: Self = Self(1 << 6);
    /// A bypass flow: all its packets bypass the network stack. Reply direction, in both entries.
    /// Shares its bit with DIALLED.
    pub const BYPASS: Self = Self(1 << 7);
    /// The flow has requested a liberal conntrack entry: see [`Offer`](super::Offer). Original
    /// direction, in the reply entry. Shares its bit with REDIALLED.
    pub const OFFERED: Self = Self(1 << 5);
    /// The conntrack entry is liberal, because it misses packets, and so accepts any end of the
    /// flow. Original direction, in the reply entry. Shares its bit with LEAVING.
    pub const MADE_LIBERAL: Self = Self(1 << 6);

    /// The agent has found the backend lost with its node, so the programs answer the client's
    /// packets with a RST. A packet of the backend clears this bit. Reply direction, in the
    /// original entry. Shares its bit with REDIALLED and OFFERED of the other direction.
    pub const LOST: Self = Self(1 << 5);

    /// The conntrack entry may be liberal: the agent has the request, and may have acted. Conntrack
    /// stays liberal for the lifetime of its entry. Original direction, in the reply entry.
    pub const LIBERAL: Self = Self(Self::OFFERED.0 | Self::MADE_LIBERAL.0);

    #[inline(always)]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    #[inline(always)]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns 1 if both sides have responded to each other and the flow has not ended, else 0.
    /// Branchless: each branch would multiply the verifier's work.
    #[inline(always)]
    pub const fn goes_on(tx: Self, rx: Self) -> u32 {
        let assured = (tx.0 | rx.0) >> Self::ASSURED.0.trailing_zeros();
        assured as u32 & !Self::is_over(tx, rx) & 1
    }

    /// Returns 1 if a RST or both FINs have ended the flow, else 0.
    #[inline(always)]
    pub const fn is_over(tx: Self, rx: Self) -> u32 {
        let reset = (tx.0 | rx.0) >> Self::RST.0.trailing_zeros();
        let leaves =
            tx.0 >> Self::FIN.0.trailing_zeros() | tx.0 >> Self::LEAVING.0.trailing_zeros();
        let closed = leaves & rx.0 >> Self::FIN.0.trailing_zeros();
        ((reset | closed) & 1) as u32
    }

    #[inline(always)]
    pub const fn only(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    #[inline(always)]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}
