//! Stores the latest Events and problems, for `kpx events`. On a host without an API server, this
//! is the only record of Events.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use jiff::Timestamp;
use proxy_core::input::ObjectName;

/// The maximum number of entries. With notes of at most [`NOTE`] bytes, they take at most 3 MiB.
const CAPACITY: usize = 1_000;
const NOTE: usize = 1_024;
/// The maximum number of an entry's further Services.
const SERVICES: usize = 4;

/// An Event of an object, or a change of one of the agent's problems. Equal entries are counted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Entry {
    pub is_warning: bool,
    pub reason: &'static str,
    /// The kind of the object: `Service`, `EndpointSlice`, `LocalRedirect`, `Node`, or `Problem`
    /// for a problem of the agent.
    pub kind: &'static str,
    pub namespace: Box<str>,
    pub name: Box<str>,
    pub note: Box<str>,
    /// Further Services that the entry concerns, at most [`SERVICES`].
    pub services: Box<[ObjectName]>,
}

impl Entry {
    /// Returns the Services of the entry, including its object.
    pub fn concerned(&self) -> impl Iterator<Item = ObjectName> {
        let own = (self.kind == "Service").then(|| ObjectName::new(&*self.namespace, &*self.name));
        own.into_iter().chain(self.services.iter().cloned())
    }
}

/// The count and the times of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reported {
    pub entry: Arc<Entry>,
    pub count: u64,
    pub first: Timestamp,
    pub last: Timestamp,
}

/// A handle on the journal, which the parts of the agent write and its servers read.
#[derive(Clone, Debug, Default)]
pub struct Journal(Arc<Mutex<Pages>>);

#[derive(Debug, Default)]
struct Pages {
    next: u64,
    /// The entries by number; the latest entry has the highest number.
    by_number: BTreeMap<u64, Reported>,
    numbers: HashMap<Arc<Entry>, u64>,
    by_namespace: BTreeMap<Box<str>, BTreeSet<u64>>,
}

impl Journal {
    pub fn report(&self, entry: Entry) {
        self.lock().report(entry, Timestamp::now());
    }

    /// Returns the entries, the latest last.
    pub fn all(&self) -> Vec<Reported> {
        self.lock().by_number.values().cloned().collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Pages> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pages {
    fn report(&mut self, mut entry: Entry, at: Timestamp) {
        if entry.note.len() > NOTE {
            entry.note = entry.note[..entry.note.floor_char_boundary(NOTE)].into();
        }
        if entry.services.len() > SERVICES {
            entry.services = entry.services[..SERVICES].into();
        }
        let known = self
            .numbers
            .remove(&entry)
            .and_then(|number| self.remove(number));
        if known.is_none() && self.by_number.len() >= CAPACITY {
            self.make_room();
        }
        let reported = known.unwrap_or_else(|| Reported {
            entry: Arc::new(entry),
            count: 0,
            first: at,
            last: at,
        });
        let number = self.next;
        self.next += 1;
        self.numbers.insert(Arc::clone(&reported.entry), number);
        self.by_namespace
            .entry(reported.entry.namespace.clone())
            .or_default()
            .insert(number);
        self.by_number.insert(
            number,
            Reported {
                count: reported.count.saturating_add(1),
                last: at,
                ..reported
            },
        );
    }

    /// Removes the oldest entry of the namespace with the most entries, so that the authors of one
    /// namespace cannot evict the entries of other namespaces.
    fn make_room(&mut self) {
        let most = self
            .by_namespace
            .values()
            .max_by_key(|numbers| numbers.len());
        if let Some(number) = most.and_then(BTreeSet::first).copied()
            && let Some(reported) = self.remove(number)
        {
            self.numbers.remove(&reported.entry);
        }
    }

    fn remove(&mut self, number: u64) -> Option<Reported> {
        let reported = self.by_number.remove(&number)?;
        if let Some(numbers) = self.by_namespace.get_mut(&reported.entry.namespace) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.by_namespace.remove(&reported.entry.namespace);
            }
        }
        Some(reported)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(namespace: &str, note: &str) -> Entry {
        let namespace = namespace.into();
        let name = "web".into();
        let note = note.into();
        let services = Box::new([]);
        Entry {
            is_warning: true,
            reason: "InvalidField",
            kind: "Service",
            namespace,
            name,
            note,
            services,
        }
    }

    #[test]
    fn equal_entries_are_counted_and_the_newest_comes_last() {
        let mut pages = Pages::default();
        for (second, note) in (0..).zip(["a", "b", "a"]) {
            pages.report(entry("shop", note), Timestamp::from_second(second).unwrap());
        }
        let reported = pages.by_number.values().map(|reported| {
            (
                &*reported.entry.note,
                reported.count,
                reported.first.as_second(),
                reported.last.as_second(),
            )
        });
        assert_eq!(
            reported.collect::<Vec<_>>(),
            [("b", 1, 1, 1), ("a", 2, 0, 2)]
        );
    }

    #[test]
    fn namespace_with_the_most_entries_makes_room() {
        let mut pages = Pages::default();
        let at = Timestamp::UNIX_EPOCH;
        pages.report(entry("", "the agent's own"), at);
        pages.report(entry("shop", "old"), at);
        for n in 0..5 * CAPACITY {
            pages.report(entry("noisy", &format!("{n} {}", "ä".repeat(NOTE))), at);
        }
        let notes: Vec<_> = pages
            .by_number
            .values()
            .map(|reported| reported.entry.note.len())
            .collect();
        assert_eq!((notes.len(), notes[0], notes[1]), (CAPACITY, 15, 3));
        assert!(notes.iter().all(|length| *length <= NOTE));
        assert_eq!(
            (pages.numbers.len(), pages.by_namespace["noisy"].len()),
            (CAPACITY, CAPACITY - 2)
        );
    }
}
