//! Reports the devices of this network namespace, starting with a full list.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, bail};
use futures::{Stream, StreamExt};
use netlink_packet_core::{NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};
use rtnetlink::MulticastGroup;
use rtnetlink::sys::AsyncSocket;
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tracing::warn;

use super::far_end;
use super::filter;
use super::link::{self, Link, LinkKind};
use super::netlink::{Handle, connect, dump};

/// The minimum time between two full lists.
const MIN_PERIOD: Duration = Duration::from_secs(1);

/// The bytes of events that the kernel may queue, limited by `net.core.rmem_max`.
const RECEIVE_BUFFER: u32 = 4 << 20;

/// The minimum time between two look-ups of routes. A pod starts after its CNI plugin exits, which
/// takes about as long.
const PAUSE: Duration = Duration::from_millis(100);

/// The maximum number of messages handled before a report.
const BATCH: usize = 256;

type Links = BTreeMap<u32, Link>;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LinkEvent {
    /// The full list: devices not in the list are gone. Sent first, after lost events, and once per
    /// period.
    All(Vec<Link>),
    /// A new or changed device.
    Put(Box<Link>),
    /// The interface index of a removed device.
    Del(u32),
}

/// Reports the devices of this thread's network namespace until the receiver is gone. Events follow
/// the kernel's messages at once; several changes of a device in a batch become one event. Every
/// `period` a full list lets the receiver verify its own changes to the devices.
pub async fn watch(events: mpsc::Sender<LinkEvent>, period: Duration) -> anyhow::Result<()> {
    let groups = [
        MulticastGroup::Link,
        MulticastGroup::Ipv4Ifaddr,
        MulticastGroup::Ipv6Ifaddr,
    ];
    // With two sockets, answers and events do not compete for buffer space. Subscribing before the
    // first list misses no change.
    let (mut event_socket, _, messages) =
        rtnetlink::new_multicast_connection(&groups).context("subscribe to changes of devices")?;
    event_socket
        .socket_mut()
        .socket_mut()
        .set_rx_buf_sz(RECEIVE_BUFFER)
        .context("enlarge the event socket")?;
    let (request_socket, handle) = connect()?;
    // On a third socket, a routing daemon's thousands of messages do not displace device events.
    let groups = [
        MulticastGroup::Ipv4Route,
        MulticastGroup::Ipv6Route,
        MulticastGroup::Tc,
    ];
    let (route_socket, _, routes) = rtnetlink::new_multicast_connection(&groups)
        .context("subscribe to changes of routes and filters")?;
    let messages = messages.map(|(message, _)| message);
    let routes = routes.map(|(message, _)| message);
    tokio::select! {
        () = event_socket => bail!("the netlink socket for events failed"),
        () = route_socket => bail!("the netlink socket for changes of routes and filters failed"),
        () = request_socket => bail!("the netlink socket for requests failed"),
        result = follow(&handle, messages, routes, events, period) => result,
    }
}

async fn follow(
    handle: &Handle,
    messages: impl Stream<Item = NetlinkMessage<RouteNetlinkMessage>> + Unpin,
    routes: impl Stream<Item = NetlinkMessage<RouteNetlinkMessage>> + Unpin,
    events: mpsc::Sender<LinkEvent>,
    period: Duration,
) -> anyhow::Result<()> {
    let mut messages = messages.ready_chunks(BATCH);
    let mut routes = routes.ready_chunks(BATCH);
    // The devices whose routes or filters have changed.
    let mut rerouted_devices = BTreeSet::new();
    let mut refiltered = BTreeSet::new();
    let mut look_at = Instant::now();
    let mut relist = interval(period.max(MIN_PERIOD));
    relist.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut links = Links::new();
    loop {
        let report = tokio::select! {
            () = events.closed() => return Ok(()),
            _ = relist.tick() => list(handle, &mut links).await?,
            batch = messages.next() => {
                let batch = batch.context("the netlink socket for events closed")?;
                if batch.iter().any(|message| matches!(message.payload, NetlinkPayload::Overrun(_))) {
                    warn!("the socket cannot hold all changes of devices: listing all");
                    list(handle, &mut links).await?
                } else {
                    changes(handle, &mut links, batch).await?
                }
            }
            batch = routes.next() => {
                let batch = batch.context("the netlink socket for changes of routes and filters closed")?;
                rerouted_devices.append(&mut stale(&links, &batch));
                refiltered.extend(batch.iter().filter_map(filter::named));
                continue;
            }
            () = sleep_until(look_at), if !rerouted_devices.is_empty() || !refiltered.is_empty() => {
                look_at = Instant::now() + PAUSE;
                let routes = std::mem::take(&mut rerouted_devices);
                let filters = std::mem::take(&mut refiltered);
                looked_at(handle, &mut links, routes, filters).await?
            }
        };
        for event in report {
            if events.send(event).await.is_err() {
                return Ok(());
            }
        }
    }
}

