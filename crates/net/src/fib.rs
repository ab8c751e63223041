//! Looks up the kernel's route for a packet.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;

use anyhow::{Context, bail};
use futures::StreamExt;
use ipnet::IpNet;
use netlink_packet_core::{NLM_F_REQUEST, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::route::{
    RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use super::netlink::{Handle, dump};
use super::route::{PROTOCOL, address, family, ip};
use super::sysctl;

/// The prefix lengths below which a route counts as a default route: 0.0.0.0/0, and the two halves
/// (/1) that VPNs install instead. The widest pod networks are the private ranges 10.0.0.0/8 and
/// fc00::/7.
const WIDEST4: u8 = 8;
const WIDEST6: u8 = 7;

/// The class of the route to an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RouteClass {
    /// The address is the host's own.
    Own,
    /// The address is on-link on this device (interface index).
    OnLink(u32),
    /// A route to the address's network.
    Routed,
    /// A default route.
    Default,
    /// No usable route; the text is the kernel's error.
    Nowhere(String),
}

/// Returns the kernel's route class for each address. Routes into the anchor, given by interface
/// index, count as [`RouteClass::Nowhere`].
pub async fn route_classes(
    handle: &Handle,
    addrs: &BTreeSet<IpAddr>,
    anchor: u32,
) -> anyhow::Result<BTreeMap<IpAddr, RouteClass>> {
    let mut classes = BTreeMap::new();
    for addr in addrs {
        let class = route_class(handle, *addr, anchor)
            .await
            .with_context(|| format!("look up the route to {addr}"))?;
        classes.insert(*addr, class);
    }
    Ok(classes)
}

/// Returns true if a route to such a network counts as a default route.
pub fn is_default(ipv4: bool, prefix_len: u8) -> bool {
    prefix_len < if ipv4 { WIDEST4 } else { WIDEST6 }
}

/// Returns true if an IPv4 route of the main table has several next hops.
pub async fn has_many_ways(handle: &Handle) -> anyhow::Result<bool> {
    let mut request = RouteMessage::default();
    request.header.address_family = AddressFamily::Inet;
    request.header.table = RouteHeader::RT_TABLE_MAIN;
    let routes = dump(
        handle,
        RouteNetlinkMessage::GetRoute(request),
        |message| match message {
            RouteNetlinkMessage::NewRoute(route) => {
                let is_many =
                    |attribute: &RouteAttribute| matches!(attribute, RouteAttribute::MultiPath(_));
                route.attributes.iter().any(is_many).then_some(())
            }
            _ => None,
        },
    );
    match routes.await {
        // A network namespace without routes has no table.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        routes => Ok(!routes.context("list the routes")?.is_empty()),
    }
}

/// Returns the networks within `ranges` to which routes of other programs, in any table, forward
/// packets.
pub async fn networks_within(handle: &Handle, ranges: &[IpNet]) -> anyhow::Result<Vec<IpNet>> {
    let mut found = Vec::new();
    for is_ipv4 in [true, false] {
        if !ranges.iter().any(|range| range.addr().is_ipv4() == is_ipv4)
            || !is_ipv4 && !sysctl::has_ipv6()
        {
            continue;
        }
        let mut request = RouteMessage::default();
        request.header.address_family = if is_ipv4 {
            AddressFamily::Inet
        } else {
            AddressFamily::Inet6
        };
        let routes = dump(
            handle,
            RouteNetlinkMessage::GetRoute(request),
            |message| match message {
                RouteNetlinkMessage::NewRoute(route) => {
                    others(&route).filter(|net| ranges.iter().any(|range| range.contains(net)))
                }
                _ => None,
            },
        );
        match routes.await {
            // A network namespace without routes has no table.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            routes => found.extend(routes.context("list the routes")?),
        }
    }
    found.sort_unstable();
    found.dedup();
    Ok(found)
}

/// Returns the network of a route, if it is another program's unicast route.
fn others(route: &RouteMessage) -> Option<IpNet> {
    let header = &route.header;
    if header.kind != RouteType::Unicast || header.protocol == RouteProtocol::Other(PROTOCOL) {
        return None;
    }
    let to = route
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RouteAttribute::Destination(addr) => ip(addr),
            _ => None,
        });
    let everywhere = || match header.address_family {
        AddressFamily::Inet => IpAddr::from([0; 4]),
        _ => IpAddr::from([0; 16]),
    };
    IpNet::new(
        to.unwrap_or_else(everywhere),
        header.destination_prefix_length,
    )
    .ok()
}

