//! Describes devices for the programs.

use std::collections::BTreeMap;

use anyhow::Result;
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::device::{self, Device};

use super::Node;
use crate::desired::Desired;
use crate::net::link::{Link, LinkKind};
use crate::net::{addr, sysctl};

impl Node {
    /// Writes the ranges of pods' addresses for the programs.
    pub(super) fn write_pods(&mut self, desired: &Desired) -> Result<()> {
        let pod_cidrs = if self.is_outside() { Vec::new() } else { desired.pod_cidrs() };
        self.maps.set_pods(&self.detection.nets(), &pod_cidrs)?;
        self.pod_cidrs = pod_cidrs;
        Ok(())
    }

    /// Writes for the programs whether there are bridges, if that has changed.
    pub(super) fn note_stacked(&mut self) -> Result<()> {
        let flags = flags(&self.links);
        match self.maps.node()? {
            Some(known) if known.has(device::Node::STACKED) != (flags != 0) => self.write_node(),
            _ => Ok(()),
        }
    }
}

/// Returns the flag of [`device::Node`] that results from all devices together.
pub(super) fn flags(links: &BTreeMap<u32, Link>) -> u32 {
    let is_stacked = links.values().any(|link| link.kind == LinkKind::Bridge || may_be_macvlan(link));
    if is_stacked { device::Node::STACKED } else { 0 }
}

/// Returns true if the device may be a macvlan or ipvlan, which lies on another device whose hooks see its packets as
/// well. Some other kinds of device count too.
fn may_be_macvlan(link: &Link) -> bool {
    link.kind == LinkKind::Other && link.ethernet && !link.peer_netns
}

/// Returns the row of `DEVICES` for a link. `links` are all devices, by interface index.
///
/// `has_many_ways` is set if some route has several next hops: a lookup names only one of them.
pub(super) fn row(link: &Link, links: &BTreeMap<u32, Link>, pod: bool, detected: bool, has_many_ways: bool) -> Device {
    let bridge = link.master.and_then(|master| links.get(&master)).filter(|master| master.kind == LinkKind::Bridge);
    // The host's IP layer is behind the bridge, and uses the bridge's parameters.
    let routed = bridge.unwrap_or(link);
    let flags = [
        (pod, Device::POD),
        (detected, Device::DETECTED),
        (pod && link.is_plain_pair(), Device::PEER),
        (is_edge(link.kind), Device::EDGE),
        (!has_many_ways && !links.values().any(may_be_macvlan) && is_strict(&routed.name), Device::STRICT4),
        (bridge.is_some_and(|bridge| bridge.name == OPEN_VSWITCH), Device::LOOSE),
    ];
    let flags = flags.into_iter().filter(|(is_set, _)| *is_set).fold(0, |all, (_, flag)| all | flag);
    let addr4 = addr::device_address(link).unwrap_or(Addr4::UNSPECIFIED);
    let addr6 = addr::device_address(link).unwrap_or(Addr6::UNSPECIFIED);
    let bridge = bridge.map_or(0, |bridge| bridge.index);
    Device::new(flags, addr4, addr6).with_link(bridge, link.mtu, routed.mac.unwrap_or_default())
}

/// The master of all ports of Open vSwitch, by its kernel module's name. Hosts have their addresses on ports of other
/// names.
const OPEN_VSWITCH: &str = "ovs-system";

/// Returns true if a packet passes no other hook of this host before it arrives at such a device. A bridge, a VLAN, an
/// overlay or a macvlan has other devices below it.
fn is_edge(kind: LinkKind) -> bool {
    matches!(kind, LinkKind::Physical | LinkKind::Veth | LinkKind::Netkit)
}

/// Returns true if the kernel drops packets whose replies it would send through another device (RFC 3704 §2.2). The
/// kernel uses the larger of two parameters.
fn is_strict(name: &str) -> bool {
    let of = |name: &str| {
        let value = sysctl::read(&format!("ipv4/conf/{name}/rp_filter")).ok().flatten();
        value.and_then(|value| value.parse().ok()).unwrap_or(0)
    };
    of("all").max(of(name)) == 1_u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::role::Behind;

    #[test]
    fn a_port_is_routed_by_its_bridge() {
        let bridge = link(7, "cni-of-no-host", LinkKind::Bridge, None);
        let port = link(8, "port-of-no-host", LinkKind::Veth, Some(7));
        let links = BTreeMap::from([(7, bridge.clone()), (8, port.clone())]);
        let row_of = |link: &Link| row(link, &links, false, false, false);
        assert_eq!((row_of(&port).bridge, row_of(&port).mac), (7, [2, 0, 0, 0, 0, 7]));
        assert_eq!((row_of(&bridge).bridge, row_of(&bridge).mac), (0, [2, 0, 0, 0, 0, 7]));
        assert!(row_of(&port).flags() & Device::EDGE != 0);
        assert!(row_of(&bridge).flags() & Device::EDGE == 0, "its port has a hook");
    }

    fn link(index: u8, name: &str, kind: LinkKind, master: Option<u32>) -> Link {
        Link {
            index: index.into(),
            name: name.to_owned(),
            mac: Some([2, 0, 0, 0, 0, index]),
            mtu: 1500,
            kind,
            ethernet: true,
            master,
            peer_netns: false,
            queues: false,
            up: true,
            addrs: [].into(),
            behind: Behind::Nothing,
        }
    }
}
