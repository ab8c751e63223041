//! The contents of the maps, as a function of the models.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use proxy_common::addr::{Addr, Addr4, Addr6, Port, SockAddr};
use proxy_common::frontend::{
    Backend, Endpoint, EndpointKey, Frontend, FrontendKey, Maglev, Service, Set, SetKey, SlotKey,
    SourceRange,
};
use proxy_common::names;

use crate::model::{FamilyModel, ModelOptions, NodeModel, ServiceModel};
use crate::room::{Rows, maps};
use crate::shares::{self, Room, Shares};
use crate::store::Store;

mod text;

pub use text::*;

/// The contents of the maps that the programs look up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tables {
    pub v4: FamilyTables<Addr4>,
    pub v6: FamilyTables<Addr6>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FamilyTables<A: Addr> {
    pub frontends: BTreeMap<FrontendKey<A>, Frontend<A>>,
    pub services: BTreeMap<FrontendKey<A>, Service>,
    pub slots: BTreeMap<SlotKey<A>, Backend<A>>,
    pub endpoints: BTreeMap<EndpointKey<A>, Endpoint>,
    pub maglev: BTreeMap<SetKey<A>, Arc<Maglev>>,
    pub source_ranges: BTreeSet<RangeKey<A>>,
}

/// A key of `SOURCE_RANGES` with its prefix length. The map is a set; its values carry no meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RangeKey<A: Addr> {
    pub range: SourceRange<A>,
    /// The LPM prefix length: [`SourceRange::SERVICE_BITS`] plus the prefix length of the address.
    pub bits: u32,
}

impl<A: Addr> RangeKey<A> {
    /// Creates a key. `prefix` counts address bits; the address's other bits are 0.
    pub fn new(service: FrontendKey<A>, addr: A, prefix: u8) -> Self {
        Self {
            range: SourceRange::new(service, addr),
            bits: SourceRange::<A>::SERVICE_BITS + u32::from(prefix),
        }
    }
}

impl<A: Addr> Default for FamilyTables<A> {
    fn default() -> Self {
        Self {
            frontends: BTreeMap::new(),
            services: BTreeMap::new(),
            slots: BTreeMap::new(),
            endpoints: BTreeMap::new(),
            maglev: BTreeMap::new(),
            source_ranges: BTreeSet::new(),
        }
    }
}

impl Tables {
    /// Returns the number of rows of each map, by map name.
    pub fn sizes(&self) -> BTreeMap<&'static str, usize> {
        self.v4
            .sizes(&names::IPV4)
            .chain(self.v6.sizes(&names::IPV6))
            .collect()
    }

    /// Builds the tables from scratch. [`crate::desired::Desired`] computes equal tables
    /// incrementally.
    pub fn of(store: &Store, options: &ModelOptions) -> Self {
        Self::within(Room::default(), store, options)
    }

    /// Like [`Self::of`], for maps of limited capacity.
    pub fn within(room: Room, store: &Store, options: &ModelOptions) -> Self {
        let node = NodeModel {
            room,
            ..NodeModel::of(store, options)
        };
        let models: Vec<_> = store
            .services()
            .map(|(name, _)| ServiceModel::of(store, name, &node).0)
            .collect();
        Self {
            v4: FamilyTables::of(models.iter().filter_map(|model| model.v4.as_ref()), room),
            v6: FamilyTables::of(models.iter().filter_map(|model| model.v6.as_ref()), room),
        }
    }
}

impl<A: Addr> FamilyTables<A> {
    fn sizes(
        &self,
        family: &names::FamilyMaps,
    ) -> impl Iterator<Item = (&'static str, usize)> + use<A> {
        maps(family).into_iter().zip(self.rows())
    }

