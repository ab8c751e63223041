//! Divides the maps' capacity among namespaces, so that no tenant's Services displace another
//! tenant's.
//!
//! If all Services fit, all are served. Otherwise each namespace gets its demand up to a level that
//! uses up the capacity (max-min fairness). Above the level the oldest Services keep their rows,
//! port by port. A port whose look-up tables alone exceed the capacity is served without them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::SubAssign;

use proxy_common::addr::Addr;
use proxy_common::frontend::FrontendKey;

use crate::compact::Shared;
use crate::input::ObjectName;
use crate::model::{Cause, Claim, FamilyModel, ObjectRef, Skipped};
pub use crate::room::Room;
use crate::room::{MAPS, Rows, add, without_tables};

/// The operators' names of the rows, and the flags that enlarge their maps.
const KINDS: [(&str, &str); MAPS] = [
    ("frontends", OF_SERVICES),
    ("service ports", OF_SERVICES),
    ("backends", OF_ENDPOINTS),
    ("endpoints", OF_ENDPOINTS),
    ("Maglev tables", "8 KiB each"),
    ("source ranges", OF_SERVICES),
];
const OF_SERVICES: &str = "--service-table-size";
const OF_ENDPOINTS: &str = "--endpoint-table-size";

/// The rows of one family's Services, and the ports that do not fit.
#[derive(Debug)]
pub(crate) struct Shares<A: Addr> {
    room: Room,
    by_namespace: BTreeMap<Shared, Rows>,
    /// The maximum rows of a namespace in each map. `None` if all fit.
    levels: [Option<usize>; MAPS],
    left_out: LeftOut<A>,
    /// The service ports whose look-up tables do not fit.
    plain: LeftOut<A>,
    /// Set if a model has changed since [`Self::settle`].
    pub(crate) is_stale: bool,
}

/// The affected frontends of each Service.
pub(crate) type LeftOut<A> = BTreeMap<ObjectName, BTreeSet<FrontendKey<A>>>;

impl<A: Addr> Default for Shares<A> {
    fn default() -> Self {
        Self {
            room: Room::default(),
            by_namespace: BTreeMap::new(),
            levels: [None; MAPS],
            left_out: LeftOut::new(),
            plain: LeftOut::new(),
            is_stale: false,
        }
    }
}

impl<A: Addr> Shares<A> {
    pub(crate) fn new(room: Room) -> Self {
        Self {
            room,
            ..Self::default()
        }
    }

    pub(crate) fn room(&self) -> Room {
        self.room
    }

    pub(crate) fn add(&mut self, model: &FamilyModel<A>) {
        add(
            self.by_namespace
                .entry(model.claim.service.namespace.clone())
                .or_default(),
            &rows(model),
        );
        self.is_stale = true;
    }

    pub(crate) fn remove(&mut self, model: &FamilyModel<A>) {
        let namespace = &model.claim.service.namespace;
        if let Some(total) = self.by_namespace.get_mut(namespace) {
            total
                .iter_mut()
                .zip(rows(model))
                .for_each(|(total, rows)| total.sub_assign(rows));
            if *total == Rows::default() {
                self.by_namespace.remove(namespace);
            }
        }
        self.is_stale = true;
    }

    /// Returns true if the frontend does not fit.
    pub(crate) fn leave_out(&self, service: &ObjectName, key: &FrontendKey<A>) -> bool {
        contains(&self.left_out, service, key)
    }

    /// Returns true if the service port's look-up tables do not fit.
    pub(crate) fn is_plain(&self, service: &ObjectName, key: &FrontendKey<A>) -> bool {
        contains(&self.plain, service, key)
    }

