//! The LocalRedirects, indexed by Service.

use std::collections::{BTreeMap, BTreeSet};
use std::iter::from_fn;
use std::ops::Bound;
use std::sync::Arc;

use super::{Dirty, Kind};
use crate::compact::{LocalRedirect, Service, Shared};
use crate::input::{ObjectName, Update};

#[derive(Clone, Debug, Default)]
pub(super) struct Redirects {
    pub(super) kind: Kind<LocalRedirect>,
    /// The LocalRedirects that name each Service of their namespace, existing or not. A tenant may
    /// create thousands.
    of: BTreeMap<ObjectName, BTreeSet<ObjectName>>,
    /// The stand-in Services for LocalRedirects of addresses.
    pub(super) of_addresses: BTreeMap<ObjectName, Arc<Service>>,
}

impl Redirects {
    pub(super) fn apply(&mut self, update: Update<LocalRedirect>) -> Dirty {
        let mut services = BTreeSet::new();
        let mut objects = BTreeSet::new();
        let Self {
            kind,
            of,
            of_addresses,
        } = self;
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

    /// Returns the Services in these namespaces that a LocalRedirect redirects.
    pub(super) fn services_in(
        &self,
        namespaces: &BTreeSet<Shared>,
    ) -> impl Iterator<Item = ObjectName> {
        let in_namespace = |namespace: &Shared| {
            let first = ObjectName::new(namespace.clone(), "");
            let services = self.of.range(first.clone()..).map(|(service, _)| service);
            services
                .take_while(move |service| service.namespace == first.namespace)
                .cloned()
        };
        namespaces.iter().flat_map(in_namespace)
    }

    /// Returns the Services after `name`, or all if `name` is `None`, merged with the stand-ins.
    pub(super) fn with_stand_ins<'a>(
        &'a self,
        services: &'a BTreeMap<ObjectName, Arc<Service>>,
        name: Option<&ObjectName>,
    ) -> impl Iterator<Item = (&'a ObjectName, &'a Arc<Service>)> {
        let after = (
            name.map_or(Bound::Unbounded, Bound::Excluded),
            Bound::Unbounded,
        );
        let [mut objects, mut stand_ins] = [services, &self.of_addresses]
            .map(|services| services.range::<ObjectName, _>(after).peekable());
        from_fn(move || match (objects.peek(), stand_ins.peek()) {
            // A manifest may give a Service the name of a stand-in.
            (Some((object, _)), Some((stand_in, _))) if stand_in == object => {
                stand_ins.next();
                objects.next()
            }
            (Some((object, _)), Some((stand_in, _))) if stand_in < object => stand_ins.next(),
            (Some(_), _) => objects.next(),
            (None, _) => stand_ins.next(),
        })
    }

    pub(super) fn of<'a>(
        &'a self,
        service: &ObjectName,
    ) -> impl Iterator<Item = &'a LocalRedirect> {
        let names = self.of.get(service).into_iter().flatten();
        names
            .filter_map(|name| self.kind.objects.get(name))
            .map(Arc::as_ref)
    }
}

fn forget(
    of: &mut BTreeMap<ObjectName, BTreeSet<ObjectName>>,
    service: &ObjectName,
    object: &ObjectName,
) {
    if let Some(objects) = of.get_mut(service) {
        objects.remove(object);
        if objects.is_empty() {
            of.remove(service);
        }
    }
}
