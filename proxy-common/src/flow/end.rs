//! The plausibility of TCP packets that end a flow.

/// The last number that one side has acknowledged, in the other side's sequence space and host byte
/// order.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acked(pub u32);

/// The idle seconds after which a side has no data in flight.
const SILENCE_SECS: u32 = 2;

impl Acked {
    /// The side has not acknowledged anything yet.
    pub const UNKNOWN: Self = Self(0);

    /// Returns true if a side may end the flow with this sequence number, given the other side's
    /// last acknowledgement and up to `ahead` bytes in flight.
    ///
    /// An idle side resets and closes with exactly the expected number (RFC 5961 §3.2). A blind
    /// attacker has to guess it out of 2^32.
    #[inline(always)]
    pub const fn permits_end(self, seq: u32, ahead: Ahead) -> bool {
        self.0 == Self::UNKNOWN.0 || seq == self.0 || seq.wrapping_sub(self.0) < ahead.0
    }
}

/// The maximum bytes that one side may have in flight.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead(u32);

impl Ahead {
    pub const NOTHING: Self = Self(0);
    /// Before a RST, which ends a flow at once: an attacker needs 2^12 packets to hit a number in
    /// the window.
    pub const RESET: Self = Self(1 << 20);
    /// Before a backend's FIN, after which the client ends the flow: the maximum receive buffer is
    /// 32 MiB in Linux 6.18 (`tcp_rmem`).
    pub const GOODBYE: Self = Self(1 << 25);

    /// Returns the bytes in flight that are plausible before a packet that ends a flow, from a
    /// recently active side.
    #[inline(always)]
    pub const fn of_lively(resets: bool, is_client: bool) -> Self {
        match (resets, is_client) {
            (true, _) => Self::RESET,
            (false, false) => Self::GOODBYE,
            // A client's FIN ahead of its data counts only once the backend has sent its FIN,
            // because anyone may spoof it.
            (false, true) => Self::NOTHING,
        }
    }
}

/// Returns true if a side may have data in flight after this idle time.
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