    /// Divides the capacity again if a model has changed. Returns the frontends that each Service
    /// gains or loses.
    pub(crate) fn settle<'a>(
        &mut self,
        models: impl Iterator<Item = &'a FamilyModel<A>>,
    ) -> LeftOut<A> {
        if !std::mem::take(&mut self.is_stale) {
            return LeftOut::new();
        }
        let level_of = |map: usize| {
            level(
                self.by_namespace.values().map(|rows| rows[map]),
                self.room.0[map],
            )
        };
        self.levels = std::array::from_fn(level_of);
        let before = (
            std::mem::take(&mut self.left_out),
            std::mem::take(&mut self.plain),
        );
        if self.levels.iter().any(Option::is_some) {
            (self.left_out, self.plain) = left_out(models, &self.by_namespace, &self.levels);
        }
        let mut changed = difference(&before.0, &self.left_out);
        for (service, keys) in difference(&before.1, &self.plain) {
            changed.entry(service).or_default().extend(keys);
        }
        changed
    }

    /// Returns the parts of a Service that do not fit.
    pub(crate) fn skipped(&self, model: &FamilyModel<A>) -> Vec<Skipped> {
        let service = &model.claim.service;
        let of = |left_out: &LeftOut<A>| {
            left_out
                .get(service)
                .into_iter()
                .flatten()
                .filter(|key| model.ports.get(key).is_some())
                .count()
        };
        let left_out = of(&self.left_out);
        let plain = of(&self.plain);
        let namespace = &service.namespace;
        let ports = model.ports.keys().count();
        let full = self
            .levels
            .into_iter()
            .zip(self.by_namespace[namespace])
            .zip(KINDS);
        let full = full
            .filter_map(|((level, rows), kind)| Some((level.filter(|level| rows > *level)?, kind)));
        let shares: Vec<_> = full
            .map(|(level, (kind, flag))| format!("{level} {kind} ({flag})"))
            .collect();
        let why = [
            (left_out, "are not served"),
            (plain, "are served without weights and Maglev tables"),
        ];
        let why = why
            .into_iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| {
                let of = format!(
                    "{count} of {ports} ports {what}: the Services of namespace {namespace}"
                );
                let why = format!(
                    "{of} have their share of this node's room, {}",
                    shares.join(", ")
                );
                let object = ObjectRef {
                    kind: "Service",
                    name: service.clone(),
                };
                Skipped {
                    object,
                    field: "spec.ports".to_owned(),
                    why,
                    cause: Cause::NoRoom,
                }
            });
        why.collect()
    }
}

/// Orders claimed items round-robin by namespace, the oldest Service of each namespace first.
pub(crate) fn in_turn<'a, T: Ord>(claimed: impl Iterator<Item = (&'a Claim, T)>) -> Vec<T> {
    let mut by_namespace: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (claim, item) in claimed {
        by_namespace
            .entry(&claim.service.namespace)
            .or_default()
            .push((claim, item));
    }
    let mut in_turn = Vec::new();
    for mut claimed in by_namespace.into_values() {
        claimed.sort_unstable();
        in_turn.extend(
            claimed
                .into_iter()
                .enumerate()
                .map(|(turn, (claim, item))| (turn, claim, item)),
        );
    }
    in_turn.sort_unstable();
    in_turn.into_iter().map(|(_, _, item)| item).collect()
}

/// Computes [`Shares`] from scratch.
pub(crate) fn shares_of<A: Addr>(models: &[&FamilyModel<A>], room: Room) -> Shares<A> {
    let mut shares = Shares::new(room);
    models.iter().for_each(|model| shares.add(model));
    shares.settle(models.iter().copied());
    shares
}

fn contains<A: Addr>(of: &LeftOut<A>, service: &ObjectName, key: &FrontendKey<A>) -> bool {
    !of.is_empty() && of.get(service).is_some_and(|keys| keys.contains(key))
}

/// Returns the frontends that are in only one of `before` and `now`.
fn difference<A: Addr>(before: &LeftOut<A>, now: &LeftOut<A>) -> LeftOut<A> {
    let none = BTreeSet::new();
    let changed = |service: &ObjectName| {
        let [before, now] = [before, now].map(|of| of.get(service).unwrap_or(&none));
        let changed: BTreeSet<_> = before.symmetric_difference(now).copied().collect();
        (!changed.is_empty()).then(|| (service.clone(), changed))
    };
    before
        .keys()
        .chain(now.keys())
        .filter_map(changed)
        .collect()
}

