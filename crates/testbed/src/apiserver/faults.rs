//! The faults that a test enables.

use std::time::Duration;

use super::failure::Failure;

/// The enabled faults. Faults never change the data.
#[derive(Clone, Debug)]
pub(crate) struct Faults {
    /// Verb, resource (plural), and the answer.
    pub(crate) answers: Vec<(String, String, Failure)>,
    /// Verb and resource (plural) of requests that are executed without an answer.
    pub(crate) unanswered: Vec<(String, String)>,
    /// The answer to every request, like a load balancer without servers.
    pub(crate) everything: Option<Failure>,
    /// The time over which each list is sent in pieces.
    pub(crate) list_trickle: Option<Duration>,
    /// The garbage that new watches of a resource (plural) send instead of events.
    pub(crate) garbled: Vec<(String, Garbage)>,
    /// New watches repeat each event, followed by the event before it.
    pub(crate) disorder: bool,
    pub(crate) list_delay: Duration,
    pub(crate) watch_life: Option<Duration>,
    pub(crate) tokens_refused: bool,
    /// If false, `sendInitialEvents` is refused, as before 1.32.
    pub(crate) streaming_lists: bool,
    /// If true, an expired version ends a watch by the response status, else by the first event.
    pub(crate) gone_by_status: bool,
    /// The number of times that all watches were cut. A watch breaks when it changes.
    pub(crate) cuts: u64,
    /// The number of times that all watches got 410 Gone.
    pub(crate) expiries: u64,
}

/// The bytes of a watch without events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Garbage {
    /// An endless line, as fast as the client reads.
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

    /// Returns the garbage that watches of a resource send.
    pub(crate) fn garbage(&self, resource: &str) -> Option<Garbage> {
        self.garbled
            .iter()
            .find(|(garbled, _)| garbled == resource)
            .map(|(_, garbage)| *garbage)
    }

    /// Disables all faults. The counts remain, because they only grow.
    pub(crate) fn heal(&mut self) {
        *self = Self {
            cuts: self.cuts,
            expiries: self.expiries,
            ..Self::default()
        };
    }
}
