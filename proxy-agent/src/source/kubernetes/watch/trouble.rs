//! What is wrong with a watch, told to whoever asks: status, health, metrics and log.

use std::collections::BTreeMap;
use std::time::Duration;

use tracing::debug;

use super::failure::{End, Over};
use crate::health::{Health, Problem};
use crate::input::ObjectName;
use crate::metrics::Watches;

/// From so many on, watches that end at once are a problem.
const ENDS: u32 = 5;

/// Over how long the looks at a server's history are spread, of all nodes and kinds: after an outage, in which its data may
/// have been restored, and after a watch that ended, as those of all nodes do when a server restarts in good order.
const AFTER_OUTAGE: Duration = Duration::from_secs(1);
const AFTER_END: Duration = Duration::from_secs(10);

pub(super) struct Trouble<'a> {
    kind: String,
    watch: Problem,
    /// What cannot be told of the server's history.
    history: Problem,
    health: &'a Health,
    /// Something was amiss since the server's history was last known: who answers next may have other data. A look comes
    /// within this time.
    doubt: Option<Duration>,
}

impl<'a> Trouble<'a> {
    /// At first it has yet to be found well: an earlier client may have left a problem behind.
    pub(super) fn new(kind: String, health: &'a Health) -> Self {
        Watches::of_process().know(&kind);
        let (watch, history) = (Problem::Watch(kind.clone()), Problem::History(kind.clone()));
        Self { kind, watch, history, health, doubt: Some(AFTER_OUTAGE) }
    }

    /// `ends`: how many watches have ended in a row that had begun.
    pub(super) fn met(&mut self, over: &Over, unserved: bool, ends: u32) {
        debug!(what = %self.watch, ?over, "list or watch over");
        if unserved {
            Watches::of_process().unserved(&self.kind);
            self.doubt = Some(AFTER_OUTAGE);
            self.health.end(&self.history);
            return self.over();
        }
        if !matches!(over, Over::Ended(End::InTime | End::Early)) {
            Watches::of_process().failed(&self.kind);
        }
        self.doubt = match over {
            Over::Failed(_) | Over::Late => Some(AFTER_OUTAGE),
            Over::Ended(End::Early | End::Broken(_)) => self.doubt.or(Some(AFTER_END)),
            Over::Ended(End::InTime) | Over::Lost(_) | Over::ReceiverGone => self.doubt,
        };
        match over.problem() {
            Some(why) => self.health.begin(&self.watch, why),
            None if ends >= ENDS => self.health.begin(&self.watch, format!("no watch lasts: {}", end(over))),
            None => {}
        }
    }

    /// A list was answered. It says little of the watch, if that does not last.
    pub(super) fn listed(&mut self, ends: u32) {
        self.is_back();
        if ends < ENDS {
            self.health.end(&self.watch);
        }
    }

    pub(super) fn over(&self) {
        self.health.end(&self.watch);
    }

    /// Whether the server's history is the same could not be told. The watch goes on meanwhile.
    pub(super) fn untold(&self, over: &Over) {
        debug!(what = %self.history, ?over, "no look");
        Watches::of_process().failed(&self.kind);
        let why = over.problem().unwrap_or_else(|| end(over));
        self.health.begin(&self.history, format!("changes may be missing, the server's version is not known: {why}"));
    }

    /// The server's history is known to be the one that we have.
    pub(super) fn is_back(&mut self) {
        self.doubt = None;
        self.health.end(&self.history);
    }

    pub(super) fn is_in_doubt(&self) -> bool {
        self.doubt.is_some()
    }

    /// The wait before a look at the history.
    pub(super) fn before_look(&self) -> Duration {
        self.doubt.unwrap_or_default().mul_f32(rand::random())
    }

    pub(super) fn unreadable(&self, objects: &BTreeMap<ObjectName, String>) {
        Watches::of_process().unreadable(&self.kind, objects.len());
        let objects_problem = Problem::Objects(self.kind.clone());
        match objects.first_key_value() {
            Some((name, why)) => {
                self.health.begin(&objects_problem, format!("{} cannot be read, such as {name}: {why}", objects.len()));
            }
            None => self.health.end(&objects_problem),
        }
    }
}

fn end(over: &Over) -> String {
    match over {
        Over::Ended(End::Broken(why)) | Over::Lost(why) => why.clone(),
        _ => "the server ends it".to_owned(),
    }
}