async fn route_class(handle: &Handle, addr: IpAddr, anchor: u32) -> anyhow::Result<RouteClass> {
    let mut message = NetlinkMessage::from(RouteNetlinkMessage::GetRoute(question(addr)));
    message.header.flags = NLM_F_REQUEST;
    let mut answers = handle.clone().request(message)?;
    let answer = answers.next().await.context("the netlink socket closed")?;
    match answer.payload {
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewRoute(route)) => {
            Ok(parse(&route, anchor))
        }
        NetlinkPayload::Error(error) => Ok(RouteClass::Nowhere(error.to_io().to_string())),
        other => bail!("unexpected answer {other:?}"),
    }
}

/// Returns the source address that the kernel's tunnels use for packets to an address. `None` if there
/// is no route, or if the address cannot be told: IPv6 tunnels ignore the source that a route names.
pub async fn tunnel_source(handle: &Handle, addr: IpAddr) -> anyhow::Result<Option<IpAddr>> {
    if addr.is_ipv6() {
        let matching = look_up(handle, question(addr)).await?;
        if matching.is_none_or(|route| source(&route).is_some()) {
            return Ok(None);
        }
    }
    let mut looked_up = question(addr);
    looked_up.header.flags = RouteFlags::empty();
    let route = look_up(handle, looked_up).await?;
    Ok(route
        .filter(|route| route.header.kind == RouteType::Unicast)
        .and_then(|route| source(&route)))
}

fn source(route: &RouteMessage) -> Option<IpAddr> {
    route
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RouteAttribute::PrefSource(addr) => ip(addr),
            _ => None,
        })
}

/// Returns the kernel's answer; `None` if there is no route.
async fn look_up(handle: &Handle, question: RouteMessage) -> anyhow::Result<Option<RouteMessage>> {
    let mut message = NetlinkMessage::from(RouteNetlinkMessage::GetRoute(question));
    message.header.flags = NLM_F_REQUEST;
    let mut answers = handle.clone().request(message)?;
    let answer = answers.next().await.context("the netlink socket closed")?;
    match answer.payload {
        NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewRoute(route)) => Ok(Some(route)),
        NetlinkPayload::Error(_) => Ok(None),
        other => bail!("unexpected answer {other:?}"),
    }
}

fn question(addr: IpAddr) -> RouteMessage {
    let mut message = RouteMessage::default();
    message.header.address_family = family(addr);
    message.header.destination_prefix_length = if addr.is_ipv4() { 32 } else { 128 };
    // The flag requests the matching route instead of the look-up's result.
    message.header.flags = RouteFlags::FibMatch;
    message
        .attributes
        .push(RouteAttribute::Destination(address(addr)));
    message
}

fn parse(route: &RouteMessage, anchor: u32) -> RouteClass {
    let header = &route.header;
    match header.kind {
        RouteType::Local => return RouteClass::Own,
        RouteType::Unicast => {}
        kind => return RouteClass::Nowhere(format!("the route is of type {kind:?}")),
    }
    let mut device = None;
    let mut gateway = false;
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Oif(index) => device = Some(*index),
            RouteAttribute::Gateway(_) | RouteAttribute::Via(_) | RouteAttribute::MultiPath(_) => {
                gateway = true
            }
            _ => {}
        }
    }
    if device == Some(anchor) {
        return RouteClass::Nowhere("it is a service's address".to_owned());
    }
    let ipv4 = header.address_family == netlink_packet_route::AddressFamily::Inet;
    match device {
        _ if is_default(ipv4, header.destination_prefix_length) => RouteClass::Default,
        Some(device) if !gateway => RouteClass::OnLink(device),
        _ => RouteClass::Routed,
    }
}

