//! What the maps should hold, as a function of the models, and how that reads as text.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::frontend::{Backend, Frontend, FrontendKey, FrontendKind, Service, Set, SlotKey};

use crate::model::{FamilyModel, NodeModel, ServiceModel, ServicePort};
use crate::store::Store;

/// The contents of the maps that say where packets go.
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
}

impl<A: Addr> Default for FamilyTables<A> {
    fn default() -> Self {
        Self { frontends: BTreeMap::new(), services: BTreeMap::new(), slots: BTreeMap::new() }
    }
}

impl Tables {
    /// The desired state, from scratch. [`crate::desired::Desired`] keeps the same up to date at less cost.
    pub fn of(store: &Store) -> Self {
        let node = NodeModel::of(store);
        let models: Vec<_> = store.services().map(|(name, _)| ServiceModel::of(store, name, &node).0).collect();
        Self {
            v4: FamilyTables::of(models.iter().filter_map(|model| model.v4.as_ref())),
            v6: FamilyTables::of(models.iter().filter_map(|model| model.v6.as_ref())),
        }
    }
}

impl<A: Addr> FamilyTables<A> {
    /// A frontend that several models claim goes to the least claim.
    pub fn of<'a>(models: impl Iterator<Item = &'a FamilyModel<A>>) -> Self {
        let mut models: Vec<_> = models.collect();
        models.sort_unstable_by_key(|model| &model.claim);
        let mut tables = Self::default();
        for model in models {
            for key in model.frontends.keys() {
                if !tables.frontends.contains_key(key) {
                    tables.insert(key, model);
                }
            }
        }
        tables
    }

    /// Adds the rows of one frontend as `model` has them: its own and, where it names a service port, that one's.
    pub fn insert(&mut self, key: &FrontendKey<A>, model: &FamilyModel<A>) {
        self.frontends.extend(model.frontends.get_key_value(key));
        if let Some(port) = model.ports.get(key) {
            self.services.insert(*key, port.service());
            for set in Set::ALL {
                let backends = (0..u16::MAX).zip(port.backends(set));
                self.slots.extend(backends.map(|(index, backend)| (SlotKey::new(*key, set, index), *backend)));
            }
        }
    }

    /// The rows of these frontends and the service ports that they name, on their own.
    pub fn part<'a>(&self, keys: impl Iterator<Item = &'a FrontendKey<A>>) -> Self {
        let mut part = Self::default();
        for key in keys {
            part.frontends.extend(self.frontends.get_key_value(key));
            part.services.extend(self.services.get_key_value(key));
            part.slots.extend(self.slots_of(key));
        }
        part
    }

    fn slots_of(&self, service: &FrontendKey<A>) -> impl Iterator<Item = (&SlotKey<A>, &Backend<A>)> {
        let [first, .., last] = Set::ALL;
        self.slots.range(SlotKey::new(*service, first, 0)..=SlotKey::new(*service, last, u16::MAX))
    }
}

impl<A: Addr> ServicePort<A> {
    fn service(&self) -> Service {
        let count = |set| u16::try_from(self.backends(set).len()).expect("a model's sets are cut to 65,535 backends");
        Service::new(count(Set::CLUSTER), count(Set::LOCAL), self.flags)
    }

    fn backends(&self, set: Set) -> &[Backend<A>] {
        if set == Set::LOCAL { &self.local } else { &self.cluster }
    }
}

impl fmt::Display for Tables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.v4, self.v6)
    }
}

/// One paragraph for each frontend or service port. Every row is shown, also one that should not be there.
impl<A: Addr> fmt::Display for FamilyTables<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys = self.frontends.keys().chain(self.services.keys()).chain(self.slots.keys().map(|slot| &slot.service));
        for key in keys.collect::<BTreeSet<_>>() {
            write!(f, "{key:?}")?;
            if let Some(frontend) = self.frontends.get(key) {
                write!(f, " {}", FrontendText(key, frontend))?;
            }
            if let Some(service) = self.services.get(key) {
                write!(f, " {}", ServiceText(service))?;
            }
            writeln!(f)?;
            for (slot, backend) in self.slots_of(key) {
                writeln!(f, "  {}[{}] -> {}", set_name(slot.set), slot.index, BackendText(backend))?;
            }
        }
        Ok(())
    }
}

/// A frontend's kind, and the service port to which it leads if that is not itself.
pub(crate) struct FrontendText<'a, A: Addr>(pub(crate) &'a FrontendKey<A>, pub(crate) &'a Frontend<A>);
pub(crate) struct ServiceText<'a>(pub(crate) &'a Service);
pub(crate) struct BackendText<'a, A: Addr>(pub(crate) &'a Backend<A>);

pub(crate) fn set_name(set: Set) -> &'static str {
    if set == Set::LOCAL { "local" } else { "cluster" }
}

impl<A: Addr> fmt::Display for FrontendText<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(key, frontend) = self;
        match frontend.kind {
            FrontendKind::ADDRESS => f.write_str("address")?,
            FrontendKind::CLUSTER_IP => f.write_str("cluster-ip")?,
            unknown => write!(f, "{unknown:?}")?,
        }
        if frontend.service == **key { Ok(()) } else { write!(f, " of {:?}", frontend.service) }
    }
}

impl fmt::Display for ServiceText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(service) = self;
        write!(f, "cluster={} local={}", service.count(Set::CLUSTER), service.count(Set::LOCAL))?;
        for (flag, name) in [(Service::INTERNAL_LOCAL, "internal-local"), (Service::HAS_ENDPOINTS, "has-endpoints")] {
            if service.has(flag) {
                write!(f, " {name}")?;
            }
        }
        Ok(())
    }
}

impl<A: Addr> fmt::Display for BackendText<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(backend) = self;
        let at = std::net::SocketAddr::new(backend.addr.ip(), backend.port.get());
        write!(f, "{at}{}", if backend.is_local() { " local" } else { "" })
    }
}
