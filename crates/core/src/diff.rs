//! The ordered map writes from one state to another.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::frontend::{
    Backend, Endpoint, EndpointKey, Frontend, FrontendKey, FrontendKind, Maglev, Service, SetKey,
    SlotKey,
};

use crate::tables::{
    BackendText, EndpointText, FamilyTables, FrontendText, MaglevText, RangeKey, RangeText,
    ServiceText, Tables, set_name,
};

/// One map write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    V4(FamilyChange<Addr4>),
    V6(FamilyChange<Addr6>),
}

/// One map write of one family. A row is written after the rows that it refers to, and deleted
/// before them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FamilyChange<A: Addr> {
    PutSourceRange(RangeKey<A>),
    PutEndpoint(EndpointKey<A>, Endpoint),
    PutSlot(SlotKey<A>, Backend<A>),
    PutMaglev(SetKey<A>, Arc<Maglev>),
    PutService(FrontendKey<A>, Service),
    /// A new frontend, or a changed frontend of the same service port.
    PutFrontend(FrontendKey<A>, Frontend<A>),
    /// A frontend, and the service port that it leaves.
    MoveFrontend(FrontendKey<A>, Frontend<A>, FrontendKey<A>),
    /// A frontend, and its last service port.
    DelFrontend(FrontendKey<A>, FrontendKey<A>),
    DelService(FrontendKey<A>),
    DelMaglev(SetKey<A>),
    DelSlot(SlotKey<A>),
    DelSourceRange(RangeKey<A>),
    DelEndpoint(EndpointKey<A>),
}

/// Returns the writes from `now` to `want`. Stopping after any of them is safe: a dialled address
/// reaches backends of the old or the new state, and no write admits a client that neither state
/// admits. The families are independent, so one follows the other.
pub fn diff(now: &Tables, want: &Tables) -> Vec<Change> {
    let v4 = diff_family(&now.v4, &want.v4).into_iter().map(Change::V4);
    v4.chain(diff_family(&now.v6, &want.v6).into_iter().map(Change::V6))
        .collect()
}

pub(crate) fn diff_family<A: Addr>(
    now: &FamilyTables<A>,
    want: &FamilyTables<A>,
) -> Vec<FamilyChange<A>> {
    let (opened, services): (Vec<_>, Vec<_>) =
        changed(&now.services, &want.services).partition(|(key, service)| opens(now, key, service));
    let led_to = |key: &FrontendKey<A>| now.frontends.get(key).map(|frontend| frontend.service);
    let put_frontend = |(key, frontend): (FrontendKey<A>, Frontend<A>)| match led_to(&key) {
        Some(service) if service != frontend.service => {
            FamilyChange::MoveFrontend(key, frontend, service)
        }
        _ => FamilyChange::PutFrontend(key, frontend),
    };
    let del_frontend = |key| FamilyChange::DelFrontend(key, led_to(&key).unwrap_or(key));
    let [new_ranges, old_ranges] = [(want, now), (now, want)].map(|(some, others)| {
        some.source_ranges
            .difference(&others.source_ranges)
            .copied()
    });

    let moves = changed(&now.frontends, &want.frontends)
        .filter(|(_, new)| new.kind == FrontendKind::LOAD_BALANCER);
    let moves = moves.filter_map(|(key, new)| {
        Some((led_to(&key).filter(|old| *old != new.service)?, new.service))
    });
    let (left, joined): (BTreeSet<_>, BTreeSet<_>) = moves.unzip();
    let (left_ranges, new_ranges): (Vec<_>, Vec<_>) = new_ranges.partition(|range| {
        left.contains(&range.range.service) && guards(now, &range.range.service)
    });
    let (joined_ranges, old_ranges): (Vec<_>, Vec<_>) = old_ranges.partition(|range| {
        let service = &range.range.service;
        joined.contains(service) && guards(now, service) && guards(want, service)
    });
    let (late, frontends): (Vec<_>, Vec<_>) = changed(&now.frontends, &want.frontends)
        .partition(|(key, frontend)| waits(now, key, frontend));

    let mut changes = Vec::new();
    // Deleting a frontend needs no earlier write. Deletions precede the new source ranges because
    // clients in these ranges may not dial the deleted frontends.
    changes.extend(gone(&now.frontends, &want.frontends).map(del_frontend));
    changes.extend(new_ranges.into_iter().map(FamilyChange::PutSourceRange));
    changes.extend(
        changed(&now.endpoints, &want.endpoints).map(|(k, v)| FamilyChange::PutEndpoint(k, v)),
    );
    changes.extend(changed(&now.slots, &want.slots).map(|(k, v)| FamilyChange::PutSlot(k, v)));
    changes.extend(changed(&now.maglev, &want.maglev).map(|(k, v)| FamilyChange::PutMaglev(k, v)));
    changes.extend(
        services
            .into_iter()
            .map(|(k, v)| FamilyChange::PutService(k, v)),
    );
    // Clients in these ranges may not dial a frontend that arrives from another service port.
    changes.extend(joined_ranges.into_iter().map(FamilyChange::DelSourceRange));
    changes.extend(frontends.into_iter().map(put_frontend));
    // Clients in the new ranges may not dial a frontend that another service port still has.
    changes.extend(left_ranges.into_iter().map(FamilyChange::PutSourceRange));
    changes.extend(
        opened
            .into_iter()
            .map(|(k, v)| FamilyChange::PutService(k, v)),
    );
    changes.extend(gone(&now.services, &want.services).map(FamilyChange::DelService));
    changes.extend(gone(&now.maglev, &want.maglev).map(FamilyChange::DelMaglev));
    changes.extend(gone(&now.slots, &want.slots).map(FamilyChange::DelSlot));
    changes.extend(old_ranges.into_iter().map(FamilyChange::DelSourceRange));
    changes.extend(late.into_iter().map(put_frontend));
    changes.extend(gone(&now.endpoints, &want.endpoints).map(FamilyChange::DelEndpoint));
    changes
}

