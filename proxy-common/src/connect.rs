//! What became of the TCP connections that a service port opened to a backend: the time until the
//! backend answered, and the failures.

use crate::addr::{Addr, Port, Proto};
use crate::assert_size;
use crate::balance::hash_addr;

mod asked;

pub use asked::{Asked, SynTimes};

/// The moment of a flow's first SYN. The reply's entry of a TCP flow holds it in
/// [`Flow::generation`](crate::flow::Flow::generation) until the backend's first packet.
///
/// In units of 1.024 µs since boot, which come again after 73 minutes.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DialTime(pub u32);

/// The nanoseconds of a unit are this power of 2.
const UNIT: u32 = 10;
/// The nanoseconds of a unit.
pub const UNIT_NANOS: u64 = 1 << UNIT;

impl DialTime {
    /// No moment: the programs that opened the flow did not note it.
    pub const UNKNOWN: Self = Self(0);

    /// From the nanoseconds since boot.
    #[inline(always)]
    pub const fn at(boot_ns: u64) -> Self {
        let units = (boot_ns >> UNIT) as u32;
        // The value of UNKNOWN stays free: the next unit stands for it.
        Self(if units == Self::UNKNOWN.0 { 1 } else { units })
    }

    /// Returns true if this is the earlier one of two moments within 36 minutes.
    pub const fn is_before(self, other: Self) -> bool {
        (self.0.wrapping_sub(other.0) as i32) < 0
    }

    /// Returns the units that have passed.
    #[inline(always)]
    pub const fn units_until(self, boot_ns: u64) -> u32 {
        ((boot_ns >> UNIT) as u32).wrapping_sub(self.0)
    }
}

/// The number of buckets.
pub const BUCKETS: usize = 18;
/// The highest number of units in the first bucket is this power of 2: 66 µs. Each further bucket
/// ends at the double, and the last one has no end.
const FIRST: u32 = 6;

/// Returns the bucket of a time.
#[inline(always)]
pub const fn bucket(units: u32) -> usize {
    let above = units.saturating_sub(1) >> FIRST;
    let bucket = (u32::BITS - above.leading_zeros()) as usize;
    if bucket < BUCKETS {
        bucket
    } else {
        BUCKETS - 1
    }
}

/// Returns the highest number of units in a bucket; None for the last one.
pub const fn bound_units(bucket: usize) -> Option<u64> {
    if bucket < BUCKETS - 1 {
        Some(1 << (FIRST as usize + bucket))
    } else {
        None
    }
}

/// The outcome of a connection: the units until its answer, or one of the numbers below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Outcome(pub u32);

impl Outcome {
    /// A SYN came again early, and the backend has sent nothing.
    pub const RETRANSMITTED: Self = Self(u32::MAX);
    const UNITS_MAX: u32 = u32::MAX - 0x1000;
    /// The bits of a failure's [`Voter`].
    const VOTER: u32 = 0xff;
    const ASKED: u32 = u32::MAX - 0x1ff;
    const REFUSED: u32 = u32::MAX - 0x2ff;
    const UNHEARD: u32 = u32::MAX - 0x3ff;
    const UNREACHABLE: u32 = u32::MAX - 0x4ff;
    /// A datagram of a flow without an answer was refused by an ICMP "port unreachable".
    pub const DATAGRAM_REFUSED: Self = Self(u32::MAX - 0x5ff);

    /// None yet: this client's first SYN is about to go there.
    #[inline(always)]
    pub const fn asked(Voter(voter): Voter) -> Self {
        Self(Self::ASKED | voter as u32)
    }

    /// The backend's first packet was a RST to this client.
    #[inline(always)]
    pub const fn refused(Voter(voter): Voter) -> Self {
        Self(Self::REFUSED | voter as u32)
    }

    /// A SYN of this client came again after [`PATIENCE`], and the backend has sent nothing.
    #[inline(always)]
    pub const fn unheard(Voter(voter): Voter) -> Self {
        Self(Self::UNHEARD | voter as u32)
    }

    /// An ICMP error told this client that its SYN did not reach the backend, which has sent
    /// nothing.
    #[inline(always)]
    pub const fn unreachable(Voter(voter): Voter) -> Self {
        Self(Self::UNREACHABLE | voter as u32)
    }

