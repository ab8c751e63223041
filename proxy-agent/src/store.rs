//! The objects as last seen. Nothing is interpreted here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Node, Service};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::ServiceCIDR;

use crate::input::{Input, ObjectName, Update};
use crate::ip_family::IpFamily;
use crate::metrics::Trigger;

/// The label by which an EndpointSlice names its Service (well-known label of discovery.k8s.io).
const SERVICE_NAME: &str = "kubernetes.io/service-name";
/// The annotation by which an EndpointSlice says when came to pass what it tells, in RFC 3339.
pub(crate) const LAST_CHANGE_TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";

/// The objects as last seen, and the name of the node that looks.
#[derive(Clone, Debug)]
pub struct Store {
    node_name: String,
    services: Kind<Service>,
    slices: Kind<EndpointSlice>,
    /// Which slices name a Service, whether or not it exists yet.
    slices_of: BTreeMap<ObjectName, BTreeSet<ObjectName>>,
    nodes: Kind<Node>,
    service_cidrs: Kind<ServiceCIDR>,
}

/// What an input makes out of date.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Dirty {
    /// These Services, whose objects changed. They need not exist.
    Services(BTreeSet<ObjectName>),
    /// These Services, whose slices changed. They need not exist.
    Endpoints {
        services: BTreeSet<ObjectName>,
        slices: usize,
        triggers: Vec<Trigger>,
    },
    /// This node, on which every Service may depend.
    Node,
    ServiceCidrs,
}

impl Store {
    pub fn new(node_name: impl Into<String>) -> Self {
        Self {
            node_name: node_name.into(),
            services: Kind::default(),
            slices: Kind::default(),
            slices_of: BTreeMap::new(),
            nodes: Kind::default(),
            service_cidrs: Kind::default(),
        }
    }

    pub fn apply(&mut self, input: Input) -> Dirty {
        match input {
            Input::Service(update) => {
                let mut dirty = BTreeSet::new();
                self.services.apply(update, |name, _, _| {
                    dirty.insert(name.clone());
                });
                Dirty::Services(dirty)
            }
            Input::EndpointSlice(update) => self.apply_slices(update),
            Input::Node(update) => {
                self.nodes.apply(update, |_, _, _| {});
                Dirty::Node
            }
            Input::ServiceCidr(update) => {
                self.service_cidrs.apply(update, |_, _, _| {});
                Dirty::ServiceCidrs
            }
        }
    }

    /// A slice dirties the Service that it names; if its label changed, the one that it named before too.
    fn apply_slices(&mut self, update: Update<EndpointSlice>) -> Dirty {
        let (mut dirty, mut slices, mut triggers) = (BTreeSet::new(), 0, Vec::new());
        let slices_of = &mut self.slices_of;
        self.slices.apply(update, |slice, old, new| {
            slices += 1;
            triggers.extend(trigger(old, new));
            if let Some(service) = old.and_then(service_of)
                && let Some(slices) = slices_of.get_mut(&service)
            {
                slices.remove(slice);
                if slices.is_empty() {
                    slices_of.remove(&service);
                }
                dirty.insert(service);
            }
            if let Some(service) = new.and_then(service_of) {
                slices_of.entry(service.clone()).or_default().insert(slice.clone());
                dirty.insert(service);
            }
        });
        Dirty::Endpoints { services: dirty, slices, triggers }
    }

    /// Whether every kind has been listed. Before that, absent does not mean deleted.
    pub fn is_complete(&self) -> bool {
        self.services.listed && self.slices.listed && self.nodes.listed && self.service_cidrs.listed
    }

    pub fn node_name(&self) -> &str {
        &self.node_name
    }

    /// The object of this node, whatever others a source delivers.
    pub fn node(&self) -> Option<&Node> {
        self.nodes.objects.get(&ObjectName::new("", &self.node_name)).map(Arc::as_ref)
    }

    pub fn service(&self, name: &ObjectName) -> Option<&Service> {
        self.services.objects.get(name).map(Arc::as_ref)
    }

    pub fn services(&self) -> impl Iterator<Item = (&ObjectName, &Arc<Service>)> {
        self.services.objects.iter()
    }

    /// The slices that name `service`, by name.
    pub fn slices_of(&self, service: &ObjectName) -> impl Iterator<Item = &Arc<EndpointSlice>> {
        let names = self.slices_of.get(service).into_iter().flatten();
        names.filter_map(|name| self.slices.objects.get(name))
    }

    pub fn service_cidrs(&self) -> impl Iterator<Item = &ServiceCIDR> {
        self.service_cidrs.objects.values().map(Arc::as_ref)
    }
}

/// When the change of a slice came to pass. The annotation of one that was deleted tells of the change before.
fn trigger(old: Option<&EndpointSlice>, new: Option<&EndpointSlice>) -> Option<Trigger> {
    let slice = new.or(old)?;
    let (service, family) = (service_of(slice)?, IpFamily::from_name(&slice.address_type)?);
    let Some(new) = new else { return Some(Trigger { service, family, at: None }) };
    let at = new.metadata.annotations.as_ref()?.get(LAST_CHANGE_TRIGGER_TIME)?.parse().ok()?;
    Some(Trigger { service, family, at: Some(at) })
}