/// Returns true if the service port drops its source ranges. Its removed LoadBalancer frontends
/// must be deleted before that.
fn opens<A: Addr>(now: &FamilyTables<A>, key: &FrontendKey<A>, want: &Service) -> bool {
    guards(now, key) && !want.has(Service::SOURCE_RANGES)
}

/// Returns true if the service port restricts its LoadBalancer frontends to source ranges.
fn guards<A: Addr>(now: &FamilyTables<A>, key: &FrontendKey<A>) -> bool {
    now.services
        .get(key)
        .is_some_and(|service| service.has(Service::SOURCE_RANGES))
}

/// Returns true if a new frontend must wait for the removal of old source ranges, because clients
/// in them may not dial it.
fn waits<A: Addr>(now: &FamilyTables<A>, key: &FrontendKey<A>, frontend: &Frontend<A>) -> bool {
    !now.frontends.contains_key(key)
        && frontend.kind == FrontendKind::LOAD_BALANCER
        && guards(now, &frontend.service)
}

// `changed` and `gone` merge two sorted maps in one iteration: half a million separate look-ups
// take much longer.

fn changed<'a, K: Copy + Ord, V: Clone + Eq>(
    now: &'a BTreeMap<K, V>,
    want: &'a BTreeMap<K, V>,
) -> impl Iterator<Item = (K, V)> {
    let mut now = now.iter().peekable();
    let is_changed = move |wanted: &(&K, &V)| {
        while now.next_if(|(key, _)| *key < wanted.0).is_some() {}
        now.peek() != Some(wanted)
    };
    want.iter()
        .filter(is_changed)
        .map(|(key, value)| (*key, value.clone()))
}

fn gone<K: Copy + Ord, V>(now: &BTreeMap<K, V>, want: &BTreeMap<K, V>) -> impl Iterator<Item = K> {
    let mut want = want.keys().peekable();
    let is_gone = move |known: &&K| {
        while want.next_if(|key| key < known).is_some() {}
        want.peek() != Some(known)
    };
    now.keys().filter(is_gone).copied()
}

/// A service port of either family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ServiceKey {
    V4(FrontendKey<Addr4>),
    V6(FrontendKey<Addr6>),
}

impl Change {
    /// Returns true if the write changes a frontend.
    pub fn is_of_frontend(&self) -> bool {
        match self {
            Self::V4(change) => change.is_of_frontend(),
            Self::V6(change) => change.is_of_frontend(),
        }
    }

    /// Returns the service ports of this write: two if a frontend moves between them. After a write
    /// of a service port fails or is omitted, the caller must omit the service port's other writes.
    pub fn services(&self) -> impl Iterator<Item = ServiceKey> {
        let (service, other) = match self {
            Self::V4(change) => (
                ServiceKey::V4(change.service()),
                change.left_service().map(ServiceKey::V4),
            ),
            Self::V6(change) => (
                ServiceKey::V6(change.service()),
                change.left_service().map(ServiceKey::V6),
            ),
        };
        std::iter::once(service).chain(other)
    }
}

