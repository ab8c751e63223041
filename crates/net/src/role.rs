//! Decides the role of a device: whether programs are attached, and which.

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;

use ipnet::IpNet;

use super::link::{Link, LinkHeader, LinkKind};
use super::{anchor, tunnel};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Loopback,
    /// The near end of kpx's veth pair, through which the service routes go.
    Anchor,
    /// A device of kpx for packets that other nodes hand over.
    Tunnel,
    /// A device to machines outside the node or to a pod.
    Device {
        /// True if a pod is behind the device.
        pod: bool,
    },
    /// A device without programs, with the reason.
    Ignored(&'static str),
}

/// The hosts behind a device, by its routes. A later variant outranks an earlier variant: a network
/// of any hosts is not a pod, even if routes to single hosts exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum FarEnd {
    /// No route uses the device.
    #[default]
    Nothing,
    /// Routes to single addresses only. None of the addresses is this host's.
    Hosts,
    Network(IpNet),
    /// A router that forwards packets.
    Router,
}

impl FarEnd {
    /// Classifies the far end by a route to `to`; `own` are this host's addresses.
    pub fn of(to: IpNet, gateway: bool, own: &HashSet<IpAddr>) -> Self {
        let is_single = to.prefix_len() == to.max_prefix_len();
        match to.addr() {
            _ if gateway => Self::Router,
            // Every IPv6 device has a link-local route; for IPv4 both ends configure link-local
            // addresses.
            IpAddr::V4(addr) if addr.is_link_local() || addr.is_multicast() => Self::Nothing,
            IpAddr::V6(addr) if addr.is_unicast_link_local() || addr.is_multicast() => {
                Self::Nothing
            }
            // The kernel adds a route for each of the host's IPv6 addresses.
            addr if is_single && own.contains(&addr) => Self::Nothing,
            _ if is_single => Self::Hosts,
            _ => Self::Network(to),
        }
    }
}

/// Returns a device's role. `links` are all devices by interface index, because the role depends on
/// the device's master.
pub fn role(link: &Link, links: &BTreeMap<u32, Link>) -> Role {
    let to_netns = link.leads_elsewhere();
    let bridge = link.master.and_then(|master| links.get(&master));
    let master = bridge.map(|master| master.kind);
    match (link.kind, master) {
        (LinkKind::Loopback, _) => Role::Loopback,
        (LinkKind::Veth, _) if link.name == anchor::NAME => Role::Anchor,
        (LinkKind::Veth, _) if link.name == anchor::PEER => Role::Ignored("the anchor's other end"),
        (LinkKind::Other, _) if tunnel::NAMES.contains(&&*link.name) => Role::Tunnel,
        (LinkKind::Ipsec, _) => {
            Role::Ignored("an IPsec interface shows packets with the header of their tunnel")
        }
        (LinkKind::Dummy, _) => Role::Ignored("a dummy carries no packets"),
        (LinkKind::Ifb, _) => {
            Role::Ignored("an ifb only shapes packets that other devices receive")
        }
        (LinkKind::Nlmon, _) => Role::Ignored("nlmon carries netlink messages"),
        _ if link.header == LinkHeader::Other => {
            Role::Ignored("its packets start neither with Ethernet nor with IP")
        }
        // A virtual function whose master is the failover device (hv_netvsc, net_failover).
        (_, Some(LinkKind::Physical)) => Role::Ignored("its master is served"),
        (_, Some(LinkKind::Bond)) => Role::Ignored("its bond is served"),
        (_, Some(LinkKind::Bridge))
            if to_netns && bridge.is_some_and(|bridge| is_apart(bridge, links)) =>
        {
            Role::Ignored("the node is not on its bridge")
        }
        (_, Some(LinkKind::Bridge)) if to_netns => Role::Device { pod: true },
        (_, Some(LinkKind::Bridge)) => Role::Ignored("its bridge is served"),
        // The node's own macvlan next to its pods' macvlans: frames from other hosts pass the
        // uplink's hook first.
        (LinkKind::Macvlan, _) => Role::Device {
            pod: link.far_end == FarEnd::Hosts,
        },
        // CNI plugins give a pod's device no address, or the gateway's address and a route to the
        // pod. Any other device probably belongs to a router in another namespace, behind which any
        // client may be.
        _ => Role::Device {
            pod: to_netns && (link.addrs.is_empty() || link.far_end == FarEnd::Hosts),
        },
    }
}

/// The master of all ports of Open vSwitch bridges.
pub const OPEN_VSWITCH: &str = "ovs-system";