    /// The backend has answered so many units after the first SYN.
    #[inline(always)]
    pub const fn answered(units: u32) -> Self {
        Self(if units < Self::UNITS_MAX {
            units
        } else {
            Self::UNITS_MAX
        })
    }

    /// Returns the times of an answer; None for a failure.
    #[inline(always)]
    pub const fn units(self) -> Option<u32> {
        if self.0 <= Self::UNITS_MAX {
            Some(self.0)
        } else {
            None
        }
    }

    /// Returns the client of a failure that counts against the backend.
    #[inline(always)]
    pub const fn voter(self) -> Option<Voter> {
        if self.units().is_none()
            && self.0 != Self::RETRANSMITTED.0
            && self.0 != Self::DATAGRAM_REFUSED.0
        {
            Some(Voter(self.0 as u8))
        } else {
            None
        }
    }

    #[inline(always)]
    pub const fn is_refusal(self) -> bool {
        self.0 & !Self::VOTER == Self::REFUSED || self.0 == Self::DATAGRAM_REFUSED.0
    }

    /// Returns the protocol of the flow.
    #[inline(always)]
    pub const fn proto(self) -> Proto {
        if self.0 == Self::DATAGRAM_REFUSED.0 {
            Proto::UDP
        } else {
            Proto::TCP
        }
    }

    /// Returns true for an ICMP error. Its connection may be answered yet, and counts as unanswered
    /// only when its flow ends.
    #[inline(always)]
    pub const fn is_unreachable(self) -> bool {
        self.0 & !Self::VOTER == Self::UNREACHABLE
    }
}

/// The time in units after which a SYN that comes again says that the backend is silent: the first
/// second of a client's timer (RFC 6298), less what a kernel's timer may run early.
pub const PATIENCE: u32 = (900_000_000 / UNIT_NANOS) as u32;
/// The same where clients have a backend of their own: two times of that timer.
pub const AFFINITY_PATIENCE: u32 = (2_700_000_000 / UNIT_NANOS) as u32;

/// The place of a client in [`Votes`]. Clients may share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Voter(pub u8);

impl Voter {
    /// All clients outside this node: one machine may come in the name of many. A few of the others
    /// have this place as well.
    const OUTSIDE: Self = Self(0);

    /// Returns the place of a client, which may be outside this node.
    #[inline(always)]
    pub fn of<A: Addr>(client: &A, is_outside: bool) -> Self {
        let place = (u64::from(hash_addr(client)) * u64::from(Votes::CLIENTS)) >> 32;
        // Without a branch: each one would multiply the verifier's work.
        Self(Self::OUTSIDE.0 + place as u8 * u8::from(!is_outside))
    }
}

/// What speaks against a backend since it has last answered: failures, and the clients that met
/// them.
///
/// After 255 failures comes the number 128: so one more is another number, however many there were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Votes(pub u32);

impl Votes {
    pub const NONE: Self = Self(0);
    /// The places of clients.
    const CLIENTS: u32 = 24;
    const FAILURES: u32 = 0xff;
    /// The number of failures that follows the greatest one.
    const FAILURES_AGAIN: u32 = 0x80;

    /// Adds a failure.
    #[inline(always)]
    pub const fn with(self, Voter(voter): Voter) -> Self {
        let failures = self.0 & Self::FAILURES;
        let more = if failures < Self::FAILURES {
            failures + 1
        } else {
            Self::FAILURES_AGAIN
        };
        let place = if (voter as u32) < Self::CLIENTS {
            voter as u32
        } else {
            0
        };
        Self(self.0 & !Self::FAILURES | more | 1 << (u8::BITS + place))
    }

    pub const fn failures(self) -> u32 {
        self.0 & Self::FAILURES
    }

    /// Returns the failures since `before` had so many, if the backend has not answered in between.
    pub const fn failures_since(self, before: u32) -> u32 {
        let now = self.failures();
        if now >= before {
            now - before
        } else {
            (now + (Self::FAILURES + 1 - Self::FAILURES_AGAIN)).saturating_sub(before)
        }
    }

    /// Returns the places of the clients, a bit each.
    pub const fn places(self) -> u32 {
        self.0 >> u8::BITS
    }

    /// Returns the number of clients, at the least.
    pub const fn clients(self) -> u32 {
        self.places().count_ones()
    }
}

