//! The devices of this host, and their rows for the programs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::device::{self, Device};

use super::detect::Detection;
use proxy_net::link::{KUBE_IPVS0, Link, LinkHeader, LinkKind};
use proxy_net::role::{self, FarEnd, OPEN_VSWITCH, Role, role};
use proxy_net::{Handle, LinkEvent, addr, fib, foreign_rule, sysctl};

#[derive(Debug)]
pub(super) struct Devices {
    links: BTreeMap<u32, Link>,
    is_node: bool,
    /// Set if a program's route look-up may find another reply path than the kernel's, because of
    /// several next hops or of routing rules. As of the last list of devices.
    is_misled: bool,
}

impl Devices {
    pub(super) fn new(is_node: bool) -> Self {
        Self {
            links: BTreeMap::new(),
            is_node,
            is_misled: false,
        }
    }

    /// Applies the kernel's device events. Returns true if they contain a complete list.
    pub(super) fn take(&mut self, events: impl IntoIterator<Item = LinkEvent>) -> bool {
        let mut listed = false;
        for event in events {
            match event {
                LinkEvent::All(links) => {
                    self.links = links.into_iter().map(|link| (link.index, link)).collect();
                    listed = true;
                }
                LinkEvent::Put(link) => drop(self.links.insert(link.index, *link)),
                LinkEvent::Del(ifindex) => drop(self.links.remove(&ifindex)),
            }
        }
        listed
    }

    /// Checks whether a program's route look-up may find another reply path than the kernel's.
    pub(super) async fn ask_for_routes(&mut self, handle: &Handle) {
        let has_many_ways = fib::has_many_ways(handle).await.unwrap_or(true);
        self.is_misled = has_many_ways
            || foreign_rule::mislead_strict_check(handle)
                .await
                .unwrap_or(true);
    }

    pub(super) fn links(&self) -> &BTreeMap<u32, Link> {
        &self.links
    }

    pub(super) fn are_known(&self) -> bool {
        !self.links.is_empty()
    }

    pub(super) fn addresses(&self) -> BTreeSet<IpAddr> {
        self.links
            .values()
            .flat_map(|link| link.addrs.iter().map(|net| net.addr()))
            .collect()
    }

    pub(super) fn addresses_up(&self) -> BTreeSet<IpAddr> {
        let up = self.links.values().filter(|link| link.up);
        up.flat_map(|link| link.addrs.iter().map(|net| net.addr()))
            .collect()
    }

    /// Returns the addresses of devices without a network behind them, each with its device's name.
    /// A local process serves such an address, as NodeLocal DNSCache does. The addresses of
    /// kube-ipvs0 are excluded, because kpx serves them.
    pub(super) fn kept_addresses(&self) -> BTreeMap<IpAddr, String> {
        let kept = self
            .links
            .values()
            .filter(|link| link.name != KUBE_IPVS0 && leads_nowhere(link, &self.links));
        kept.flat_map(|link| link.addrs.iter().map(|net| (net.addr(), link.name.clone())))
            .collect()
    }

    pub(super) fn role(&self, ifindex: u32) -> Option<Role> {
        self.links.get(&ifindex).map(|link| self.role_of(link))
    }

    /// Returns the reason why a device does not count as a pod's: see [`role::why_no_pod`].
    pub(super) fn why_no_pod(&self, ifindex: u32) -> Option<String> {
        let link = self.links.get(&ifindex).filter(|_| self.is_node)?;
        role::why_no_pod(link, &self.links)
    }

    /// Returns the device's role. Host mode does not distinguish pods from other clients.
    pub(super) fn role_of(&self, link: &Link) -> Role {
        match role(link, &self.links) {
            Role::Device { pod: true } if !self.is_node => {
                if link.master.is_some() {
                    Role::Ignored("its bridge is served")
                } else {
                    Role::Device { pod: false }
                }
            }
            role => role,
        }
    }

    /// Returns the names of devices where netfilter sees no packet of a bypass connection: all
    /// except veths (no other pod device is [`Device::BARE`]) and VRFs above them. A bridge's ports
    /// are not `BARE`.
    pub(super) fn surely_no_pods(&self) -> BTreeSet<String> {
        let has_veths = |index| {
            self.links
                .values()
                .any(|port| port.master == Some(index) && port.kind == LinkKind::Veth)
        };
        let others = self
            .links
            .values()
            .filter(|link| link.kind != LinkKind::Veth);
        let others = others.filter(|link| link.kind == LinkKind::Bridge || !has_veths(link.index));
        others.map(|link| link.name.clone()).collect()
    }

