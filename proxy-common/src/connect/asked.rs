//! The unanswered SYNs of a backend: evidence before any of them is retransmitted.
//!
//! A backend has two rows in `CONNECTS`: its counts, and its unanswered SYNs, with [`Asked::PROTO`]
//! in the key. At each SYN the second row copies two counts: `units` to its `units`, and `refused`
//! to its `retransmitted`. Answers and refusals increase the counts, so a difference means that the
//! backend has responded since. The second row's `refused` holds the [`Asked`], and its
//! `unanswered` the [`SynTimes`]. `units` is written last. Two CPUs that write simultaneously may
//! mix their values. The agent's sweep removes old rows.

use super::{BUCKETS, Connects, DialTime, UNIT_NANOS, Voter, Votes};
use crate::addr::Proto;

/// The SYNs since a backend's last answer. Lower half: their number and clients, as [`Votes`].
/// Upper half: the time since which two clients wait, or of the first SYN if there is a single
/// client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Asked(pub u64);

impl Asked {
    pub const NOTHING: Self = Self(0);
    /// The protocol in the keys of these rows, which no service port has.
    pub const PROTO: Proto = Proto::ANY;
    /// The minimum numbers of unanswered SYNs and clients of an overdue backend.
    const SYNS: u32 = 3;
    const CLIENTS: u32 = 2;
    /// The units until a backend is overdue: several times the bound of [`Connects::is_prompt`].
    const OVERDUE: u32 = (300_000_000 / UNIT_NANOS) as u32;
    /// The units after which the evidence is obsolete: the SYNs have been retransmitted, and the
    /// agent has evaluated the failures.
    const OLD: u32 = (2_500_000_000 / UNIT_NANOS) as u32;
    /// The seconds after the last SYN for which a row is valid.
    pub const OLD_SECS: u32 = 3;

    /// Returns the SYNs as failures, with their clients.
    pub const fn votes(self) -> Votes {
        Votes(self.0 as u32)
    }

    /// Returns the time since which the clients wait.
    pub const fn since(self) -> DialTime {
        DialTime((self.0 >> u32::BITS) as u32)
    }

    const fn waited(self, boot_ns: u64) -> u32 {
        self.since().units_until(boot_ns)
    }

    /// Adds a client's SYN.
    #[inline(always)]
    #[must_use]
    pub const fn with(self, voter: Voter, boot_ns: u64) -> Self {
        let is_old = self.waited(boot_ns) >= Self::OLD;
        let before = if is_old { Votes::NONE } else { self.votes() };
        let votes = before.with(voter);
        let is_change = before.failures() == 0
            || before.clients() < Self::CLIENTS && votes.clients() >= Self::CLIENTS;
        let since = if is_change {
            DialTime::at(boot_ns).0 as u64
        } else {
            self.0 >> u32::BITS
        };
        Self(since << u32::BITS | votes.0 as u64)
    }

    /// Returns true if a client has waited longer than a prompt backend takes.
    #[inline(always)]
    pub const fn is_late(self, boot_ns: u64) -> bool {
        let waited = self.waited(boot_ns);
        self.votes().failures() > 0 && waited >= Self::OVERDUE && waited < Self::OLD
    }

    /// Returns true if the backend is late for two clients and at least three SYNs.
    #[inline(always)]
    pub const fn is_overdue(self, boot_ns: u64) -> bool {
        self.is_late(boot_ns)
            && self.votes().failures() >= Self::SYNS
            && self.votes().clients() >= Self::CLIENTS
    }
}

/// The times of a backend's last SYN, and of the last SYN with a response (an answer or a refusal).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct SynTimes(pub u64);

impl SynTimes {
    /// The units after which an answered SYN is forgotten: 18 minutes, because
    /// [`DialTime::is_before`] is valid for 36.
    const OLD: u32 = 1 << 30;
    /// The maximum clock difference between two CPUs, in units: a second.
    const LATER: u32 = 1 << 20;

    /// Adds a SYN. `is_heard` is set if the backend has responded since the last SYN.
    #[inline(always)]
    #[must_use]
    pub const fn with(self, boot_ns: u64, is_heard: bool) -> Self {
        let heard = self.heard(is_heard);
        let heard = if heard.units_until(boot_ns).wrapping_add(Self::LATER) < Self::OLD {
            heard
        } else {
            DialTime::UNKNOWN
        };
        Self((heard.0 as u64) << u32::BITS | DialTime::at(boot_ns).0 as u64)
    }

    /// Returns the time of the last SYN with a response. [`DialTime::UNKNOWN`] if there is none.
    #[inline(always)]
    pub const fn heard(self, is_heard: bool) -> DialTime {
        DialTime(if is_heard {
            self.0
        } else {
            self.0 >> u32::BITS
        } as u32)
    }
}

/// The first bucket of late answers: after 67 ms.
const LATE: usize = 11;
/// A prompt backend answers at most one of this many connections late.
const LATE_OF: u64 = 64;

impl Connects {
    /// Returns the unanswered SYNs in `row`, and the time of the last SYN with a response.
    pub const fn unanswered(&self, row: &Self) -> (Asked, DialTime) {
        let has_answered = row.units != self.units;
        let is_heard = has_answered || row.retransmitted != self.refused;
        (
            if has_answered {
                Asked::NOTHING
            } else {
                Asked(row.refused)
            },
            SynTimes(row.unanswered).heard(is_heard),
        )
    }

