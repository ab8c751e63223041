//! The map writes that turn one state into another.

use std::collections::BTreeMap;
use std::fmt;

use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::frontend::{Backend, Frontend, FrontendKey, Service, SlotKey};

use crate::tables::{BackendText, FamilyTables, FrontendText, ServiceText, Tables, set_name};

/// One map write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    V4(FamilyChange<Addr4>),
    V6(FamilyChange<Addr6>),
}

/// In the order in which a diff has them. What counts is put after what it counts and before what leads to it, and
/// taken away the other way round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FamilyChange<A: Addr> {
    PutSlot(SlotKey<A>, Backend<A>),
    PutService(FrontendKey<A>, Service),
    PutFrontend(FrontendKey<A>, Frontend<A>),
    DelFrontend(FrontendKey<A>),
    DelService(FrontendKey<A>),
    DelSlot(SlotKey<A>),
}

/// The writes that turn `now` into `want`, safe to stop after any one of them: whatever a client dials in between leads
/// to backends of the old or the new state. Families know nothing of each other, so one follows the other.
pub fn diff(now: &Tables, want: &Tables) -> Vec<Change> {
    let v4 = diff_family(&now.v4, &want.v4).map(Change::V4);
    v4.chain(diff_family(&now.v6, &want.v6).map(Change::V6)).collect()
}

pub(crate) fn diff_family<A: Addr>(
    now: &FamilyTables<A>,
    want: &FamilyTables<A>,
) -> impl Iterator<Item = FamilyChange<A>> {
    let put_slots = changed(&now.slots, &want.slots).map(|(k, v)| FamilyChange::PutSlot(k, v));
    let put_services = changed(&now.services, &want.services).map(|(k, v)| FamilyChange::PutService(k, v));
    let put_frontends = changed(&now.frontends, &want.frontends).map(|(k, v)| FamilyChange::PutFrontend(k, v));
    let del_frontends = gone(&now.frontends, &want.frontends).map(FamilyChange::DelFrontend);
    let del_services = gone(&now.services, &want.services).map(FamilyChange::DelService);
    let del_slots = gone(&now.slots, &want.slots).map(FamilyChange::DelSlot);
    let puts = put_slots.chain(put_services).chain(put_frontends);
    puts.chain(del_frontends).chain(del_services).chain(del_slots)
}

fn changed<K: Copy + Ord, V: Copy + Eq>(now: &BTreeMap<K, V>, want: &BTreeMap<K, V>) -> impl Iterator<Item = (K, V)> {
    want.iter().filter(|(key, value)| now.get(key) != Some(value)).map(|(key, value)| (*key, *value))
}

fn gone<K: Copy + Ord, V>(now: &BTreeMap<K, V>, want: &BTreeMap<K, V>) -> impl Iterator<Item = K> {
    now.keys().filter(|key| !want.contains_key(key)).copied()
}

/// A service port of either family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ServiceKey {
    V4(FrontendKey<Addr4>),
    V6(FrontendKey<Addr6>),
}

impl Change {
    /// The service port that this write is part of. Those of one must not be made after one of them has failed.
    pub fn service(&self) -> ServiceKey {
        match self {
            Self::V4(change) => ServiceKey::V4(change.service()),
            Self::V6(change) => ServiceKey::V6(change.service()),
        }
    }
}

impl<A: Addr> FamilyChange<A> {
    fn service(&self) -> FrontendKey<A> {
        match self {
            Self::PutSlot(key, _) | Self::DelSlot(key) => key.service,
            Self::PutFrontend(_, frontend) => frontend.service,
            Self::PutService(key, _) | Self::DelFrontend(key) | Self::DelService(key) => *key,
        }
    }
}

impl Tables {
    pub fn apply(&mut self, change: &Change) {
        match change {
            Change::V4(change) => self.v4.apply(change),
            Change::V6(change) => self.v6.apply(change),
        }
    }
}

impl<A: Addr> FamilyTables<A> {
    pub fn apply(&mut self, change: &FamilyChange<A>) {
        match change {
            FamilyChange::PutSlot(key, backend) => drop(self.slots.insert(*key, *backend)),
            FamilyChange::PutService(key, service) => drop(self.services.insert(*key, *service)),
            FamilyChange::PutFrontend(key, frontend) => drop(self.frontends.insert(*key, *frontend)),
            FamilyChange::DelFrontend(key) => drop(self.frontends.remove(key)),
            FamilyChange::DelService(key) => drop(self.services.remove(key)),
            FamilyChange::DelSlot(key) => drop(self.slots.remove(key)),
        }
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::V4(change) => change.fmt(f),
            Self::V6(change) => change.fmt(f),
        }
    }
}

impl<A: Addr> fmt::Display for FamilyChange<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slot = |key: &SlotKey<A>| format!("slot {:?} {}[{}]", key.service, set_name(key.set), key.index);
        match self {
            Self::PutSlot(key, backend) => write!(f, "put {} -> {}", slot(key), BackendText(backend)),
            Self::PutService(key, service) => write!(f, "put service {key:?} {}", ServiceText(service)),
            Self::PutFrontend(key, frontend) => write!(f, "put frontend {key:?} {}", FrontendText(key, frontend)),
            Self::DelFrontend(key) => write!(f, "del frontend {key:?}"),
            Self::DelService(key) => write!(f, "del service {key:?}"),
            Self::DelSlot(key) => write!(f, "del {}", slot(key)),
        }
    }
}

#[cfg(test)]
mod tests;
