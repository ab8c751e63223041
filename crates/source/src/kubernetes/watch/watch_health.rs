//! Reports the problems of a watch to status, health, metrics and log.

use std::collections::BTreeMap;
use std::time::Duration;

use tracing::debug;

use super::failure::{StreamEnd, WatchEnd};
use crate::health::{Health, Problem};
use crate::watches::Watches;
use proxy_core::input::ObjectName;

/// The number of consecutive short watches that becomes a problem.
const ENDS: u32 = 5;

/// The time over which comparisons of all nodes and kinds are spread after an outage, in which the
/// server's data may have been restored.
const AFTER_OUTAGE: Duration = Duration::from_secs(1);
/// The spread after an early end: a clean server restart ends the watches of all nodes.
const AFTER_END: Duration = Duration::from_millis(1_500);
/// The number of objects that adds a second to the spread: a comparison costs their metadata.
const PER_SEC: usize = 5_000;

pub(super) struct WatchHealth<'a> {
    kind: String,
    watch: Problem,
    history: Problem,
    health: &'a Health,
    /// Set if the server's history is in doubt after a failure, because the next server may have
    /// other data. A comparison follows within this time.
    compares_within: Option<Duration>,
}

impl<'a> WatchHealth<'a> {
    /// Creates the state with a comparison due: an earlier client may have left a problem.
    pub(super) fn new(kind: String, health: &'a Health) -> Self {
        Watches::of_process().know(&kind);
        let watch = Problem::Watch(kind.clone());
        let history = Problem::History(kind.clone());
        Self {
            kind,
            watch,
            history,
            health,
            compares_within: Some(AFTER_OUTAGE),
        }
    }

    /// Records the end of a list or watch. `ends` is the number of consecutive watches that had
    /// begun and ended.
    pub(super) fn ended(&mut self, end: &WatchEnd, unserved: bool, ends: u32) {
        debug!(what = %self.watch, ?end, "list or watch over");
        if unserved {
            Watches::of_process().unserved(&self.kind);
            self.compares_within = Some(AFTER_OUTAGE);
            self.health.end(&self.history);
            return self.clear();
        }
        if !matches!(end, WatchEnd::Closed(StreamEnd::InTime | StreamEnd::Early)) {
            Watches::of_process().failed(&self.kind);
        }
        self.compares_within = match end {
            WatchEnd::Failed(_) | WatchEnd::Late => Some(AFTER_OUTAGE),
            WatchEnd::Closed(StreamEnd::Early | StreamEnd::Broken(_)) => {
                self.compares_within.or(Some(AFTER_END))
            }
            WatchEnd::Closed(StreamEnd::InTime) | WatchEnd::Lost(_) | WatchEnd::ReceiverGone => {
                self.compares_within
            }
        };
        match end.problem() {
            Some(why) => self.health.begin(&self.watch, why),
            None if ends >= ENDS => self
                .health
                .begin(&self.watch, format!("no watch lasts: {}", reason(end))),
            None => {}
        }
    }

    /// Records a list. While watches end early, a list does not end the problem of the watch.
    pub(super) fn listed(&mut self, ends: u32) {
        self.history_is_known();
        if ends < ENDS {
            self.health.end(&self.watch);
        }
    }

    pub(super) fn clear(&self) {
        self.health.end(&self.watch);
    }

    /// Records a failed comparison. The watch continues.
    pub(super) fn comparison_failed(&self, end: &WatchEnd) {
        debug!(what = %self.history, ?end, "no comparison");
        Watches::of_process().failed(&self.kind);
        let why = end.problem().unwrap_or_else(|| reason(end));
        self.health.begin(
            &self.history,
            format!("changes may be missing: comparing with the server's objects failed: {why}"),
        );
    }

    pub(super) fn history_is_known(&mut self) {
        self.compares_within = None;
        self.health.end(&self.history);
    }

    /// Returns the wait before a comparison of `objects` objects; `None` if it is not required.
    pub(super) fn comparison_delay(&self, objects: usize) -> Option<Duration> {
        let spread = self.compares_within? + Duration::from_secs((objects / PER_SEC) as u64);
        Some(spread.mul_f32(rand::random()))
    }

    pub(super) fn unreadable(&self, objects: &BTreeMap<ObjectName, String>) {
        Watches::of_process().unreadable(&self.kind, objects.len());
        let objects_problem = Problem::Objects(self.kind.clone());
        match objects.first_key_value() {
            Some((name, why)) => {
                self.health.begin(
                    &objects_problem,
                    format!("{} cannot be read, such as {name}: {why}", objects.len()),
                );
            }
            None => self.health.end(&objects_problem),
        }
    }
}

fn reason(end: &WatchEnd) -> String {
    match end {
        WatchEnd::Closed(StreamEnd::Broken(why)) | WatchEnd::Lost(why) => why.clone(),
        _ => "the server ends it".to_owned(),
    }
}