    /// Builds the tables of several models. The smallest claim wins a frontend that several models
    /// claim. ClusterIPs win over all other frontends, redirected addresses lose to them. Other
    /// frontends are programmed only together with the ClusterIP of their service port. Each
    /// namespace has its share of `room`.
    pub fn of<'a>(models: impl Iterator<Item = &'a FamilyModel<A>>, room: Room) -> Self {
        let mut models: Vec<_> = models.collect();
        models.sort_unstable_by_key(|model| &model.claim);
        let shares = shares::shares_of(&models, room);
        let mut holders: BTreeMap<_, &FamilyModel<A>> = BTreeMap::new();
        let claimed_frontends = |external: bool, yields: bool| {
            let claimed_frontends = models
                .iter()
                .filter(move |model| model.claim.yields == yields)
                .flat_map(|model| {
                    model
                        .frontends
                        .iter()
                        .map(move |(key, claimed)| (*model, key, claimed.frontend))
                });
            claimed_frontends
                .filter(move |(_, _, frontend)| frontend.kind.is_external() == external)
        };
        for (model, key, _) in claimed_frontends(false, false) {
            holders.entry(*key).or_insert(model);
        }
        for (model, key, frontend) in claimed_frontends(true, false) {
            let is_cluster_ip = holders.contains_key(&FrontendKey::address(key.addr));
            let has_port = holders
                .get(&frontend.service)
                .is_some_and(|holder| holder.claim == model.claim);
            if !is_cluster_ip && has_port {
                holders.entry(*key).or_insert(model);
            }
        }
        for (model, key, _) in claimed_frontends(false, true) {
            if !holders.contains_key(&FrontendKey::address(key.addr)) {
                holders.entry(*key).or_insert(model);
            }
        }
        // A frontend that does not fit stays with its Service; the next claim does not get it.
        holders.retain(|key, model| !shares.leave_out(&model.claim.service, key));
        let mut tables = Self::default();
        for (key, model) in &holders {
            tables.insert(key, model, &shares);
        }
        tables
    }

    /// Adds the rows of one frontend: its own, and those of its service port if `key` is a
    /// ClusterIP. A frontend that the host keeps has no row, but its service port serves the
    /// Service's other frontends.
    pub(crate) fn insert(
        &mut self,
        key: &FrontendKey<A>,
        model: &FamilyModel<A>,
        shares: &Shares<A>,
    ) {
        let frontend = model.frontends.get(key).map(|claimed| claimed.frontend);
        self.frontends.extend(
            frontend
                .filter(|frontend| !model.is_kept(frontend))
                .map(|frontend| (*key, frontend)),
        );
        let Some(port) = model.ports.get(key) else {
            return;
        };
        let is_plain = shares.is_plain(&model.claim.service, key);
        self.services
            .insert(*key, if is_plain { port.plain() } else { port.service });
        let direct = port.direct.as_deref().filter(|_| !is_plain);
        let direct = direct.into_iter().flat_map(|direct| {
            [
                (Set::DIRECT, &*direct.backends),
                (Set::NODES, &*direct.nodes),
            ]
        });
        let sets = Set::ALL.map(|set| (set, port.backends(set)));
        for (set, backends) in sets.into_iter().chain(direct) {
            let backends = (0..u16::MAX).zip(backends);
            self.slots.extend(
                backends.map(|(index, backend)| (SlotKey::new(*key, set, index), *backend)),
            );
        }
        self.endpoints.extend(
            port.endpoints
                .iter()
                .map(|(at, endpoint)| (EndpointKey::new(*key, *at), *endpoint)),
        );
        let maglev = port.maglev.iter().filter(|_| !is_plain);
        self.maglev
            .extend(maglev.map(|(set, table)| (SetKey::new(*key, *set), Arc::clone(table))));
        self.source_ranges.extend(
            model
                .source_ranges
                .iter()
                .map(|(addr, prefix)| RangeKey::new(*key, *addr, *prefix)),
        );
    }

    /// Returns the rows of these frontends, and of the service ports with the same keys.
    pub fn part<'a>(&self, keys: impl Iterator<Item = &'a FrontendKey<A>>) -> Self {
        let mut part = Self::default();
        for key in keys {
            part.frontends.extend(self.frontends.get_key_value(key));
            part.services.extend(self.services.get_key_value(key));
            part.slots.extend(self.slots_of(key));
            part.endpoints.extend(self.endpoints_of(key));
            part.maglev.extend(
                self.maglev_of(key)
                    .map(|(set, maglev)| (*set, Arc::clone(maglev))),
            );
            part.source_ranges.extend(self.source_ranges_of(key));
        }
        part
    }

    pub(crate) fn rows(&self) -> Rows {
        [
            self.frontends.len(),
            self.services.len(),
            self.slots.len(),
            self.endpoints.len(),
            self.maglev.len(),
            self.source_ranges.len(),
        ]
    }

    /// Returns the number of rows of a frontend and of the service port with the same key.
    pub(crate) fn rows_of(&self, key: &FrontendKey<A>) -> Rows {
        let frontends = usize::from(self.frontends.contains_key(key));
        let Some(service) = self.services.get(key) else {
            return [frontends, 0, 0, 0, 0, 0];
        };
        let slots = if service.has(Service::HANDS_OVER) {
            self.slots_of(key).count()
        } else {
            Set::ALL
                .map(|set| usize::from(service.count(set)))
                .iter()
                .sum()
        };
        let endpoints = self.endpoints_of(key).count();
        let maglev = self.maglev_of(key).count();
        [
            frontends,
            1,
            slots,
            endpoints,
            maglev,
            self.source_ranges_of(key).count(),
        ]
    }

    fn slots_of(
        &self,
        service: &FrontendKey<A>,
    ) -> impl Iterator<Item = (&SlotKey<A>, &Backend<A>)> {
        let first = SlotKey::new(*service, Set::CLUSTER, 0);
        self.slots
            .range(first..=SlotKey::new(*service, Set::NODES, u16::MAX))
    }

    // The keys sort by service port first.

    fn endpoints_of(
        &self,
        service: &FrontendKey<A>,
    ) -> impl Iterator<Item = (&EndpointKey<A>, &Endpoint)> {
        let first = EndpointKey::new(*service, SockAddr::new(A::UNSPECIFIED, Port::ANY));
        self.endpoints
            .range(first..)
            .take_while(|(key, _)| key.service == *service)
    }

    fn maglev_of(
        &self,
        service: &FrontendKey<A>,
    ) -> impl Iterator<Item = (&SetKey<A>, &Arc<Maglev>)> {
        self.maglev
            .range(SetKey::new(*service, Set::CLUSTER)..=SetKey::new(*service, Set::NODES))
    }

    fn source_ranges_of(&self, service: &FrontendKey<A>) -> impl Iterator<Item = &RangeKey<A>> {
        let first = RangeKey {
            range: SourceRange::new(*service, A::UNSPECIFIED),
            bits: 0,
        };
        self.source_ranges
            .range(first..)
            .take_while(|key| key.range.service == *service)
    }
}
