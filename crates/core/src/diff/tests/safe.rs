//! The checks after every single write.

use std::collections::BTreeSet;

use proxy_common::addr::{Addr, Proto, SockAddr};
use proxy_common::frontend::{
    Algorithm, Backend, EndpointKey, FrontendKey, FrontendKind, Service, Set, SetKey, SlotKey,
};
use proxy_common::policy::{self, Origin};

use crate::diff::Change;
use crate::tables::{FamilyTables, RangeKey, Tables};

/// Applies `changes` one by one. Returns an error after the first unsafe write, or for a wrong
/// final state.
pub(super) fn walk(old: &Tables, new: &Tables, changes: Vec<Change>) -> Result<(), String> {
    let now = walk_with(old, new, changes, |_| true)?;
    if now == *new {
        Ok(())
    } else {
        Err(format!("ends in\n{now}"))
    }
}

/// Like [`walk`], but applies only `accepted` changes. Omits later changes of the same service
/// ports, as [`Change::services`] requires.
pub(super) fn walk_with(
    old: &Tables,
    new: &Tables,
    changes: Vec<Change>,
    mut accepted: impl FnMut(&Change) -> bool,
) -> Result<Tables, String> {
    let mut now = old.clone();
    let mut failed = BTreeSet::new();
    for change in changes {
        if change.services().any(|service| failed.contains(&service)) || !accepted(&change) {
            failed.extend(change.services());
            continue;
        }
        now.apply(&change);
        let v4 = Moment {
            now: &now.v4,
            old: &old.v4,
            new: &new.v4,
        };
        let v6 = Moment {
            now: &now.v6,
            old: &old.v6,
            new: &new.v6,
        };
        v4.check()
            .and_then(|()| v6.check())
            .map_err(|wrong| format!("after {change}: {wrong}"))?;
    }
    Ok(now)
}

/// The tables between two writes, with the states before and after all of them.
struct Moment<'a, A: Addr> {
    now: &'a FamilyTables<A>,
    old: &'a FamilyTables<A>,
    new: &'a FamilyTables<A>,
}

