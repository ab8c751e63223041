//! The state shared by the handle, the connections and the watches.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use super::faults::Faults;
use super::kinds::Kind;
use super::kubelet::Container;
use super::meter::Meter;
use super::objects::Objects;
use super::view::View;

#[derive(Debug)]
pub(crate) struct Shared {
    state: Mutex<State>,
    /// Notifies watches of every state change.
    changed: watch::Sender<()>,
    /// Notifies tests of every state change.
    happened: Condvar,
    pub(crate) token: String,
    pub(crate) bookmark_every: Duration,
    pub(crate) meter: Arc<Meter>,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) objects: Objects,
    pub(crate) faults: Faults,
    pub(crate) traffic: Traffic,
    /// The running containers, by namespace and pod.
    pub(crate) containers: BTreeMap<(String, String), Arc<dyn Container>>,
}

/// The requests so far.
#[derive(Clone, Debug, Default)]
pub struct Traffic {
    requests: BTreeMap<(String, String), usize>,
    lists: BTreeMap<&'static str, usize>,
    total: usize,
    /// The number of HTTP/2 requests.
    http2: usize,
    /// Verb, group and resource (plural).
    kinds: BTreeSet<(&'static str, &'static str, &'static str)>,
    watches: BTreeMap<&'static str, usize>,
}

impl Traffic {
    /// Returns the number of requests of a verb and a resource (plural), including refused
    /// requests.
    pub fn requests(&self, verb: &str, resource: &str) -> usize {
        self.requests
            .get(&(verb.to_owned(), resource.to_owned()))
            .copied()
            .unwrap_or_default()
    }

    /// Returns the number of lists of a resource's (plural) complete objects, including refused
    /// requests.
    pub fn lists(&self, resource: &str) -> usize {
        self.lists.get(resource).copied().unwrap_or_default()
    }

    /// Returns the number of all requests, including those that faults answered.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Returns the number of requests over HTTP/2, which the server offers to all.
    pub fn by_http2(&self) -> usize {
        self.http2
    }

    /// Returns the number of open watches of a resource (plural).
    pub fn watches(&self, resource: &str) -> usize {
        self.watches.get(resource).copied().unwrap_or_default()
    }

    /// Returns all requested combinations of verb, group (empty for core) and resource (plural).
    pub fn kinds(&self) -> impl Iterator<Item = (&'static str, &'static str, &'static str)> {
        self.kinds.iter().copied()
    }

    pub(crate) fn arrived(&mut self, version: http::Version) {
        self.total += 1;
        self.http2 += usize::from(version == http::Version::HTTP_2);
    }

    pub(crate) fn count(&mut self, verb: &'static str, kind: &'static Kind, view: View) {
        *self
            .requests
            .entry((verb.to_owned(), kind.plural.to_owned()))
            .or_default() += 1;
        *self.lists.entry(kind.plural).or_default() +=
            usize::from(verb == "list" && view == View::Whole);
        self.asked(verb, kind.group, kind.plural);
    }

    pub(crate) fn asked(
        &mut self,
        verb: &'static str,
        group: &'static str,
        resource: &'static str,
    ) {
        self.kinds.insert((verb, group, resource));
    }

    pub(crate) fn opened(&mut self, resource: &'static str) {
        *self.watches.entry(resource).or_default() += 1;
    }

    pub(crate) fn closed(&mut self, resource: &'static str) {
        *self.watches.entry(resource).or_default() -= 1;
    }
}

impl Shared {
    pub(crate) fn new(objects: Objects, token: String, bookmark_every: Duration) -> Self {
        let state = State {
            objects,
            faults: Faults::default(),
            traffic: Traffic::default(),
            containers: BTreeMap::new(),
        };
        let state = Mutex::new(state);
        let changed = watch::Sender::new(());
        Self {
            state,
            changed,
            happened: Condvar::new(),
            token,
            bookmark_every,
            meter: Arc::default(),
        }
    }

    pub(crate) fn read<T>(&self, f: impl FnOnce(&State) -> T) -> T {
        f(&self.lock())
    }

    /// Changes the state and wakes all waiters.
    pub(crate) fn change<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        let result = f(&mut self.lock());
        self.changed.send_replace(());
        self.happened.notify_all();
        result
    }

    pub(crate) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Waits until the condition holds. Returns false after `limit`.
    pub(crate) fn wait(&self, limit: Duration, mut condition: impl FnMut(&State) -> bool) -> bool {
        let waited = self
            .happened
            .wait_timeout_while(self.lock(), limit, |state| !condition(state));
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    /// A test that panics with the lock must not make other threads panic.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