/// Returns the network of a unicast route, unless it is a default route.
pub(super) fn specific(route: &RouteMessage) -> Option<IpNet> {
    let header = &route.header;
    let to = route
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            RouteAttribute::Destination(addr) => ip(addr),
            _ => None,
        })?;
    let is_specific = header.kind == RouteType::Unicast
        && !is_default(to.is_ipv4(), header.destination_prefix_length);
    if is_specific {
        IpNet::new(to, header.destination_prefix_length).ok()
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::AddressFamily;

    use super::*;

    const ANCHOR: u32 = 9;

    #[test]
    fn a_route_classifies_an_address() {
        let via = || {
            vec![
                RouteAttribute::Oif(2),
                RouteAttribute::Gateway(address("192.0.2.1".parse().unwrap())),
            ]
        };
        let dev = |index| vec![RouteAttribute::Oif(index)];
        let cases: [(&str, RouteMessage, RouteClass); 10] = [
            (
                "a static route",
                route(16, RouteType::Unicast, via()),
                RouteClass::Routed,
            ),
            (
                "several ways",
                route(
                    16,
                    RouteType::Unicast,
                    vec![RouteAttribute::MultiPath(vec![])],
                ),
                RouteClass::Routed,
            ),
            (
                "a neighbour",
                route(24, RouteType::Unicast, dev(2)),
                RouteClass::OnLink(2),
            ),
            (
                "the widest private network",
                route(8, RouteType::Unicast, via()),
                RouteClass::Routed,
            ),
            (
                "the default route",
                route(0, RouteType::Unicast, via()),
                RouteClass::Default,
            ),
            (
                "a default route without a gateway",
                route(0, RouteType::Unicast, dev(2)),
                RouteClass::Default,
            ),
            (
                "half of everything, as VPNs have it",
                route(1, RouteType::Unicast, via()),
                RouteClass::Default,
            ),
            (
                "its own",
                route(32, RouteType::Local, dev(1)),
                RouteClass::Own,
            ),
            (
                "nothing",
                route(8, RouteType::BlackHole, vec![]),
                nowhere("the route is of type BlackHole"),
            ),
            (
                "the anchor",
                route(12, RouteType::Unicast, dev(ANCHOR)),
                nowhere("it is a service's address"),
            ),
        ];
        for (name, route, lead) in cases {
            assert_eq!(parse(&route, ANCHOR), lead, "{name}");
        }
    }

    #[test]
    fn a_specific_route_names_its_network() {
        for (net, kind, is_specific) in [
            ("10.0.0.0/8", RouteType::Unicast, true),
            ("fc00::/7", RouteType::Unicast, true),
            ("2000::/3", RouteType::Unicast, false),
            ("128.0.0.0/1", RouteType::Unicast, false),
            ("10.244.0.0/16", RouteType::Unreachable, false),
        ] {
            let net: ipnet::IpNet = net.parse().unwrap();
            let mut message = route(
                net.prefix_len(),
                kind,
                vec![RouteAttribute::Destination(address(net.addr()))],
            );
            message.header.address_family = family(net.addr());
            assert_eq!(specific(&message), is_specific.then_some(net));
        }
    }

    fn route(prefix_len: u8, kind: RouteType, attributes: Vec<RouteAttribute>) -> RouteMessage {
        let mut route = RouteMessage::default();
        route.header.address_family = AddressFamily::Inet;
        route.header.destination_prefix_length = prefix_len;
        route.header.kind = kind;
        route.attributes = attributes;
        route
    }

    fn nowhere(why: &str) -> RouteClass {
        RouteClass::Nowhere(why.to_owned())
    }
}
