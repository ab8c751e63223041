//! What is wrong just now, with the source or with the agent's own work.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use jiff::Timestamp;
use tokio::sync::watch;
use tracing::{info, warn};

/// What the loop calls its own work: writing the maps, and leading the node's packets to the datapath.
pub const MAPS: &str = "maps";
pub const NODE: &str = "node";

/// Problems, by what they befall: `EndpointSlice watch`, `web.yaml:14`.
pub type Problems = BTreeMap<String, Problem>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub why: String,
    /// When it began, however its reason may have changed since.
    pub since: Timestamp,
}

/// Problems are reported here; the status and whoever else wants to know reads them.
///
/// A problem is logged when it begins, when its reason changes, and when it is over; not each time it is met again.
#[derive(Clone, Debug, Default)]
pub struct Health(watch::Sender<Problems>);

impl Health {
    pub fn problems(&self) -> Problems {
        self.0.borrow().clone()
    }

    /// Whether this is a problem just now.
    pub fn has(&self, what: &str) -> bool {
        self.0.borrow().contains_key(what)
    }

    /// Wakes at every change.
    pub fn subscribe(&self) -> watch::Receiver<Problems> {
        self.0.subscribe()
    }

    pub fn begin(&self, what: &str, why: impl Into<String>) {
        let why = why.into();
        self.0.send_if_modified(|problems| {
            match problems.entry(what.to_owned()) {
                Entry::Occupied(known) if known.get().why == why => return false,
                Entry::Occupied(mut known) => known.get_mut().why.clone_from(&why),
                Entry::Vacant(new) => drop(new.insert(Problem { why: why.clone(), since: Timestamp::now() })),
            }
            warn!(what, why, "problem");
            true
        });
    }

    pub fn end(&self, what: &str) {
        self.0.send_if_modified(|problems| {
            let Some(over) = problems.remove(what) else { return false };
            info!(what, since = %over.since, "problem is over");
            true
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_keeps_its_beginning_and_wakes_readers_only_when_it_changes() {
        let health = Health::default();
        let mut reader = health.subscribe();

        health.begin("Service watch", "refused");
        assert!(reader.has_changed().unwrap());
        let since = reader.borrow_and_update()["Service watch"].since;

        health.begin("Service watch", "refused");
        assert!(!reader.has_changed().unwrap(), "the same problem is no news");

        health.begin("Service watch", "timed out");
        assert!(reader.has_changed().unwrap());
        let problem = Problem { why: "timed out".into(), since };
        assert_eq!(health.problems(), BTreeMap::from([("Service watch".to_owned(), problem)]));
        reader.mark_unchanged();

        health.end("Service watch");
        assert!(reader.has_changed().unwrap());
        assert!(reader.borrow_and_update().is_empty());

        health.end("Service watch");
        assert!(!reader.has_changed().unwrap(), "what was over before is no news");
    }
}
