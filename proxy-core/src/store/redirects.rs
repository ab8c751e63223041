//! Stores LocalRedirects, and finds those of a Service.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{Dirty, Kind};
use crate::compact::{LocalRedirect, Service, Shared};
use crate::input::{ObjectName, Update};

#[derive(Clone, Debug, Default)]
pub(super) struct Redirects {
    pub(super) kind: Kind<LocalRedirect>,
    /// The objects that name a Service of their namespace, whether or not that exists. A tenant may make thousands.
    of: BTreeMap<ObjectName, BTreeSet<ObjectName>>,
    /// The Services that stand for objects of addresses.
    pub(super) of_addresses: BTreeMap<ObjectName, Arc<Service>>,
}

impl Redirects {
    pub(super) fn apply(&mut self, update: Update<LocalRedirect>) -> Dirty {
        let (mut services, mut objects) = (BTreeSet::new(), BTreeSet::new());
        let Self { kind, of, of_addresses } = self;
        kind.apply(update, |name, old, new| {
            objects.insert(name.clone());
            if let Some(old) = old {
                of_addresses.remove(&old.stand_in());
                services.extend(old.service().inspect(|service| forget(of, service, name)));
            }
            let Some(new) = new else { return };
            if let Some(service) = new.service_of_address() {
                of_addresses.insert(service.name.clone(), Arc::new(service));
            }
            if let Some(service) = new.service() {
                if service.namespace == name.namespace {
                    of.entry(service.clone()).or_default().insert(name.clone());
                }
                services.insert(service);
            }
        });
        Dirty::Redirects { services, objects }
    }

    /// Returns the Services of these namespaces for which pods may answer by an object.
    pub(super) fn services_in(&self, namespaces: &BTreeSet<Shared>) -> impl Iterator<Item = ObjectName> {
        self.of.keys().filter(|service| namespaces.contains(&service.namespace)).cloned()
    }

    /// Returns the objects that name a Service of their own namespace.
    pub(super) fn of<'a>(&'a self, service: &ObjectName) -> impl Iterator<Item = &'a LocalRedirect> {
        let names = self.of.get(service).into_iter().flatten();
        names.filter_map(|name| self.kind.objects.get(name)).map(Arc::as_ref)
    }
}

fn forget(of: &mut BTreeMap<ObjectName, BTreeSet<ObjectName>>, service: &ObjectName, object: &ObjectName) {
    if let Some(objects) = of.get_mut(service) {
        objects.remove(object);
        if objects.is_empty() {
            of.remove(service);
        }
    }
}
