//! Orders dirty Services round-robin by namespace, so that a namespace with constant changes does
//! not delay others.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use crate::compact::Shared;
use crate::input::ObjectName;

/// The Services that wait for a pass.
#[derive(Debug, Default)]
pub(super) struct Turns {
    waiting: BTreeSet<ObjectName>,
    queue: Queue,
    /// The Services larger than a pass. Each has a pass of its own.
    large: Queue,
    is_large_due: bool,
}

/// Services in order of arrival, with a turn for each namespace.
#[derive(Debug, Default)]
struct Queue {
    by_namespace: BTreeMap<Shared, VecDeque<ObjectName>>,
    turns: VecDeque<Shared>,
}

impl Turns {
    /// Adds Services. A waiting Service keeps its place.
    pub(super) fn extend(&mut self, services: impl IntoIterator<Item = ObjectName>) {
        for service in services {
            if self.waiting.insert(service.clone()) {
                self.queue.push(service);
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn contains(&self, service: &ObjectName) -> bool {
        self.waiting.contains(service)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &ObjectName> {
        self.waiting.iter()
    }

    pub(super) fn take_all(&mut self) -> BTreeSet<ObjectName> {
        std::mem::take(self).waiting
    }

    /// Takes the Services of the next pass, for about `rows` rows. `rows_of` estimates a Service's
    /// rows.
    pub(super) fn take(
        &mut self,
        rows: usize,
        rows_of: impl Fn(&ObjectName) -> usize,
    ) -> Vec<ObjectName> {
        let mut taken = Vec::new();
        let mut taken_rows = 0;
        while taken_rows < rows && !(self.is_large_due && self.large.is_some()) {
            let Some(service) = self.queue.pop() else {
                break;
            };
            let rows_of_this = rows_of(&service);
            if rows_of_this > rows {
                self.large.push(service);
            } else {
                taken_rows += rows_of_this.max(1);
                taken.push(service);
            }
        }
        self.is_large_due = !taken.is_empty();
        if taken.is_empty() {
            taken.extend(self.large.pop());
        }
        for service in &taken {
            self.waiting.remove(service);
        }
        taken
    }
}

impl Queue {
    fn is_some(&self) -> bool {
        !self.turns.is_empty()
    }

    fn push(&mut self, service: ObjectName) {
        let namespace = service.namespace.clone();
        let services = self.by_namespace.entry(namespace.clone()).or_default();
        if services.is_empty() {
            self.turns.push_back(namespace);
        }
        services.push_back(service);
    }

    /// Takes the next Service of the namespace in turn.
    fn pop(&mut self) -> Option<ObjectName> {
        let namespace = self.turns.pop_front()?;
        let services = self.by_namespace.get_mut(&namespace)?;
        let service = services.pop_front();
        if services.is_empty() {
            self.by_namespace.remove(&namespace);
        } else {
            self.turns.push_back(namespace);
        }
        service
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(names: &[&str]) -> Turns {
        let mut turns = Turns::default();
        turns.extend(names.iter().map(|name| named(name)));
        turns
    }

    fn named(name: &str) -> ObjectName {
        let (namespace, name) = name.split_once('/').unwrap();
        ObjectName::new(namespace, name)
    }

    /// Takes a pass of ten rows. A Service's name is its number of rows.
    fn pass(turns: &mut Turns) -> Vec<String> {
        let rows_of = |service: &ObjectName| service.name.parse().unwrap();
        turns
            .take(10, rows_of)
            .iter()
            .map(ToString::to_string)
            .collect()
    }

    #[test]
    fn each_namespace_has_its_turn() {
        let mut turns = waiting(&["a/5", "a/6", "a/7", "b/1", "c/2"]);
        assert_eq!(pass(&mut turns), ["a/5", "b/1", "c/2", "a/6"]);
        turns.extend(["a/5", "a/7", "b/9"].map(named));
        assert_eq!(pass(&mut turns), ["a/7", "b/9"]);
        assert_eq!(pass(&mut turns), ["a/5"]);
        assert!(turns.is_empty() && pass(&mut turns).is_empty());
    }

    #[test]
    fn a_large_service_has_a_pass_of_its_own_after_each_of_others() {
        let mut turns = waiting(&["a/30", "a/20", "b/1"]);
        assert_eq!(pass(&mut turns), ["b/1"]);
        turns.extend(["b/2", "c/40"].map(named));
        assert_eq!(pass(&mut turns), ["a/30"]);
        turns.extend(["a/30", "c/3"].map(named));
        assert_eq!(pass(&mut turns), ["b/2", "c/3"]);
        assert_eq!(pass(&mut turns), ["a/20"]);
        assert_eq!(pass(&mut turns), ["c/40"]);
        assert_eq!(pass(&mut turns), ["a/30"]);
        assert!(turns.is_empty());
    }

    #[test]
    fn all_services_are_taken_at_once() {
        let mut turns = waiting(&["b/1", "a/2", "a/30"]);
        assert_eq!(turns.take_all(), ["a/2", "a/30", "b/1"].map(named).into());
        assert!(turns.is_empty() && pass(&mut turns).is_empty());
    }
}
