//! The shares of a family's flow table. A client opens no flow while it holds as many entries as
//! are free; a namespace opens none while its Services hold four times as many.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use k8s_openapi::api::core::v1::Service;

use super::{Flow, Model};

const NAMESPACE: usize = 4;

impl Model {
    /// Returns true if the new flow's client or namespace has used up its share.
    pub(super) fn is_share_used_up(&mut self, flow: &Flow) -> bool {
        let is_counted =
            |other: &&Flow| other.client.is_ipv4() == flow.client.is_ipv4() && other.goes_on();
        let lasting: Vec<&Flow> = self.flows.values().filter(is_counted).collect();
        let entries = |flow: &&Flow| flow.legs().len();
        let free = self.room - lasting.iter().map(entries).sum::<usize>();
        // While half of the table is free, shares do not apply.
        if free > self.room / 2 {
            return false;
        }
        let is_clients = |other: &&&Flow| holder(other) == holder(flow);
        let of_client: usize = lasting.iter().filter(is_clients).map(entries).sum();
        let mut of_namespaces: BTreeMap<&str, usize> = BTreeMap::new();
        for other in lasting {
            if let Some(namespace) = self.namespace(other.service) {
                *of_namespaces.entry(namespace).or_default() += entries(&other);
            }
        }
        of_namespaces.retain(|_, held| *held >= free * NAMESPACE);
        let is_namespace_full = self
            .namespace(flow.service)
            .is_some_and(|namespace| of_namespaces.contains_key(namespace));
        let event = match () {
            () if of_client >= free => "client_at_its_share",
            () if is_namespace_full => "namespace_at_its_share",
            () if !of_namespaces.is_empty() => "opened_beside_a_namespace_at_its_share",
            () => "opened_below_all_shares",
        };
        *self.shares.entry(event).or_default() += 1;
        of_client >= free || is_namespace_full
    }

    /// Returns the namespace of a Service by its ClusterIP.
    fn namespace(&self, service: Option<SocketAddr>) -> Option<&str> {
        let ip = service?.ip().to_string();
        let has_ip = |service: &&Service| {
            let ips = service
                .spec
                .as_ref()
                .and_then(|spec| spec.cluster_ips.as_ref());
            ips.is_some_and(|ips| ips.contains(&ip))
        };
        self.cluster
            .services
            .iter()
            .find(has_ip)?
            .metadata
            .namespace
            .as_deref()
    }
}

/// Returns the holder of a flow's entries: the client, or its /64 network if it is outside.
fn holder(flow: &Flow) -> IpAddr {
    match flow.client.ip() {
        IpAddr::V6(ip) if flow.is_from_outside() => {
            Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64).into()
        }
        ip => ip,
    }
}
