//! The differences of the nodes' clocks to this machine's. Pure.

use std::fmt::{Display, Formatter, Result};

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

/// The difference of a clock to this machine's, and its greatest error, in seconds. A clock that is
/// ahead has a positive difference.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Skew {
    pub secs: f64,
    pub error: f64,
}

impl Skew {
    /// Returns the difference of a clock that was read between two times of this machine.
    pub(crate) fn between(before: Timestamp, read: Timestamp, after: Timestamp) -> Self {
        let took = after.duration_since(before).as_secs_f64().max(0.0);
        Self {
            secs: read.duration_since(before).as_secs_f64() - took / 2.0,
            error: took / 2.0,
        }
    }

    /// Returns the better of two readings. A later reading that contradicts an earlier one wins:
    /// the clock was set.
    pub(crate) fn joined(self, later: Self) -> Self {
        let agree = (self.secs - later.secs).abs() <= self.error + later.error;
        if agree && self.error < later.error {
            self
        } else {
            later
        }
    }

    pub(crate) fn is_beyond(&self, secs: f64) -> bool {
        self.secs.abs() - self.error > secs
    }

    /// Returns a time of the node's clock on this machine's clock.
    pub(crate) fn corrected(&self, time: Timestamp) -> Timestamp {
        let by = SignedDuration::try_from_secs_f64(self.secs).unwrap_or_default();
        time.checked_sub(by).unwrap_or(time)
    }
}

impl Display for Skew {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        let side = if self.secs < 0.0 {
            "behind"
        } else {
            "ahead of"
        };
        write!(
            f,
            "the clock is {:.1} s {side} this machine's",
            self.secs.abs()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: i64) -> Timestamp {
        Timestamp::from_millisecond(1_700_000_000_000 + millis).unwrap()
    }

    #[test]
    fn clock_is_known_to_half_of_the_round_trip() {
        let skew = Skew::between(at(0), at(5_100), at(200));
        assert!((skew.secs - 5.0).abs() < 1e-9 && (skew.error - 0.1).abs() < 1e-9);
        assert_eq!(skew.corrected(at(5_100)), at(100));
        assert!(skew.is_beyond(4.8) && !skew.is_beyond(4.95));
        assert_eq!(
            skew.to_string(),
            "the clock is 5.0 s ahead of this machine's"
        );
        let behind = Skew::between(at(0), at(-3_000), at(0));
        assert_eq!(
            behind.to_string(),
            "the clock is 3.0 s behind this machine's"
        );
    }

    #[test]
    fn best_reading_stays_until_the_clock_is_set() {
        let exact = Skew {
            secs: 1.0,
            error: 0.01,
        };
        let vague = Skew {
            secs: 1.3,
            error: 0.5,
        };
        let set = Skew {
            secs: -7.0,
            error: 0.5,
        };
        assert_eq!(exact.joined(vague), exact);
        assert_eq!(vague.joined(exact), exact);
        assert_eq!(exact.joined(set), set);
    }
}