/// Lists devices before addresses: an address on an unlisted device arrives again as an event,
/// after the event for the device.
async fn list(handle: &Handle, links: &mut Links) -> anyhow::Result<Vec<LinkEvent>> {
    links.clear();
    for message in dump(handle, link::get_all(), Some)
        .await
        .context("list devices")?
    {
        apply(links, message);
    }
    let addresses = RouteNetlinkMessage::GetAddress(AddressMessage::default());
    for message in dump(handle, addresses, Some)
        .await
        .context("list addresses")?
    {
        apply(links, message);
    }
    let all: Vec<u32> = links.keys().copied().collect();
    far_end::query(handle, links, all.iter().copied()).await?;
    filter::query(handle, links, all).await?;
    Ok(vec![LinkEvent::All(links.values().cloned().collect())])
}

async fn changes(
    handle: &Handle,
    links: &mut Links,
    batch: Vec<NetlinkMessage<RouteNetlinkMessage>>,
) -> anyhow::Result<Vec<LinkEvent>> {
    let before = links.clone();
    let mut touched = BTreeSet::new();
    let mut orphaned = BTreeSet::new();
    for message in batch {
        if let NetlinkPayload::InnerMessage(message) = message.payload {
            orphaned.extend(orphaned_peer(&message));
            touched.extend(apply(links, message));
        }
    }
    for index in orphaned {
        if !links.contains_key(&index) {
            continue;
        }
        let mut which = LinkMessage::default();
        which.header.index = index;
        if let Some(message) = link::get(handle, which)
            .await
            .context("look at a veth whose peer moved")?
        {
            touched.extend(apply(links, RouteNetlinkMessage::NewLink(message)));
        }
    }
    // When a device or an address disappears, the kernel removes its routes without a message.
    far_end::query(handle, links, touched.iter().copied()).await?;
    // The message about a filter may have preceded the message about its device.
    filter::query(
        handle,
        links,
        touched
            .iter()
            .copied()
            .filter(|index| !before.contains_key(index)),
    )
    .await?;
    Ok(touched
        .into_iter()
        .filter_map(|index| difference(index, before.get(&index), links.get(&index)))
        .collect())
}

/// Reads the changed routes and filters of these devices. Returns the events for devices that
/// differ.
async fn looked_at(
    handle: &Handle,
    links: &mut Links,
    routes: BTreeSet<u32>,
    filters: BTreeSet<u32>,
) -> anyhow::Result<Vec<LinkEvent>> {
    let named = routes.union(&filters);
    let before: Links = named
        .filter_map(|index| Some((*index, links.get(index)?.clone())))
        .collect();
    far_end::query(handle, links, routes).await?;
    filter::query(handle, links, filters).await?;
    Ok(before
        .iter()
        .filter_map(|(index, before)| difference(*index, Some(before), links.get(index)))
        .collect())
}