/// An outcome and the ports of a connection, in one register.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct PortsAndOutcome(pub u64);

impl PortsAndOutcome {
    #[inline(always)]
    pub const fn new(service: Port, backend: Port, Outcome(outcome): Outcome) -> Self {
        Self((outcome as u64) << 32 | (service.wire() as u64) << 16 | backend.wire() as u64)
    }

    #[inline(always)]
    pub const fn service(self) -> Port {
        Port::from_wire((self.0 >> 16) as u16)
    }

    #[inline(always)]
    pub const fn backend(self) -> Port {
        Port::from_wire(self.0 as u16)
    }

    #[inline(always)]
    pub const fn outcome(self) -> Outcome {
        Outcome((self.0 >> 32) as u32)
    }
}

/// Value of `CONNECTS`, keyed by service port and backend. The row of the backend without address
/// has the counts of backends that were not dialled for long.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Connects {
    /// The answered connections, by the time from the first SYN to the first SYN with ACK.
    pub buckets: [u64; BUCKETS],
    /// The sum of these times, in units.
    pub units: u64,
    /// The connections that the backend's first packet reset; in a row of UDP, the datagrams that
    /// it refused before it had sent a packet.
    pub refused: u64,
    /// The connections whose flow the agent has swept before the backend had sent a packet.
    /// Programs count none of those that they forget.
    pub unanswered: u64,
    /// The SYNs that came again before the backend had sent a packet.
    pub retransmitted: u64,
    /// When a program last counted: seconds since boot.
    pub last_secs: u32,
    /// What speaks against the backend since its last answer.
    pub votes: Votes,
}
assert_size!(Connects = (BUCKETS + 4) * 8 + 4 + 4);

impl Connects {
    pub const NOTHING: Self = Self {
        buckets: [0; BUCKETS],
        units: 0,
        refused: 0,
        unanswered: 0,
        retransmitted: 0,
        last_secs: 0,
        votes: Votes::NONE,
    };

    /// Returns the number of answered connections.
    pub fn answered(&self) -> u64 {
        self.buckets
            .iter()
            .fold(0, |sum, bucket| sum.wrapping_add(*bucket))
    }

    /// Returns the number of connections that the backend refused, or never answered.
    pub const fn failed(&self) -> u64 {
        self.refused.wrapping_add(self.unanswered)
    }

    /// Returns what was counted since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let mut since = *self;
        since
            .buckets
            .iter_mut()
            .zip(before.buckets)
            .for_each(|(now, before)| *now = now.saturating_sub(before));
        since.units = self.units.saturating_sub(before.units);
        since.refused = self.refused.saturating_sub(before.refused);
        since.unanswered = self.unanswered.saturating_sub(before.unanswered);
        since.retransmitted = self.retransmitted.saturating_sub(before.retransmitted);
        since
    }
}

