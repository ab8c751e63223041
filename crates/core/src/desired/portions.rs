//! Divides the frontends whose rows may be out of date into portions. No Service waits for all rows
//! of a large one.

use std::collections::{BTreeMap, BTreeSet};

use proxy_common::addr::Addr;
use proxy_common::frontend::FrontendKey;

use crate::room::{MAPS, Room, Rows, add};

/// The frontends that wait for a portion, each with the pass since which it waits.
#[derive(Debug)]
pub(super) struct Portions<A: Addr>(BTreeMap<FrontendKey<A>, u64>);

/// The facts about a frontend that decide on its portion.
pub(super) struct Facts<A: Addr> {
    /// The service ports that it leads to, in the tables and in the models.
    pub(super) service_ports: [Option<FrontendKey<A>>; 2],
    /// Its rows in the tables.
    pub(super) before: Rows,
    /// Its rows by the models.
    pub(super) after: Rows,
}

/// The limits of a portion.
pub(super) struct Limits {
    /// The rows that a portion is for, about.
    pub(super) rows: usize,
    pub(super) room: Room,
    /// The rows in the tables.
    pub(super) used: Rows,
}

/// The frontends that lead or have led to the same service port. Their writes depend on each other.
struct Group {
    places: Vec<usize>,
    /// The pass since which the first of them waits.
    since: u64,
    before: Rows,
    after: Rows,
    /// The waiting rows of their Service.
    rows_of_service: usize,
}

impl<A: Addr> Default for Portions<A> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<A: Addr> Portions<A> {
    /// Adds frontends in a pass. A frontend that waits already keeps its place.
    pub(super) fn extend(&mut self, pass: u64, keys: impl IntoIterator<Item = FrontendKey<A>>) {
        for key in keys {
            self.0.entry(key).or_insert(pass);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the frontends that wait, each with its pass.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&FrontendKey<A>, u64)> {
        self.0.iter().map(|(key, since)| (key, *since))
    }

    pub(super) fn take_all(&mut self) -> BTreeSet<FrontendKey<A>> {
        std::mem::take(&mut self.0).into_keys().collect()
    }

    /// Takes the next portion: a third for what makes room, a third for the smallest Services, and
    /// a third for what waits longest.
    pub(super) fn take(
        &mut self,
        mut limits: Limits,
        facts_of: impl Fn(&FrontendKey<A>) -> Facts<A>,
    ) -> BTreeSet<FrontendKey<A>> {
        let keys: Vec<_> = self.0.keys().copied().collect();
        let facts: Vec<_> = keys.iter().map(facts_of).collect();
        if facts.iter().map(Facts::size).sum::<usize>() <= limits.rows {
            return self.take_all();
        }
        let is_address = |group: &Group| {
            group
                .places
                .iter()
                .all(|place| keys[*place] == FrontendKey::address(keys[*place].addr))
        };
        let (addresses, groups): (Vec<_>, Vec<_>) =
            self.groups(&keys, &facts).into_iter().partition(is_address);
        let (mut shrinking, mut groups): (Vec<_>, Vec<_>) =
            groups.into_iter().partition(Group::shrinks);
        shrinking.sort_by_key(|group| group.since);
        let (mut taken, rest) = limits.choose(shrinking, 0);
        groups.extend(rest);
        groups.sort_by_key(|group| group.rows_of_service);
        let (small, mut rest) = limits.choose(groups, 0);
        taken.extend(small);
        rest.sort_by_key(|group| group.since);
        let (older, rest) = limits.choose(rest, 1);
        taken.extend(older);
        // The row of an address refuses all other ports. It must not come before those that wait as
        // long.
        let since = since_by_address(&rest, &keys, &facts);
        let comes_last = |group: &Group| {
            since
                .get(&keys[group.places[0]].addr)
                .is_none_or(|since| *since > group.since)
        };
        taken.extend(
            addresses
                .into_iter()
                .filter(|group| comes_last(group) && limits.take(group)),
        );
        if taken.is_empty() {
            // The models have room for each other, though not one after the other.
            return self.take_all();
        }
        let taken: BTreeSet<_> = taken
            .iter()
            .flat_map(|group| &group.places)
            .map(|place| keys[*place])
            .collect();
        self.0.retain(|key, _| !taken.contains(key));
        taken
    }

    fn groups(&self, keys: &[FrontendKey<A>], facts: &[Facts<A>]) -> Vec<Group> {
        let mut rows_at: BTreeMap<A, usize> = BTreeMap::new();
        let mut united = United::of(keys.len());
        for (place, facts) in facts.iter().enumerate() {
            if let Some(addr) = facts.addresses().next() {
                *rows_at.entry(addr).or_default() += facts.size();
            }
            for service in facts
                .service_ports
                .iter()
                .flatten()
                .filter_map(|port| keys.binary_search(port).ok())
            {
                united.unite(place, service);
            }
        }
        let mut groups: BTreeMap<usize, Group> = BTreeMap::new();
        for (place, (key, facts)) in keys.iter().zip(facts).enumerate() {
            let group = groups
                .entry(united.first_of(place))
                .or_insert_with(Group::new);
            group.places.push(place);
            group.since = group.since.min(self.0[key]);
            add(&mut group.before, &facts.before);
            add(&mut group.after, &facts.after);
            let rows = facts.addresses().next().map_or(0, |addr| rows_at[&addr]);
            group.rows_of_service = group.rows_of_service.max(rows);
        }
        groups.into_values().collect()
    }
}

/// Returns the pass since which the first of these groups waits at each address.
fn since_by_address<A: Addr>(
    groups: &[Group],
    keys: &[FrontendKey<A>],
    facts: &[Facts<A>],
) -> BTreeMap<A, u64> {
    let mut since_by_address = BTreeMap::new();
    for group in groups {
        for place in &group.places {
            for addr in facts[*place].addresses().chain([keys[*place].addr]) {
                let since = since_by_address.entry(addr).or_insert(group.since);
                *since = group.since.min(*since);
            }
        }
    }
    since_by_address
}

impl<A: Addr> Facts<A> {
    fn size(&self) -> usize {
        size(&self.before, &self.after)
    }

