//! Adds the routes of a host in host mode.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use proxy_common::addr::Addr;

use super::Desired;
use super::family::Family;
use crate::input::ObjectName;
use crate::model::{Lead, Outside, Unreachable, endpoint_addresses};

impl Desired {
    /// Returns the view of the cluster in host mode.
    pub fn outside(&self) -> Option<&Outside> {
        self.node.outside.as_ref()
    }

    /// Returns all addresses whose routes the state depends on.
    pub fn addresses_to_reach(&self) -> BTreeSet<IpAddr> {
        let nodes = self.outside().into_iter().flat_map(Outside::node_addresses);
        self.store.slices().flat_map(endpoint_addresses).chain(nodes).collect()
    }

    /// Returns the addresses among them without a known route.
    pub fn addresses_to_ask_for(&self) -> BTreeSet<IpAddr> {
        let Some(outside) = self.outside() else { return BTreeSet::new() };
        let slices = self.dirty.iter().flat_map(|name| self.store.slices_of(name));
        let addresses = slices.flat_map(|slice| endpoint_addresses(slice)).chain(outside.node_addresses());
        addresses.filter(|ip| outside.lead(ip).is_none()).collect()
    }

    /// Takes in the routes' classes. The new ones extend the known ones, or replace them if `all` is set.
    pub fn learn_leads(&mut self, leads: BTreeMap<IpAddr, Lead>, all: bool) {
        let (Some(reach), Some(outside)) = (&mut self.options.reach, &mut self.node.outside) else { return };
        let changed = outside.learn(reach, leads, all);
        if outside.node_addresses().any(|ip| changed.contains(&ip)) {
            self.dirty.extend(self.store.services().map(|(name, _)| name.clone()));
        } else if !changed.is_empty() {
            let touched = |name: &ObjectName| {
                self.store.slices_of(name).any(|slice| !endpoint_addresses(slice).is_disjoint(&changed))
            };
            self.dirty.extend(self.store.services().map(|(name, _)| name).filter(|name| touched(name)).cloned());
        }
    }

    /// Returns true if a backend is a socket of this host.
    pub fn has_own_backend(&self) -> bool {
        let leads = self.options.reach.iter().flat_map(|reach| reach.leads.values());
        leads.into_iter().any(|lead| *lead == Lead::Own)
    }

    /// Returns the backends left out since the last sync because this host does not reach them, by Service.
    pub fn unreachable(&self) -> BTreeMap<&ObjectName, Vec<&Unreachable>> {
        let mut all: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (service, unreachable) in self.v4.unreachable().chain(self.v6.unreachable()) {
            all.entry(service).or_default().push(unreachable);
        }
        all
    }

    /// Returns the Services that have backends but none within reach, with those backends.
    pub fn cut_off(&self) -> BTreeMap<&ObjectName, Vec<&Unreachable>> {
        let mut all = self.unreachable();
        all.retain(|service, _| !self.v4.is_served(service) && !self.v6.is_served(service));
        all
    }
}

impl<A: Addr> Family<A> {
    fn unreachable(&self) -> impl Iterator<Item = (&ObjectName, &Unreachable)> {
        self.models.iter().flat_map(|(service, model)| model.unreachable.iter().map(move |one| (service, one)))
    }

    /// Returns true if any port of a Service has a backend.
    fn is_served(&self, service: &ObjectName) -> bool {
        self.models.get(service).is_some_and(|model| model.ports.values().any(|port| !port.cluster.is_empty()))
    }
}