impl core::ops::AddAssign for Connects {
    fn add_assign(&mut self, other: Self) {
        self.buckets
            .iter_mut()
            .zip(other.buckets)
            .for_each(|(sum, more)| *sum = sum.wrapping_add(more));
        self.units = self.units.wrapping_add(other.units);
        self.refused = self.refused.wrapping_add(other.refused);
        self.unanswered = self.unanswered.wrapping_add(other.unanswered);
        self.retransmitted = self.retransmitted.wrapping_add(other.retransmitted);
        self.last_secs = self.last_secs.max(other.last_secs);
        // Votes are of one backend: no sum has any but its own.
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bucket_holds_times_up_to_its_bound() {
        for (units, want) in [
            (0, 0),
            (1, 0),
            (64, 0),
            (65, 1),
            (128, 1),
            (129, 2),
            (1 << 22, 16),
            ((1 << 22) + 1, 17),
        ] {
            assert_eq!(bucket(units), want, "{units}");
        }
        assert_eq!(bucket(u32::MAX), BUCKETS - 1);
        for nth in 0..BUCKETS - 1 {
            let bound = u32::try_from(bound_units(nth).unwrap()).unwrap();
            assert_eq!((bucket(bound), bucket(bound + 1)), (nth, nth + 1));
        }
        assert_eq!(bound_units(BUCKETS - 1), None);
    }

    #[test]
    fn time_passes_over_the_end_of_the_clock() {
        let end = u64::from(u32::MAX) << UNIT;
        assert_eq!(DialTime::at(end).units_until(end + 5 * UNIT_NANOS), 5);
        assert_eq!(
            DialTime::at(1 << (u32::BITS + UNIT)),
            DialTime(1),
            "never unknown"
        );
        let [before, after] = [DialTime::at(end), DialTime::at(end + 5 * UNIT_NANOS)];
        assert!(before.is_before(after) && !after.is_before(before) && !before.is_before(before));
        assert_eq!(
            DialTime::at(3 * UNIT_NANOS + 1).units_until(4 * UNIT_NANOS),
            1
        );
    }

    #[test]
    fn ports_and_outcome_share_a_register() {
        let refused = Outcome::refused(Voter(23));
        let unheard = Outcome::unheard(Voter(7));
        let unreachable = Outcome::unreachable(Voter(31));
        for outcome in [
            refused,
            unheard,
            unreachable,
            Outcome::RETRANSMITTED,
            Outcome::answered(7),
        ] {
            let both = PortsAndOutcome::new(Port::new(80), Port::new(8080), outcome);
            assert_eq!(
                (both.service(), both.backend(), both.outcome()),
                (Port::new(80), Port::new(8080), outcome)
            );
        }
        let failures = [refused, unheard, unreachable];
        assert_eq!(
            failures.map(Outcome::voter),
            [Some(Voter(23)), Some(Voter(7)), Some(Voter(31))]
        );
        assert_eq!(failures.map(Outcome::is_refusal), [true, false, false]);
        assert_eq!(failures.map(Outcome::is_unreachable), [false, false, true]);
        for outcome in [
            Outcome::RETRANSMITTED,
            Outcome::answered(7),
            Outcome::answered(u32::MAX),
        ] {
            assert_eq!((outcome.voter(), outcome.is_refusal()), (None, false));
        }
        let datagram = Outcome::DATAGRAM_REFUSED;
        assert_eq!(
            (datagram.voter(), datagram.is_refusal(), datagram.proto()),
            (None, true, Proto::UDP)
        );
        assert!(
            Outcome::answered(u32::MAX).units().is_some()
                && Outcome::RETRANSMITTED.units().is_none()
        );
    }

    #[test]
    fn votes_count_failures_and_tell_clients_apart() {
        let mut votes = Votes::NONE;
        for nth in 0..300 {
            votes = votes.with(Voter(u8::try_from(nth % 2 * 23).unwrap()));
        }
        assert_eq!((votes.failures(), votes.clients()), (172, 2), "{votes:?}");
        assert_eq!(
            [100, 172, 200, 255].map(|before| votes.failures_since(before)),
            [72, 0, 100, 45]
        );
        let client = |last| crate::addr::Addr4::from(core::net::Ipv4Addr::new(10, 244, 1, last));
        let voter = |last| Voter::of(&client(last), false);
        let mut all = (0..=255).fold(Votes::NONE, |votes, last| votes.with(voter(last)));
        assert_eq!((all.failures(), all.clients()), (128, Votes::CLIENTS));
        let outside = (0..=99).fold(Votes::NONE, |votes, last| {
            votes.with(Voter::of(&client(last), true))
        });
        assert_eq!(
            (outside.failures(), outside.clients()),
            (100, 1),
            "clients outside are one"
        );
        all = all.with(Voter(u8::MAX));
        assert_eq!(all.failures(), 129, "any number is a client");
        assert_eq!(
            Votes::NONE.with(Voter(1)).with(Voter(23)).places(),
            1 << 1 | 1 << 23
        );
    }

    #[test]
    fn difference_and_sum_are_opposites() {
        let before = Connects {
            buckets: [3; BUCKETS],
            units: 7,
            refused: 1,
            ..Connects::NOTHING
        };
        let mut now = Connects {
            buckets: [4; BUCKETS],
            units: 9,
            refused: 1,
            unanswered: 2,
            ..Connects::NOTHING
        };
        let since = now.since(&before);
        assert_eq!(
            (since.answered(), since.units, since.failed()),
            (BUCKETS as u64, 2, 2)
        );
        now = before;
        now += since;
        assert_eq!((now.answered(), now.units), (4 * BUCKETS as u64, 9));
    }
}
