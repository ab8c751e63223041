//! What the packets of one direction have shown.

/// A set of bits: the packets seen of one direction of a flow.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen(pub(super) u8);

impl Seen {
    pub const NOTHING: Self = Self(0);
    pub const PACKET: Self = Self(1 << 0);
    pub const FIN: Self = Self(1 << 1);
    pub const RST: Self = Self(1 << 2);
    /// The client has shown that it got an answer, or the backend has gone on after several: no
    /// address was borrowed.
    pub const ASSURED: Self = Self(1 << 3);
    /// Nothing speaks against delivering this direction past the stack. Of what comes back: it
    /// comes in with the addresses with which it leaves, so that no program between the hooks
    /// translates the flow again. In both entries, of either direction.
    pub const DIRECT: Self = Self(1 << 4);
    /// The client has dialled again on a flow that was silent for long, and the backend has not
    /// said since that it knows the flow. Of what goes there, in the opener's entry.
    pub const REDIALLED: Self = Self(1 << 5);
    /// A FIN has come whose number is ahead of what the backend has acknowledged: it counts once
    /// the backend ends as well. Of what goes there, in the opener's entry.
    pub const LEAVING: Self = Self(1 << 6);
    /// A SYN has come on an established flow, and no packet of the backend since. Of what goes
    /// there, in the opener's entry.
    pub const DIALLED: Self = Self(1 << 7);
    /// The backend has acknowledged more with its last packets. Of what comes back, in the reply's
    /// entry; LEAVING has the same bit.
    pub const ADVANCED: Self = Self(1 << 6);
    /// A packet of another connection has come from the backend, which has not answered yet: the
    /// client has its port for that connection as well. Of what comes back, in the opener's entry;
    /// ADVANCED, in the reply's entry, has the same bit.
    pub const CLASHES: Self = Self(1 << 6);
    /// The flow was opened past the stack, which sees none of its packets. Of what comes back, in
    /// both entries; DIALLED has the same bit.
    pub const WHOLE: Self = Self(1 << 7);
    /// The flow has asked the agent whether it may skip the stack beside conntrack: see
    /// [`Offer`](super::Offer). Of what goes there, in the reply's entry; REDIALLED has the same
    /// bit.
    pub const OFFERED: Self = Self(1 << 5);
    /// Conntrack tolerates that it misses packets of the flow, and so believes any end of it. Of
    /// what goes there, in the reply's entry; LEAVING has the same bit.
    pub const TOLERATED: Self = Self(1 << 6);

    /// The agent has found the backend gone with its node: the client's packets are answered with a
    /// RST. A packet of the backend takes it back. Of what comes back, in the opener's entry;
    /// REDIALLED and OFFERED, of the other direction, have the same bit.
    pub const LOST: Self = Self(1 << 5);

    /// Conntrack may be liberal with the flow: the agent has been asked, and has perhaps told
    /// conntrack so. Conntrack stays so for as long as it has its entry. Of what goes there, in the
    /// reply's entry.
    pub const LIBERAL: Self = Self(Self::OFFERED.0 | Self::TOLERATED.0);

    #[inline(always)]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    #[inline(always)]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns 1 if both sides have spoken, each knowing of the other, and neither a RST nor both
    /// FINs have ended that; else 0. In bits, because each branch would multiply the verifier's
    /// work.
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
