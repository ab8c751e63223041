//! Indexes pods' endpoints and Services' ExternalIPs by address.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::compact::{EndpointSlice, Service};
use crate::input::ObjectName;
use crate::model::{ip, ip_of};

/// The slices and Services of each address.
///
/// Only endpoints with a pod as `targetRef` count. Manual endpoints may have any address, such as a
/// load balancer's.
#[derive(Clone, Debug, Default)]
pub(super) struct Endpoints {
    slices: BTreeSet<(IpAddr, ObjectName)>,
    services: BTreeSet<(IpAddr, ObjectName)>,
}

impl Endpoints {
    /// Records the change of a Service.
    pub(super) fn take_service(
        &mut self,
        name: &ObjectName,
        old: Option<&Service>,
        new: Option<&Service>,
    ) {
        let [old, new] = [old, new].map(|service| service.map(external_ips).unwrap_or_default());
        replace(&mut self.services, name, &old, &new);
    }

    /// Records the change of a slice. Returns the Services with an ExternalIP among its changed
    /// addresses.
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

    pub(super) fn slices_at(&self, ip: IpAddr) -> impl Iterator<Item = &ObjectName> {
        at(&self.slices, ip)
    }
}

pub(super) fn external_ips(service: &Service) -> BTreeSet<IpAddr> {
    service
        .external_ips
        .iter()
        .filter_map(|text| ip(text).ok())
        .collect()
}

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
