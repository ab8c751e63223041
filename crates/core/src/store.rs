//! The objects as last seen, without interpretation.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use proxy_common::frontend::Namespace;

use crate::compact::{Compact, EndpointSlice, LocalPod, LocalRedirect, Service};
use crate::input::{Input, ObjectName, Trigger, Update};
use crate::ip_family::IpFamily;
use crate::model::ObjectRef;

mod endpoints;
mod marked;
mod namespaces;
mod redirects;

use endpoints::Endpoints;
use marked::Marked;
use namespaces::Namespaces;
use redirects::Redirects;

#[derive(Clone, Debug)]
pub struct Store {
    node_name: String,
    services: Kind<Service>,
    slices: Kind<EndpointSlice>,
    /// The slices of each Service name, including names without a Service.
    slices_of: BTreeMap<ObjectName, Vec<ObjectName>>,
    endpoints: Endpoints,
    namespaces: Namespaces,
    nodes: Kind<Node>,
    service_cidrs: Kind<ServiceCIDR>,
    /// Only Services with a local redirect depend on Pods.
    pods: Kind<LocalPod>,
    redirects: Redirects,
    /// The addresses that LocalRedirects may redirect.
    redirect_addresses: Vec<IpNet>,
    marked: Marked,
    /// Set if Services may depend on Pods and LocalRedirects.
    has_redirects: bool,
    api_server: BTreeSet<SocketAddr>,
}