/// Returns true for a bridge that has no address of the node and only ports into other namespaces.
/// The node does not route through such a bridge: a tenant owns the network, and its addresses may
/// coincide with ClusterIPs.
fn is_apart(bridge: &Link, links: &BTreeMap<u32, Link>) -> bool {
    let is_nodes = |port: &Link| port.master == Some(bridge.index) && !port.leads_elsewhere();
    // A VLAN or macvlan on the bridge has its own address. An Open vSwitch bridge contains the
    // node's port.
    let may_carry = |link: &Link| {
        matches!(link.kind, LinkKind::Vlan | LinkKind::Macvlan) && !link.leads_elsewhere()
    };
    bridge.addrs.is_empty()
        && bridge.far_end == FarEnd::Nothing
        && bridge.name != OPEN_VSWITCH
        && !links.values().any(|link| is_nodes(link) || may_carry(link))
}

/// Explains why a pair into another namespace does not count as a pod's device. Returns `None` for
/// pods' devices and clear routers.
pub fn why_no_pod(link: &Link, links: &BTreeMap<u32, Link>) -> Option<String> {
    if !link.leads_elsewhere() || role(link, links) != (Role::Device { pod: false }) {
        return None;
    }
    let has = match link.far_end {
        FarEnd::Nothing => "an address, but no route to a pod through it".to_owned(),
        FarEnd::Network(net) => format!("an address and a network of its own ({net})"),
        FarEnd::Hosts | FarEnd::Router => return None,
    };
    Some(format!(
        "{} has {has}, so it counts as a router's",
        link.name
    ))
}

/// The flags that identify pods' addresses where devices do not.
pub const TELL_PODS: &str = "--cluster-cidr or --detect-local-mode";

#[cfg(test)]
mod tests {
    use super::*;
    use LinkKind::*;

    #[test]
    #[expect(clippy::too_many_lines, reason = "a table of cases")]
    fn each_device_has_its_role() {
        let device = Role::Device { pod: false };
        let pod = Role::Device { pod: true };
        let cases = [
            (
                "lo",
                Link {
                    header: LinkHeader::Other,
                    ..link("lo", Loopback)
                },
                Role::Loopback,
            ),
            ("anchor", link("kpx0", Veth), Role::Anchor),
            (
                "anchor's peer",
                link("kpx1", Veth),
                Role::Ignored("the anchor's other end"),
            ),
            (
                "a stranger of the anchor's name",
                link("kpx0", Bridge),
                device,
            ),
            ("network card", link("eth0", Physical), device),
            (
                "network card that is down",
                Link {
                    up: false,
                    ..link("eth0", Physical)
                },
                device,
            ),
            ("bridge", link("cni0", Bridge), device),
            ("bond", link("bond0", Bond), device),
            ("VLAN", link("eth0.5", Vlan), device),
            ("overlay", link("flannel.1", Overlay), device),
            ("macvlan", link("mac0", Macvlan), device),
            (
                "macvlan with an address",
                with_addr(link("mac0", Macvlan)),
                device,
            ),
            ("tap of a virtual machine", link("tap0", Other), device),
            (
                "bond's slave",
                Link {
                    master: Some(BOND),
                    ..link("eth1", Physical)
                },
                Role::Ignored("its bond is served"),
            ),
            (
                "bridge's card",
                Link {
                    master: Some(BRIDGE),
                    ..link("eth1", Physical)
                },
                Role::Ignored("its bridge is served"),
            ),
            (
                "bridge's tap",
                Link {
                    master: Some(BRIDGE),
                    ..link("tap0", Other)
                },
                Role::Ignored("its bridge is served"),
            ),
            (
                "bridge's veth of this namespace",
                Link {
                    master: Some(BRIDGE),
                    ..link("v0", Veth)
                },
                Role::Ignored("its bridge is served"),
            ),
            (
                "bridge's pod",
                Link {
                    master: Some(BRIDGE),
                    ..away(link("v0", Veth))
                },
                pod,
            ),
            (
                "bridge's pod that has an address",
                Link {
                    master: Some(BRIDGE),
                    ..with_addr(away(link("v0", Veth)))
                },
                pod,
            ),
            ("routed pod", away(link("cali0", Veth)), pod),
            ("routed pod behind netkit", away(link("lxc0", Netkit)), pod),
            (
                "veth to a namespace, with an address",
                with_addr(away(link("v0", Veth))),
                device,
            ),
            ("veth of this namespace", link("v0", Veth), device),
            (
                "VLAN whose parent is elsewhere",
                away(link("eth0", Vlan)),
                device,
            ),
            (
                "slave of a VRF",
                Link {
                    master: Some(VRF),
                    ..link("eth1", Physical)
                },
                device,
            ),
            (
                "slave of a device not known yet",
                Link {
                    master: Some(99),
                    ..link("eth1", Physical)
                },
                device,
            ),
            (
                "dummy",
                link("dummy0", Dummy),
                Role::Ignored("a dummy carries no packets"),
            ),
            (
                "dummy on a bridge",
                Link {
                    master: Some(BRIDGE),
                    ..link("dummy0", Dummy)
                },
                Role::Ignored("a dummy carries no packets"),
            ),
            (
                "ifb",
                link("ifb0", Ifb),
                Role::Ignored("an ifb only shapes packets that other devices receive"),
            ),
            (
                "nlmon",
                Link {
                    header: LinkHeader::Other,
                    ..link("nlmon0", Nlmon)
                },
                Role::Ignored("nlmon carries netlink messages"),
            ),
        ];
        let links = [(BRIDGE, Bridge), (BOND, Bond), (VRF, Other)];
        let links = links
            .map(|(index, kind)| {
                (
                    index,
                    Link {
                        index,
                        ..with_addr(link("master", kind))
                    },
                )
            })
            .into();
        for (name, link, want) in cases {
            assert_eq!(role(&link, &links), want, "{name}");
        }
    }

