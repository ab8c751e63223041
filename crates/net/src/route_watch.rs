//! Reports changes to other programs' routes and rules in this network namespace, and the loss of
//! kpx's routes and rules.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, bail};
use futures::{Stream, StreamExt};
use ipnet::IpNet;
use netlink_packet_core::{NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::route::{RouteAttribute, RouteMessage, RouteProtocol};
use rtnetlink::MulticastGroup;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use super::route::{PROTOCOL, ip};
use super::rule::{self, SERVICES, TABLE};

/// The minimum time between two reports: routing daemons change thousands of routes.
const PAUSE: Duration = Duration::from_millis(500);

const BATCH: usize = 1_024;

/// The watched networks. Routing daemons change thousands of routes to other networks.
#[derive(Clone, Debug, Default)]
pub struct WatchedNets(Arc<Mutex<Option<Vec<IpNet>>>>);

impl WatchedNets {
    /// Restricts the reports to routes within these networks. Before the first call all routes are
    /// reported.
    pub fn set(&self, nets: &[IpNet]) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(nets.to_vec());
    }

    fn have(&self, route: &RouteMessage) -> bool {
        let to = route
            .attributes
            .iter()
            .find_map(|attribute| match attribute {
                RouteAttribute::Destination(addr) => ip(addr),
                _ => None,
            });
        let net = to.and_then(|to| IpNet::new(to, route.header.destination_prefix_length).ok());
        let nets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        nets.as_ref()
            .is_none_or(|nets| net.is_some_and(|net| nets.iter().any(|one| one.contains(&net))))
    }
}

/// Reports changes until the receiver is gone.
pub async fn watch_routes(changes: mpsc::Sender<()>, nets: WatchedNets) -> anyhow::Result<()> {
    let groups = [
        MulticastGroup::Ipv4Route,
        MulticastGroup::Ipv6Route,
        MulticastGroup::Ipv4Rule,
        MulticastGroup::Ipv6Rule,
    ];
    let (socket, _, messages) =
        rtnetlink::new_multicast_connection(&groups).context("subscribe to changes of routes")?;
    tokio::select! {
        () = socket => bail!("the netlink socket for changes of routes failed"),
        result = follow(messages.map(|(message, _)| message), changes, nets) => result,
    }
}

async fn follow(
    messages: impl Stream<Item = NetlinkMessage<RouteNetlinkMessage>> + Unpin,
    changes: mpsc::Sender<()>,
    nets: WatchedNets,
) -> anyhow::Result<()> {
    let mut messages = messages.ready_chunks(BATCH);
    let mut news = false;
    let pause = sleep(Duration::ZERO);
    tokio::pin!(pause);
    loop {
        tokio::select! {
            () = changes.closed() => return Ok(()),
            // Read messages at any time, because the queue is unbounded.
            batch = messages.next() => {
                let batch = batch.context("the netlink socket for changes of routes closed")?;
                news |= batch.iter().any(|message| is_change(message, &nets));
            }
            () = &mut pause, if !pause.is_elapsed() => {}
            permit = changes.reserve(), if news && pause.is_elapsed() => {
                let Ok(permit) = permit else { return Ok(()) };
                permit.send(());
                news = false;
                pause.as_mut().reset(Instant::now() + PAUSE);
            }
        }
    }
}

/// Returns true for a change to report. Lost messages count, because they may contain any change.
fn is_change(message: &NetlinkMessage<RouteNetlinkMessage>, nets: &WatchedNets) -> bool {
    match &message.payload {
        NetlinkPayload::InnerMessage(message) => match message {
            RouteNetlinkMessage::NewRoute(route) => !is_ours(route) && nets.have(route),
            RouteNetlinkMessage::DelRoute(route) if is_ours(route) => is_service_route(route),
            RouteNetlinkMessage::DelRoute(route) => nets.have(route),
            RouteNetlinkMessage::NewRule(rule) => !rule::is_ours(rule),
            RouteNetlinkMessage::DelRule(_) => true,
            _ => false,
        },
        NetlinkPayload::Overrun(_) => true,
        _ => false,
    }
}

fn is_ours(route: &RouteMessage) -> bool {
    route.header.protocol == RouteProtocol::Other(PROTOCOL)
}

/// Returns true for a route in a table that kpx's rules use.
fn is_service_route(route: &RouteMessage) -> bool {
    [TABLE, SERVICES]
        .into_iter()
        .any(|table| route.attributes.contains(&RouteAttribute::Table(table)))
}