/// The state that an input invalidates. The names may belong to missing objects.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Dirty {
    /// The changed Services. `of_other_proxies` is set if another proxy serves or served any of
    /// them.
    Services {
        services: BTreeSet<ObjectName>,
        of_other_proxies: bool,
    },
    /// The Services of changed slices.
    Endpoints {
        services: BTreeSet<ObjectName>,
        slices: usize,
        triggers: Vec<Trigger>,
    },
    /// The Services with a possibly changed local redirect.
    Redirects {
        services: BTreeSet<ObjectName>,
        /// The changed LocalRedirects.
        objects: BTreeSet<ObjectName>,
    },
    Nothing,
    /// This node or the API server's addresses, which every Service may depend on.
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
            endpoints: Endpoints::default(),
            namespaces: Namespaces::default(),
            nodes: Kind::default(),
            service_cidrs: Kind::default(),
            pods: Kind::default(),
            redirects: Redirects::default(),
            redirect_addresses: Vec::new(),
            marked: Marked::default(),
            has_redirects: false,
            api_server: BTreeSet::new(),
        }
    }

    /// Makes Pods and LocalRedirects required kinds. LocalRedirects may redirect Services and these
    /// addresses.
    pub fn with_redirects(self, has_redirects: bool, redirect_addresses: Vec<IpNet>) -> Self {
        Self {
            has_redirects,
            redirect_addresses,
            ..self
        }
    }

    pub fn apply(&mut self, input: Input) -> Dirty {
        match input {
            Input::Service(update) => {
                let mut services = BTreeSet::new();
                let mut of_other_proxies = false;
                let Self {
                    marked,
                    endpoints,
                    namespaces,
                    ..
                } = self;
                self.services.apply(update, |name, old, new| {
                    marked.take(name, new);
                    endpoints.take_service(name, old, new);
                    namespaces.take(&name.namespace, old.is_some(), new.is_some());
                    of_other_proxies |= [old, new]
                        .into_iter()
                        .flatten()
                        .any(|service| service.is_of_other_proxy);
                    services.insert(name.clone());
                });
                let renumbered = self.namespaces.settle();
                services.extend(
                    renumbered
                        .iter()
                        .flat_map(|namespace| self.services.names_of(namespace))
                        .cloned(),
                );
                Dirty::Services {
                    services,
                    of_other_proxies,
                }
            }
            Input::EndpointSlice(update) => self.apply_slices(update),
            Input::Node(update) => {
                let mut changed = false;
                self.nodes.apply(update, |_, _, _| changed = true);
                if changed { Dirty::Node } else { Dirty::Nothing }
            }
            Input::ApiServer(addresses) => {
                self.api_server = addresses;
                Dirty::Node
            }
            Input::ServiceCidr(update) => {
                self.service_cidrs.apply(update, |_, _, _| {});
                Dirty::ServiceCidrs
            }
            Input::Pod(update) => {
                let mut namespaces = BTreeSet::new();
                self.pods.apply(update, |name, _, _| {
                    namespaces.extend([name.namespace.clone()])
                });
                let annotated = self
                    .marked
                    .redirected
                    .iter()
                    .filter(|service| namespaces.contains(&service.namespace))
                    .cloned();
                let services = annotated
                    .chain(self.redirects.services_in(&namespaces))
                    .collect();
                match self.has_redirects {
                    true => Dirty::Redirects {
                        services,
                        objects: BTreeSet::new(),
                    },
                    false => Dirty::Nothing,
                }
            }
            Input::LocalRedirect(update) => self.redirects.apply(update),
        }
    }

    /// Applies slices. A slice dirties its Service, the previous Service if the label changed, and
    /// the Services with an ExternalIP at which the slice adds or removes a pod.
    fn apply_slices(&mut self, update: Update<EndpointSlice>) -> Dirty {
        let mut dirty = BTreeSet::new();
        let mut slices = 0;
        let mut triggers = Vec::new();
        let Self {
            slices_of,
            endpoints,
            ..
        } = self;
        self.slices.apply(update, |slice, old, new| {
            slices += 1;
            dirty.extend(endpoints.take_slice(slice, old, new));
            triggers.extend(trigger(old, new));
            let [before, now] =
                [old, new].map(|slice| slice.and_then(|slice| slice.service.as_ref()));
            dirty.extend(before.into_iter().chain(now).cloned());
            if before == now {
                return;
            }
            if let Some(service) = before
                && let Some(slices) = slices_of.get_mut(service)
            {
                slices.retain(|other| other != slice);
                if slices.is_empty() {
                    slices_of.remove(service);
                }
            }
            if let Some(service) = now {
                let slices = slices_of
                    .entry(service.clone())
                    .or_insert_with(|| Vec::with_capacity(1));
                slices.insert(slices.partition_point(|other| other < slice), slice.clone());
            }
        });
        Dirty::Endpoints {
            services: dirty,
            slices,
            triggers,
        }
    }

    /// Returns true once every required kind is listed. Before that, absent does not mean deleted.
    pub fn is_complete(&self) -> bool {
        let has_redirects = !self.has_redirects || self.pods.listed && self.redirects.kind.listed;
        self.services.listed
            && self.slices.listed
            && self.nodes.listed
            && self.service_cidrs.listed
            && has_redirects
    }

    pub fn node_name(&self) -> &str {
        &self.node_name
    }

    pub fn node(&self) -> Option<&Node> {
        self.nodes
            .objects
            .get(&ObjectName::new("", &self.node_name))
            .map(Arc::as_ref)
    }

    /// Returns all Nodes that the source delivers.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.objects.values().map(Arc::as_ref)
    }

    /// Returns true if the API server refuses access to Nodes.
    pub fn is_node_refused(&self) -> bool {
        self.nodes.refused
    }

    /// Returns the addresses at which the source reaches the API server. Empty if there is no API
    /// server.
    pub fn api_server(&self) -> &BTreeSet<SocketAddr> {
        &self.api_server
    }

    pub fn service(&self, name: &ObjectName) -> Option<&Arc<Service>> {
        self.services
            .objects
            .get(name)
            .or_else(|| self.redirects.of_addresses.get(name))
    }

    /// Returns the Services with an annotation about connections to lost nodes.
    pub(crate) fn resetting(&self) -> &BTreeSet<ObjectName> {
        &self.marked.resetting
    }

    /// Returns the Services that other proxies serve.
    pub(crate) fn of_other_proxies(&self) -> impl Iterator<Item = &Service> {
        let services = self
            .marked
            .of_other_proxies
            .iter()
            .filter_map(|name| self.services.objects.get(name));
        services.map(Arc::as_ref)
    }

    pub fn services_of(&self, namespace: &str) -> impl Iterator<Item = &Arc<Service>> {
        self.services.of(namespace)
    }

    /// Returns the number of a namespace that has Services.
    pub(crate) fn namespace_number(&self, namespace: &str) -> Namespace {
        self.namespaces.number(namespace)
    }

    pub fn services(&self) -> impl Iterator<Item = (&ObjectName, &Arc<Service>)> {
        self.services_after(None)
    }

    /// Returns the Services after `name`, sorted by name, or all if `name` is `None`.
    pub(crate) fn services_after(
        &self,
        name: Option<&ObjectName>,
    ) -> impl Iterator<Item = (&ObjectName, &Arc<Service>)> {
        self.redirects.with_stand_ins(&self.services.objects, name)
    }

    pub(crate) fn redirect_addresses(&self) -> &[IpNet] {
        &self.redirect_addresses
    }

    pub fn slices_of(&self, service: &ObjectName) -> impl Iterator<Item = &Arc<EndpointSlice>> {
        // A slice's label may name a redirected address, which has no endpoints of its own.
        let names = self
            .slices_of
            .get(service)
            .filter(|_| !self.redirects.of_addresses.contains_key(service));
        let names = names.into_iter().flatten();
        names.filter_map(|name| self.slices.objects.get(name))
    }

    /// Returns the slices of other namespaces that have a pod at an ExternalIP of the Service, with
    /// that address.
    pub(crate) fn slices_at_external_ips<'a>(
        &'a self,
        name: &'a ObjectName,
        service: &Service,
    ) -> impl Iterator<Item = (IpAddr, &'a EndpointSlice)> {
        let at = |ip| self.endpoints.slices_at(ip).map(move |slice| (ip, slice));
        let slices = endpoints::external_ips(service).into_iter().flat_map(at);
        let others = slices.filter(|(_, slice)| slice.namespace != name.namespace);
        others.filter_map(|(ip, slice)| Some((ip, self.slice(slice)?)))
    }

    pub fn slices_in(&self, namespace: &str) -> impl Iterator<Item = &Arc<EndpointSlice>> {
        self.slices.of(namespace)
    }

    pub fn slice(&self, name: &ObjectName) -> Option<&EndpointSlice> {
        self.slices.objects.get(name).map(Arc::as_ref)
    }

    pub fn slices(&self) -> impl Iterator<Item = &EndpointSlice> {
        self.slices.objects.values().map(Arc::as_ref)
    }

    /// Returns the object's uid. A new object with the same name has a new uid.
    pub fn uid(&self, object: &ObjectRef) -> Option<&str> {
        let uid = match object.kind {
            "Service" => self.services.uid(&object.name),
            "EndpointSlice" => self.slices.uid(&object.name),
            "ServiceCIDR" => self.service_cidrs.uid(&object.name),
            "Pod" => self.pods.uid(&object.name),
            "LocalRedirect" => self.redirects.kind.uid(&object.name),
            _ => None,
        };
        uid.filter(|uid| !uid.is_empty())
    }

    /// Returns the Pods of this node. `None` before the first list.
    pub fn pods(&self) -> Option<impl Iterator<Item = &LocalPod>> {
        self.pods
            .listed
            .then(|| self.pods.objects.values().map(Arc::as_ref))
    }

    /// Returns the Pods of this node in a namespace, by name.
    pub fn pods_in(&self, namespace: &str) -> impl Iterator<Item = &LocalPod> {
        self.pods.of(namespace).map(Arc::as_ref)
    }

    pub fn redirects_in(&self, namespace: &str) -> impl Iterator<Item = &LocalRedirect> {
        self.redirects.kind.of(namespace).map(Arc::as_ref)
    }

    pub(crate) fn redirect(&self, name: &ObjectName) -> Option<&LocalRedirect> {
        self.redirects.kind.objects.get(name).map(Arc::as_ref)
    }

    /// Returns the LocalRedirects that name the Service, from its namespace.
    pub(crate) fn redirects_of(
        &self,
        service: &ObjectName,
    ) -> impl Iterator<Item = &LocalRedirect> {
        self.redirects.of(service)
    }

    /// Returns true if the API server refuses access to Pods.
    pub fn are_pods_refused(&self) -> bool {
        self.pods.refused
    }

    pub fn service_cidrs(&self) -> impl Iterator<Item = &ServiceCIDR> {
        self.service_cidrs.objects.values().map(Arc::as_ref)
    }
}