impl<A: Addr> Moment<'_, A> {
    /// Checks that a client that dials now gets the result of the old or the new state.
    fn check(&self) -> Result<(), String> {
        for key in self
            .old
            .frontends
            .keys()
            .filter(|key| self.new.frontends.contains_key(key))
        {
            if !self.now.frontends.contains_key(key) {
                return Err(format!("{key:?} has vanished"));
            }
        }
        for (key, frontend) in self
            .now
            .frontends
            .iter()
            .filter(|(_, frontend)| frontend.kind != FrontendKind::ADDRESS)
        {
            let name = &frontend.service;
            let service = self
                .now
                .services
                .get(name)
                .ok_or_else(|| format!("{key:?} leads to no service"))?;
            if frontend.kind == FrontendKind::LOAD_BALANCER {
                self.check_source_ranges(name, service)?;
                self.check_clients(key)?;
            }
        }
        for (name, service) in &self.now.services {
            for set in Set::ALL {
                self.check_set(name, service, set)?;
            }
            self.check_served(name)?;
        }
        self.check_endpoints()
    }

    /// Checks that every slot of a set has a backend of the old or the new state.
    fn check_set(&self, name: &FrontendKey<A>, service: &Service, set: Set) -> Result<(), String> {
        for index in 0..service.count(set) {
            let backend = self.check_slot(SlotKey::new(*name, set, index))?;
            // Flows and affinities of a backend need its endpoint row.
            let endpoint = EndpointKey::new(*name, SockAddr::new(backend.addr, backend.port));
            let remembers =
                |service: &Service| name.proto == Proto::UDP || service.affinity_secs > 0;
            let always = remembers(service) && self.new.services.get(name).is_some_and(remembers);
            if always && !self.now.endpoints.contains_key(&endpoint) {
                return Err(format!("{endpoint:?} is not known"));
            }
        }
        let has_table = service.algorithm == Algorithm::MAGLEV || service.has(Service::WEIGHTED);
        if has_table && service.count(set) > 0 {
            let maglev = self.now.maglev.get(&SetKey::new(*name, set));
            let maglev = maglev.ok_or_else(|| format!("{name:?} has no maglev table"))?;
            for index in 0..=maglev.slots.iter().copied().max().unwrap_or_default() {
                self.check_slot(SlotKey::new(*name, set, index))?;
            }
        }
        Ok(())
    }

    fn check_slot(&self, slot: SlotKey<A>) -> Result<Backend<A>, String> {
        let backend = self
            .now
            .slots
            .get(&slot)
            .ok_or_else(|| format!("{slot:?} is a hole"))?;
        let mut members = [self.old, self.new]
            .into_iter()
            .flat_map(|state| members(state, &slot.service, slot.set));
        if members.any(|member| member == backend) {
            Ok(*backend)
        } else {
            Err(format!(
                "{slot:?} holds {backend:?}, which is of neither state"
            ))
        }
    }

    fn check_served(&self, name: &FrontendKey<A>) -> Result<(), String> {
        for (kind, origin) in [
            (FrontendKind::CLUSTER_IP, Origin::POD),
            (FrontendKind::NODE_PORT, Origin::EXTERNAL),
            (FrontendKind::NODE_PORT, Origin::NODE),
        ] {
            let served = |state: &FamilyTables<A>| {
                let service = state.services.get(name);
                service.is_some_and(|service| service.count(policy::set(kind, service, origin)) > 0)
            };
            if served(self.old) && served(self.new) && !served(self.now) {
                return Err(format!("{name:?} has no backends for a while"));
            }
        }
        Ok(())
    }

    /// Checks the source ranges of a load balancer: a client that neither state admits is refused,
    /// and a client that both states admit is admitted.
    fn check_source_ranges(&self, name: &FrontendKey<A>, service: &Service) -> Result<(), String> {
        let states = || [self.old, self.new].into_iter();
        let guarded = |state: &&FamilyTables<A>| {
            state
                .services
                .get(name)
                .is_some_and(|service| service.has(Service::SOURCE_RANGES))
        };
        let open = |state: &FamilyTables<A>| {
            let kind = FrontendKind::LOAD_BALANCER;
            !guarded(&state)
                && state
                    .frontends
                    .values()
                    .any(|it| it.kind == kind && it.service == *name)
        };
        if !service.has(Service::SOURCE_RANGES) {
            return if states().any(open) {
                Ok(())
            } else {
                Err(format!("{name:?} is open to everyone"))
            };
        }
        let now = ranges(self.now, name);
        if states()
            .filter(guarded)
            .any(|state| ranges(state, name).is_subset(&now))
        {
            Ok(())
        } else {
            Err(format!("{name:?} lacks source ranges"))
        }
    }

    /// Checks that no client reaches a load balancer address if neither state admits it.
    fn check_clients(&self, key: &FrontendKey<A>) -> Result<(), String> {
        let clients = self.now.source_ranges.iter().map(|range| range.range.addr);
        let mut clients = clients.filter(|client| {
            admits(self.now, key, *client)
                && !admits(self.old, key, *client)
                && !admits(self.new, key, *client)
        });
        clients.next().map_or(Ok(()), |client| {
            Err(format!("{key:?} lets {:?} in", client.ip()))
        })
    }

    /// Checks that a client of a deleted endpoint gets a replacement.
    fn check_endpoints(&self) -> Result<(), String> {
        for key in self
            .old
            .endpoints
            .keys()
            .filter(|key| !self.now.endpoints.contains_key(key))
        {
            let name = &key.service;
            let settled = |set| {
                let table = SetKey::new(*name, set);
                let table_is_new = self
                    .new
                    .maglev
                    .get(&table)
                    .is_none_or(|new| self.now.maglev.get(&table) == Some(new));
                table_is_new && members(self.now, name, set).eq(members(self.new, name, set))
            };
            let settled = self.now.services.get(name) == self.new.services.get(name)
                && Set::ALL.into_iter().all(settled);
            if !settled {
                return Err(format!("{key:?} has gone too early"));
            }
        }
        Ok(())
    }
}

fn members<'a, A: Addr>(
    tables: &'a FamilyTables<A>,
    service: &FrontendKey<A>,
    set: Set,
) -> impl Iterator<Item = &'a Backend<A>> {
    let count = tables
        .services
        .get(service)
        .map_or(0, |service| service.count(set));
    let service = *service;
    (0..count).filter_map(move |index| tables.slots.get(&SlotKey::new(service, set, index)))
}

fn ranges<A: Addr>(tables: &FamilyTables<A>, service: &FrontendKey<A>) -> BTreeSet<RangeKey<A>> {
    tables
        .source_ranges
        .iter()
        .filter(|key| key.range.service == *service)
        .copied()
        .collect()
}

fn admits<A: Addr>(tables: &FamilyTables<A>, key: &FrontendKey<A>, client: A) -> bool {
    let Some(frontend) = tables.frontends.get(key) else {
        return false;
    };
    let service = tables.services.get(&frontend.service);
    let guarded = frontend.kind == FrontendKind::LOAD_BALANCER
        && service.is_some_and(|service| service.has(Service::SOURCE_RANGES));
    !guarded
        || ranges(tables, &frontend.service)
            .iter()
            .any(|range| contains(range, client))
}

fn contains<A: Addr>(range: &RangeKey<A>, client: A) -> bool {
    let prefix =
        u8::try_from(range.bits - proxy_common::frontend::SourceRange::<A>::SERVICE_BITS).unwrap();
    ipnet::IpNet::new(range.range.addr.ip(), prefix)
        .unwrap()
        .contains(&client.ip())
}
