//! Divides the room of the maps among the namespaces, so that no tenant's Services take the room of another's.
//!
//! As long as all Services fit, all are served. Where they do not, each namespace gets what it needs up to a level at
//! which the room is used up (max-min fairness). Above that level the oldest Services keep theirs, port by port.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::SubAssign;

use proxy_common::addr::Addr;
use proxy_common::frontend::FrontendKey;

use crate::compact::Shared;
use crate::input::ObjectName;
use crate::model::{Cause, Claim, FamilyModel, ObjectRef, Skipped};
pub use crate::room::Room;
use crate::room::{MAPS, Rows, add};

/// The names of the rows for operators, and the flags that make room for them.
const KINDS: [(&str, &str); MAPS] = [
    ("frontends", OF_SERVICES),
    ("service ports", OF_SERVICES),
    ("backends", OF_ENDPOINTS),
    ("endpoints", OF_ENDPOINTS),
    ("Maglev tables", OF_SERVICES),
    ("source ranges", OF_SERVICES),
];
const OF_SERVICES: &str = "--service-table-size";
const OF_ENDPOINTS: &str = "--endpoint-table-size";

/// The rows of the Services of one family, and the ports that have no room.
#[derive(Debug)]
pub(crate) struct Shares<A: Addr> {
    room: Room,
    by_namespace: BTreeMap<Shared, Rows>,
    /// The most rows that a namespace may have in each map; None where all have room.
    levels: [Option<usize>; MAPS],
    left_out: LeftOut<A>,
    /// Set if a model has changed since [`Self::settle`].
    pub(crate) is_stale: bool,
}

/// The frontends without room, by Service.
pub(crate) type LeftOut<A> = BTreeMap<ObjectName, BTreeSet<FrontendKey<A>>>;

impl<A: Addr> Default for Shares<A> {
    fn default() -> Self {
        Self {
            room: Room::default(),
            by_namespace: BTreeMap::new(),
            levels: [None; MAPS],
            left_out: LeftOut::new(),
            is_stale: false,
        }
    }
}

impl<A: Addr> Shares<A> {
    pub(crate) fn new(room: Room) -> Self {
        Self { room, ..Self::default() }
    }

    pub(crate) fn room(&self) -> Room {
        self.room
    }

    pub(crate) fn add(&mut self, model: &FamilyModel<A>) {
        add(self.by_namespace.entry(model.claim.service.namespace.clone()).or_default(), &rows(model));
        self.is_stale = true;
    }

    pub(crate) fn remove(&mut self, model: &FamilyModel<A>) {
        let namespace = &model.claim.service.namespace;
        if let Some(total) = self.by_namespace.get_mut(namespace) {
            total.iter_mut().zip(rows(model)).for_each(|(total, rows)| total.sub_assign(rows));
            if *total == Rows::default() {
                self.by_namespace.remove(namespace);
            }
        }
        self.is_stale = true;
    }

    /// Returns true if a Service goes without this frontend.
    pub(crate) fn leave_out(&self, service: &ObjectName, key: &FrontendKey<A>) -> bool {
        !self.left_out.is_empty() && self.left_out.get(service).is_some_and(|left_out| left_out.contains(key))
    }