impl<A: Addr> FamilyChange<A> {
    fn is_of_frontend(&self) -> bool {
        matches!(
            self,
            Self::PutFrontend(..) | Self::MoveFrontend(..) | Self::DelFrontend(..)
        )
    }

    fn service(&self) -> FrontendKey<A> {
        match self {
            Self::PutSourceRange(key) | Self::DelSourceRange(key) => key.range.service,
            Self::PutEndpoint(key, _) | Self::DelEndpoint(key) => key.service,
            Self::PutSlot(key, _) | Self::DelSlot(key) => key.service,
            Self::PutMaglev(key, _) | Self::DelMaglev(key) => key.service,
            Self::PutService(service, _)
            | Self::DelService(service)
            | Self::DelFrontend(_, service) => *service,
            Self::PutFrontend(_, frontend) | Self::MoveFrontend(_, frontend, _) => frontend.service,
        }
    }

    fn left_service(&self) -> Option<FrontendKey<A>> {
        if let Self::MoveFrontend(_, _, left) = self {
            Some(*left)
        } else {
            None
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
            FamilyChange::PutSourceRange(key) => drop(self.source_ranges.insert(*key)),
            FamilyChange::PutEndpoint(key, endpoint) => {
                self.endpoints.insert(*key, *endpoint);
            }
            FamilyChange::PutSlot(key, backend) => drop(self.slots.insert(*key, *backend)),
            FamilyChange::PutMaglev(key, maglev) => {
                drop(self.maglev.insert(*key, Arc::clone(maglev)))
            }
            FamilyChange::PutService(key, service) => drop(self.services.insert(*key, *service)),
            FamilyChange::PutFrontend(key, frontend)
            | FamilyChange::MoveFrontend(key, frontend, _) => {
                self.frontends.insert(*key, *frontend);
            }
            FamilyChange::DelFrontend(key, _) => drop(self.frontends.remove(key)),
            FamilyChange::DelService(key) => drop(self.services.remove(key)),
            FamilyChange::DelMaglev(key) => drop(self.maglev.remove(key)),
            FamilyChange::DelSlot(key) => drop(self.slots.remove(key)),
            FamilyChange::DelSourceRange(key) => drop(self.source_ranges.remove(key)),
            FamilyChange::DelEndpoint(key) => drop(self.endpoints.remove(key)),
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
        let slot = |key: &SlotKey<A>| {
            format!(
                "slot {:?} {}[{}]",
                key.service,
                set_name(key.set),
                key.index
            )
        };
        let range =
            |key: &RangeKey<A>| format!("source-range {:?} {}", key.range.service, RangeText(key));
        let endpoint = |key: &EndpointKey<A>| format!("endpoint {:?} {:?}", key.service, key.at);
        let maglev = |key: &SetKey<A>| format!("maglev {:?} {}", key.service, set_name(key.set));
        match self {
            Self::PutSourceRange(key) => write!(f, "put {}", range(key)),
            Self::PutEndpoint(key, flags) => {
                write!(f, "put {}{}", endpoint(key), EndpointText(flags))
            }
            Self::PutSlot(key, backend) => {
                write!(f, "put {} -> {}", slot(key), BackendText(backend))
            }
            Self::PutMaglev(key, table) => write!(f, "put {} {}", maglev(key), MaglevText(table)),
            Self::PutService(key, service) => {
                write!(f, "put service {key:?} {}", ServiceText(service))
            }
            Self::PutFrontend(key, frontend) => {
                write!(f, "put frontend {key:?} {}", FrontendText(key, frontend))
            }
            Self::MoveFrontend(key, frontend, left) => {
                write!(
                    f,
                    "put frontend {key:?} {}, no longer of {left:?}",
                    FrontendText(key, frontend)
                )
            }
            Self::DelFrontend(key, _) => write!(f, "del frontend {key:?}"),
            Self::DelService(key) => write!(f, "del service {key:?}"),
            Self::DelMaglev(key) => write!(f, "del {}", maglev(key)),
            Self::DelSlot(key) => write!(f, "del {}", slot(key)),
            Self::DelSourceRange(key) => write!(f, "del {}", range(key)),
            Self::DelEndpoint(key) => write!(f, "del {}", endpoint(key)),
        }
    }
}

#[cfg(test)]
mod tests;
