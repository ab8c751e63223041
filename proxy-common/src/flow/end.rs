//! The plausibility of a TCP packet that claims to end its flow.

/// The number that one side has acknowledged last, in the other's sequence space and host byte
/// order.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acked(pub u32);

/// After so many seconds nothing of what a side has sent is on its way.
const SILENCE_SECS: u32 = 2;

impl Acked {
    /// That side has acknowledged nothing yet.
    pub const UNKNOWN: Self = Self(0);

    /// Returns true if a side may end the flow with this sequence number, when the other side has
    /// acknowledged this much and perhaps as many bytes of it are `ahead`, on their way.
    ///
    /// A side in silence resets and closes with the very number that the other expects (RFC 5961
    /// §3.2). A sender that does not see the packets has to guess it, out of 2^32.
    #[inline(always)]
    pub const fn permits_end(self, seq: u32, ahead: Ahead) -> bool {
        self.0 == Self::UNKNOWN.0 || seq == self.0 || seq.wrapping_sub(self.0) < ahead.0
    }
}

/// The bytes that one side may have on their way.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead(u32);

impl Ahead {
    pub const NOTHING: Self = Self(0);
    /// The bytes before a RST: it ends a flow at once, so a stranger shall need 2^12 of them to hit
    /// a number.
    pub const RESET: Self = Self(1 << 20);
    /// The bytes before a FIN of a backend, after which its client ends the flow: the limit of a
    /// receive buffer is 32 MiB in Linux 6.18 (`tcp_rmem`).
    pub const GOODBYE: Self = Self(1 << 25);

    /// Returns the bytes that may be on their way before a packet that ends a flow, from a side of
    /// which more was acknowledged lately.
    #[inline(always)]
    pub const fn of_lively(resets: bool, is_client: bool) -> Self {
        match (resets, is_client) {
            (true, _) => Self::RESET,
            (false, false) => Self::GOODBYE,
            // The FIN of a client that is behind data counts once the backend ends as well: anyone
            // may send it in the client's name.
            (false, true) => Self::NOTHING,
        }
    }
}

/// Returns true if a side that was heard that long ago may have data on its way.
#[inline(always)]
pub const fn is_recent(idle_secs: u32) -> bool {
    idle_secs <= SILENCE_SECS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn side_ends_with_the_expected_number_or_shortly_ahead() {
        for acked in [1, 5_000, u32::MAX].map(Acked) {
            for ahead in [Ahead::NOTHING, Ahead::RESET, Ahead::GOODBYE] {
                let permits = |by: u32| acked.permits_end(acked.0.wrapping_add(by), ahead);
                assert!(
                    permits(0) && !permits(ahead.0.max(1)) && !permits(u32::MAX),
                    "{acked:?} {ahead:?}"
                );
                assert_eq!(
                    (permits(1), permits(ahead.0.saturating_sub(1))),
                    (ahead.0 > 1, true),
                    "{acked:?} {ahead:?}"
                );
            }
        }
    }

    #[test]
    fn client_says_goodbye_with_the_expected_number_alone() {
        let ahead = |resets, is_client| Ahead::of_lively(resets, is_client);
        assert_eq!([ahead(true, true), ahead(true, false)], [Ahead::RESET; 2]);
        assert_eq!(
            [ahead(false, true), ahead(false, false)],
            [Ahead::NOTHING, Ahead::GOODBYE]
        );
    }

    #[test]
    fn side_that_acknowledged_nothing_permits_everything() {
        assert!(Acked::UNKNOWN.permits_end(77, Ahead::NOTHING));
    }
}
