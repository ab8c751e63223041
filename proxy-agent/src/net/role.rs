//! What a device is to kpx: whether programs go onto it, and which.

use std::collections::BTreeMap;

use super::anchor;
use super::link::{Link, LinkKind};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Loopback,
    /// The near end of our own pair, into which the service routes lead.
    Anchor,
    /// Packets enter and leave the node here, or a pod.
    Device {
        /// The far end is a pod.
        pod: bool,
    },
    /// Nothing goes onto it, and why.
    Ignored(&'static str),
}

/// `links` are all devices, by interface index: what a device is depends on what it is enslaved to.
pub fn role(link: &Link, links: &BTreeMap<u32, Link>) -> Role {
    let to_netns = matches!(link.kind, LinkKind::Veth | LinkKind::Netkit) && link.peer_netns;
    let master = link.master.and_then(|master| links.get(&master)).map(|master| master.kind);
    match (link.kind, master) {
        (LinkKind::Loopback, _) => Role::Loopback,
        (LinkKind::Veth, _) if link.name == anchor::NAME => Role::Anchor,
        (LinkKind::Veth, _) if link.name == anchor::PEER => Role::Ignored("the anchor's other end"),
        (LinkKind::Dummy, _) => Role::Ignored("a dummy carries no packets"),
        (LinkKind::Ifb, _) => Role::Ignored("an ifb only shapes what other devices receive"),
        (LinkKind::Nlmon, _) => Role::Ignored("nlmon carries netlink messages"),
        _ if !link.ethernet => Role::Ignored("not an Ethernet device"),
        (_, Some(LinkKind::Bond)) => Role::Ignored("its bond is served"),
        (_, Some(LinkKind::Bridge)) if to_netns => Role::Device { pod: true },
        (_, Some(LinkKind::Bridge)) => Role::Ignored("its bridge is served"),
        // With an address of its own it is rather a link to a router in a namespace, from where anyone may come.
        _ => Role::Device { pod: to_netns && link.addrs.is_empty() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use LinkKind::*;

    #[test]
    fn roles() {
        let device = Role::Device { pod: false };
        let pod = Role::Device { pod: true };
        let cases = [
            ("lo", Link { ethernet: false, ..link("lo", Loopback) }, Role::Loopback),
            ("anchor", link("kpx0", Veth), Role::Anchor),
            ("anchor's peer", link("kpx1", Veth), Role::Ignored("the anchor's other end")),
            ("a stranger of the anchor's name", link("kpx0", Bridge), device),
            ("network card", link("eth0", Physical), device),
            ("network card that is down", Link { up: false, ..link("eth0", Physical) }, device),
            ("bridge", link("cni0", Bridge), device),
            ("bond", link("bond0", Bond), device),
            ("VLAN", link("eth0.5", Vlan), device),
            ("overlay", link("flannel.1", Overlay), device),
            ("tap of a virtual machine", link("tap0", Other), device),
            (
                "bond's slave",
                Link { master: Some(BOND), ..link("eth1", Physical) },
                Role::Ignored("its bond is served"),
            ),
            (
                "bridge's card",
                Link { master: Some(BRIDGE), ..link("eth1", Physical) },
                Role::Ignored("its bridge is served"),
            ),
            (
                "bridge's tap",
                Link { master: Some(BRIDGE), ..link("tap0", Other) },
                Role::Ignored("its bridge is served"),
            ),
            (
                "bridge's veth of this namespace",
                Link { master: Some(BRIDGE), ..link("v0", Veth) },
                Role::Ignored("its bridge is served"),
            ),
            ("bridge's pod", Link { master: Some(BRIDGE), ..away(link("v0", Veth)) }, pod),
            (
                "bridge's pod that has an address",
                Link { master: Some(BRIDGE), ..with_addr(away(link("v0", Veth))) },
                pod,
            ),
            ("routed pod", away(link("cali0", Veth)), pod),
            ("routed pod behind netkit", away(link("lxc0", Netkit)), pod),
            ("veth to a namespace, with an address", with_addr(away(link("v0", Veth))), device),
            ("veth of this namespace", link("v0", Veth), device),
            ("VLAN whose parent is elsewhere", away(link("eth0", Vlan)), device),
            ("slave of a VRF", Link { master: Some(VRF), ..link("eth1", Physical) }, device),
            ("slave of a device not known yet", Link { master: Some(99), ..link("eth1", Physical) }, device),
            ("dummy", link("dummy0", Dummy), Role::Ignored("a dummy carries no packets")),
            (
                "dummy on a bridge",
                Link { master: Some(BRIDGE), ..link("dummy0", Dummy) },
                Role::Ignored("a dummy carries no packets"),
            ),
            ("ifb", link("ifb0", Ifb), Role::Ignored("an ifb only shapes what other devices receive")),
            (
                "nlmon",
                Link { ethernet: false, ..link("nlmon0", Nlmon) },
                Role::Ignored("nlmon carries netlink messages"),
            ),
            ("wireguard", Link { ethernet: false, ..link("wg0", Other) }, Role::Ignored("not an Ethernet device")),
        ];
        let links = [(BRIDGE, Bridge), (BOND, Bond), (VRF, Other)];
        let links = links.map(|(index, kind)| (index, Link { index, ..link("master", kind) })).into();
        for (name, link, want) in cases {
            assert_eq!(role(&link, &links), want, "{name}");
        }
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
            ethernet: true,
            master: None,
            peer_netns: false,
            queues: false,
            up: true,
            addrs: [].into(),
        }
    }

    fn away(link: Link) -> Link {
        Link { peer_netns: true, ..link }
    }

    fn with_addr(link: Link) -> Link {
        Link { addrs: ["10.0.0.1/24".parse().unwrap()].into(), ..link }
    }
}