/// Returns the devices whose changed routes decide their roles.
fn stale(links: &Links, messages: &[NetlinkMessage<RouteNetlinkMessage>]) -> BTreeSet<u32> {
    let reported = links
        .values()
        .filter(|link| link.is_told_by_routes())
        .map(|link| link.index);
    let mut named = BTreeSet::new();
    for message in messages {
        match far_end::named(message) {
            Some(devices) => named.extend(devices),
            None => return reported.collect(),
        }
    }
    if named.is_empty() {
        named
    } else {
        reported.filter(|index| named.contains(index)).collect()
    }
}

fn difference(index: u32, before: Option<&Link>, now: Option<&Link>) -> Option<LinkEvent> {
    match now {
        _ if before == now => None,
        Some(link) => Some(LinkEvent::Put(Box::new(link.clone()))),
        None => Some(LinkEvent::Del(index)),
    }
}

/// Applies a message. Returns the interface index of the device if the device has changed.
fn apply(links: &mut Links, message: RouteNetlinkMessage) -> Option<u32> {
    match message {
        RouteNetlinkMessage::NewLink(message) => {
            let mut link = Link::from_message(&message)?;
            let index = link.index;
            if let Some(known) = links.remove(&index) {
                (link.addrs, link.far_end) = (known.addrs, known.far_end);
                (link.filtered, link.filtered_out) = (known.filtered, known.filtered_out);
                link.lacks_egress = known.lacks_egress;
            }
            links.insert(index, link);
            Some(index)
        }
        RouteNetlinkMessage::DelLink(message) => {
            let index = Link::from_message(&message)?.index;
            links.remove(&index).map(|_| index)
        }
        RouteNetlinkMessage::NewAddress(message) => {
            let (index, addr, usable) = link::address(&message)?;
            let addrs = &mut links.get_mut(&index)?.addrs;
            let changed = if usable {
                addrs.insert(addr)
            } else {
                addrs.remove(&addr)
            };
            changed.then_some(index)
        }
        RouteNetlinkMessage::DelAddress(message) => {
            let (index, addr, _) = link::address(&message)?;
            links.get_mut(&index)?.addrs.remove(&addr).then_some(index)
        }
        _ => None,
    }
}

