//! Omits the ClusterIPs that a device of the host has (such as NodeLocal DNSCache's), and the
//! networks in ClusterIP ranges that pods or routes also use.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;

use super::Desired;
use crate::model::cluster_ips;

impl Desired {
    /// Replaces the addresses that the host keeps, with their devices. Returns true if that affects
    /// a Service.
    pub fn keep_by_host(&mut self, addresses: BTreeMap<IpAddr, String>) -> bool {
        let before = std::mem::replace(&mut self.options.kept_addresses, addresses);
        let now = &self.options.kept_addresses;
        if before == *now {
            return false;
        }
        self.node.kept_addresses.clone_from(now);
        let has_changed = |ip: IpAddr| before.get(&ip) != now.get(&ip);
        let services = self
            .store
            .services()
            .filter(|(_, service)| cluster_ips(service).any(has_changed));
        let services: Vec<_> = services.map(|(name, _)| name.clone()).collect();
        let concerns_any = !services.is_empty();
        self.dirty.extend(services);
        concerns_any
    }

    /// Replaces the shared networks in ClusterIP ranges. Returns true if that may affect a Service.
    pub fn share_networks(&mut self, networks: &[IpNet]) -> bool {
        if self.options.shared_networks == networks {
            return false;
        }
        self.options.shared_networks = networks.to_vec();
        self.rebuild_node();
        true
    }
}

#[cfg(test)]
mod tests {
    use proxy_common::frontend::FrontendKind;

    use super::*;
    use crate::builders::{listed, service};
    use crate::model::Cause;
    use crate::tables::Tables;

    fn kinds(desired: &Desired) -> Vec<FrontendKind> {
        desired
            .tables()
            .v4
            .frontends
            .values()
            .map(|frontend| frontend.kind)
            .collect()
    }

    #[test]
    fn the_host_keeps_a_cluster_ip_and_no_other_service_gets_it() {
        let mut desired = Desired::new("here");
        let dns = service("kube-system/dns")
            .cluster_ip("10.96.0.10")
            .port("", "UDP", 53)
            .type_("NodePort");
        let thief = service("thief")
            .cluster_ip("10.96.0.11")
            .port("", "UDP", 53)
            .external_ip("10.96.0.10");
        let inputs = listed()
            .into_iter()
            .chain([dns.node_port(30_053).into(), thief.into()]);
        inputs.for_each(|input| desired.apply(input));
        desired.sync();
        let served = desired.tables().clone();
        let addresses =
            |ip: &str| BTreeMap::from([(ip.parse().unwrap(), "nodelocaldns".to_owned())]);

        assert!(
            !desired.keep_by_host(addresses("169.254.20.10")),
            "no Service is there"
        );
        assert!(desired.keep_by_host(addresses("10.96.0.10")));
        let skipped = desired.sync().skipped;
        assert_eq!(
            kinds(&desired),
            [
                FrontendKind::NODE_PORT,
                FrontendKind::ADDRESS,
                FrontendKind::CLUSTER_IP
            ]
        );
        assert_eq!(
            desired.tables().v4.services,
            served.v4.services,
            "the node port is served"
        );
        assert_eq!(
            desired.tables(),
            &Tables::of(&desired.store, &desired.options)
        );
        assert_eq!(
            skipped
                .iter()
                .map(|skipped| skipped.cause)
                .collect::<Vec<_>>(),
            [Cause::KeptByHost]
        );
        assert_eq!(
            skipped[0].to_string(),
            "Service kube-system/dns spec.clusterIP: 10.96.0.10 is an address of device nodelocaldns: packets to it stay \
             with the host"
        );
        assert!(
            !desired.keep_by_host(addresses("10.96.0.10")),
            "it is known"
        );

        assert!(desired.keep_by_host(BTreeMap::new()));
        desired.sync();
        assert_eq!(desired.tables(), &served);
    }
}