    /// Divides the room among these models, if any has changed. Returns the frontends that each Service gains or loses.
    pub(crate) fn settle<'a>(&mut self, models: impl Iterator<Item = &'a FamilyModel<A>>) -> LeftOut<A> {
        if !std::mem::take(&mut self.is_stale) {
            return LeftOut::new();
        }
        let level_of = |map: usize| level(self.by_namespace.values().map(|rows| rows[map]), self.room.0[map]);
        self.levels = std::array::from_fn(level_of);
        let before = std::mem::take(&mut self.left_out);
        if self.levels.iter().any(Option::is_some) {
            self.left_out = left_out(models, &self.by_namespace, &self.levels);
        }
        let none = BTreeSet::new();
        let changed = |service: &ObjectName| {
            let [before, now] = [&before, &self.left_out].map(|left_out| left_out.get(service).unwrap_or(&none));
            let changed: BTreeSet<_> = before.symmetric_difference(now).copied().collect();
            (!changed.is_empty()).then(|| (service.clone(), changed))
        };
        before.keys().chain(self.left_out.keys()).filter_map(changed).collect()
    }

    /// Returns what a Service goes without.
    pub(crate) fn skipped(&self, model: &FamilyModel<A>) -> Vec<Skipped> {
        let service = &model.claim.service;
        let Some(left_out) = self.left_out.get(service) else { return Vec::new() };
        let left_out = left_out.iter().filter(|key| model.ports.get(key).is_some()).count();
        let (namespace, ports) = (&service.namespace, model.ports.keys().count());
        let full = self.levels.into_iter().zip(self.by_namespace[namespace]).zip(KINDS);
        let full = full.filter_map(|((level, rows), kind)| Some((level.filter(|level| rows > *level)?, kind)));
        let shares: Vec<_> = full.map(|(level, (kind, flag))| format!("{level} {kind} ({flag})")).collect();
        let why = format!(
            "{left_out} of {ports} ports are not served: the Services of namespace {namespace} have their share of this node's room, {}",
            shares.join(", ")
        );
        let object = ObjectRef { kind: "Service", name: service.clone() };
        vec![Skipped { object, field: "spec.ports".to_owned(), why, cause: Cause::NoRoom }]
    }
}

/// Puts what Services claim in an order in which each namespace has its turn. Within a namespace the oldest Service is first.
pub(crate) fn in_turn<'a, T: Ord>(claimed: impl Iterator<Item = (&'a Claim, T)>) -> Vec<T> {
    let mut by_namespace: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (claim, item) in claimed {
        by_namespace.entry(&claim.service.namespace).or_default().push((claim, item));
    }
    let mut in_turn = Vec::new();
    for mut claimed in by_namespace.into_values() {
        claimed.sort_unstable();
        in_turn.extend(claimed.into_iter().enumerate().map(|(turn, (claim, item))| (turn, claim, item)));
    }
    in_turn.sort_unstable();
    in_turn.into_iter().map(|(_, _, item)| item).collect()
}

/// Computes from nothing what [`Shares`] keeps.
pub(crate) fn left_out_of<A: Addr>(models: &[&FamilyModel<A>], room: Room) -> LeftOut<A> {
    let mut shares = Shares::new(room);
    models.iter().for_each(|model| shares.add(model));
    shares.settle(models.iter().copied());
    shares.left_out
}

/// Returns the level up to which all demands are met so that `room` is used up; None if it is not.
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
) -> LeftOut<A> {
    let fits = |rows: &Rows| rows.iter().zip(levels).all(|(rows, level)| level.is_none_or(|level| *rows <= level));
    let is_over = |model: &&FamilyModel<A>| !fits(&by_namespace[&model.claim.service.namespace]);
    let mut models: Vec<_> = models.filter(is_over).collect();
    models.sort_unstable_by_key(|model| &model.claim);
    let mut used: BTreeMap<&Shared, Rows> = BTreeMap::new();
    let mut left_out = LeftOut::new();
    for model in models {
        let used = used.entry(&model.claim.service.namespace).or_default();
        let mut without = BTreeSet::new();
        for (service, frontends) in by_service(model) {
            let mut with = *used;
            add(&mut with, &rows_of(model, &service, frontends.len()));
            if fits(&with) && !model.without_room.contains(&service) {
                *used = with;
            } else {
                without.extend(frontends);
            }
        }
        if !without.is_empty() {
            left_out.insert(model.claim.service.clone(), without);
        }
    }
    left_out
}

