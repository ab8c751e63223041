//! The state transition of a flow by one packet, as a pure function for every packet path.

use super::Seen;
use crate::addr::Proto;

/// The number of datagrams after which a backend proves that its client listens: a stream after a
/// single request.
const ANSWERS: u64 = 4;

/// The bits that one packet shows: bits of [`Seen`], [`Signals::OPENER`] and [`Signals::ANSWER`].
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signals(u8);

impl Signals {
    pub const PACKET: Self = Self(Seen::PACKET.0);
    pub const FIN: Self = Self(Seen::PACKET.0 | Seen::FIN.0);
    pub const RST: Self = Self(Seen::PACKET.0 | Seen::RST.0);
    /// An opening packet (SYN, INIT). Datagrams never have this bit.
    pub const OPENER: Self = Self(Seen::PACKET.0 | OPENER);
    /// A SYN-ACK, with the number that the client must acknowledge: see [`Proof`](super::Proof).
    pub const ANSWER: Self = Self(Seen::PACKET.0 | ANSWER);
    /// SCTP's COOKIE ACK: its sender has received its own cookie back (RFC 9260 §5.1).
    pub const ACCEPTED: Self = Self(Seen::PACKET.0 | Seen::ASSURED.0);

    #[inline(always)]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns true if the packet ends a direction with the bits `before`: any RST, or the first
    /// FIN.
    #[inline(always)]
    pub const fn ends(self, before: Seen) -> bool {
        self.0 & (Seen::RST.0 | Seen::FIN.0 & !before.0) != 0
    }

    #[inline(always)]
    pub const fn seen(self) -> Seen {
        Seen(self.0 & !(OPENER | ANSWER | Seen::ASSURED.0))
    }

    #[inline(always)]
    pub const fn resets(self) -> bool {
        self.0 & Seen::RST.0 != 0
    }

    /// Returns true for a FIN without RST.
    #[inline(always)]
    pub const fn is_goodbye(self) -> bool {
        self.0 & (Seen::FIN.0 | Seen::RST.0) == Seen::FIN.0
    }

    #[inline(always)]
    pub const fn opens_connection(self) -> bool {
        self.0 & OPENER != 0
    }

    #[inline(always)]
    pub const fn answers_opener(self) -> bool {
        self.0 & ANSWER != 0
    }
}

/// Outside the bits of [`Seen`].
const OPENER: u8 = 1 << 7;
const ANSWER: u8 = 1 << 6;

/// The sender of a packet, and the bits of the entry so far.
#[derive(Clone, Copy, Debug)]
pub enum Sender {
    /// The original entry holds both directions. `proves` is set if the packet proves the client of
    /// an answered flow: a datagram, or an acknowledgement that meets the [`Proof`](super::Proof),
    /// but never an SCTP packet.
    Client { tx: Seen, rx: Seen, proves: bool },
    /// The reply entry holds its own direction only. `is_stream` is the result of [`is_stream`].
    Backend { rx: Seen, is_stream: bool },
}

/// Returns true if a further packet, after `packets` of the backend, assures the flow.
#[inline(always)]
pub const fn is_stream(proto: Proto, packets: u64) -> bool {
    proto.0 == Proto::UDP.0 && packets >= ANSWERS
}

/// The effect of a packet on its flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The direction's bits, including this packet's.
    pub seen: Seen,
    /// The packet changes flow state, not only counters and times.
    pub is_change: bool,
    /// The sender continues after the other side's RST, so it did not accept the RST.
    pub revokes_reset: bool,
}

