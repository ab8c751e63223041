//! The routes of a host in host mode.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto};
use proxy_common::frontend::FrontendKey;

use super::Desired;
use super::family::Family;
use crate::input::ObjectName;
use crate::model::{
    ClusterRoute, FamilyModel, HostMode, TunnelledPod, Unreachable, endpoint_addresses,
};

impl Desired {
    /// Returns the cluster's nodes and the host's routes to them. `None` on a node.
    pub fn host_mode(&self) -> Option<&HostMode> {
        self.node.host_mode.as_ref()
    }

    /// Returns the addresses of all endpoints and nodes.
    pub fn addresses_to_reach(&self) -> BTreeSet<IpAddr> {
        let nodes = self
            .host_mode()
            .into_iter()
            .flat_map(HostMode::node_addresses);
        self.store
            .slices()
            .flat_map(endpoint_addresses)
            .chain(nodes)
            .collect()
    }

    /// Returns the addresses without a known route, of nodes and changed Services' endpoints.
    pub fn addresses_to_ask_for(&self) -> BTreeSet<IpAddr> {
        let Some(host_mode) = self.host_mode() else {
            return BTreeSet::new();
        };
        let slices = self
            .dirty
            .iter()
            .flat_map(|name| self.store.slices_of(name));
        let addresses = slices
            .flat_map(|slice| endpoint_addresses(slice))
            .chain(host_mode.node_addresses());
        addresses
            .filter(|ip| host_mode.route(ip).is_none())
            .collect()
    }

    /// Adds route classes, or replaces all of them if `all` is set.
    pub fn update_routes(&mut self, routes: BTreeMap<IpAddr, ClusterRoute>, all: bool) {
        let (Some(host_routes), Some(host_mode)) =
            (&mut self.options.host_routes, &mut self.node.host_mode)
        else {
            return;
        };
        let changed = host_mode.update(host_routes, routes, all);
        if host_mode.node_addresses().any(|ip| changed.contains(&ip)) {
            self.dirty
                .extend(self.store.services().map(|(name, _)| name.clone()));
        } else if !changed.is_empty() {
            let touched = |name: &ObjectName| {
                self.store
                    .slices_of(name)
                    .any(|slice| !endpoint_addresses(slice).is_disjoint(&changed))
            };
            self.dirty.extend(
                self.store
                    .services()
                    .map(|(name, _)| name)
                    .filter(|name| touched(name))
                    .cloned(),
            );
        }
    }

    /// Returns true if any backend is a socket of this host.
    pub fn has_own_backend(&self) -> bool {
        if self.host_mode().is_some_and(HostMode::has_tunnel) {
            return true;
        }
        let routes = self
            .options
            .host_routes
            .iter()
            .flat_map(|host_routes| host_routes.routes.values());
        routes.into_iter().any(|route| *route == ClusterRoute::Own)
    }

    /// Returns the backends omitted as unreachable, by Service, as of the last sync.
    pub fn unreachable(&self) -> BTreeMap<&ObjectName, Vec<&Unreachable>> {
        let mut all: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (service, unreachable) in self.v4.unreachable().chain(self.v6.unreachable()) {
            all.entry(service).or_default().push(unreachable);
        }
        all
    }

    /// Returns the pods that serve a ClusterIP and port through the tunnel, and the Service's name.
    pub fn tunnelled(&self, service: SocketAddr) -> Option<(&ObjectName, &[TunnelledPod])> {
        let v4 =
            Addr4::from_ip(service.ip()).and_then(|addr| self.v4.tunnelled(addr, service.port()));
        v4.or_else(|| {
            Addr6::from_ip(service.ip()).and_then(|addr| self.v6.tunnelled(addr, service.port()))
        })
    }

    /// Returns the Services whose backends are all unreachable, with these backends.
    pub fn cut_off(&self) -> BTreeMap<&ObjectName, Vec<&Unreachable>> {
        let mut all = self.unreachable();
        all.retain(|service, _| !self.v4.is_served(service) && !self.v6.is_served(service));
        all
    }

    /// Returns the unreachable backends of each port, protocol and family without a reachable
    /// backend, for Services that another port or family still serves.
    pub fn cut_off_ports(&self) -> Vec<(&ObjectName, Vec<&Unreachable>)> {
        let whole = self.cut_off();
        let mut ports: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for (service, one) in self.v4.without_way().chain(self.v6.without_way()) {
            ports
                .entry((service, one.port, one.proto, one.backend.is_ipv6()))
                .or_default()
                .push(one);
        }
        let ports = ports
            .into_iter()
            .filter(|((service, ..), _)| !whole.contains_key(service));
        ports.map(|((service, ..), all)| (service, all)).collect()
    }
}

impl<A: Addr> Family<A> {
    fn unreachable(&self) -> impl Iterator<Item = (&ObjectName, &Unreachable)> {
        self.models_out_of_reach()
            .flat_map(|(service, model)| model.unreachable.iter().map(move |one| (service, one)))
    }

    fn models_out_of_reach(&self) -> impl Iterator<Item = (&ObjectName, &Arc<FamilyModel<A>>)> {
        self.out_of_reach
            .iter()
            .filter_map(|service| Some((service, self.models.get(service)?)))
    }

    /// Returns the unreachable backends of ports without any other backend.
    fn without_way(&self) -> impl Iterator<Item = (&ObjectName, &Unreachable)> {
        self.models_out_of_reach().flat_map(|(service, model)| {
            let is_served = |one: &Unreachable| {
                let mut ports = model
                    .ports
                    .iter()
                    .filter(|(key, _)| (key.port.get(), key.proto) == (one.port, one.proto));
                ports.any(|(_, port)| !port.cluster.is_empty())
            };
            model
                .unreachable
                .iter()
                .filter(move |one| !is_served(one))
                .map(move |one| (service, one))
        })
    }

    fn tunnelled(&self, addr: A, port: u16) -> Option<(&ObjectName, &[TunnelledPod])> {
        let key = FrontendKey::new(addr, Port::new(port), Proto::TCP);
        let model = self.holder(&key)?;
        Some((&model.claim.service, model.tunnelled.get(&key)?))
    }

    fn is_served(&self, service: &ObjectName) -> bool {
        self.models
            .get(service)
            .is_some_and(|model| model.ports.values().any(|port| !port.cluster.is_empty()))
    }
}
