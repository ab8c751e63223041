//! The outcomes of a service port's TCP connections to a backend: the time until the answer, and
//! the failures.

use crate::addr::{Addr, Port, Proto};
use crate::assert_size;
use crate::balance::hash_addr;

/// The time of a flow's first SYN. The reply entry of a TCP flow holds it in
/// [`Flow::generation`](crate::flow::Flow::generation) until the backend's first packet.
///
/// In units of 1.024 µs since boot. Wraps after 73 minutes.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DialTime(pub u32);

/// The binary logarithm of a unit in nanoseconds.
const UNIT: u32 = 10;
/// Nanoseconds in a unit.
pub const UNIT_NANOS: u64 = 1 << UNIT;

impl DialTime {
    /// No time: the programs that opened the flow did not record it.
    pub const UNKNOWN: Self = Self(0);

    /// Takes nanoseconds since boot.
    #[inline(always)]
    pub const fn at(boot_ns: u64) -> Self {
        let units = (boot_ns >> UNIT) as u32;
        // Reserves the value of UNKNOWN.
        Self(if units == Self::UNKNOWN.0 { 1 } else { units })
    }

    /// Returns the units since this time.
    #[inline(always)]
    pub const fn units_until(self, boot_ns: u64) -> u32 {
        ((boot_ns >> UNIT) as u32).wrapping_sub(self.0)
    }
}

pub const BUCKETS: usize = 18;
/// The binary logarithm of the first bucket's bound in units: 66 µs. Each bound is twice the
/// previous; the last bucket is unbounded.
const FIRST: u32 = 6;

/// Returns the bucket of a time in units.
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

/// Returns the inclusive upper bound of a bucket in units. `None` for the last bucket.
pub const fn bound_units(bucket: usize) -> Option<u64> {
    if bucket < BUCKETS - 1 {
        Some(1 << (FIRST as usize + bucket))
    } else {
        None
    }
}

/// The outcome of a connection: the units until the answer, or one of the codes below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Outcome(pub u32);

impl Outcome {
    /// A SYN was retransmitted, and the backend has sent no packet: of a flow, before [`PATIENCE`];
    /// of a translated socket, at any time.
    pub const RETRANSMITTED: Self = Self(u32::MAX);
    const UNITS_MAX: u32 = u32::MAX - 0x1000;
    /// The bits with a failure's [`Voter`].
    const VOTER: u32 = 0xff;
    const REFUSED: u32 = u32::MAX - 0x2ff;
    const UNHEARD: u32 = u32::MAX - 0x3ff;
    const UNREACHABLE: u32 = u32::MAX - 0x4ff;
    /// The client's kernel gave up or got an ICMP error, or the client closed its socket after
    /// [`PATIENCE`]. The backend has sent no packet.
    pub const UNANSWERED: Self = Self(u32::MAX - 0x6ff);
    /// A RST refused a socket's connection.
    pub const CONNECT_REFUSED: Self = Self(u32::MAX - 0x7ff);
    /// An ICMP "port unreachable" refused a datagram of a flow that the backend has not answered.
    pub const DATAGRAM_REFUSED: Self = Self(u32::MAX - 0x5ff);

    /// The backend's first packet to this client was a RST.
    #[inline(always)]
    pub const fn refused(Voter(voter): Voter) -> Self {
        Self(Self::REFUSED | voter as u32)
    }

    /// This client retransmitted its SYN after [`PATIENCE`], and the backend has sent no packet.
    #[inline(always)]
    pub const fn unheard(Voter(voter): Voter) -> Self {
        Self(Self::UNHEARD | voter as u32)
    }

    /// An ICMP error reported that this client's SYN did not reach the backend, which has sent no
    /// packet.
    #[inline(always)]
    pub const fn unreachable(Voter(voter): Voter) -> Self {
        Self(Self::UNREACHABLE | voter as u32)
    }

    /// The backend answered `units` units after the first SYN.
    #[inline(always)]
    pub const fn answered(units: u32) -> Self {
        Self(if units < Self::UNITS_MAX {
            units
        } else {
            Self::UNITS_MAX
        })
    }

