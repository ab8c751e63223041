//! What is wrong with a watch, told to whoever asks: status, health, metrics and log.

use std::collections::BTreeMap;

use tracing::debug;

use super::failure::{End, Over};
use crate::health::Health;
use crate::input::ObjectName;
use crate::metrics::Watches;

/// From so many on, watches that end at once are a problem.
const ENDS: u32 = 5;

pub(super) struct Trouble<'a> {
    kind: String,
    what: String,
    health: &'a Health,
    /// Since the server's history was last known, something was amiss: who answers next may have other data.
    was_away: bool,
}

impl<'a> Trouble<'a> {
    /// At first it has yet to be found well: an earlier client may have left a problem behind.
    pub(super) fn new(kind: String, health: &'a Health) -> Self {
        Watches::of_process().know(&kind);
        Self { what: format!("{kind} watch"), kind, health, was_away: true }
    }

    /// `ends`: how many watches have ended in a row that had begun.
    pub(super) fn met(&mut self, over: &Over, unserved: bool, ends: u32) {
        debug!(what = self.what, ?over, "list or watch over");
        if unserved {
            Watches::of_process().unserved(&self.kind);
            self.was_away = true;
            return self.over();
        }
        if !matches!(over, Over::Ended(End::InTime | End::Early)) {
            Watches::of_process().failed(&self.kind);
        }
        self.was_away |= matches!(over, Over::Ended(End::Early | End::Broken(_)) | Over::Failed(_) | Over::Late);
        match over.problem() {
            Some(why) => self.health.begin(&self.what, why),
            None if ends >= ENDS => self.health.begin(&self.what, format!("no watch lasts: {}", end(over))),
            None => {}
        }
    }

    /// A list was answered. It says little of the watch, if that does not last.
    pub(super) fn listed(&mut self, ends: u32) {
        self.was_away = false;
        if ends < ENDS {
            self.health.end(&self.what);
        }
    }

    pub(super) fn over(&self) {
        self.health.end(&self.what);
    }

    /// Whether the server's history is the same could not be told. The watch goes on meanwhile.
    pub(super) fn untold(&self, over: &Over) {
        debug!(what = self.what, ?over, "no look at the server's history");
        Watches::of_process().failed(&self.kind);
    }

    /// The server's history is the same.
    pub(super) fn is_back(&mut self) {
        self.was_away = false;
    }

    pub(super) fn was_away(&self) -> bool {
        self.was_away
    }

    pub(super) fn unreadable(&self, objects: &BTreeMap<ObjectName, String>) {
        Watches::of_process().unreadable(&self.kind, objects.len());
        let what = format!("{} objects", self.kind);
        match objects.first_key_value() {
            Some((name, why)) => {
                self.health.begin(&what, format!("{} cannot be read, such as {name}: {why}", objects.len()));
            }
            None => self.health.end(&what),
        }
    }
}

fn end(over: &Over) -> String {
    match over {
        Over::Ended(End::Broken(why)) | Over::Lost(why) => why.clone(),
        _ => "the server ends it".to_owned(),
    }
}