    #[test]
    fn pod_is_no_pod_on_a_bridge_that_the_node_is_not_on() {
        let apart = Role::Ignored("the node is not on its bridge");
        let port = |index, port: Link| {
            (
                index,
                Link {
                    index,
                    master: Some(BRIDGE),
                    ..port
                },
            )
        };
        let pod = port(20, away(link("v0", Veth)));
        let bridge = Link {
            index: BRIDGE,
            ..link("br0", Bridge)
        };
        let cases = [
            ("alone", bridge.clone(), vec![], apart),
            (
                "with another pod",
                bridge.clone(),
                vec![port(21, away(link("v1", Veth)))],
                apart,
            ),
            (
                "with an address",
                with_addr(bridge.clone()),
                vec![],
                Role::Device { pod: true },
            ),
            (
                "with a route",
                Link {
                    far_end: FarEnd::Hosts,
                    ..bridge.clone()
                },
                vec![],
                Role::Device { pod: true },
            ),
            (
                "with a card",
                bridge.clone(),
                vec![port(21, link("eth0", Physical))],
                Role::Device { pod: true },
            ),
            (
                "below a VLAN",
                bridge.clone(),
                vec![(21, link("br0.5", Vlan))],
                Role::Device { pod: true },
            ),
            (
                "of Open vSwitch",
                Link {
                    name: OPEN_VSWITCH.to_owned(),
                    ..bridge
                },
                vec![],
                Role::Device { pod: true },
            ),
        ];
        for (name, bridge, others, want) in cases {
            let links = others
                .into_iter()
                .chain([(BRIDGE, bridge), pod.clone()])
                .collect();
            assert_eq!(role(&pod.1, &links), want, "{name}");
        }
    }

    #[test]
    fn devices_without_ethernet_headers_have_their_roles() {
        let of = |kind, header| {
            role(
                &Link {
                    header,
                    ..link("wg0", kind)
                },
                &BTreeMap::new(),
            )
        };
        assert_eq!(of(Other, LinkHeader::None), Role::Device { pod: false });
        let can = Role::Ignored("its packets start neither with Ethernet nor with IP");
        assert_eq!(of(Other, LinkHeader::Other), can);
        let ipsec =
            Role::Ignored("an IPsec interface shows packets with the header of their tunnel");
        assert_eq!(of(Ipsec, LinkHeader::None), ipsec);
    }

    const BRIDGE: u32 = 10;
    const BOND: u32 = 11;
    const VRF: u32 = 12;

