//! Maintains the service routes, which send this host's packets to Services through the anchor.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use anyhow::Context;
use ipnet::IpNet;
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use rtnetlink::{Error, RouteMessageBuilder};
use tracing::debug;

use super::netlink::{Handle, dump};
use super::sysctl;

/// The protocol number (`RTA_PROTOCOL`) of kpx's routes: "K", which neither the kernel's
/// `rtnetlink.h` nor iproute2's `rt_protos` assigns. `ip route show proto 75` lists the routes.
pub const PROTOCOL: u8 = b'K';

/// The metric of routes that end the look-up in a table. A route through the anchor to the same
/// network takes precedence: the kernel prefers the smallest metric, and routes through the anchor
/// have the kernel's default, 0 or 1024.
const THROW_METRIC: u32 = 4096;

/// The table that every look-up uses.
pub const MAIN: u32 = RouteHeader::RT_TABLE_MAIN as u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Route {
    pub dst: IpNet,
    /// The source address for sockets that are not bound to an address.
    pub src: Option<IpAddr>,
}

/// The result of a pass. The kernel may refuse some routes and accept the rest.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Report {
    pub added: usize,
    pub replaced: usize,
    pub deleted: usize,
    /// The refused routes, with the kernel's error. Every pass retries them.
    pub refused: Vec<(Route, String)>,
}

/// kpx's routes in a table, which go through the anchor or end the look-up.
pub struct Routes {
    handle: Handle,
    table: u32,
    /// The anchor's interface index; `None` for routes that end the look-up.
    anchor: Option<u32>,
    /// The routes in the kernel, as last read or written. The kernel removes routes by itself in
    /// some cases: see [`Routes::verify`].
    now: BTreeMap<IpNet, Option<IpAddr>>,
}

impl Routes {
    /// Reads kpx's routes. `anchor` is the anchor's interface index; a new anchor needs a new
    /// `Routes`.
    pub async fn open(handle: Handle, table: u32, anchor: u32) -> anyhow::Result<Self> {
        let now = read(&handle, table, Some(anchor)).await?;
        Ok(Self {
            handle,
            table,
            anchor: Some(anchor),
            now,
        })
    }

    /// Reads kpx's `throw` routes, which end the look-up in a table: the kernel continues with the
    /// next rule.
    pub async fn open_throws(handle: Handle, table: u32) -> anyhow::Result<Self> {
        let now = read(&handle, table, None).await?;
        Ok(Self {
            handle,
            table,
            anchor: None,
            now,
        })
    }

    /// Deletes the routes that are not in `want`, and adds none.
    pub async fn retain(&mut self, want: &BTreeSet<Route>) -> anyhow::Result<Report> {
        let kept = want
            .iter()
            .filter(|route| self.now.contains_key(&route.dst.trunc()))
            .copied()
            .collect();
        self.reconcile(&kept).await
    }

    /// Makes kpx's routes equal to `want`, and keeps other programs' routes, even conflicting
    /// routes. Compares with the routes in memory, so the cost is proportional to the difference.
    pub async fn reconcile(&mut self, want: &BTreeSet<Route>) -> anyhow::Result<Report> {
        let mut report = Report::default();
        let want: BTreeMap<IpNet, Route> = want
            .iter()
            .map(|route| (route.dst.trunc(), *route))
            .collect();
        for (&dst, &route) in &want {
            match self.now.get(&dst) {
                Some(&src) if src == route.src => {}
                Some(_) => {
                    report.replaced +=
                        usize::from(self.put(dst, route, true, &mut report.refused).await?)
                }
                None => {
                    report.added +=
                        usize::from(self.put(dst, route, false, &mut report.refused).await?)
                }
            }
        }
        let surplus: Vec<IpNet> = self
            .now
            .keys()
            .filter(|dst| !want.contains_key(dst))
            .copied()
            .collect();
        for dst in surplus {
            report.deleted += usize::from(self.del(dst, &mut report.refused).await?);
        }
        Ok(report)
    }

