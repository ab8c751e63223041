//! The plausibility of a TCP packet that claims to end its flow.

/// The number that one side has acknowledged last, in the other's sequence space and host byte order.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acked(pub u32);

/// The bytes that one side can have on their way: the limit of a receive buffer is 32 MiB in Linux 6.18 (`tcp_rmem`).
const WINDOW: u32 = 1 << 25;

/// After so many seconds nothing of what a side has sent is on its way.
const SILENCE_SECS: u32 = 2;

impl Acked {
    /// That side has acknowledged nothing yet.
    pub const UNKNOWN: Self = Self(0);

    /// Returns true if a FIN or RST with this sequence number may come from a side of which the other has acknowledged this
    /// much. If `advances`, more may be on its way.
    ///
    /// A side in silence resets and closes with the very number that the other expects (RFC 5961 §3.2). A sender that does not
    /// see the packets has to guess it, out of 2^32.
    #[inline(always)]
    pub const fn permits_end(self, seq: u32, advances: bool) -> bool {
        self.0 == Self::UNKNOWN.0 || seq == self.0 || self.is_behind(seq) && advances
    }

    /// Returns true if a side that has sent this number may have the rest on its way.
    #[inline(always)]
    pub const fn is_behind(self, seq: u32) -> bool {
        seq.wrapping_sub(self.0) < WINDOW
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
    fn silent_side_ends_with_the_expected_number_alone() {
        for acked in [1, 5_000, u32::MAX] {
            let acked = Acked(acked);
            for (ahead, silent, busy) in
                [(0, true, true), (1, false, true), (WINDOW - 1, false, true), (WINDOW, false, false)]
            {
                let seq = acked.0.wrapping_add(ahead);
                let permitted = (acked.permits_end(seq, false), acked.permits_end(seq, true));
                assert_eq!(permitted, (silent, busy), "{acked:?} {ahead}");
            }
            assert!(!acked.permits_end(acked.0.wrapping_sub(1), true));
        }
    }

    #[test]
    fn side_that_acknowledged_nothing_permits_everything() {
        assert!(Acked::UNKNOWN.permits_end(77, false));
    }
}
