//! The faults that a test makes the server have.

use std::time::Duration;

use super::failure::Failure;

/// The faults that are switched on. None of them touches the data.
#[derive(Clone, Debug)]
pub(crate) struct Faults {
    /// Verb, resource (plural), and what is answered instead.
    pub(crate) answers: Vec<(String, String, Failure)>,
    /// Verb and resource (plural) of requests that are carried out and never answered.
    pub(crate) unanswered: Vec<(String, String)>,
    /// The answer to every request of every client, as a load balancer without servers gives it.
    pub(crate) everything: Option<Failure>,
    /// Every list comes in pieces, over so long.
    pub(crate) list_trickle: Option<Duration>,
    /// Watches of a resource (plural) that start send this in place of events.
    pub(crate) garbled: Vec<(String, Garbage)>,
    /// After each event of a watch it comes once more, and so does the one before it.
    pub(crate) disorder: bool,
    /// Every list waits so long before it is read.
    pub(crate) list_delay: Duration,
    /// Every watch that starts ends after so long.
    pub(crate) watch_life: Option<Duration>,
    pub(crate) tokens_refused: bool,
    /// Off: `sendInitialEvents` is refused, as by servers before 1.32.
    pub(crate) streaming_lists: bool,
    /// How a watch from too old a version is told so: by the status of the response, or by the
    /// first event.
    pub(crate) gone_by_status: bool,
    /// Counts the times that all watches were cut; a watch that sees it change breaks off.
    pub(crate) cuts: u64,
    /// Counts the times that all watches were told that their version is too old.
    pub(crate) expiries: u64,
}

/// The bytes of a watch that sends no event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Garbage {
    /// A line without end, as fast as the client reads it.
    EndlessLine,
    /// A byte a second.
    Trickle,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            answers: Vec::new(),
            unanswered: Vec::new(),
            everything: None,
            list_trickle: None,
            garbled: Vec::new(),
            disorder: false,
            list_delay: Duration::ZERO,
            watch_life: None,
            tokens_refused: false,
            streaming_lists: true,
            gone_by_status: false,
            cuts: 0,
            expiries: 0,
        }
    }
}

impl Faults {
    pub(crate) fn answer(&self, verb: &str, resource: &str) -> Option<Failure> {
        let hit = self
            .answers
            .iter()
            .find(|(v, r, _)| v == verb && r == resource);
        hit.map(|(_, _, failure)| failure.clone())
    }

    pub(crate) fn is_unanswered(&self, verb: &str, resource: &str) -> bool {
        self.unanswered
            .iter()
            .any(|(v, r)| v == verb && r == resource)
    }

    /// Returns what watches of a resource send in place of events.
    pub(crate) fn garbage(&self, resource: &str) -> Option<Garbage> {
        self.garbled
            .iter()
            .find(|(garbled, _)| garbled == resource)
            .map(|(_, garbage)| *garbage)
    }

    /// Back to a server without faults, but for the counts, which only ever grow.
    pub(crate) fn heal(&mut self) {
        *self = Self {
            cuts: self.cuts,
            expiries: self.expiries,
            ..Self::default()
        };
    }
}