    /// Returns the devices of [`Self::surely_no_pods`] by which no bypass packet leaves for a pod
    /// of another node.
    pub(super) fn surely_no_ways(&self) -> BTreeSet<String> {
        let ways = self
            .links
            .values()
            .filter(|link| may_be_way(link))
            .map(|link| link.name.clone());
        &self.surely_no_pods() - &ways.collect()
    }

    /// Returns the names of all uplinks that may be [`Device::BARE`].
    pub(super) fn ways(&self) -> BTreeSet<String> {
        let ways = self.links.values().filter(|link| may_be_way(link));
        let ways = ways.filter(|link| self.role_of(link) == Role::Device { pod: false });
        ways.map(|link| link.name.clone()).collect()
    }

    /// Returns the names of the pods' devices that may be [`Device::BARE`]. `None` if a device may
    /// belong to a VRF: netfilter then matches the VRF's name.
    pub(super) fn bare_pods(&self) -> Option<BTreeSet<String>> {
        let is_bridge = |index| {
            self.links
                .get(&index)
                .is_some_and(|master| master.kind == LinkKind::Bridge)
        };
        let pods = self.links.values().filter(|link| link.is_plain_pair());
        let mut pods = pods.filter(|link| self.role_of(link) == Role::Device { pod: true });
        pods.try_fold(BTreeSet::new(), |mut names, link| match link.master {
            Some(master) if is_bridge(master) => Some(names),
            Some(_) => None,
            None => {
                names.insert(link.name.clone());
                Some(names)
            }
        })
    }

    pub(super) fn rows(&self, detection: &Detection) -> BTreeMap<u32, Device> {
        // An uplink's filter sees the packets of all devices above it.
        let may_be_bare = !self.links.values().any(|link| {
            (link.filtered || link.filtered_out)
                && self.role_of(link) == Role::Device { pod: false }
        });
        let rows = self.links.values().filter_map(|link| {
            let Role::Device { pod } = self.role_of(link) else {
                return None;
            };
            let detected = detection.finds(link, &self.links);
            let row = row(link, &self.links, pod, detected, self.is_misled);
            Some((
                link.index,
                if pod || may_be_bare {
                    row
                } else {
                    row.without(Device::BARE)
                },
            ))
        });
        rows.collect()
    }

    /// Returns the flags of [`device::Node`] that depend on all devices together.
    pub(super) fn flags(&self) -> u32 {
        let has = |is_so: fn(&Link) -> bool| self.links.values().any(is_so);
        let is_stacked = has(|link| link.kind == LinkKind::Bridge || may_be_macvlan(link));
        let flags = [
            (is_stacked, device::Node::STACKED),
            (has(may_be_macvlan), device::Node::MACVLANS),
            (has(|link| link.filtered), device::Node::FILTERED),
        ];
        flags
            .into_iter()
            .filter(|(is_set, _)| *is_set)
            .fold(0, |all, (_, flag)| all | flag)
    }
}

/// Returns true if packets that bypass the stack may leave for other nodes by this kind of device.
fn may_be_way(link: &Link) -> bool {
    let kinds = [
        LinkKind::Physical,
        LinkKind::Veth,
        LinkKind::Bond,
        LinkKind::Vlan,
        LinkKind::Overlay,
    ];
    kinds.contains(&link.kind) && link.header == LinkHeader::Ethernet && link.master.is_none()
}

/// Returns true for a dummy device, and for a bridge without ports.
fn leads_nowhere(link: &Link, links: &BTreeMap<u32, Link>) -> bool {
    match link.kind {
        LinkKind::Dummy => true,
        LinkKind::Bridge => !links.values().any(|port| port.master == Some(link.index)),
        _ => false,
    }
}

/// Returns true if the device may be a macvlan or ipvlan, whose packets also pass the hooks of the
/// device below. Includes some other kinds of device.
fn may_be_macvlan(link: &Link) -> bool {
    let kinds = [LinkKind::Macvlan, LinkKind::Other];
    kinds.contains(&link.kind) && link.header == LinkHeader::Ethernet && !link.peer_netns
}