    /// Returns the units until the answer. `None` if the backend has not answered.
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
        match self.0 & !Self::VOTER {
            Self::REFUSED | Self::UNHEARD | Self::UNREACHABLE => Some(Voter(self.0 as u8)),
            _ => None,
        }
    }

    #[inline(always)]
    pub const fn is_refusal(self) -> bool {
        self.0 & !Self::VOTER == Self::REFUSED
            || self.0 == Self::DATAGRAM_REFUSED.0
            || self.0 == Self::CONNECT_REFUSED.0
    }

    #[inline(always)]
    pub const fn is_unanswered(self) -> bool {
        self.0 == Self::UNANSWERED.0
    }

    #[inline(always)]
    pub const fn proto(self) -> Proto {
        if self.0 == Self::DATAGRAM_REFUSED.0 {
            Proto::UDP
        } else {
            Proto::TCP
        }
    }

    /// Returns true for an ICMP error. The backend may still answer, so the connection counts as
    /// unanswered only when its flow ends.
    #[inline(always)]
    pub const fn is_unreachable(self) -> bool {
        self.0 & !Self::VOTER == Self::UNREACHABLE
    }
}

/// The units after which a retransmitted SYN counts as a failure: the client's initial timeout of
/// one second (RFC 6298), less the inaccuracy of kernel timers. Also the units after which a closed
/// socket's connection counts as unanswered.
pub const PATIENCE: u32 = (900_000_000 / UNIT_NANOS) as u32;
/// The value of [`PATIENCE`] under session affinity: two timeouts.
pub const AFFINITY_PATIENCE: u32 = (2_700_000_000 / UNIT_NANOS) as u32;

/// A client's bit in [`Votes`]. Clients may share a bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Voter(pub u8);

impl Voter {
    /// All clients outside this node, because a single machine may spoof many addresses. A few
    /// local clients share the bit.
    const OUTSIDE: Self = Self(0);

    /// Returns the bit of a client.
    #[inline(always)]
    pub fn of<A: Addr>(client: &A, is_outside: bool) -> Self {
        let place = (u64::from(hash_addr(client)) * u64::from(Votes::CLIENTS)) >> 32;
        // Branchless: each branch would multiply the verifier's work.
        Self(Self::OUTSIDE.0 + place as u8 * u8::from(!is_outside))
    }
}

/// The evidence against a backend since its last answer to a flow: failures, and their clients.
///
/// After 255 the number of failures continues at 128, so each failure changes the number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Votes(pub u32);

impl Votes {
    pub const NONE: Self = Self(0);
    /// The number of client bits.
    const CLIENTS: u32 = 24;
    const FAILURES: u32 = 0xff;
    /// The number of failures after 255.
    const FAILURES_AGAIN: u32 = 0x80;

    /// Adds a failure of a client.
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

    /// Returns the failures since a count of `before`, provided that the backend has not answered
    /// since.
    pub const fn failures_since(self, before: u32) -> u32 {
        let now = self.failures();
        if now >= before {
            now - before
        } else {
            (now + (Self::FAILURES + 1 - Self::FAILURES_AGAIN)).saturating_sub(before)
        }
    }

    /// Returns the client bits.
    pub const fn places(self) -> u32 {
        self.0 >> u8::BITS
    }

    /// Returns a lower bound of the number of clients.
    pub const fn clients(self) -> u32 {
        self.places().count_ones()
    }
}

/// An outcome and a connection's ports in one register.
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

/// Value of `CONNECTS`, keyed by service port and backend. The row of the unspecified backend holds
/// the counts of backends that were removed as idle.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Connects {
    /// The answered connections by time from the first SYN to the first SYN-ACK.
    pub buckets: [u64; BUCKETS],
    /// The sum of these times in units.
    pub units: u64,
    /// The connections that the backend's first packet reset; in a row of UDP, the datagrams that
    /// the backend refused before it had sent a packet.
    pub refused: u64,
    /// The connections that ended without a packet of the backend: of flows, as the agent's sweep
    /// finds them, and of sockets. Flows that the programs evict are not counted.
    pub unanswered: u64,
    /// The SYNs that clients retransmitted before any packet of the backend.
    pub retransmitted: u64,
    /// The time of the last update, in seconds since boot.
    pub last_secs: u32,
    /// The evidence against the backend since its last answer to a flow.
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

    pub fn answered(&self) -> u64 {
        self.buckets
            .iter()
            .fold(0, |sum, bucket| sum.wrapping_add(*bucket))
    }

    /// Returns the number of refused and unanswered connections.
    pub const fn failed(&self) -> u64 {
        self.refused.wrapping_add(self.unanswered)
    }

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
        // Votes concern a single backend, so a sum keeps its own votes.
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
            Outcome::UNANSWERED,
            Outcome::answered(7),
            Outcome::answered(u32::MAX),
        ] {
            assert_eq!((outcome.voter(), outcome.is_refusal()), (None, false));
            assert_eq!(outcome.is_unanswered(), outcome == Outcome::UNANSWERED);
        }
        let socket = Outcome::CONNECT_REFUSED;
        assert_eq!(
            (socket.voter(), socket.is_refusal(), socket.proto()),
            (None, true, Proto::TCP)
        );
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