/// Computes the transition. Branchless: each branch would multiply the verifier's work.
#[inline(always)]
pub const fn step(sender: Sender, packet: Signals) -> Step {
    const PACKET_TO_ASSURED: u32 =
        Seen::ASSURED.0.trailing_zeros() - Seen::PACKET.0.trailing_zeros();
    const RST_TO_ASSURED: u32 = Seen::ASSURED.0.trailing_zeros() - Seen::RST.0.trailing_zeros();
    const OPENER_TO_ASSURED: u32 = OPENER.trailing_zeros() - Seen::ASSURED.0.trailing_zeros();
    // `proves as u8` must be the first bit.
    const { assert!(Seen::PACKET.0 == true as u8) };
    let rst = packet.0 & Seen::RST.0;
    let opener = packet.0 & OPENER;
    let (before, either, assured) = match sender {
        // The client continues after an answer. A repeated opening packet proves nothing, because
        // its address may be spoofed.
        Sender::Client { tx, rx, proves } => {
            let answered = (rx.0 & Seen::PACKET.0 & proves as u8) << PACKET_TO_ASSURED;
            (
                tx.0,
                tx.0 | rx.0,
                answered & !(rst << RST_TO_ASSURED) & !(opener >> OPENER_TO_ASSURED),
            )
        }
        Sender::Backend { rx, is_stream } => (
            rx.0,
            rx.0,
            packet.0 & Seen::ASSURED.0 | if is_stream { Seen::ASSURED.0 } else { 0 },
        ),
    };
    // A side that continues has not ended the flow by its own RST.
    let seen = before & (!Seen::RST.0 | rst) | packet.seen().0 | assured;
    let state_change = seen ^ before | rst | either & Seen::RST.0 | packet.0 & (OPENER | ANSWER);
    Step {
        seen: Seen(seen),
        is_change: state_change != 0,
        revokes_reset: rst == 0,
    }
}

