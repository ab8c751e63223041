//! Reads the routes that show which devices belong to pods.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::Context;
use ipnet::IpNet;
use netlink_packet_core::{NLM_F_REPLACE, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::route::{RouteAttribute, RouteMessage, RouteType};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::link::Link;
use super::netlink::{Handle, dump};
use super::role::FarEnd;
use super::route::ip;
use super::sysctl;

/// The maximum number of devices whose routes are requested per device, which makes the kernel skip
/// all other routes. For more devices, all routes are listed once.
const FEW: usize = 8;

/// The part of a route that shows which hosts are reachable through its devices.
#[derive(Debug, PartialEq, Eq)]
struct DeviceRoute {
    /// The interface indexes: a route may have several next hops.
    devices: Vec<u32>,
    to: IpNet,
    gateway: bool,
}

/// Sets the far ends of these devices from the routes of all tables.
pub(super) async fn query(
    handle: &Handle,
    links: &mut BTreeMap<u32, Link>,
    which: impl IntoIterator<Item = u32>,
) -> anyhow::Result<()> {
    let mut found = BTreeMap::new();
    for index in which {
        if let Some(link) = links.get_mut(&index) {
            link.far_end = FarEnd::Nothing;
            found.extend(link.is_told_by_routes().then_some((index, FarEnd::Nothing)));
        }
    }
    if found.is_empty() {
        return Ok(());
    }
    let own: HashSet<IpAddr> = links
        .values()
        .flat_map(|link| link.addrs.iter().map(|net| net.addr()))
        .collect();
    let asked: BTreeSet<u32> = found.keys().copied().collect();
    for request in requests(&asked) {
        for device_route in device_routes(handle, request, &asked).await? {
            let says = FarEnd::of(device_route.to, device_route.gateway, &own);
            for device in device_route.devices {
                found
                    .entry(device)
                    .and_modify(|far_end| *far_end = says.max(*far_end));
            }
        }
    }
    for (index, far_end) in found {
        links.entry(index).and_modify(|link| link.far_end = far_end);
    }
    Ok(())
}

fn requests(devices: &BTreeSet<u32>) -> Vec<RouteMessage> {
    let families = [AddressFamily::Inet, AddressFamily::Inet6].into_iter();
    let families = families.filter(|family| *family == AddressFamily::Inet || sysctl::has_ipv6());
    let of = |family, device: Option<u32>| {
        let mut request = RouteMessage::default();
        request.header.address_family = family;
        request.header.kind = RouteType::Unicast;
        request.attributes.extend(device.map(RouteAttribute::Oif));
        request
    };
    let few = devices.len() <= FEW;
    families
        .flat_map(|family| match few {
            true => devices
                .iter()
                .map(|device| of(family, Some(*device)))
                .collect(),
            false => vec![of(family, None)],
        })
        .collect()
}

async fn device_routes(
    handle: &Handle,
    request: RouteMessage,
    devices: &BTreeSet<u32>,
) -> anyhow::Result<Vec<DeviceRoute>> {
    let device_routes = dump(
        handle,
        RouteNetlinkMessage::GetRoute(request),
        |message| match message {
            RouteNetlinkMessage::NewRoute(route) => device_route(&route)
                .filter(|route| route.devices.iter().any(|device| devices.contains(device))),
            _ => None,
        },
    );
    match device_routes.await {
        // The device is gone, or the network namespace has no routes.
        Err(error)
            if error.raw_os_error() == Some(nix::libc::ENODEV)
                || error.kind() == io::ErrorKind::NotFound =>
        {
            Ok(Vec::new())
        }
        device_routes => device_routes.context("list the routes through veths"),
    }
}

/// Returns the interface indexes of the route in a notification; `None` if it may concern any
/// device.
pub(super) fn named(message: &NetlinkMessage<RouteNetlinkMessage>) -> Option<Vec<u32>> {
    let route = match &message.payload {
        NetlinkPayload::InnerMessage(
            RouteNetlinkMessage::NewRoute(route) | RouteNetlinkMessage::DelRoute(route),
        ) => route,
        NetlinkPayload::Overrun(_) => return None, // The lost messages may concern any device.
        _ => return Some(Vec::new()),
    };
    let device_route = device_route(route);
    // The kernel does not report the device of a replaced route. Routes to pods have full prefix
    // lengths, which routing daemons rarely replace.
    let replaces = message.header.flags & NLM_F_REPLACE != 0;
    if replaces
        && device_route
            .as_ref()
            .is_none_or(|route| route.to.prefix_len() == route.to.max_prefix_len())
    {
        return None;
    }
    Some(device_route.map(|route| route.devices).unwrap_or_default())
}

/// Reads a route. Returns `None` unless the route is unicast.
fn device_route(route: &RouteMessage) -> Option<DeviceRoute> {
    let header = &route.header;
    let mut to: IpAddr = match header.address_family {
        AddressFamily::Inet => Ipv4Addr::UNSPECIFIED.into(),
        AddressFamily::Inet6 => Ipv6Addr::UNSPECIFIED.into(),
        _ => return None,
    };
    let mut devices = Vec::new();
    let mut gateway = false;
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Destination(addr) => to = ip(addr)?,
            RouteAttribute::Oif(index) => devices.push(*index),
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) => gateway = true,
            RouteAttribute::MultiPath(hops) => {
                devices.extend(hops.iter().map(|hop| hop.interface_index));
                gateway = true;
            }
            _ => {}
        }
    }
    let to = IpNet::new(to, header.destination_prefix_length).ok()?;
    (header.kind == RouteType::Unicast).then_some(DeviceRoute {
        devices,
        to,
        gateway,
    })
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::NetlinkHeader;
    use netlink_packet_route::route::{RouteNextHop, RouteVia};

    use super::super::route::{address, family};
    use super::*;

    /// A case: name, network, the rest of the route; its devices, and whether there is a gateway.
    type Case<'a> = (&'a str, &'a str, Vec<RouteAttribute>, Vec<u32>, bool);

    #[test]
    fn a_route_names_its_network_and_devices() {
        let dev = || RouteAttribute::Oif(7);
        let via = |gateway: &str| RouteAttribute::Gateway(address(gateway.parse().unwrap()));
        let hop = |index| {
            let mut hop = RouteNextHop::default();
            hop.interface_index = index;
            hop
        };
        let cases: [Case<'_>; 6] = [
            ("a host", "10.244.1.2/32", vec![dev()], vec![7], false),
            ("a host of IPv6", "fd00::2/128", vec![dev()], vec![7], false),
            ("a network", "10.244.1.0/24", vec![dev()], vec![7], false),
            (
                "everything",
                "0.0.0.0/0",
                vec![dev(), via("192.0.2.1")],
                vec![7],
                true,
            ),
            (
                "a gateway of the other family",
                "10.0.0.0/8",
                vec![
                    dev(),
                    RouteAttribute::Via(RouteVia::Inet6("fe80::1".parse().unwrap())),
                ],
                vec![7],
                true,
            ),
            (
                "two ways",
                "fd00::/64",
                vec![RouteAttribute::MultiPath(vec![hop(7), hop(8)])],
                vec![7, 8],
                true,
            ),
        ];
        for (name, to, attributes, devices, gateway) in cases {
            let to: IpNet = to.parse().unwrap();
            assert_eq!(
                device_route(&route(to, attributes)),
                Some(DeviceRoute {
                    devices,
                    to,
                    gateway
                }),
                "{name}"
            );
        }
        let mut local = route("10.244.1.1/32".parse().unwrap(), vec![dev()]);
        local.header.kind = RouteType::Local;
        assert_eq!(device_route(&local), None);
    }

    #[test]
    fn a_notification_names_devices_or_may_concern_any() {
        let message = |to: &str, flags: u16| {
            let route = route(to.parse().unwrap(), vec![RouteAttribute::Oif(7)]);
            let mut message = NetlinkMessage::from(RouteNetlinkMessage::NewRoute(route));
            message.header.flags = flags;
            message
        };
        assert_eq!(named(&message("10.244.1.2/32", 0)), Some(vec![7]));
        assert_eq!(
            named(&message("10.244.1.2/32", NLM_F_REPLACE)),
            None,
            "which device's was it before?"
        );
        assert_eq!(
            named(&message("10.0.0.0/8", NLM_F_REPLACE)),
            Some(vec![7]),
            "a routing daemon's"
        );
        let lost = NetlinkMessage::new(
            NetlinkHeader::default(),
            NetlinkPayload::Overrun(Default::default()),
        );
        assert_eq!(named(&lost), None);
    }

    #[test]
    fn few_devices_are_asked_about_one_by_one() {
        let filters = |count: u32| -> Vec<bool> {
            let requests = requests(&(1..=count).collect());
            let inet = requests
                .iter()
                .filter(|request| request.header.address_family == AddressFamily::Inet);
            inet.map(|request| !request.attributes.is_empty()).collect()
        };
        assert_eq!(filters(2), [true, true]);
        assert_eq!(filters(9), [false]);
    }

    fn route(to: IpNet, attributes: Vec<RouteAttribute>) -> RouteMessage {
        let mut route = RouteMessage::default();
        route.header.address_family = family(to.addr());
        route.header.destination_prefix_length = to.prefix_len();
        route.header.kind = RouteType::Unicast;
        if to.prefix_len() > 0 {
            route
                .attributes
                .push(RouteAttribute::Destination(address(to.addr())));
        }
        route.attributes.extend(attributes);
        route
    }
}