    /// Returns the ClusterIPs of its Services, the next one first.
    fn addresses(&self) -> impl Iterator<Item = A> {
        let [before, after] = self.service_ports;
        [after, before].into_iter().flatten().map(|port| port.addr)
    }
}

impl Group {
    fn new() -> Self {
        Self {
            places: Vec::new(),
            since: u64::MAX,
            before: Rows::default(),
            after: Rows::default(),
            rows_of_service: 0,
        }
    }

    fn size(&self) -> usize {
        size(&self.before, &self.after)
    }

    /// Returns true if the group has fewer rows than before, and in no map more.
    fn shrinks(&self) -> bool {
        self.before != self.after
            && self
                .before
                .iter()
                .zip(self.after)
                .all(|(before, after)| after <= *before)
    }
}

/// Returns the rows that a change takes in all maps, before it or after it.
fn size(before: &Rows, after: &Rows) -> usize {
    before
        .iter()
        .zip(after)
        .map(|(before, after)| before.max(after))
        .sum()
}

impl Limits {
    /// Takes groups from the front, within a third of the rows, but `least` of them in any case. A
    /// group that grows waits until there is room for it. Returns those and the rest.
    fn choose(&mut self, groups: Vec<Group>, least: usize) -> (Vec<Group>, Vec<Group>) {
        let mut taken = Vec::new();
        let mut rest = Vec::new();
        let mut size = 0;
        for group in groups {
            let is_small = size + group.size() <= self.rows / 3 || taken.len() < least;
            if is_small && self.take(&group) {
                size += group.size();
                taken.push(group);
            } else {
                rest.push(group);
            }
        }
        (taken, rest)
    }

    /// Counts a group if there is room for it.
    fn take(&mut self, group: &Group) -> bool {
        let after =
            |map: usize| (self.used[map] + group.after[map]).saturating_sub(group.before[map]);
        let fits =
            |map: usize| group.after[map] <= group.before[map] || after(map) <= self.room.0[map];
        if !(0..MAPS).all(fits) {
            return false;
        }
        self.used = std::array::from_fn(after);
        true
    }
}

/// The disjoint sets of places, each a tree whose root is its first place.
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
        let one = self.first_of(one);
        let other = self.first_of(other);
        self.0[one.max(other)] = one.min(other);
    }
}
