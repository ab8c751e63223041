//! Chooses the node's own address.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use anyhow::Context;
use netlink_packet_route::route::{RouteAttribute, RouteHeader, RouteMessage, RouteType};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use proxy_common::addr::Addr;

use super::link::Link;
use super::netlink::{Handle, dump};
use super::role::{Role, role};
use super::sysctl;

/// Returns the node's primary address of a family.
///
/// `preferred` are the addresses that the cluster or the operator gives. The first that a device
/// has counts, else the first. If none has this family, the address of the default route's device
/// counts, else of the first device that is not a pod's.
pub fn node_address<A: Addr>(
    links: &BTreeMap<u32, Link>,
    preferred: &[IpAddr],
    default_route: Option<u32>,
) -> Option<A> {
    let mut named = preferred.iter().filter(|&&ip| A::from_ip(ip).is_some());
    let present = named
        .clone()
        .find(|&&ip| links.values().any(|link| link.has(ip)));
    if let Some(&ip) = present.or_else(|| named.next()) {
        return A::from_ip(ip);
    }
    let on_default_route = default_route
        .and_then(|index| links.get(&index))
        .and_then(device_address);
    let devices = links
        .values()
        .filter(|link| role(link, links) == Role::Device { pod: false });
    on_default_route.or_else(|| devices.filter_map(device_address).next())
}

/// Returns the address from which the host sends through a device: the address with the shortest
/// prefix, and among equal prefixes the lowest address. Addresses that move between nodes
/// (keepalived, kube-vip) usually have the full prefix length.
pub fn device_address<A: Addr>(link: &Link) -> Option<A> {
    let addrs = link
        .addrs
        .iter()
        .filter_map(|net| Some((net.prefix_len(), A::from_ip(net.addr())?)));
    addrs.min().map(|(_, addr)| addr)
}

/// Returns the interface index of the main table's default route with the lowest metric.
pub async fn default_route<A: Addr>(handle: &Handle) -> anyhow::Result<Option<u32>> {
    let family = if A::UNSPECIFIED.ip().is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    if family == AddressFamily::Inet6 && !sysctl::has_ipv6() {
        return Ok(None);
    }
    let mut request = RouteMessage::default();
    request.header.address_family = family;
    request.header.table = RouteHeader::RT_TABLE_MAIN;
    request.header.kind = RouteType::Unicast;
    let defaults = dump(
        handle,
        RouteNetlinkMessage::GetRoute(request),
        |message| match message {
            RouteNetlinkMessage::NewRoute(route) if route.header.destination_prefix_length == 0 => {
                metric_and_device(&route)
            }
            _ => None,
        },
    );
    match defaults.await {
        Ok(defaults) => Ok(defaults.into_iter().min().map(|(_, device)| device)),
        // A network namespace without routes has no table.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            Err(error).with_context(|| format!("list the default routes of {}", A::FAMILY))
        }
    }
}

fn metric_and_device(route: &RouteMessage) -> Option<(u32, u32)> {
    let mut metric = 0;
    let mut device = None;
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Priority(priority) => metric = *priority,
            RouteAttribute::Oif(index) => device = Some(*index),
            RouteAttribute::MultiPath(hops) => device = hops.first().map(|hop| hop.interface_index),
            _ => {}
        }
    }
    Some((metric, device?))
}

#[cfg(test)]
mod tests {
    use proxy_common::addr::{Addr4, Addr6};

    use super::super::link::{LinkHeader, LinkKind};
    use super::super::role::FarEnd;
    use super::*;

    /// A case: name, preferred addresses, device of the default route, the node's IPv4 and IPv6
    /// addresses.
    type Case<'a> = (&'a str, &'a [&'a str], Option<u32>, [&'a str; 2]);

    #[test]
    fn a_node_has_an_address_of_each_family() {
        let cases: [Case<'_>; 8] = [
            (
                "the preferred one that a device has",
                &["192.0.2.9", "10.1.0.1"],
                None,
                ["10.1.0.1", "fd00::1"],
            ),
            (
                "lo is a device, too",
                &["10.99.0.1"],
                None,
                ["10.99.0.1", "fd00::1"],
            ),
            (
                "else the first preferred",
                &["192.0.2.9", "192.0.2.8"],
                Some(3),
                ["192.0.2.9", "fd01::2"],
            ),
            (
                "each family for itself",
                &["192.0.2.9", "fd01::2"],
                None,
                ["192.0.2.9", "fd01::2"],
            ),
            (
                "nothing preferred: default route",
                &[],
                Some(3),
                ["10.1.0.1", "fd01::2"],
            ),
            (
                "the default route's device has no address",
                &[],
                Some(5),
                ["10.0.0.7", "fd00::1"],
            ),
            (
                "the default route's device is unknown",
                &[],
                Some(9),
                ["10.0.0.7", "fd00::1"],
            ),
            (
                "no default route: first device that is no pod's",
                &[],
                None,
                ["10.0.0.7", "fd00::1"],
            ),
        ];
        let lo = Link {
            kind: LinkKind::Loopback,
            ..link(1, &["10.99.0.1/32"])
        };
        let eth0 = link(
            2,
            &["10.0.0.5/32", "10.0.0.7/24", "10.0.0.9/24", "fd00::1/64"],
        );
        let eth1 = link(3, &["10.1.0.1/16", "fd01::2/64"]);
        let pod = Link {
            kind: LinkKind::Veth,
            peer_netns: true,
            ..link(5, &[])
        };
        let links: BTreeMap<u32, Link> =
            [lo, pod, eth1, eth0].map(|link| (link.index, link)).into();
        for (name, preferred, default_route, want) in cases {
            let preferred: Vec<IpAddr> = preferred.iter().map(|ip| ip.parse().unwrap()).collect();
            let addr4 = node_address::<Addr4>(&links, &preferred, default_route).unwrap();
            let addr6 = node_address::<Addr6>(&links, &preferred, default_route).unwrap();
            assert_eq!(
                [addr4.ip(), addr6.ip()].map(|ip| ip.to_string()),
                want,
                "{name}"
            );
        }
        assert_eq!(node_address::<Addr4>(&BTreeMap::new(), &[], None), None);
    }

    fn link(index: u32, addrs: &[&str]) -> Link {
        Link {
            index,
            name: format!("dev{index}"),
            mac: None,
            mtu: 1500,
            kind: LinkKind::Physical,
            header: LinkHeader::Ethernet,
            master: None,
            peer_netns: false,
            queues: false,
            up: true,
            addrs: addrs.iter().map(|net| net.parse().unwrap()).collect(),
            far_end: FarEnd::Nothing,
            filtered: false,
            filtered_out: false,
            lacks_egress: false,
        }
    }
}
