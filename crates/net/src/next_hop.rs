//! Looks up the route to an address.

use std::net::IpAddr;

use anyhow::{Context, Result, bail};
use futures::{StreamExt, TryStreamExt};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{RouteAddress, RouteAttribute, RouteMessage};
use rtnetlink::Handle;

/// The route to an address, from this thread's network namespace.
#[derive(Clone, Debug, Default)]
pub struct NextHop {
    /// The interface index of the outgoing device.
    pub device: u32,
    /// The source address that the host would use.
    pub source: Option<IpAddr>,
    /// The router; `None` if the address is on the device's own network.
    pub gateway: Option<IpAddr>,
    /// True if the router or the address itself has not answered the device's last attempts to
    /// find its link layer address.
    pub is_silent: bool,
    /// The interface indexes of the device's ports if it is a bridge.
    pub ports: Vec<u32>,
    /// The interface index of the bridge port to the next hop.
    pub port: Option<u32>,
}

pub async fn next_hop(addr: IpAddr) -> Result<NextHop> {
    let (driver, handle, _) = rtnetlink::new_connection().context("open a netlink socket")?;
    tokio::select! {
        next_hop = ask(&handle, addr) => next_hop.with_context(|| format!("look up the route to {addr}")),
        () = driver => bail!("the netlink socket has failed"),
    }
}

async fn ask(handle: &Handle, addr: IpAddr) -> Result<NextHop> {
    let family = if addr.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    };
    let mut request = RouteMessage::default();
    request.header.address_family = family;
    request.header.destination_prefix_length = if addr.is_ipv4() { 32 } else { 128 };
    request
        .attributes
        .push(RouteAttribute::Destination(match addr {
            IpAddr::V4(addr) => RouteAddress::Inet(addr),
            IpAddr::V6(addr) => RouteAddress::Inet6(addr),
        }));
    let route = Box::pin(handle.route().get(request).execute())
        .next()
        .await
        .context("no answer")??;
    let mut next_hop = NextHop::default();
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Oif(device) => next_hop.device = *device,
            RouteAttribute::PrefSource(addr) => next_hop.source = ip(addr),
            RouteAttribute::Gateway(addr) => next_hop.gateway = ip(addr),
            _ => {}
        }
    }
    let hop = next_hop.gateway.unwrap_or(addr);
    let known = neighbours(handle, family)
        .await
        .context("list neighbours")?;
    let hop = known
        .iter()
        .find(|known| known.header.ifindex == next_hop.device && destination(known) == Some(hop));
    next_hop.is_silent = hop.is_some_and(|hop| hop.header.state == NeighbourState::Failed);
    let stations = neighbours(handle, AddressFamily::Bridge)
        .await
        .context("list the bridges' stations")?;
    let stations = stations
        .iter()
        .filter(|station| master(station) == Some(next_hop.device));
    let stations: Vec<_> = stations
        .filter_map(|station| Some((station.header.ifindex, mac(station)?)))
        .collect();
    next_hop.ports = stations
        .iter()
        .map(|(port, _)| *port)
        .filter(|port| *port != next_hop.device)
        .collect();
    let hop = hop.and_then(mac);
    next_hop.port = stations
        .iter()
        .find(|(_, mac)| hop.as_ref() == Some(mac))
        .map(|(port, _)| *port);
    Ok(next_hop)
}

async fn neighbours(handle: &Handle, family: AddressFamily) -> Result<Vec<NeighbourMessage>> {
    Ok(handle
        .neighbours()
        .get()
        .set_address_family(family)
        .execute()
        .try_collect()
        .await?)
}

fn master(station: &NeighbourMessage) -> Option<u32> {
    station
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            NeighbourAttribute::Controller(master) => Some(*master),
            _ => None,
        })
}

fn mac(neighbour: &NeighbourMessage) -> Option<Vec<u8>> {
    neighbour
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            NeighbourAttribute::LinkLayerAddress(mac) => Some(mac.clone()),
            _ => None,
        })
}

fn destination(neighbour: &NeighbourMessage) -> Option<IpAddr> {
    neighbour
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(addr)) => Some((*addr).into()),
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(addr)) => Some((*addr).into()),
            _ => None,
        })
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some((*ip).into()),
        RouteAddress::Inet6(ip) => Some((*ip).into()),
        _ => None,
    }
}
