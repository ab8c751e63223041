//! Tracks the desired addresses, routes and rules, and whether the kernel has them.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use proxy_common::addr::Proto;

use proxy_core::desired::Desired;
use proxy_core::input::ObjectName;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DesiredNode {
    /// The revision of the frontends, from which the last two fields come.
    revision: u64,
    pub(super) node_addresses: Vec<IpAddr>,
    /// The ranges of ClusterIPs, from the operator or from ServiceCIDR objects.
    pub(super) service_cidrs: Vec<IpNet>,
    /// The networks in these ranges that also have another use: pods or routes.
    pub(super) shared: Vec<IpNet>,
    /// The ClusterIPs outside the ranges, or in a shared network.
    pub(super) lone_addresses: BTreeSet<IpAddr>,
    pub(super) external_frontends: Vec<(ObjectName, (IpAddr, Proto, u16))>,
}

#[derive(Debug, Default)]
pub(super) struct SyncedNode {
    desired_node: Option<DesiredNode>,
    /// Set if the kernel has the desired state. Otherwise it may have a mixture with earlier
    /// states.
    is_done: bool,
}

impl SyncedNode {
    /// Returns the last desired state. `None` before the first sync.
    pub(super) fn desired_node(&self) -> Option<&DesiredNode> {
        self.desired_node.as_ref()
    }

    /// Takes over the desired state, the ranges of ClusterIPs and the shared networks in them.
    /// Returns true if there is work; its result goes to [`Self::end`].
    pub(super) fn begin(
        &mut self,
        desired: &Desired,
        service_cidrs: &[IpNet],
        shared: &[IpNet],
    ) -> bool {
        let revision = desired.revision();
        let node_addresses = desired.node_addresses();
        let known = self.desired_node.as_mut().filter(|_| self.is_done);
        if known.as_ref().is_some_and(|known| {
            known.revision == revision
                && known.node_addresses == node_addresses
                && known.service_cidrs == service_cidrs
                && known.shared == shared
        }) {
            return false;
        }
        let desired_node = DesiredNode {
            revision,
            node_addresses,
            service_cidrs: service_cidrs.to_vec(),
            shared: shared.to_vec(),
            lone_addresses: desired.service_addresses_apart(service_cidrs, shared),
            external_frontends: desired.external_frontends_in_turn(),
        };
        if let Some(known) = known {
            known.revision = revision;
            if *known == desired_node {
                return false;
            }
        }
        (self.desired_node, self.is_done) = (Some(desired_node), false);
        true
    }

    pub(super) fn end(&mut self, is_done: bool) {
        self.is_done = is_done;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proxy_core::builders::{listed, service, service_cidr};

    fn declare(desired: &mut Desired, cidr: &str) {
        desired.apply(service_cidr("kubernetes", &[cidr]));
        desired.sync();
    }

    fn begin(synced_node: &mut SyncedNode, desired: &Desired) -> bool {
        synced_node.begin(desired, desired.service_cidrs(), &[])
    }

    #[test]
    fn service_whose_address_is_in_a_range_makes_no_work() {
        let mut desired = Desired::new("here");
        listed().into_iter().for_each(|input| desired.apply(input));
        declare(&mut desired, "10.96.0.0/16");
        let given: IpNet = "10.98.0.0/16".parse().unwrap();
        let of_objects = desired.service_cidrs().to_vec();
        for (ranges, addr, is_work) in [
            (&of_objects[..], "10.96.0.1", false),
            (&of_objects, "10.98.0.2", true),
            (&[given], "10.98.0.3", false),
            (&[given], "10.96.0.4", true),
        ] {
            let mut synced_node = SyncedNode::default();
            assert!(
                synced_node.begin(&desired, ranges, &[]),
                "nothing is in force"
            );
            synced_node.end(true);
            desired.apply(service(addr).cluster_ip(addr).port("", "TCP", 80).into());
            desired.sync();
            assert_eq!(
                synced_node.begin(&desired, ranges, &[]),
                is_work,
                "{addr} {ranges:?}"
            );
        }
    }

    #[test]
    fn service_in_a_network_of_others_makes_work() {
        let mut desired = Desired::new("here");
        listed().into_iter().for_each(|input| desired.apply(input));
        declare(&mut desired, "10.96.0.0/16");
        let ranges = desired.service_cidrs().to_vec();
        let shared = ["10.96.3.0/24".parse().unwrap()];
        let mut synced_node = SyncedNode::default();
        for (shared, is_work) in [
            (&[][..], true),
            (&[], false),
            (&shared, true),
            (&shared, false),
        ] {
            assert_eq!(synced_node.begin(&desired, &ranges, shared), is_work);
            synced_node.end(true);
        }
        desired.apply(
            service("a")
                .cluster_ip("10.96.4.1")
                .port("", "TCP", 80)
                .into(),
        );
        desired.apply(
            service("b")
                .cluster_ip("10.96.3.1")
                .port("", "TCP", 80)
                .into(),
        );
        desired.sync();
        assert!(synced_node.begin(&desired, &ranges, &shared));
        let lone = &synced_node.desired_node().unwrap().lone_addresses;
        assert_eq!(
            lone.iter().map(ToString::to_string).collect::<Vec<_>>(),
            ["10.96.3.1"]
        );
    }

    #[test]
    fn a_failed_change_is_tried_again() {
        let mut desired = Desired::new("here");
        listed().into_iter().for_each(|input| desired.apply(input));
        let mut synced_node = SyncedNode::default();
        assert!(synced_node.desired_node().is_none());
        declare(&mut desired, "10.96.0.0/16");
        assert!(begin(&mut synced_node, &desired));
        synced_node.end(false);
        assert!(begin(&mut synced_node, &desired), "it has failed");
        synced_node.end(true);
        assert!(!begin(&mut synced_node, &desired), "it is in force");
        declare(&mut desired, "10.97.0.0/16");
        assert!(
            begin(&mut synced_node, &desired),
            "something else is wanted"
        );
        synced_node.end(false);
        // The first state is desired again; half of it may have been replaced.
        declare(&mut desired, "10.96.0.0/16");
        assert!(
            begin(&mut synced_node, &desired),
            "half of the other is in force"
        );
        synced_node.end(true);
        assert!(!begin(&mut synced_node, &desired));
    }
}
