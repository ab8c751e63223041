//! Numbers for the namespaces that have Services.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use proxy_common::frontend::Namespace;

use crate::compact::Shared;

/// The number of each namespace, which depends on the set of names alone, so that a restart gives
/// the same numbers.
///
/// The number is a hash of the name. If names collide, the first in order keeps the number and the
/// others are hashed again. So a tenant cannot obtain another tenant's number by its choice of
/// name.
#[derive(Clone, Debug, Default)]
pub(super) struct Namespaces {
    services: BTreeMap<Shared, usize>,
    numbers: BTreeMap<Shared, Namespace>,
    /// Set if a namespace was added or removed since the last numbering.
    is_stale: bool,
}

impl Namespaces {
    pub(super) fn number(&self, namespace: &str) -> Namespace {
        self.numbers.get(namespace).copied().unwrap_or_default()
    }

    /// Records that a Service was added or removed.
    pub(super) fn take(&mut self, namespace: &Shared, was_there: bool, is_there: bool) {
        match (was_there, is_there) {
            (false, true) => {
                let services = self.services.entry(namespace.clone()).or_default();
                *services += 1;
                self.is_stale |= *services == 1;
            }
            (true, false) => {
                let services = self
                    .services
                    .get_mut(namespace)
                    .expect("the Service was counted");
                *services -= 1;
                if *services == 0 {
                    self.services.remove(namespace);
                    self.is_stale = true;
                }
            }
            (true, true) | (false, false) => {}
        }
    }

    /// Renumbers the namespaces after a change. Returns the namespaces with a new number.
    pub(super) fn settle(&mut self) -> Vec<Shared> {
        if !std::mem::take(&mut self.is_stale) {
            return Vec::new();
        }
        let numbers = numbered(self.services.keys(), hashed);
        let before = std::mem::replace(&mut self.numbers, numbers);
        let changed = before
            .into_iter()
            .filter(|(name, was)| self.numbers.get(name).is_some_and(|is| is != was));
        changed.map(|(name, _)| name).collect()
    }
}

fn numbered<'a>(
    names: impl Iterator<Item = &'a Shared>,
    hashed: impl Fn(&str, u32) -> Namespace,
) -> BTreeMap<Shared, Namespace> {
    let mut taken = BTreeSet::from([Namespace::NONE]);
    let first_free = |name: &'a Shared| {
        let mut tries = (0..u32::MAX).map(|nth| hashed(name, nth));
        (
            name.clone(),
            tries
                .find(|number| taken.insert(*number))
                .unwrap_or_default(),
        )
    };
    names.map(first_free).collect()
}

fn hashed(name: &str, nth: u32) -> Namespace {
    // Rust may change this hash. Then numbers change with the agent's version, like any changed
    // row.
    let mut hasher = DefaultHasher::new();
    (name, nth).hash(&mut hasher);
    Namespace::new((hasher.finish() >> 40) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> BTreeSet<Shared> {
        names.iter().map(|name| Shared::from(*name)).collect()
    }

    #[test]
    fn no_two_namespaces_have_a_number() {
        let all: BTreeSet<Shared> = (0..20_000)
            .map(|nth| Shared::from(format!("tenant-{nth}")))
            .collect();
        let numbers = numbered(all.iter(), hashed);
        let distinct: BTreeSet<Namespace> = numbers.values().copied().collect();
        assert_eq!((numbers.len(), distinct.len()), (20_000, 20_000));
        assert!(!distinct.contains(&Namespace::NONE));
        // A small number space, so that most names collide.
        let crowded = |name: &str, nth: u32| Namespace::new(hashed(name, nth).number() % 32);
        let some: BTreeSet<Shared> = all.into_iter().take(20).collect();
        let distinct: BTreeSet<Namespace> = numbered(some.iter(), crowded).into_values().collect();
        assert_eq!(distinct.len(), 20);
    }

    #[test]
    fn numbers_depend_on_the_names_that_are_there() {
        let mut orders = [["a", "b", "c"], ["c", "a", "b"]].map(|order| {
            let mut namespaces = Namespaces::default();
            for name in order {
                namespaces.take(&name.into(), false, true);
                let _changed = namespaces.settle();
            }
            namespaces
        });
        assert_eq!(orders[0].numbers, orders[1].numbers);
        let [first, _] = &mut orders;
        first.take(&"b".into(), true, false);
        assert!(first.settle().is_empty());
        assert_eq!(
            first.numbers.keys().cloned().collect::<BTreeSet<_>>(),
            names(&["a", "c"])
        );
        assert!(first.number("b").is_none() && !first.number("a").is_none());
        first.take(&"a".into(), false, true);
        first.take(&"a".into(), true, false);
        assert!(
            first.settle().is_empty() && !first.number("a").is_none(),
            "one Service is left"
        );
    }
}