/// Returns the time of a slice's change. A deleted slice's annotation still has the previous
/// change.
fn trigger(old: Option<&EndpointSlice>, new: Option<&EndpointSlice>) -> Option<Trigger> {
    let slice = new.or(old)?;
    let service = slice.service.clone()?;
    let family = IpFamily::from_name(&slice.address_type)?;
    let Some(new) = new else {
        return Some(Trigger {
            service,
            family,
            at: None,
        });
    };
    Some(Trigger {
        service,
        family,
        at: Some(new.triggered?),
    })
}

/// The objects of one kind. `Arc`s let readers keep objects while the next input is applied.
#[derive(Clone, Debug)]
struct Kind<K> {
    objects: BTreeMap<ObjectName, Arc<K>>,
    listed: bool,
    refused: bool,
}

impl<K> Default for Kind<K> {
    fn default() -> Self {
        Self {
            objects: BTreeMap::new(),
            listed: false,
            refused: false,
        }
    }
}

impl<K: Compact + PartialEq> Kind<K> {
    /// Returns the objects of a namespace, by name.
    fn of(&self, namespace: &str) -> impl Iterator<Item = &Arc<K>> {
        self.named_of(namespace).map(|(_, object)| object)
    }

    fn names_of(&self, namespace: &str) -> impl Iterator<Item = &ObjectName> {
        self.named_of(namespace).map(|(name, _)| name)
    }