/// Returns true if a plain packet ([`Signals::PACKET`]) cannot change flow state: its sender has
/// shown the same bits before, and neither side a RST. `assures` is set if such a packet may assure
/// its sender. `other` holds the other side's bits (nothing in the reply entry). A cheaper
/// equivalent of [`step`] for these packets.
#[inline(always)]
pub const fn is_settled(own: Seen, other: Seen, assures: bool) -> bool {
    let shown = Seen::PACKET.0 | if assures { Seen::ASSURED.0 } else { 0 };
    own.0 & (shown | Seen::RST.0) == shown && other.0 & Seen::RST.0 == 0
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    const SYN: Signals = Signals::OPENER;
    const DATA: Signals = Signals::PACKET;
    const FIN: Signals = Signals::FIN;
    const RST: Signals = Signals::RST;

    /// Sends packets of either side through both entries, as the programs do.
    fn follow(proto: Proto, packets: &[(bool, Signals)]) -> (Seen, Seen, Vec<bool>) {
        let mut tx = Seen::PACKET;
        let mut rx = Seen::NOTHING;
        let mut returned = 0;
        let mut state_change = Vec::new();
        for &(is_client, packet) in packets {
            let (own, other) = if is_client {
                (&mut tx, &mut rx)
            } else {
                (&mut rx, &mut tx)
            };
            let sender = match is_client {
                true => Sender::Client {
                    tx: *own,
                    rx: *other,
                    proves: proto != Proto::SCTP,
                },
                false => Sender::Backend {
                    rx: *own,
                    is_stream: is_stream(proto, returned),
                },
            };
            let step = step(sender, packet);
            *own = step.seen;
            if step.revokes_reset {
                *other = other.without(Seen::RST);
            }
            returned += u64::from(!is_client);
            state_change.push(step.is_change);
        }
        (tx, rx, state_change)
    }

    #[test]
    fn client_is_assured_when_it_goes_on_after_an_answer() {
        let (tx, rx, state_change) = follow(
            Proto::TCP,
            &[(false, DATA), (true, DATA), (true, DATA), (false, DATA)],
        );
        assert_eq!((tx, rx), (Seen::PACKET.with(Seen::ASSURED), Seen::PACKET));
        assert_eq!(state_change, [true, true, false, false]);
    }

    #[test]
    fn opener_sent_again_assures_no_client() {
        let (tx, _, state_change) = follow(Proto::TCP, &[(false, DATA), (true, SYN), (true, SYN)]);
        assert_eq!((tx, state_change), (Seen::PACKET, vec![true, true, true]));
        let (tx, _, _) = follow(Proto::UDP, &[(false, DATA), (true, DATA)]);
        assert!(tx.has(Seen::ASSURED), "no datagram is an opener");
    }

    #[test]
    fn client_without_proof_assures_nothing() {
        let tx = Seen::PACKET;
        let rx = Seen::PACKET;
        assert_eq!(
            step(
                Sender::Client {
                    tx,
                    rx,
                    proves: false
                },
                DATA
            )
            .seen,
            tx
        );
        assert!(
            step(
                Sender::Client {
                    tx,
                    rx,
                    proves: true
                },
                DATA
            )
            .seen
            .has(Seen::ASSURED)
        );
        let assured = tx.with(Seen::ASSURED);
        assert_eq!(
            step(
                Sender::Client {
                    tx: assured,
                    rx,
                    proves: false
                },
                DATA
            )
            .seen,
            assured,
            "once is enough"
        );
    }

    #[test]
    fn every_answer_to_an_opener_is_news() {
        let (_, rx, state_change) = follow(
            Proto::TCP,
            &[
                (false, Signals::ANSWER),
                (false, Signals::ANSWER),
                (false, DATA),
            ],
        );
        assert_eq!((rx, state_change), (Seen::PACKET, vec![true, true, false]));
    }

    #[test]
    fn only_backend_accepts_cookie() {
        let (tx, rx, _) = follow(
            Proto::SCTP,
            &[(false, DATA), (true, Signals::ACCEPTED), (true, DATA)],
        );
        assert_eq!(State::of(tx, rx), State::Answered);
        let (tx, rx, state_change) = follow(
            Proto::SCTP,
            &[
                (false, DATA),
                (true, DATA),
                (false, Signals::ACCEPTED),
                (true, DATA),
            ],
        );
        assert_eq!(
            (State::of(tx, rx), state_change),
            (State::Established, vec![true, false, true, false])
        );
    }

    #[test]
    fn packet_of_settled_flow_is_never_news() {
        let mut settled = 0;
        for (own, other) in
            (0..=u8::MAX).flat_map(|own| (0..=u8::MAX).map(move |other| (Seen(own), Seen(other))))
        {
            for assures in [false, true]
                .into_iter()
                .filter(|assures| is_settled(own, other, *assures))
            {
                settled += 1;
                let (client, backend) = (
                    Sender::Client {
                        tx: own,
                        rx: other,
                        proves: assures,
                    },
                    Sender::Backend {
                        rx: own,
                        is_stream: assures,
                    },
                );
                assert!(!step(client, DATA).is_change, "{client:?}");
                assert!(!step(backend, DATA).is_change, "{backend:?}");
            }
        }
        assert_eq!(settled, (64 + 32) * 128);
    }

    #[test]
    fn backend_is_assured_by_its_fifth_datagram() {
        let (_, rx, _) = follow(Proto::UDP, &[(false, DATA); 4]);
        assert!(!rx.has(Seen::ASSURED));
        let (_, rx, state_change) = follow(Proto::UDP, &[(false, DATA); 6]);
        assert!(rx.has(Seen::ASSURED));
        assert_eq!(state_change, [true, false, false, false, true, false]);
        let (_, rx, _) = follow(Proto::TCP, &[(false, DATA); 6]);
        assert!(!rx.has(Seen::ASSURED), "TCP acknowledges");
    }

    #[test]
    fn reset_is_the_end_until_either_side_goes_on() {
        for is_client in [true, false] {
            let (tx, rx, _) = follow(Proto::TCP, &[(false, DATA), (true, DATA), (is_client, RST)]);
            assert_eq!(State::of(tx, rx), State::Reset);
            for goes_on in [true, false] {
                let (tx, rx, _) = follow(
                    Proto::TCP,
                    &[
                        (false, DATA),
                        (true, DATA),
                        (is_client, RST),
                        (goes_on, DATA),
                    ],
                );
                assert_eq!(State::of(tx, rx), State::Established);
            }
        }
    }

    #[test]
    fn reset_by_a_client_alone_assures_nothing() {
        let (tx, _, _) = follow(Proto::TCP, &[(false, DATA), (true, RST)]);
        assert!(!tx.has(Seen::ASSURED));
    }

    #[test]
    fn flow_ends_once_with_the_second_fin() {
        let (tx, rx, state_change) = follow(
            Proto::TCP,
            &[
                (false, DATA),
                (true, DATA),
                (true, FIN),
                (false, FIN),
                (true, FIN),
            ],
        );
        assert_eq!(
            (State::of(tx, rx), state_change),
            (State::Closed, vec![true, true, true, true, false])
        );
        assert_eq!(Seen::is_over(tx, rx), 1);
        assert_eq!(Seen::is_over(tx, rx.with(Seen::RST)), 1);
        assert_eq!(Seen::is_over(tx, rx.without(Seen::FIN)), 0);
        assert_eq!(Seen::is_over(Seen::PACKET, Seen::RST), 1);
        assert_eq!(
            Seen::is_over(Seen::PACKET, Seen::PACKET.with(Seen::ASSURED)),
            0
        );
    }
}
