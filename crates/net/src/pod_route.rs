//! Maintains routes to pods through their nodes, for a host on the nodes' network without other
//! routes to the pods.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;

use anyhow::Context;
use ipnet::IpNet;
use netlink_packet_route::route::{RouteAttribute, RouteHeader, RouteMessage, RouteProtocol};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::{Error, RouteMessageBuilder};
use tracing::info;

use super::netlink::{Handle, dump};
use super::route::{MAIN, PROTOCOL, address, family, ip};
use super::{fib, sysctl};

/// The metric (`RTA_PRIORITY`) of kpx's routes, which rank after other programs' routes to the same
/// network.
const METRIC: u32 = 4_096;

/// The next hop to a node's pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Hop {
    pub gateway: IpAddr,
    /// The interface index.
    pub device: u32,
}

/// kpx's routes to pods, recognised by protocol number and gateway.
pub struct PodRoutes {
    handle: Handle,
}

impl PodRoutes {
    pub fn new(handle: Handle) -> Self {
        Self { handle }
    }

    /// Makes kpx's routes equal to `want`, except where another program's route covers the network.
    /// Returns the routes that the kernel refuses; the next call retries them.
    pub async fn reconcile(&self, want: &BTreeMap<IpNet, Hop>) -> anyhow::Result<Vec<String>> {
        let (now, others) = read(&self.handle).await?;
        let covered = |net: &IpNet| others.iter().any(|other| other.contains(net));
        let want: BTreeMap<IpNet, Hop> = want
            .iter()
            .filter(|(net, _)| !covered(net))
            .map(|(net, hop)| (*net, *hop))
            .collect();
        let mut refused = Vec::new();
        for (net, hop) in &want {
            if now.get(net) != Some(hop) {
                let request = self.handle.route().add(message(*net, Some(*hop))).replace();
                match request.execute().await {
                    Ok(()) => info!(%net, via = %hop.gateway, "pod route put"),
                    Err(Error::NetlinkError(error)) => {
                        refused.push(format!("{net} via {}: {error}", hop.gateway))
                    }
                    Err(error) => {
                        return Err(error).with_context(|| format!("put the route to {net}"));
                    }
                }
            }
        }
        for net in now.keys().filter(|net| !want.contains_key(net)) {
            delete(&self.handle, *net).await?;
        }
        Ok(refused)
    }
}

/// Returns the number of kpx's routes, including those of earlier agents.
pub async fn count(handle: &Handle) -> anyhow::Result<usize> {
    Ok(read(handle).await?.0.len())
}

/// Removes kpx's routes, including those of earlier agents.
pub async fn remove(handle: &Handle) -> anyhow::Result<()> {
    let (ours, _) = read(handle).await?;
    for net in ours.into_keys() {
        delete(handle, net).await?;
    }
    Ok(())
}

async fn delete(handle: &Handle, net: IpNet) -> anyhow::Result<()> {
    match handle.route().del(message(net, None)).execute().await {
        // The route is already gone.
        Err(Error::NetlinkError(error)) if error.raw_code() == -nix::libc::ESRCH => Ok(()),
        result => result.with_context(|| format!("delete the route to {net}")),
    }?;
    info!(%net, "pod route deleted");
    Ok(())
}

fn message(net: IpNet, hop: Option<Hop>) -> RouteMessage {
    let mut message = RouteMessageBuilder::<IpAddr>::new()
        .table_id(MAIN)
        .protocol(RouteProtocol::Other(PROTOCOL))
        .priority(METRIC)
        .build();
    message.header.address_family = family(net.addr());
    message.header.destination_prefix_length = net.prefix_len();
    message
        .attributes
        .push(RouteAttribute::Destination(address(net.addr())));
    if let Some(hop) = hop {
        message.attributes.extend([
            RouteAttribute::Gateway(address(hop.gateway)),
            RouteAttribute::Oif(hop.device),
        ]);
    }
    message
}

/// Reads kpx's routes to pods, and the networks of other programs' routes, from the main table.
async fn read(handle: &Handle) -> anyhow::Result<(BTreeMap<IpNet, Hop>, Vec<IpNet>)> {
    let mut ours = BTreeMap::new();
    let mut others = Vec::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        if family == AddressFamily::Inet6 && !sysctl::has_ipv6() {
            continue;
        }
        let mut request = RouteMessage::default();
        request.header.address_family = family;
        request.header.table = RouteHeader::RT_TABLE_MAIN;
        let routes = dump(
            handle,
            RouteNetlinkMessage::GetRoute(request),
            |message| match message {
                RouteNetlinkMessage::NewRoute(route) => parse(&route),
                _ => None,
            },
        );
        let routes = match routes.await {
            // A network namespace without routes has no table.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            routes => routes.with_context(|| format!("list the {family:?} routes"))?,
        };
        for (net, hop) in routes {
            match hop {
                Some(hop) => drop(ours.insert(net, hop)),
                None => others.push(net),
            }
        }
    }
    Ok((ours, others))
}

/// Returns the network, and the next hop if the route is kpx's. Returns `None` for kpx's routes to
/// Services, which have no gateway.
fn parse(route: &RouteMessage) -> Option<(IpNet, Option<Hop>)> {
    let net = fib::specific(route)?;
    let mut gateway = None;
    let mut device = None;
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Gateway(addr) => gateway = ip(addr),
            RouteAttribute::Oif(index) => device = Some(*index),
            _ => {}
        }
    }
    if route.header.protocol != RouteProtocol::Other(PROTOCOL) {
        return Some((net, None));
    }
    Some((
        net,
        Some(Hop {
            gateway: gateway?,
            device: device?,
        }),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sent_route_is_read_back() {
        for (net, gateway) in [
            ("10.244.1.0/24", "192.0.2.1"),
            ("fd00:244:1::/64", "fd00::1"),
        ] {
            let net: IpNet = net.parse().unwrap();
            let hop = Hop {
                gateway: gateway.parse().unwrap(),
                device: 7,
            };
            let ours = message(net, Some(hop));
            assert_eq!(parse(&ours), Some((net, Some(hop))));
            assert_eq!(parse(&message(net, None)), None, "to services");
            let mut foreign = ours;
            foreign.header.protocol = RouteProtocol::Static;
            assert_eq!(parse(&foreign), Some((net, None)), "another program's");
        }
    }
}
