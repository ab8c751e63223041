//! The objects and their history, in the role of etcd and the watch cache.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use serde_json::{Value, json};

use super::failure::{Failure, Outcome};
use super::kinds::Kind;

/// The changes kept for watches and paged lists.
const HISTORY: usize = 100_000;

/// The key of an object. Ordered like lists: by namespace, then name.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    group: &'static str,
    plural: &'static str,
    pub(crate) namespace: String,
    pub(crate) name: String,
}

impl Key {
    pub(crate) fn new(kind: &Kind, namespace: &str, name: &str) -> Self {
        Self {
            group: kind.group,
            plural: kind.plural,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        }
    }

    pub(crate) fn is_of(&self, kind: &Kind) -> bool {
        self.group == kind.group && self.plural == kind.plural
    }
}

/// A write. `old` is absent for a creation, `new` for a deletion.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) version: u64,
    pub(crate) key: Key,
    pub(crate) old: Option<Arc<Value>>,
    pub(crate) new: Option<Arc<Value>>,
}

/// All objects of all kinds, with one version counter, as in etcd.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    objects: BTreeMap<Key, Arc<Value>>,
    /// By version, without gaps, from `forgotten + 1` on.
    changes: VecDeque<Change>,
    version: u64,
    /// The last version without a stored change.
    forgotten: u64,
    /// Watches may not start before this version, even if its changes are stored. Watches that run
    /// during a compaction still get their missing changes.
    compacted: u64,
}

impl Store {
    /// Returns an empty store with version 1: version 0 means "any" to clients.
    pub(crate) fn new() -> Self {
        Self {
            objects: BTreeMap::new(),
            changes: VecDeque::new(),
            version: 1,
            forgotten: 1,
            compacted: 1,
        }
    }

    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    pub(crate) fn get(&self, key: &Key) -> Option<&Arc<Value>> {
        self.objects.get(key)
    }

    /// Writes `object` (or its deletion) as the next version, which goes into the object. Returns
    /// the stored object.
    pub(crate) fn write(&mut self, key: &Key, object: Option<Value>) -> Option<Arc<Value>> {
        self.version += 1;
        let new = object.map(|mut object| {
            object["metadata"]["resourceVersion"] = json!(self.version.to_string());
            Arc::new(object)
        });
        let old = match &new {
            Some(object) => self.objects.insert(key.clone(), object.clone()),
            None => self.objects.remove(key),
        };
        self.changes.push_back(Change {
            version: self.version,
            key: key.clone(),
            old,
            new: new.clone(),
        });
        if self.changes.len() > HISTORY {
            self.forget(self.version - HISTORY as u64);
        }
        new
    }

    /// Returns the current objects of a kind in a namespace, or in all if it is empty.
    pub(crate) fn objects(
        &self,
        kind: &Kind,
        namespace: &str,
    ) -> impl Iterator<Item = (&Key, &Arc<Value>)> {
        let all = namespace.is_empty();
        let first = Key::new(kind, namespace, "");
        let of = first.clone();
        self.objects.range(first..).take_while(move |(k, _)| {
            k.group == of.group && k.plural == of.plural && (all || k.namespace == of.namespace)
        })
    }

    /// Returns the objects at `version`, by undoing later changes; `None` if that is too long ago.
    pub(crate) fn objects_at(
        &self,
        kind: &Kind,
        namespace: &str,
        version: u64,
    ) -> Option<BTreeMap<Key, Arc<Value>>> {
        if version < self.compacted {
            return None;
        }
        let mut objects: BTreeMap<_, _> = self
            .objects(kind, namespace)
            .map(|(key, object)| (key.clone(), object.clone()))
            .collect();
        let later = self
            .changes
            .iter()
            .rev()
            .take_while(|c| c.version > version);
        for change in later
            .filter(|c| c.key.is_of(kind) && (namespace.is_empty() || c.key.namespace == namespace))
        {
            match &change.old {
                Some(object) => objects.insert(change.key.clone(), object.clone()),
                None => objects.remove(&change.key),
            };
        }
        Some(objects)
    }

    /// Checks that a watch may start after `version`.
    pub(crate) fn check_start(&self, version: u64) -> Outcome<()> {
        if version < self.compacted {
            return Err(Failure::expired(format!(
                "too old resource version: {version} ({})",
                self.compacted
            )));
        }
        Ok(())
    }

    pub(crate) fn changes_after(&self, version: u64) -> Outcome<impl Iterator<Item = &Change>> {
        if version < self.forgotten {
            return Err(Failure::expired(format!(
                "too old resource version: {version} ({})",
                self.forgotten
            )));
        }
        Ok(self
            .changes
            .range(self.changes.partition_point(|c| c.version <= version)..))
    }

    /// Prevents starts from older versions.
    pub(crate) fn compact(&mut self) {
        // An extra version without a change makes the current version an older version too.
        self.version += 1;
        self.changes.push_back(Change {
            version: self.version,
            key: Key::default(),
            old: None,
            new: None,
        });
        self.compacted = self.version;
    }

    /// Restores the data of `backup`, without any history.
    pub(crate) fn restore(&mut self, backup: Self) {
        let version = backup.version;
        *self = Self {
            changes: VecDeque::new(),
            forgotten: version,
            compacted: version,
            ..backup
        };
    }

    fn forget(&mut self, version: u64) {
        self.changes
            .drain(..self.changes.partition_point(|c| c.version <= version));
        self.forgotten = version;
        self.compacted = self.compacted.max(version);
    }
}
