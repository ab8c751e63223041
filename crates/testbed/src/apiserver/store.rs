//! The objects and their history: what etcd and the watch cache are to kube-apiserver.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use serde_json::{Value, json};

use super::failure::{Failure, Outcome};
use super::kinds::Kind;

/// How many changes are remembered for watches and for lists by page.
const HISTORY: usize = 100_000;

/// Where an object is kept. Ordered as lists are: by namespace, then by name.
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

/// One write. `old` is absent where an object appears, `new` where one goes.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) version: u64,
    pub(crate) key: Key,
    pub(crate) old: Option<Arc<Value>>,
    pub(crate) new: Option<Arc<Value>>,
}

/// All objects of all kinds, under one count of versions, as in etcd.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    objects: BTreeMap<Key, Arc<Value>>,
    /// By version, without holes, from `forgotten + 1` on.
    changes: VecDeque<Change>,
    version: u64,
    /// The last version whose change is no longer known.
    forgotten: u64,
    /// No watch may start from before this version, even where its changes are still known. Watches
    /// that run while the history is compacted still get their missing changes.
    compacted: u64,
}

impl Store {
    /// An empty store. Counts from 1: version 0 means "any" to clients.
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

    /// Writes `object` (or its absence) as the next version, which goes into the object, and
    /// returns it as stored.
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

    /// The objects of a kind, in one namespace or (if empty) in all, as they are now.
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

    /// The same as they were at `version`: what is now, with the later changes undone.
    /// None if that is too long ago.
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

    /// The changes after `version`, oldest first.
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

    /// Lets nothing start from before now any more.
    pub(crate) fn compact(&mut self) {
        // One more version without a change, so that the last version before now is an older one
        // too.
        self.version += 1;
        self.changes.push_back(Change {
            version: self.version,
            key: Key::default(),
            old: None,
            new: None,
        });
        self.compacted = self.version;
    }

    /// The data of `backup`, and of what came before it and after it nothing.
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
