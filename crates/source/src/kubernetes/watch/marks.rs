//! Compares the sent objects with a list of metadata. Once new writes have passed the last seen
//! version, only this comparison detects data restored from a backup: the server grants a watch
//! from that version, which never brings the backup's earlier objects.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher as _, RandomState};
use std::marker::PhantomData;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::{Metadata, Resource};
use proxy_core::compact::{Compact, NAMED, Needed};
use proxy_core::input::ObjectName;
use serde::{Deserialize, Deserializer};

/// The objects' hashes of uid and version, by hash of the name. 100,000 objects take 2 MiB.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Marks(HashMap<u64, u64>);

/// The random key of the hashes, so that no tenant can choose colliding names.
static HASHES: LazyLock<RandomState> = LazyLock::new(RandomState::new);

impl Marks {
    pub(super) fn put(&mut self, name: &ObjectName, (uid, version): (&str, &str)) {
        self.0.insert(number(name), HASHES.hash_one((uid, version)));
    }

    pub(super) fn remove(&mut self, name: &ObjectName) {
        self.0.remove(&number(name));
    }
}

fn number(name: &ObjectName) -> u64 {
    HASHES.hash_one(name)
}

/// The objects as they were sent, shared with the comparison in progress.
#[derive(Clone, Debug, Default)]
pub(super) struct Sent(Arc<Mutex<SentState>>);

#[derive(Debug, Default)]
struct SentState {
    marks: Marks,
    /// The resource version up to which all changes were sent.
    version: String,
    /// The objects sent since a comparison began, which its list may omit. `None` if none is in
    /// progress.
    since: Option<HashSet<u64>>,
}

/// A comparison in progress while the value lives.
pub(super) struct Comparison {
    sent: Sent,
    /// The minimum resource version of the comparison's list.
    pub(super) version: String,
}

impl Drop for Comparison {
    fn drop(&mut self) {
        self.sent.state().since = None;
    }
}

impl Sent {
    fn state(&self) -> MutexGuard<'_, SentState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn list(&self, marks: Marks, version: &str) {
        *self.state() = SentState {
            marks,
            version: version.to_owned(),
            since: None,
        };
    }

    /// Records an event of an object: its uid and version, or `None` for a deletion.
    pub(super) fn event(&self, name: &ObjectName, mark: Option<(&str, &str)>) {
        let mut state = self.state();
        if let Some(since) = &mut state.since {
            since.insert(number(name));
        }
        match mark {
            Some(mark) => state.marks.put(name, mark),
            None => state.marks.remove(name),
        }
    }

    pub(super) fn advance(&self, version: &str) {
        version.clone_into(&mut self.state().version);
    }

    pub(super) fn objects(&self) -> usize {
        self.state().marks.0.len()
    }

    pub(super) fn begin(&self) -> Comparison {
        let mut state = self.state();
        state.since = Some(HashSet::new());
        Comparison {
            sent: self.clone(),
            version: state.version.clone(),
        }
    }
}

impl Comparison {
    /// Returns the number of objects that differ from a list requested since the comparison began,
    /// except objects with later events. Events may be in transit, so the caller counts again a
    /// moment later.
    pub(super) fn differences(&self, Marks(listed): &Marks) -> usize {
        let state = self.sent.state();
        let Marks(sent) = &state.marks;
        let gone = sent.keys().filter(|name| !listed.contains_key(*name));
        let others = listed
            .iter()
            .filter(|(name, mark)| sent.get(*name) != Some(*mark))
            .map(|(name, _)| name);
        let is_later = |name: &u64| {
            state
                .since
                .as_ref()
                .is_some_and(|since| since.contains(name))
        };
        gone.chain(others).filter(|name| !is_later(name)).count()
    }
}

#[derive(Clone, Debug)]
pub(super) struct Meta<K>(ObjectMeta, PhantomData<fn() -> K>);

impl<'de, K> Deserialize<'de> for Meta<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Object {
            #[serde(default)]
            metadata: ObjectMeta,
        }
        Ok(Self(
            Object::deserialize(deserializer)?.metadata,
            PhantomData,
        ))
    }
}

impl<K: Compact> Resource for Meta<K> {
    const API_VERSION: &'static str = K::Object::API_VERSION;
    const GROUP: &'static str = K::Object::GROUP;
    const KIND: &'static str = K::Object::KIND;
    const VERSION: &'static str = K::Object::VERSION;
    const URL_PATH_SEGMENT: &'static str = K::Object::URL_PATH_SEGMENT;
    type Scope = <K::Object as Resource>::Scope;
}

impl<K: Compact> Metadata for Meta<K> {
    type Ty = ObjectMeta;

    fn metadata(&self) -> &ObjectMeta {
        &self.0
    }

    fn metadata_mut(&mut self) -> &mut ObjectMeta {
        &mut self.0
    }
}

impl<K: Compact + Clone> Compact for Meta<K> {
    type Object = Self;

    const NEEDED: Needed = NAMED;

    fn compact(object: Self) -> Self {
        object
    }

    fn name(&self) -> ObjectName {
        ObjectName::from(&self.0)
    }

    fn uid(&self) -> &str {
        self.0.uid.as_deref().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn marks(objects: &[(&str, &str)]) -> Marks {
        let mut marks = Marks::default();
        objects
            .iter()
            .for_each(|(name, version)| marks.put(&ObjectName::new("", *name), ("uid", version)));
        marks
    }

    #[test]
    fn objects_of_later_events_do_not_differ() {
        let sent = Sent::default();
        sent.list(
            marks(&[("same", "1"), ("changed", "1"), ("gone", "3")]),
            "7",
        );
        let comparison = sent.begin();
        assert_eq!((comparison.version.as_str(), sent.objects()), ("7", 3));
        let listed = marks(&[("same", "1"), ("changed", "2"), ("new", "8")]);
        assert_eq!(comparison.differences(&listed), 3);
        for (name, mark) in [
            ("changed", Some(("uid", "9"))),
            ("new", Some(("uid", "8"))),
            ("gone", None),
        ] {
            sent.event(&ObjectName::new("", name), mark);
        }
        assert_eq!(comparison.differences(&listed), 0);
        drop(comparison);
        sent.advance("9");
        let comparison = sent.begin();
        assert_eq!(comparison.version, "9");
        assert_eq!(
            comparison.differences(&listed),
            1,
            "the next comparison's list has to have what changed"
        );
    }

    #[test]
    fn object_that_was_made_again_differs() {
        let name = ObjectName::new("shop", "web");
        let sent = Sent::default();
        sent.event(&name, Some(("uid-1", "7")));
        let comparison = sent.begin();
        let mut listed = Marks::default();
        listed.put(&name, ("uid-2", "7"));
        assert_eq!(comparison.differences(&listed), 1);
        listed.put(&name, ("uid-1", "7"));
        assert_eq!(comparison.differences(&listed), 0);
    }
}