    fn named_of(&self, namespace: &str) -> impl Iterator<Item = (&ObjectName, &Arc<K>)> {
        let first = ObjectName::new(namespace, "");
        let objects = self.objects.range(first.clone()..);
        objects.take_while(move |(name, _)| name.namespace == first.namespace)
    }

    fn uid(&self, name: &ObjectName) -> Option<&str> {
        Some(self.objects.get(name)?.uid())
    }

    /// Calls `changed(name, old, new)` for every object that really changes.
    fn apply(
        &mut self,
        update: Update<K>,
        mut changed: impl FnMut(&ObjectName, Option<&K>, Option<&K>),
    ) {
        match update {
            Update::All(objects) => self.apply(Update::AllBut(objects, BTreeSet::new()), changed),
            Update::AllBut(objects, unreadable) => {
                (self.listed, self.refused) = (true, false);
                let kept = self
                    .objects
                    .iter()
                    .filter(|(name, _)| unreadable.contains(name));
                let kept = kept.map(|(name, object)| (name.clone(), object.clone()));
                let listed = objects
                    .into_iter()
                    .map(|object| (object.name(), Arc::new(object)));
                let objects = kept.chain(listed).collect();
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
            Update::Refused => (self.listed, self.refused) = (true, true),
            Update::Put(object) => {
                let name = object.name();
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
    /// Returns the initial lists, as a newly started source would send them.
    pub(crate) fn lists(&self) -> [Input; 7] {
        fn all<K: Clone>(kind: &Kind<K>) -> Update<K> {
            Update::All(
                kind.objects
                    .values()
                    .map(|object| K::clone(object))
                    .collect(),
            )
        }
        [
            Input::ApiServer(self.api_server.clone()),
            Input::Service(all(&self.services)),
            Input::EndpointSlice(all(&self.slices)),
            Input::Node(all(&self.nodes)),
            Input::ServiceCidr(all(&self.service_cidrs)),
            Input::Pod(all(&self.pods)),
            Input::LocalRedirect(all(&self.redirects.kind)),
        ]
    }
}

#[cfg(test)]
mod tests;