/// Returns the index of the end that remains when a pair's other end moves to another network
/// namespace. The kernel announces the move, but the change of the remaining end only when its
/// carrier changes, when packets already flow.
fn orphaned_peer(message: &RouteNetlinkMessage) -> Option<u32> {
    let RouteNetlinkMessage::DelLink(message) = message else {
        return None;
    };
    let moved = message
        .attributes
        .iter()
        .any(|attribute| matches!(attribute, LinkAttribute::NewNetnsId(_)));
    let pair = matches!(
        Link::from_message(message)?.kind,
        LinkKind::Veth | LinkKind::Netkit
    );
    message
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            LinkAttribute::Link(peer) if moved && pair => Some(*peer),
            _ => None,
        })
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::AddressFamily;
    use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressScope};
    use netlink_packet_route::link::{InfoKind, LinkInfo, LinkLayerType};

    use super::*;
    use RouteNetlinkMessage::{DelAddress, DelLink, NewAddress, NewLink};

    #[test]
    fn messages_become_events() {
        let mut links = Links::new();
        let cases = [
            (
                "a new device",
                NewLink(device(7, "eth0")),
                Some("put eth0 []"),
            ),
            ("nothing new", NewLink(device(7, "eth0")), None),
            (
                "an address",
                NewAddress(address(7, "10.0.0.1/24")),
                Some("put eth0 [10.0.0.1/24]"),
            ),
            (
                "the same address",
                NewAddress(address(7, "10.0.0.1/24")),
                None,
            ),
            (
                "an address of an unknown device",
                NewAddress(address(8, "10.0.0.2/24")),
                None,
            ),
            ("a link-local address", NewAddress(link_local(7)), None),
            (
                "an address that is still checked",
                NewAddress(tentative(7, "fd00::1/64")),
                None,
            ),
            (
                "an address after the check",
                NewAddress(address(7, "fd00::1/64")),
                Some("put eth0 [10.0.0.1/24, fd00::1/64]"),
            ),
            (
                "an address found to be a duplicate",
                NewAddress(duplicate(7, "fd00::1/64")),
                Some("put eth0 [10.0.0.1/24]"),
            ),
            (
                "a new name",
                NewLink(device(7, "uplink")),
                Some("put uplink [10.0.0.1/24]"),
            ),
            (
                "an address gone",
                DelAddress(address(7, "10.0.0.1/24")),
                Some("put uplink []"),
            ),
            ("news of a bridge's port", NewLink(port(7)), None),
            ("a port that left its bridge", DelLink(port(7)), None),
            ("a device gone", DelLink(device(7, "uplink")), Some("del 7")),
            ("gone already", DelLink(device(7, "uplink")), None),
        ];
        for (name, message, event) in cases {
            let before = links.clone();
            let index = apply(&mut links, message);
            let now =
                index.and_then(|index| difference(index, before.get(&index), links.get(&index)));
            assert_eq!(now.map(shown).as_deref(), event, "{name}");
        }
    }

    #[test]
    fn the_remaining_end_of_a_pair_is_looked_up() {
        let gone = |kind, moved: bool| {
            let mut message = device(7, "vethpod");
            message.attributes.extend([
                LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind)]),
                LinkAttribute::Link(6),
            ]);
            message
                .attributes
                .extend(moved.then_some(LinkAttribute::NewNetnsId(0)));
            DelLink(message)
        };
        assert_eq!(orphaned_peer(&gone(InfoKind::Veth, true)), Some(6));
        assert_eq!(
            orphaned_peer(&gone(InfoKind::Vlan, true)),
            None,
            "a VLAN's parent lost nothing"
        );
        assert_eq!(
            orphaned_peer(&gone(InfoKind::Veth, false)),
            None,
            "deleted, and so is its peer"
        );
    }

    fn device(index: u32, name: &str) -> LinkMessage {
        let mut message = LinkMessage::default();
        message.header.index = index;
        message.header.link_layer_type = LinkLayerType::Ether;
        message
            .attributes
            .push(LinkAttribute::IfName(name.to_owned()));
        message
    }

    fn port(index: u32) -> LinkMessage {
        let mut message = device(index, "port");
        message.header.interface_family = AddressFamily::Bridge;
        message
    }

    fn address(index: u32, net: &str) -> AddressMessage {
        let net: ipnet::IpNet = net.parse().unwrap();
        let mut message = AddressMessage::default();
        message.header.index = index;
        message.header.prefix_len = net.prefix_len();
        message.header.scope = AddressScope::Universe;
        // With IFA_LOCAL, as on a point-to-point device, IFA_ADDRESS is the peer's address.
        if net.addr().is_ipv4() {
            message
                .attributes
                .push(AddressAttribute::Address("192.0.2.1".parse().unwrap()));
            message.attributes.push(AddressAttribute::Local(net.addr()));
        } else {
            message
                .attributes
                .push(AddressAttribute::Address(net.addr()));
        }
        message
    }

    fn link_local(index: u32) -> AddressMessage {
        let mut message = address(index, "fe80::1/64");
        message.header.scope = AddressScope::Link;
        message
    }

    fn tentative(index: u32, net: &str) -> AddressMessage {
        let mut message = address(index, net);
        message.header.flags = AddressHeaderFlags::Tentative;
        message
    }

    fn duplicate(index: u32, net: &str) -> AddressMessage {
        let mut message = address(index, net);
        message.header.flags = AddressHeaderFlags::Permanent | AddressHeaderFlags::Dadfailed;
        message
    }

    fn shown(event: LinkEvent) -> String {
        match event {
            LinkEvent::All(_) => "all".to_owned(),
            LinkEvent::Put(link) => format!("put {} {:?}", link.name, Vec::from_iter(link.addrs)),
            LinkEvent::Del(index) => format!("del {index}"),
        }
    }
}