fn service_of(slice: &EndpointSlice) -> Option<ObjectName> {
    let service = slice.metadata.labels.as_ref()?.get(SERVICE_NAME)?;
    let namespace = slice.metadata.namespace.as_deref().unwrap_or_default();
    (!service.is_empty()).then(|| ObjectName::new(namespace, service))
}

/// The objects of one kind; shared with those who look at them while the next input is taken in.
#[derive(Clone, Debug)]
struct Kind<K> {
    objects: BTreeMap<ObjectName, Arc<K>>,
    listed: bool,
}

impl<K> Default for Kind<K> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), listed: false }
    }
}

impl<K: kube::Resource + PartialEq> Kind<K> {
    /// Calls `changed(name, old, new)` for every object of which `update` really changes something.
    fn apply(&mut self, update: Update<K>, mut changed: impl FnMut(&ObjectName, Option<&K>, Option<&K>)) {
        match update {
            Update::All(objects) => {
                self.listed = true;
                let objects = objects.into_iter().map(|object| (ObjectName::from(&object), Arc::new(object))).collect();
                let before = std::mem::replace(&mut self.objects, objects);
                for (name, old) in &before {
                    if !self.objects.contains_key(name) {
                        changed(name, Some(old), None);
                    }
                }
                for (name, new) in &self.objects {
                    let old = before.get(name);
                    let old = old.map(Arc::as_ref);
                    if old != Some(new) {
                        changed(name, old, Some(new));
                    }
                }
            }
            Update::Put(object) => {
                let name = ObjectName::from(&*object);
                let old = self.objects.get(&name).map(Arc::as_ref);
                if old != Some(&*object) {
                    changed(&name, old, Some(&object));
                    self.objects.insert(name, Arc::new(*object));
                }
            }
            Update::Del(name) => {
                if let Some(old) = self.objects.remove(&name) {
                    changed(&name, Some(&old), None);
                }
            }
        }
    }
}

#[cfg(test)]
impl Store {
    /// What a source says that starts now.
    pub(crate) fn lists(&self) -> [Input; 4] {
        fn all<K: Clone>(kind: &Kind<K>) -> Update<K> {
            Update::All(kind.objects.values().map(|object| K::clone(object)).collect())
        }
        [
            Input::Service(all(&self.services)),
            Input::EndpointSlice(all(&self.slices)),
            Input::Node(all(&self.nodes)),
            Input::ServiceCidr(all(&self.service_cidrs)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builders::{names, service, slice};

    fn dirty(store: &mut Store, input: impl Into<Input>) -> Vec<String> {
        let (Dirty::Services(dirty) | Dirty::Endpoints { services: dirty, .. }) = store.apply(input.into()) else {
            panic!("not of Services")
        };
        dirty.iter().map(ObjectName::to_string).collect()
    }

    #[test]
    fn an_input_dirties_what_it_changes() {
        let mut store = Store::new("here");
        let web = || slice("web-1", "web").port("", "TCP", 80).ready("10.244.0.5");
        assert_eq!(dirty(&mut store, web()), ["default/web"], "a slice may come before its Service");
        assert_eq!(dirty(&mut store, service("web")), ["default/web"]);
        assert_eq!(dirty(&mut store, web()), [""; 0], "seen before");
        assert_eq!(dirty(&mut store, web().ready("10.244.0.6")), ["default/web"]);
        let other = slice("web-1", "other").port("", "TCP", 80);
        assert_eq!(dirty(&mut store, other.clone()), ["default/other", "default/web"], "label changed");
        assert_eq!(store.slices_of(&ObjectName::new("default", "web")).count(), 0);
        assert_eq!(dirty(&mut store, other.clone().without_service()), ["default/other"], "label removed");
        assert_eq!(dirty(&mut store, other.clone().without_service()), [""; 0]);
        assert_eq!(dirty(&mut store, other.clone()), ["default/other"], "label added");
        assert_eq!(dirty(&mut store, other.deleted()), ["default/other"]);
        assert_eq!(dirty(&mut store, other.deleted()), [""; 0], "gone before");
    }

    #[test]
    fn a_list_dirties_only_what_differs() {
        let mut store = Store::new("here");
        let list = |objects: Vec<Service>| Input::Service(Update::All(objects));
        let web = service("web").cluster_ip("10.96.0.1");
        assert_eq!(
            dirty(&mut store, list(vec![web.object(), service("old").object(), service("same").object()])),
            names(["old", "same", "web"])
        );
        let relisted = vec![web.cluster_ip("10.96.0.2").object(), service("same").object(), service("new").object()];
        assert_eq!(dirty(&mut store, list(relisted)), names(["new", "old", "web"]));
    }

    #[test]
    fn a_store_is_complete_once_every_kind_was_listed() {
        let mut store = Store::new("here");
        let lists = [
            Input::Service(Update::All(vec![])),
            Input::EndpointSlice(Update::All(vec![])),
            Input::Node(Update::All(vec![])),
            Input::ServiceCidr(Update::All(vec![])),
        ];
        let _ = store.apply(service("web").into());
        for list in lists {
            assert!(!store.is_complete());
            let _ = store.apply(list);
        }
        assert!(store.is_complete());
    }
}
