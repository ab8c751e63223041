//! Divides frontends with outdated rows into portions, so that no Service waits for all rows of a
//! large Service.

use std::collections::{BTreeMap, BTreeSet};

use proxy_common::addr::Addr;
use proxy_common::frontend::FrontendKey;

use crate::room::{MAPS, Room, Rows, add};

/// The waiting frontends, each with its first pass of waiting.
#[derive(Debug)]
pub(super) struct Portions<A: Addr>(BTreeMap<FrontendKey<A>, u64>);

/// The facts that decide on a frontend's portion.
pub(super) struct Facts<A: Addr> {
    /// Its service ports in the tables and in the models.
    pub(super) service_ports: [Option<FrontendKey<A>>; 2],
    /// The frontend's rows in the tables.
    pub(super) before: Rows,
    /// The frontend's rows in the models.
    pub(super) after: Rows,
}

pub(super) struct Limits {
    /// The approximate number of rows in a portion.
    pub(super) rows: usize,
    pub(super) room: Room,
    /// The rows in the tables.
    pub(super) used: Rows,
}

/// The frontends of one service port, before or after the change. Their writes depend on each
/// other.
struct Group {
    places: Vec<usize>,
    /// The first pass of waiting.
    since: u64,
    before: Rows,
    after: Rows,
    /// The waiting rows of the whole Service.
    rows_of_service: usize,
}

impl<A: Addr> Default for Portions<A> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<A: Addr> Portions<A> {
    /// Adds frontends in a pass. A waiting frontend keeps its place.
    pub(super) fn extend(&mut self, pass: u64, keys: impl IntoIterator<Item = FrontendKey<A>>) {
        for key in keys {
            self.0.entry(key).or_insert(pass);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&FrontendKey<A>, u64)> {
        self.0.iter().map(|(key, since)| (key, *since))
    }

    pub(super) fn take_all(&mut self) -> BTreeSet<FrontendKey<A>> {
        std::mem::take(&mut self.0).into_keys().collect()
    }

    /// Takes the next portion: a third for changes that free rows, a third for the smallest
    /// Services, and a third for the longest waiting.
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
        // A whole-address row rejects all other ports, so it must not precede ports that have
        // waited as long.
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
            // All models fit together, but their changes do not fit one after another.
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

/// Returns the earliest waiting pass of these groups, by address.
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

    /// Returns the ClusterIPs of its service ports, the future one first.
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

    /// Returns true if the group loses rows, and gains rows in no map.
    fn shrinks(&self) -> bool {
        self.before != self.after
            && self
                .before
                .iter()
                .zip(self.after)
                .all(|(before, after)| after <= *before)
    }
}

/// Returns the larger of the rows before and after, summed over all maps.
fn size(before: &Rows, after: &Rows) -> usize {
    before
        .iter()
        .zip(after)
        .map(|(before, after)| before.max(after))
        .sum()
}

impl Limits {
    /// Takes groups from the front, up to a third of the rows but at least `least` groups. A
    /// growing group waits until it fits. Returns the taken groups and the rest.
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

    /// Reserves the rows of a group. Returns false if they do not fit.
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

/// A union-find over indexes. The root of a set is its smallest index.
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