    /// Returns true if the backend has answered, and almost always promptly.
    #[inline(always)]
    pub fn is_prompt(&self) -> bool {
        let sum = |buckets: &[u64]| {
            buckets
                .iter()
                .fold(0_u64, |sum, bucket| sum.wrapping_add(*bucket))
        };
        let prompt = sum(&self.buckets[..LATE]);
        let late = sum(&self.buckets[LATE..BUCKETS]);
        prompt > 0 && late.wrapping_mul(LATE_OF) <= prompt
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const START: u64 = 7_000 * MS;

    /// Returns the state after these SYNs (time in milliseconds, client).
    fn asked(syns: &[(u64, u8)]) -> Asked {
        syns.iter().fold(Asked::NOTHING, |asked, (ms, client)| {
            asked.with(Voter(*client), START + ms * MS)
        })
    }

    fn overdue(asked: Asked) -> Vec<u64> {
        (25..6_000)
            .step_by(50)
            .filter(|ms| asked.is_overdue(START + ms * MS))
            .collect()
    }

    #[test]
    fn three_syns_of_two_clients_make_a_backend_overdue_for_two_seconds() {
        let asked = asked(&[(0, 1), (100, 2), (150, 2)]);
        let overdue = overdue(asked);
        assert_eq!(
            (overdue.first(), overdue.last()),
            (Some(&425), Some(&2_575)),
            "since the second client's SYN"
        );
    }

    #[test]
    fn one_client_or_two_syns_make_no_backend_overdue() {
        for syns in [
            &[(0, 1), (1, 1), (2, 1), (3, 1)][..],
            &[(0, 1), (1, 2)],
            &[(0, 1)],
            &[],
        ] {
            assert_eq!(overdue(asked(syns)), [0; 0], "{syns:?}");
        }
    }

    #[test]
    fn one_syn_is_late_as_soon_as_it_has_waited() {
        let late = |asked: Asked| {
            let late: Vec<u64> = (25..6_000)
                .step_by(50)
                .filter(|ms| asked.is_late(START + ms * MS))
                .collect();
            (late.first().copied(), late.last().copied())
        };
        assert_eq!(late(asked(&[(0, 1)])), (Some(325), Some(2_475)));
        assert_eq!(late(Asked::NOTHING), (None, None));
    }

    #[test]
    fn last_syn_before_an_answer_is_kept() {
        let at = |ms: u64| START + ms * MS;
        let times = SynTimes(0).with(at(0), true);
        assert_eq!(
            [times.heard(false), times.heard(true)],
            [DialTime::UNKNOWN, DialTime::at(at(0))]
        );
        let times = times
            .with(at(100), true)
            .with(at(200), false)
            .with(at(300), false);
        assert_eq!(
            [times.heard(false), times.heard(true)],
            [DialTime::at(at(0)), DialTime::at(at(300))]
        );
    }

    #[test]
    fn answered_syn_never_becomes_a_later_one() {
        let minute = |nth: u64| START + nth * 60_000 * MS;
        let later = SynTimes(0)
            .with(minute(0) + 5 * MS, true)
            .with(minute(0), true);
        assert_eq!(
            later.heard(false),
            DialTime::at(minute(0) + 5 * MS),
            "another CPU's SYN of the same moment"
        );
        let mut times = SynTimes(0).with(minute(0), true).with(minute(0), true);
        for nth in 1..200 {
            times = times.with(minute(nth), false);
            let heard = times.heard(false);
            let is_known = heard != DialTime::UNKNOWN;
            assert_eq!(is_known, nth <= 18, "{nth}");
            assert!(
                !is_known || heard.is_before(DialTime::at(minute(nth))),
                "{nth}: {heard:?}"
            );
        }
    }

    #[test]
    fn backend_owes_nothing_after_an_answer_and_is_heard_of_after_a_refusal() {
        let counted = |units, refused| Connects {
            units,
            refused,
            ..Connects::NOTHING
        };
        let asked = asked(&[(0, 1)]);
        let times = SynTimes(0).with(START, false);
        let row = Connects {
            units: 7,
            retransmitted: 2,
            refused: asked.0,
            unanswered: times.0,
            ..Connects::NOTHING
        };
        let last = DialTime::at(START);
        assert_eq!(counted(7, 2).unanswered(&row), (asked, DialTime::UNKNOWN));
        assert_eq!(counted(8, 2).unanswered(&row), (Asked::NOTHING, last));
        assert_eq!(counted(7, 3).unanswered(&row), (asked, last));
    }

    #[test]
    fn second_client_has_to_wait_as_long() {
        // An attacker's SYNs are old when the first honest SYN arrives.
        let asked = asked(&[(0, 1), (10, 1), (2_000, 2)]);
        assert!(!asked.is_overdue(START + 2_290 * MS) && asked.is_overdue(START + 2_310 * MS));
    }

    #[test]
    fn old_syns_are_forgotten_with_the_next_one() {
        let old = [(0, 1), (100, 2), (150, 2)];
        assert_eq!(
            asked(&[&old[..], &[(2_700, 2)]].concat()),
            asked(&[(2_700, 2)])
        );
        assert_eq!(
            overdue(asked(&[(0, 1), (1, 1), (2_600, 2)])),
            [0; 0],
            "one client after the other"
        );
    }

    #[test]
    fn backend_that_was_late_is_not_prompt() {
        let connects = |prompt, late| {
            let mut connects = Connects::NOTHING;
            (connects.buckets[3], connects.buckets[12]) = (prompt, late);
            connects
        };
        for (prompt, late, is_prompt) in [
            (0, 0, false),
            (0, 9, false),
            (1, 0, true),
            (63, 1, false),
            (64, 1, true),
        ] {
            assert_eq!(
                connects(prompt, late).is_prompt(),
                is_prompt,
                "{prompt} {late}"
            );
        }
    }
}