    /// Reads the kernel's routes, then reconciles like [`Routes::reconcile`]. Call this
    /// periodically, because any program may delete routes, and when the node loses an address,
    /// because the kernel then removes IPv4 routes with this source.
    pub async fn verify(&mut self, want: &BTreeSet<Route>) -> anyhow::Result<Report> {
        self.now = read(&self.handle, self.table, self.anchor).await?;
        self.reconcile(want).await
    }

    /// Adds a route. Returns true if the kernel accepted the route. With `replace` the kernel
    /// replaces an existing route atomically. Without `replace` the kernel refuses if a route
    /// exists, which then belongs to another program.
    async fn put(
        &mut self,
        dst: IpNet,
        route: Route,
        replace: bool,
        refused: &mut Refused,
    ) -> anyhow::Result<bool> {
        let request = self
            .handle
            .route()
            .add(message(dst, route.src, self.table, self.anchor));
        let request = if replace { request.replace() } else { request };
        let taken = taken(request.execute().await, route, refused)?;
        if taken {
            self.now.insert(dst, route.src);
            debug!(%dst, src = ?route.src, replace, "route put");
        }
        Ok(taken)
    }

    async fn del(&mut self, dst: IpNet, refused: &mut Refused) -> anyhow::Result<bool> {
        let request = self
            .handle
            .route()
            .del(message(dst, None, self.table, self.anchor));
        let result = match request.execute().await {
            // The route is already gone.
            Err(Error::NetlinkError(error)) if error.raw_code() == -nix::libc::ESRCH => Ok(()),
            result => result,
        };
        let taken = taken(result, Route { dst, src: None }, refused)?;
        if taken {
            self.now.remove(&dst);
            debug!(%dst, "route deleted");
        }
        Ok(taken)
    }
}

type Refused = Vec<(Route, String)>;

/// Returns true if the kernel accepted the request. Records a refusal; any other failure is an
/// error.
fn taken(result: Result<(), Error>, route: Route, refused: &mut Refused) -> anyhow::Result<bool> {
    match result {
        Ok(()) => Ok(true),
        Err(Error::NetlinkError(error)) => {
            let hint = match (-error.raw_code(), route.src) {
                (nix::libc::EINVAL, Some(src)) => format!("; no device has {src}?"),
                (nix::libc::EEXIST, _) => "; another program has a route there".to_owned(),
                _ => String::new(),
            };
            refused.push((route, format!("{error}{hint}")));
            Ok(false)
        }
        Err(error) => Err(error).with_context(|| format!("program route to {}", route.dst)),
    }
}

fn message(dst: IpNet, src: Option<IpAddr>, table: u32, anchor: Option<u32>) -> RouteMessage {
    let builder = RouteMessageBuilder::<IpAddr>::new()
        .table_id(table)
        .protocol(RouteProtocol::Other(PROTOCOL));
    let builder = match anchor {
        // IPv6 routes have no scope.
        Some(anchor) if dst.addr().is_ipv4() => {
            builder.output_interface(anchor).scope(RouteScope::Link)
        }
        Some(anchor) => builder.output_interface(anchor).scope(RouteScope::Universe),
        None => builder
            .kind(RouteType::Throw)
            .priority(THROW_METRIC)
            .scope(RouteScope::Universe),
    };
    let mut message = builder.build();
    message.header.address_family = family(dst.addr());
    message.header.destination_prefix_length = dst.prefix_len();
    message
        .attributes
        .push(RouteAttribute::Destination(address(dst.addr())));
    message
        .attributes
        .extend(src.map(|src| RouteAttribute::PrefSource(address(src))));
    message
}

pub(super) fn family(ip: IpAddr) -> AddressFamily {
    if ip.is_ipv4() {
        AddressFamily::Inet
    } else {
        AddressFamily::Inet6
    }
}