/// Returns the level at which capped demands use up `room`. `None` if all demands fit.
fn level(demands: impl Iterator<Item = usize>, room: usize) -> Option<usize> {
    let mut demands: Vec<_> = demands.collect();
    if demands.iter().sum::<usize>() <= room {
        return None;
    }
    demands.sort_unstable();
    let mut left = room;
    for (index, demand) in demands.iter().enumerate() {
        let share = left / (demands.len() - index);
        if *demand > share {
            return Some(share);
        }
        left -= demand;
    }
    None
}

fn left_out<'a, A: Addr>(
    models: impl Iterator<Item = &'a FamilyModel<A>>,
    by_namespace: &BTreeMap<Shared, Rows>,
    levels: &[Option<usize>; MAPS],
) -> (LeftOut<A>, LeftOut<A>) {
    let fits = |rows: &Rows| {
        rows.iter()
            .zip(levels)
            .all(|(rows, level)| level.is_none_or(|level| *rows <= level))
    };
    // A namespace without rows has no entry, though it may have models.
    let is_over = |model: &&FamilyModel<A>| {
        let rows = by_namespace.get(&model.claim.service.namespace);
        rows.is_some_and(|rows| !fits(rows))
    };
    let mut models: Vec<_> = models.filter(is_over).collect();
    models.sort_unstable_by_key(|model| &model.claim);
    let mut used: BTreeMap<&Shared, Rows> = BTreeMap::new();
    let mut left_out = LeftOut::new();
    let mut plain = LeftOut::new();
    for model in models {
        let used = used.entry(&model.claim.service.namespace).or_default();
        let mut without = BTreeSet::new();
        let mut without_table = BTreeSet::new();
        for (service, frontends) in by_service(model) {
            let rows = rows_of(model, &service, frontends.len());
            let with = |rows: Rows| {
                let mut with = *used;
                add(&mut with, &rows);
                fits(&with).then_some(with)
            };
            let has_room = !model.without_room.contains(&service);
            if let Some(with) = with(rows).filter(|_| has_room) {
                *used = with;
            } else if let Some(with) = with(without_tables(rows)).filter(|_| has_room) {
                *used = with;
                without_table.insert(service);
            } else {
                without.extend(frontends);
            }
        }
        let service = &model.claim.service;
        left_out.extend((!without.is_empty()).then(|| (service.clone(), without)));
        plain.extend((!without_table.is_empty()).then(|| (service.clone(), without_table)));
    }
    (left_out, plain)
}

/// Returns the frontends of a model by service port. A whole-address row is its own group.
fn by_service<A: Addr>(model: &FamilyModel<A>) -> BTreeMap<FrontendKey<A>, Vec<FrontendKey<A>>> {
    let mut by_service: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (key, claimed) in model.frontends.iter() {
        by_service
            .entry(claimed.frontend.service)
            .or_default()
            .push(*key);
    }
    by_service
}

fn rows<A: Addr>(model: &FamilyModel<A>) -> Rows {
    let mut rows = Rows::default();
    rows[0] = model.frontends.keys().count();
    for key in model.ports.keys() {
        add(&mut rows, &rows_of(model, key, 0));
    }
    rows
}

/// Returns the rows of one service port with this many frontends.
pub(crate) fn rows_of<A: Addr>(
    model: &FamilyModel<A>,
    service: &FrontendKey<A>,
    frontends: usize,
) -> Rows {
    let Some(port) = model.ports.get(service) else {
        return [frontends, 0, 0, 0, 0, 0];
    };
    let mut rows = port.rows();
    (rows[0], rows[5]) = (frontends, model.source_ranges.len());
    rows
}

/// Returns true if both models of a Service need the same rows for each port.
pub(crate) fn take_same<A: Addr>(one: &FamilyModel<A>, other: &FamilyModel<A>) -> bool {
    let rows_by_port = |model: &FamilyModel<A>| -> Vec<_> {
        model
            .ports
            .keys()
            .map(|service| (*service, rows_of(model, service, 0)))
            .collect()
    };
    one.claim == other.claim
        && one.frontends == other.frontends
        && one.without_room == other.without_room
        && rows_by_port(one) == rows_by_port(other)
}

#[cfg(test)]
mod tests;