/// Returns the row of `DEVICES` for a link. `links` are all devices, by interface index.
///
/// `is_misled` is set if a program's route look-up may find another reply path than the kernel's,
/// because of several next hops or of routing rules.
fn row(
    link: &Link,
    links: &BTreeMap<u32, Link>,
    pod: bool,
    detected: bool,
    is_misled: bool,
) -> Device {
    let bridge = link
        .master
        .and_then(|master| links.get(&master))
        .filter(|master| master.kind == LinkKind::Bridge);
    // Behind a bridge, the IP layer uses the bridge's sysctls.
    let routed = bridge.unwrap_or(link);
    let is_alone = bridge.is_none() && !link.filtered && !link.filtered_out;
    let may_tell = !is_misled && !links.values().any(may_be_macvlan);
    let is_strict = is_strict(&routed.name);
    // Packets that the kernel would drop must go through the stack, unless the programs apply the
    // same check.
    let tells_strictness = may_tell || !is_strict;
    let flags = [
        (pod, Device::POD),
        (detected, Device::DETECTED),
        (pod && link.is_plain_pair(), Device::PEER),
        (
            if pod {
                is_alone && link.is_plain_pair()
            } else {
                may_be_way(link) && tells_strictness
            },
            Device::BARE,
        ),
        (is_edge(link.kind), Device::EDGE),
        (may_tell && is_strict, Device::STRICT4),
        (
            bridge.is_some_and(|bridge| bridge.name == OPEN_VSWITCH),
            Device::LOOSE,
        ),
        (has_pods_alone(link, links), Device::POD_BRIDGE),
        (link.header == LinkHeader::None, Device::HEADERLESS),
        (
            link.filtered || !is_edge(link.kind) && links.values().any(|below| below.filtered),
            Device::FILTERED,
        ),
    ];
    let flags = flags
        .into_iter()
        .filter(|(is_set, _)| *is_set)
        .fold(0, |all, (_, flag)| all | flag);
    let addr4 = addr::device_address(link).unwrap_or(Addr4::UNSPECIFIED);
    let addr6 = addr::device_address(link).unwrap_or(Addr6::UNSPECIFIED);
    let bridge = bridge.map_or(0, |bridge| bridge.index);
    Device::new(flags, addr4, addr6).with_link(bridge, link.mtu, routed.mac.unwrap_or_default())
}

/// Returns true for a bridge all of whose ports connect pods. Networks behind another kind of port,
/// or behind a router on the bridge, have other paths to the node.
fn has_pods_alone(link: &Link, links: &BTreeMap<u32, Link>) -> bool {
    let mut ports = links
        .values()
        .filter(|port| port.master == Some(link.index))
        .peekable();
    link.kind == LinkKind::Bridge
        && link.far_end != FarEnd::Router
        && ports.peek().is_some()
        && ports.all(Link::leads_elsewhere)
}

/// Returns true if a packet that arrives at such a device has passed no other hook of this host. A
/// bridge, a VLAN, an overlay or a macvlan has other devices below it.
fn is_edge(kind: LinkKind) -> bool {
    matches!(kind, LinkKind::Physical | LinkKind::Veth | LinkKind::Netkit)
}