pub(super) fn address(ip: IpAddr) -> RouteAddress {
    match ip {
        IpAddr::V4(ip) => RouteAddress::Inet(ip),
        IpAddr::V6(ip) => RouteAddress::Inet6(ip),
    }
}

async fn read(
    handle: &Handle,
    table: u32,
    anchor: Option<u32>,
) -> anyhow::Result<BTreeMap<IpNet, Option<IpAddr>>> {
    let mut now = BTreeMap::new();
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        if family == AddressFamily::Inet6 && !sysctl::has_ipv6() {
            continue;
        }
        let mut request = RouteMessage::default();
        request.header.address_family = family;
        request.header.protocol = RouteProtocol::Other(PROTOCOL);
        request.attributes.extend(anchor.map(RouteAttribute::Oif));
        let routes = dump(
            handle,
            RouteNetlinkMessage::GetRoute(request),
            |message| match message {
                RouteNetlinkMessage::NewRoute(route) => parse(&route, table, anchor),
                _ => None,
            },
        );
        now.extend(
            routes
                .await
                .with_context(|| format!("list kpx's {family:?} routes"))?,
        );
    }
    Ok(now)
}

/// Returns the destination and source of a route; `None` if the route is not kpx's.
fn parse(route: &RouteMessage, table: u32, anchor: Option<u32>) -> Option<(IpNet, Option<IpAddr>)> {
    let header = &route.header;
    let is_kind = match anchor {
        Some(anchor) => {
            header.kind == RouteType::Unicast
                && route.attributes.contains(&RouteAttribute::Oif(anchor))
        }
        None => header.kind == RouteType::Throw,
    };
    let ours = header.protocol == RouteProtocol::Other(PROTOCOL) && is_kind;
    let mut dst = match header.address_family {
        AddressFamily::Inet => IpAddr::from([0; 4]),
        _ => IpAddr::from([0; 16]),
    };
    let mut src = None;
    let mut in_table = u32::from(header.table);
    for attribute in &route.attributes {
        match attribute {
            RouteAttribute::Table(number) => in_table = *number,
            RouteAttribute::Destination(addr) => dst = ip(addr)?,
            RouteAttribute::PrefSource(addr) => src = ip(addr),
            _ => {}
        }
    }
    (ours && in_table == table)
        .then_some((IpNet::new(dst, header.destination_prefix_length).ok()?, src))
}

pub(super) fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some((*ip).into()),
        RouteAddress::Inet6(ip) => Some((*ip).into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::rule;
    use super::*;

    #[test]
    fn a_sent_route_is_read_back() {
        for (dst, src) in [
            ("10.96.0.0/12", Some("192.0.2.1")),
            ("fd00:10:96::/108", None),
            ("0.0.0.0/0", None),
        ] {
            let dst: IpNet = dst.parse().unwrap();
            let src = src.map(|src: &str| src.parse().unwrap());
            let seven = Some(7);
            let eight = Some(8);
            for table in [MAIN, rule::TABLE, rule::SERVICES] {
                assert_eq!(
                    parse(&message(dst, src, table, seven), table, seven),
                    Some((dst, src))
                );
                assert_eq!(
                    parse(&message(dst, src, table, seven), table, eight),
                    None,
                    "through another device"
                );
                assert_eq!(
                    parse(&message(dst, src, table, seven), 100, seven),
                    None,
                    "in another table"
                );
                assert_eq!(
                    parse(&message(dst, None, table, None), table, None),
                    Some((dst, None))
                );
                assert_eq!(
                    parse(&message(dst, None, table, None), table, seven),
                    None,
                    "it ends the look-up"
                );
                assert_eq!(
                    parse(&message(dst, src, table, seven), table, None),
                    None,
                    "it leads to the anchor"
                );
            }
            let mut foreign = message(dst, src, MAIN, seven);
            foreign.header.protocol = RouteProtocol::Static;
            assert_eq!(parse(&foreign, MAIN, seven), None, "another program's");
        }
    }
}
