//! The proof that a TCP client exists: it acknowledges a number that only the backend's answer
//! contains.

use super::Acked;

/// The backend's SYN-ACK sequence number, which a client must acknowledge to establish its flow.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proof(pub u32);

/// The maximum bytes that a backend sends before the client's acknowledgement: ten segments of
/// 9,000 bytes (RFC 6928).
const WINDOW: u32 = 1 << 17;

impl Proof {
    /// The backend has not answered yet.
    pub const NONE: Self = Self(0);

    /// Takes a SYN-ACK's sequence number in host byte order.
    #[inline(always)]
    pub const fn of(seq: u32) -> Self {
        // Reserves the value of NONE.
        Self(if seq == Self::NONE.0 {
            seq.wrapping_sub(1)
        } else {
            seq
        })
    }

    /// Returns true if this acknowledgement shows that the client received the answer.
    #[inline(always)]
    pub const fn is_met(self, acked: Acked) -> bool {
        // A SYN is acknowledged by its number plus one (RFC 9293 §3.5).
        let beyond = acked.0.wrapping_sub(self.0).wrapping_sub(1);
        self.0 != Self::NONE.0 && beyond < WINDOW
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acknowledgement_proves_within_the_window() {
        for isn in [1, 1_000, u32::MAX - 1, u32::MAX] {
            let proof = Proof::of(isn);
            for (ahead, met) in [
                (0, false),
                (1, true),
                (2, true),
                (WINDOW, true),
                (WINDOW + 1, false),
            ] {
                assert_eq!(
                    proof.is_met(Acked(isn.wrapping_add(ahead))),
                    met,
                    "{isn} {ahead}"
                );
            }
            assert!(!proof.is_met(Acked(isn.wrapping_sub(1))), "{isn}");
        }
    }

    #[test]
    fn first_number_zero_is_an_answer_as_well() {
        assert!(Proof::of(0).is_met(Acked(1)) && !Proof::of(0).is_met(Acked(u32::MAX)));
    }

    #[test]
    fn nothing_proves_before_the_answer() {
        assert!(
            [0, 1, u32::MAX]
                .iter()
                .all(|acked| !Proof::NONE.is_met(Acked(*acked)))
        );
    }
}