/// Returns true if the kernel drops packets whose replies it would send through another device (RFC
/// 3704 §2.2, strict). The larger of two sysctls counts.
fn is_strict(name: &str) -> bool {
    let of = |name: &str| {
        let value = sysctl::read(&format!("ipv4/conf/{name}/rp_filter"))
            .ok()
            .flatten();
        value.and_then(|value| value.parse().ok()).unwrap_or(0)
    };
    of("all").max(of(name)) == 1_u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_routed_by_its_bridge() {
        let bridge = link(7, "cni-of-no-host", LinkKind::Bridge, None);
        let port = link(8, "port-of-no-host", LinkKind::Veth, Some(7));
        let links = BTreeMap::from([(7, bridge.clone()), (8, port.clone())]);
        let row_of = |link: &Link| row(link, &links, false, false, false);
        assert_eq!(
            (row_of(&port).bridge, row_of(&port).mac),
            (7, [2, 0, 0, 0, 0, 7])
        );
        assert_eq!(
            (row_of(&bridge).bridge, row_of(&bridge).mac),
            (0, [2, 0, 0, 0, 0, 7])
        );
        assert!(row_of(&port).flags() & Device::EDGE != 0);
        assert!(
            row_of(&bridge).flags() & Device::EDGE == 0,
            "its port has a hook"
        );
    }

    #[test]
    fn a_bridge_of_pods_alone_is_told_from_others() {
        let bridge = link(7, "cni-of-no-host", LinkKind::Bridge, None);
        let pod = Link {
            peer_netns: true,
            ..link(8, "pod-of-no-host", LinkKind::Veth, Some(7))
        };
        let overlay = link(9, "overlay-of-no-host", LinkKind::Overlay, Some(7));
        let has = |ports: &[&Link]| {
            let links = ports
                .iter()
                .copied()
                .chain([&bridge])
                .map(|link| (link.index, link.clone()))
                .collect();
            row(&bridge, &links, false, false, false).flags() & Device::POD_BRIDGE != 0
        };
        assert!(has(&[&pod]));
        assert!(!has(&[]) && !has(&[&pod, &overlay]));
        let routes = Link {
            far_end: FarEnd::Router,
            ..bridge.clone()
        };
        let links = BTreeMap::from([(7, routes.clone()), (8, pod)]);
        assert!(
            row(&routes, &links, false, false, false).flags() & Device::POD_BRIDGE == 0,
            "a router is on it"
        );
    }

    // Netfilter sees the packets of a VRF's ports under the name of the VRF.
    #[test]
    fn veths_and_vrfs_above_them_may_be_pods() {
        let mut devices = Devices::new(true);
        devices.take([LinkEvent::All(vec![
            link(1, "lo", LinkKind::Loopback, None),
            link(2, "eth0", LinkKind::Physical, None),
            link(3, "docker0", LinkKind::Bridge, None),
            link(4, "port", LinkKind::Veth, Some(3)),
            link(5, "vrf0", LinkKind::Other, None),
            link(6, "pod", LinkKind::Veth, Some(5)),
        ])]);
        assert_eq!(
            devices.surely_no_pods(),
            ["docker0", "eth0", "lo"].map(str::to_owned).into()
        );
    }

    #[test]
    fn a_filter_counts_for_devices_above_as_well() {
        let mut links = [
            link(2, "eth0", LinkKind::Physical, None),
            link(3, "eth1", LinkKind::Physical, None),
            link(4, "eth0.5", LinkKind::Vlan, None),
        ];
        let filtered = |links: &[Link]| {
            let mut devices = Devices::new(true);
            devices.take([LinkEvent::All(links.into())]);
            let rows = devices.rows(&Detection::default()).into_iter();
            let rows: Vec<u32> = rows
                .filter(|(_, row)| row.flags() & Device::FILTERED != 0)
                .map(|(index, _)| index)
                .collect();
            (rows, devices.flags() & device::Node::FILTERED != 0)
        };
        assert_eq!(filtered(&links), (vec![], false));
        links[0].filtered = true;
        assert_eq!(
            filtered(&links),
            (vec![2, 4], true),
            "a packet of the VLAN has passed a card"
        );
    }

    #[test]
    fn addresses_of_devices_that_lead_nowhere_are_kept() {
        let mut links = [
            link(2, "eth0", LinkKind::Physical, None),
            link(3, "nodelocaldns", LinkKind::Dummy, None),
            link(4, KUBE_IPVS0, LinkKind::Dummy, None),
            link(5, "cni0", LinkKind::Bridge, None),
            link(6, "veth0", LinkKind::Veth, Some(5)),
            link(7, "empty0", LinkKind::Bridge, None),
            link(8, "lo", LinkKind::Loopback, None),
        ];
        for link in &mut links {
            link.addrs
                .extend(format!("10.96.0.{}/32", link.index).parse::<ipnet::IpNet>());
        }
        let mut devices = Devices::new(true);
        devices.take([LinkEvent::All(links.into())]);
        let kept: Vec<_> = devices
            .kept_addresses()
            .iter()
            .map(|(addr, name)| format!("{addr} {name}"))
            .collect();
        assert_eq!(kept, ["10.96.0.3 nodelocaldns", "10.96.0.7 empty0"]);
    }

    fn link(index: u8, name: &str, kind: LinkKind, master: Option<u32>) -> Link {
        Link {
            index: index.into(),
            name: name.to_owned(),
            mac: Some([2, 0, 0, 0, 0, index]),
            mtu: 1500,
            kind,
            header: LinkHeader::Ethernet,
            master,
            peer_netns: false,
            queues: false,
            up: true,
            addrs: [].into(),
            far_end: FarEnd::Nothing,
            filtered: false,
            filtered_out: false,
            lacks_egress: false,
        }
    }
}