    fn link(name: &str, kind: LinkKind) -> Link {
        Link {
            index: 5,
            name: name.to_owned(),
            mac: Some([2, 0, 0, 0, 0, 5]),
            mtu: 1500,
            kind,
            header: LinkHeader::Ethernet,
            master: None,
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

    #[test]
    #[expect(clippy::too_many_lines, reason = "a table of cases")]
    fn routes_decide_the_role_of_a_pair_with_an_address() {
        let device = Role::Device { pod: false };
        let pod = Role::Device { pod: true };
        let cases = [
            ("a route to a host", far_end(&["10.244.1.2/32"]), pod),
            (
                "one of each family",
                far_end(&["10.244.1.2/32", "fd00::2/128"]),
                pod,
            ),
            ("one of IPv6 alone", far_end(&["fd00::2/128"]), pod),
            (
                "to several addresses of a pod",
                far_end(&["10.244.1.2/32", "10.244.1.9/32"]),
                pod,
            ),
            (
                "with the routes of every device",
                far_end(&["10.244.1.2/32", "fe80::/64", "ff00::/8"]),
                pod,
            ),
            (
                "with a network between the ends alone",
                far_end(&["10.244.1.2/32", "169.254.7.0/30"]),
                pod,
            ),
            (
                "while it is down",
                Link {
                    up: false,
                    ..far_end(&["10.244.1.2/32"])
                },
                pod,
            ),
            (
                "in a VRF",
                Link {
                    master: Some(VRF),
                    ..far_end(&["10.244.1.2/32"])
                },
                pod,
            ),
            (
                "netkit with an address and a route",
                Link {
                    kind: Netkit,
                    ..far_end(&["10.244.1.2/32"])
                },
                pod,
            ),
            (
                "to its own address alone",
                far_end(&["10.244.1.1/32"]),
                device,
            ),
            (
                "to link-local addresses alone",
                far_end(&["fe80::/64", "169.254.1.1/32"]),
                device,
            ),
            ("with a network", far_end(&["10.9.0.0/24"]), device),
            (
                "with a network and a host",
                far_end(&["10.244.1.2/32", "10.9.0.0/24"]),
                device,
            ),
            (
                "with a network of the other family",
                far_end(&["10.244.1.2/32", "fd00::/64"]),
                device,
            ),
            (
                "with everything",
                far_end(&["10.244.1.2/32", "0.0.0.0/0"]),
                device,
            ),
            (
                "with a router",
                far_end(&["10.244.1.2/32", "10.9.0.0/24 via"]),
                device,
            ),
            (
                "with a host behind a router",
                far_end(&["10.9.0.7/32 via"]),
                device,
            ),
            (
                "to a namespace, without an address, with a network",
                with_routes(away(link("v0", Veth)), &["10.9.0.0/24"]),
                pod,
            ),
            (
                "a node's own macvlan beside its pods'",
                Link {
                    kind: Macvlan,
                    peer_netns: false,
                    ..far_end(&["10.244.1.2/32"])
                },
                pod,
            ),
            (
                "macvlan with a network",
                Link {
                    kind: Macvlan,
                    peer_netns: false,
                    ..far_end(&["10.9.0.0/24"])
                },
                device,
            ),
            (
                "of this namespace, with a route to a host",
                with_routes(with_addr(link("v0", Veth)), &["10.9.0.7/32"]),
                device,
            ),
        ];
        let links = [(
            VRF,
            Link {
                index: VRF,
                ..link("vrf0", Other)
            },
        )]
        .into();
        for (name, link, want) in cases {
            assert_eq!(role(&link, &links), want, "{name}");
        }
    }

    #[test]
    fn the_reason_is_given_where_pods_may_be_meant() {
        let cases: [(&[&str], Option<&str>); 4] = [
            (
                &[],
                Some(
                    "v0 has an address, but no route to a pod through it, so it counts as a router's",
                ),
            ),
            (
                &["10.9.0.0/24"],
                Some(
                    "v0 has an address and a network of its own (10.9.0.0/24), so it counts as a router's",
                ),
            ),
            (&["10.9.0.0/24", "0.0.0.0/0 via"], None),
            (&["10.244.1.2/32"], None),
        ];
        for (routes, why) in cases {
            assert_eq!(
                why_no_pod(&far_end(routes), &BTreeMap::new()).as_deref(),
                why,
                "{routes:?}"
            );
        }
        assert_eq!(
            why_no_pod(&with_addr(link("v0", Veth)), &BTreeMap::new()),
            None,
            "it stays on this host"
        );
        assert_eq!(why_no_pod(&away(link("v0", Veth)), &BTreeMap::new()), None);
    }

    /// Returns a device into another namespace, with an address and these routes.
    fn far_end(routes: &[&str]) -> Link {
        with_routes(
            Link {
                addrs: ["10.244.1.1/32".parse().unwrap()].into(),
                ..away(link("v0", Veth))
            },
            routes,
        )
    }

    fn with_routes(link: Link, routes: &[&str]) -> Link {
        let own = link.addrs.iter().map(|net| net.addr()).collect();
        let says = routes.iter().map(|route| {
            let (to, gateway) = route
                .strip_suffix(" via")
                .map_or((*route, false), |to| (to, true));
            FarEnd::of(to.parse().unwrap(), gateway, &own)
        });
        Link {
            far_end: says.max().unwrap_or_default(),
            ..link
        }
    }

    fn away(link: Link) -> Link {
        Link {
            peer_netns: true,
            ..link
        }
    }

    fn with_addr(link: Link) -> Link {
        Link {
            addrs: ["10.0.0.1/24".parse().unwrap()].into(),
            ..link
        }
    }
}