/// Returns the frontends of a model by the service port that they lead to; the row of the address stands for itself.
fn by_service<A: Addr>(model: &FamilyModel<A>) -> BTreeMap<FrontendKey<A>, Vec<FrontendKey<A>>> {
    let mut by_service: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (key, claimed) in model.frontends.iter() {
        by_service.entry(claimed.frontend.service).or_default().push(*key);
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

/// Returns the rows of one service port, with so many frontends.
pub(crate) fn rows_of<A: Addr>(model: &FamilyModel<A>, service: &FrontendKey<A>, frontends: usize) -> Rows {
    let Some(port) = model.ports.get(service) else { return [frontends, 0, 0, 0, 0, 0] };
    let mut rows = port.rows();
    (rows[0], rows[5]) = (frontends, model.source_ranges.len());
    rows
}

/// Returns true if two models of a Service leave the same room to others, and need the same for each of their ports.
pub(crate) fn take_same<A: Addr>(one: &FamilyModel<A>, other: &FamilyModel<A>) -> bool {
    let rows_by_port = |model: &FamilyModel<A>| -> Vec<_> {
        model.ports.keys().map(|service| (*service, rows_of(model, service, 0))).collect()
    };
    one.claim == other.claim
        && one.frontends == other.frontends
        && one.without_room == other.without_room
        && rows_by_port(one) == rows_by_port(other)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builders::{ServiceBuilder, listed, service, slice};
    use crate::desired::Desired;
    use crate::input::Input;
    use crate::model::ModelOptions;
    use crate::tables::Tables;

    /// Room for so many frontends, and for any number of other rows.
    fn frontends(count: usize) -> Room {
        let Room(mut rows) = Room::default();
        rows[0] = count;
        Room(rows)
    }

    fn desired(room: Room) -> Desired {
        let mut desired = Desired::new("here").within(room);
        listed().into_iter().for_each(|input| desired.apply(input));
        desired
    }

    /// A Service with so many ports; its ClusterIP takes one more frontend.
    fn wide(name: &str, host: u8, ports: u16) -> ServiceBuilder {
        (1..=ports).fold(service(name).cluster_ip(&format!("10.96.0.{host}")), |service, port| service.tcp(port.into()))
    }

    /// Syncs, and returns the frontends of each address. The tables must be those that are built from nothing.
    fn served(desired: &mut Desired, room: Room) -> BTreeMap<String, usize> {
        desired.sync();
        assert_eq!(desired.tables(), &Tables::within(room, desired.store(), &ModelOptions::default()));
        let mut served = BTreeMap::new();
        for key in desired.tables().v4.frontends.keys() {
            *served.entry(key.addr.ip().to_string()).or_default() += 1;
        }
        served
    }

    fn skipped(desired: &Desired) -> Vec<String> {
        desired.skipped().map(ToString::to_string).collect()
    }

    #[test]
    fn level_uses_up_the_room() {
        let level = |demands: &[usize], room| level(demands.iter().copied(), room);
        assert_eq!(level(&[5, 5], 10), None);
        assert_eq!(level(&[5, 6], 10), Some(5));
        assert_eq!(level(&[1, 100], 10), Some(9));
        assert_eq!(level(&[1, 50, 100], 11), Some(5));
        assert_eq!(level(&[], 0), None);
    }

    #[test]
    fn namespace_takes_what_others_leave() {
        let room = frontends(20);
        let mut desired = desired(room);
        desired.apply(wide("greedy/big", 1, 19).into());
        assert_eq!(served(&mut desired, room), [("10.96.0.1".to_owned(), 20)].into());
        assert_eq!(skipped(&desired), [""; 0]);
        // The other namespace has its share at once, and the first one the rest.
        desired.apply(wide("other/web", 2, 1).into());
        assert_eq!(served(&mut desired, room), [("10.96.0.1".to_owned(), 18), ("10.96.0.2".to_owned(), 2)].into());
        assert_eq!(
            skipped(&desired),
            [
                "Service greedy/big spec.ports: 2 of 19 ports are not served: the Services of namespace greedy have their \
              share of this node's room, 18 frontends (--service-table-size)"
            ]
        );
        desired.apply(wide("other/web", 2, 1).deleted());
        assert_eq!(served(&mut desired, room), [("10.96.0.1".to_owned(), 20)].into());
        assert_eq!(skipped(&desired), [""; 0]);
    }

    #[test]
    fn replaced_endpoints_leave_shares_as_they_are() {
        let (web, of) = (wide("web", 1, 1), |ip: &str| slice("web-1", "web").tcp(8080).ready(ip));
        let mut desired = desired(Room::default());
        let mut model = |input: Input| {
            desired.apply(input);
            desired.sync();
            desired.snapshot().services[0].v4.clone().unwrap()
        };
        let first = model(web.clone().into());
        let one = model(of("10.244.0.1").into());
        let replaced = model(of("10.244.0.2").into());
        let two = model(of("10.244.0.1").ready("10.244.0.2").into());
        let more_ports = model(web.tcp(81).into());
        assert!(take_same(&one, &replaced) && one != replaced);
        assert!(!take_same(&first, &one) && !take_same(&one, &two) && !take_same(&two, &more_ports));
        let older = model(wide("web", 1, 1).tcp(81).created(2).into());
        assert!(!take_same(&more_ports, &older));
    }

    #[test]
    fn oldest_service_of_namespace_keeps_its_ports() {
        let room = frontends(15);
        let mut desired = desired(room);
        desired.apply(wide("greedy/new", 1, 10).created(2).into());
        desired.apply(wide("greedy/old", 2, 10).created(1).into());
        assert_eq!(served(&mut desired, room), [("10.96.0.1".to_owned(), 4), ("10.96.0.2".to_owned(), 11)].into());
    }

    /// As many backends as all ports and endpoints make together would take the agent's memory.
    #[test]
    fn service_is_modelled_only_as_far_as_there_is_room() {
        let room = Room::of_rows(25);
        let mut desired = desired(room);
        let pods = (1..=10)
            .fold(slice("greedy/big-1", "big").tcp(8080), |slice, host| slice.ready(&format!("10.244.0.{host}")));
        desired.apply(wide("greedy/big", 1, 20).into());
        desired.apply(pods.into());
        assert_eq!(served(&mut desired, room), [("10.96.0.1".to_owned(), 3)].into());
        assert!(skipped(&desired)[0].contains("18 of 20 ports are not served"), "{:?}", skipped(&desired));
        let services = desired.snapshot().services;
        let ports = services.iter().filter_map(|service| service.v4.as_ref()).flat_map(|v4| v4.ports.values());
        assert_eq!(
            ports.map(|port| port.cluster.len()).sum::<usize>(),
            30,
            "the third port shows that there is no room"
        );
    }

    /// A tenant that fills the room does not get the address of another.
    #[test]
    fn frontend_without_room_passes_to_no_other_service() {
        let room = frontends(8);
        let mut desired = desired(room);
        desired.apply(wide("a/old", 1, 3).created(1).into());
        desired.apply(wide("a/new", 2, 1).external_ip("203.0.113.9").created(2).into());
        desired.apply(wide("b/late", 3, 1).external_ip("203.0.113.9").created(3).into());
        assert_eq!(
            served(&mut desired, room),
            [("10.96.0.1", 4), ("10.96.0.2", 1), ("10.96.0.3", 2)].map(|(addr, n)| (addr.to_owned(), n)).into()
        );
    }

    #[test]
    fn external_frontends_have_their_turn_by_namespace() {
        let mut desired = desired(Room::default());
        let service = |name, host, ip: &str, age| wide(name, host, 2).external_ip(ip).created(age);
        desired.apply(service("a/new", 1, "1.1.1.1", 3).into());
        desired.apply(service("a/old", 2, "2.2.2.2", 2).into());
        desired.apply(service("b/web", 3, "203.0.113.9", 9).into());
        desired.sync();
        let turns = desired.external_frontends_in_turn();
        let turns: Vec<_> = turns.iter().map(|(service, (addr, _, port))| format!("{service} {addr}:{port}")).collect();
        assert_eq!(
            turns,
            [
                "a/old 2.2.2.2:1",
                "b/web 203.0.113.9:1",
                "a/old 2.2.2.2:2",
                "b/web 203.0.113.9:2",
                "a/new 1.1.1.1:1",
                "a/new 1.1.1.1:2"
            ]
        );
    }
}
