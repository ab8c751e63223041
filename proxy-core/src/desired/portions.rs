//! Divides the frontends whose rows may be out of date into portions, so that a Service with half a million rows does
//! not keep the change of another one waiting. The maps may hold some portions before others.

use std::collections::{BTreeMap, BTreeSet};

use proxy_common::addr::Addr;
use proxy_common::frontend::FrontendKey;

use crate::input::ObjectName;

/// The frontends that wait for a portion.
#[derive(Debug)]
pub(super) struct Portions<A: Addr> {
    /// The frontends, each with the pass since which it waits.
    waiting: BTreeMap<FrontendKey<A>, u64>,
    passes: u64,
}

/// The facts about a frontend that decide on its portion.
pub(super) struct Facts<'a, A: Addr> {
    /// The service ports that it leads to, in the tables and in the models.
    pub(super) service_ports: [Option<FrontendKey<A>>; 2],
    /// The Service that holds it in the models.
    pub(super) holder: Option<&'a ObjectName>,
    /// The rows that it has or will have, whichever are more.
    pub(super) rows: usize,
}

/// Frontends that lead or have led to the same service port. Their writes depend on each other.
struct Group<A: Addr> {
    keys: Vec<FrontendKey<A>>,
    /// The pass since which the first of them waits.
    since: u64,
    rows: usize,
    /// The waiting rows of the largest Service among the holders.
    rows_of_service: usize,
}

impl<A: Addr> Default for Portions<A> {
    fn default() -> Self {
        Self { waiting: BTreeMap::new(), passes: 0 }
    }
}

impl<A: Addr> Portions<A> {
    /// Adds frontends. A frontend that waits already keeps its place.
    pub(super) fn extend(&mut self, keys: impl IntoIterator<Item = FrontendKey<A>>) {
        self.passes += 1;
        for key in keys {
            self.waiting.entry(key).or_insert(self.passes);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &FrontendKey<A>> {
        self.waiting.keys()
    }

    pub(super) fn take_all(&mut self) -> BTreeSet<FrontendKey<A>> {
        std::mem::take(&mut self.waiting).into_keys().collect()
    }

    /// Takes the next portion. One half of about so many `rows` is for the smallest Services, so that they wait for no
    /// other one. The other half is for the frontends that wait longest, so that each is served.
    pub(super) fn take<'a>(
        &mut self,
        rows: usize,
        facts_of: impl Fn(&FrontendKey<A>) -> Facts<'a, A>,
    ) -> BTreeSet<FrontendKey<A>> {
        let mut small = self.groups(facts_of);
        if rows_of(&small) <= rows {
            return self.take_all();
        }
        small.sort_by_key(|group| (group.rows_of_service, group.is_address()));
        let mut old = small.split_off(within(rows / 2, &small));
        old.sort_by_key(|group| (group.since, group.is_address()));
        old.truncate(within(rows / 2, &old).max(1));
        let taken: BTreeSet<_> = small.into_iter().chain(old).flat_map(|group| group.keys).collect();
        self.waiting.retain(|key, _| !taken.contains(key));
        taken
    }

    fn groups<'a>(&self, facts_of: impl Fn(&FrontendKey<A>) -> Facts<'a, A>) -> Vec<Group<A>> {
        let keys: Vec<_> = self.waiting.keys().copied().collect();
        let facts: Vec<_> = keys.iter().map(facts_of).collect();
        let mut rows_of_service: BTreeMap<&ObjectName, usize> = BTreeMap::new();
        for (service, facts) in facts.iter().filter_map(|facts| Some((facts.holder?, facts))) {
            *rows_of_service.entry(service).or_default() += facts.rows;
        }
        let mut united = United::of(keys.len());
        for (place, facts) in facts.iter().enumerate() {
            for service in facts.service_ports.iter().flatten().filter_map(|port| keys.binary_search(port).ok()) {
                united.unite(place, service);
            }
        }
        let mut groups: BTreeMap<usize, Group<A>> = BTreeMap::new();
        for (place, (key, facts)) in keys.iter().zip(&facts).enumerate() {
            let of_service = facts.holder.map_or(0, |service| rows_of_service[service]);
            groups.entry(united.first_of(place)).or_insert_with(Group::new).add(
                *key,
                self.waiting[key],
                facts.rows,
                of_service,
            );
        }
        groups.into_values().collect()
    }
}

impl<A: Addr> Group<A> {
    fn new() -> Self {
        Self { keys: Vec::new(), since: u64::MAX, rows: 0, rows_of_service: 0 }
    }

    fn add(&mut self, key: FrontendKey<A>, since: u64, rows: usize, rows_of_service: usize) {
        self.keys.push(key);
        self.since = self.since.min(since);
        self.rows += rows;
        self.rows_of_service = self.rows_of_service.max(rows_of_service);
    }

    /// Returns true for the row of an address. It refuses packets to all ports without a row, so it follows the ports.
    fn is_address(&self) -> bool {
        self.keys.iter().all(|key| *key == FrontendKey::address(key.addr))
    }
}

fn rows_of<A: Addr>(groups: &[Group<A>]) -> usize {
    groups.iter().map(|group| group.rows).sum()
}

/// Returns the number of groups, from the first on, that have no more rows than these.
fn within<A: Addr>(rows: usize, groups: &[Group<A>]) -> usize {
    let sums = groups.iter().scan(0, |sum, group| {
        *sum += group.rows;
        Some(*sum)
    });
    sums.take_while(|sum| *sum <= rows).count()
}

/// Disjoint sets of places, each a tree whose root is its first place.
struct United(Vec<usize>);

impl United {
    fn of(places: usize) -> Self {
        Self((0..places).collect())
    }

    fn first_of(&mut self, mut place: usize) -> usize {
        while self.0[place] != place {
            self.0[place] = self.0[self.0[place]];
            place = self.0[place];
        }
        place
    }

    fn unite(&mut self, one: usize, other: usize) {
        let (one, other) = (self.first_of(one), self.first_of(other));
        self.0[one.max(other)] = one.min(other);
    }
}
