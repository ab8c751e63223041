//! Finds the pods' endpoints at an address, and the Services that name the address as an
//! ExternalIP.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::compact::{EndpointSlice, Service};
use crate::input::ObjectName;
use crate::model::{ip, ip_of};

/// The slices and Services by address.
///
/// Only endpoints that name a pod count: an operator's own endpoints may lead to any address, such
/// as a load balancer's.
#[derive(Clone, Debug, Default)]
pub(super) struct Endpoints {
    slices: BTreeSet<(IpAddr, ObjectName)>,
    services: BTreeSet<(IpAddr, ObjectName)>,
}

impl Endpoints {
    /// Takes in a Service as it was and is now.
    pub(super) fn take_service(
        &mut self,
        name: &ObjectName,
        old: Option<&Service>,
        new: Option<&Service>,
    ) {
        let [old, new] = [old, new].map(|service| service.map(external_ips).unwrap_or_default());
        replace(&mut self.services, name, &old, &new);
    }

    /// Takes in a slice as it was and is now. Returns the Services that name one of its addresses.
    pub(super) fn take_slice(
        &mut self,
        name: &ObjectName,
        old: Option<&EndpointSlice>,
        new: Option<&EndpointSlice>,
    ) -> Vec<ObjectName> {
        let [before, now] = [old, new].map(|slice| slice.map(pods).unwrap_or_default());
        replace(&mut self.slices, name, &before, &now);
        let has_other_ports = old.map(|slice| &slice.ports) != new.map(|slice| &slice.ports);
        let changed = before
            .union(&now)
            .filter(|ip| has_other_ports || before.contains(ip) != now.contains(ip));
        match self.services.is_empty() {
            true => Vec::new(),
            false => changed
                .flat_map(|ip| at(&self.services, *ip))
                .cloned()
                .collect(),
        }
    }

    /// Returns the slices with a pod at an address.
    pub(super) fn slices_at(&self, ip: IpAddr) -> impl Iterator<Item = &ObjectName> {
        at(&self.slices, ip)
    }
}

/// Returns the addresses of a Service's ExternalIPs, as far as they can be read.
pub(super) fn external_ips(service: &Service) -> BTreeSet<IpAddr> {
    service
        .external_ips
        .iter()
        .filter_map(|text| ip(text).ok())
        .collect()
}

/// Returns the addresses of a slice's pods.
fn pods(slice: &EndpointSlice) -> BTreeSet<IpAddr> {
    let pods = slice
        .endpoints
        .iter()
        .filter(|endpoint| endpoint.pod.is_some());
    pods.filter_map(|endpoint| ip_of(&endpoint.address).ok())
        .collect()
}

fn at(names: &BTreeSet<(IpAddr, ObjectName)>, ip: IpAddr) -> impl Iterator<Item = &ObjectName> {
    let first = (ip, ObjectName::new("", ""));
    names
        .range(first..)
        .take_while(move |(other, _)| *other == ip)
        .map(|(_, name)| name)
}

fn replace(
    names: &mut BTreeSet<(IpAddr, ObjectName)>,
    name: &ObjectName,
    before: &BTreeSet<IpAddr>,
    now: &BTreeSet<IpAddr>,
) {
    for gone in before.difference(now) {
        names.remove(&(*gone, name.clone()));
    }
    names.extend(now.difference(before).map(|ip| (*ip, name.clone())));
}
