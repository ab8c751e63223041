//! Reports changes of routes or rules in this network namespace, except for kpx's own.

use std::time::Duration;

use anyhow::{Context, bail};
use futures::{Stream, StreamExt};
use netlink_packet_core::{NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::route::{RouteMessage, RouteProtocol};
use rtnetlink::MulticastGroup;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

use super::route::PROTOCOL;

/// The shortest time between two reports: routing daemons change routes by the thousand.
const PAUSE: Duration = Duration::from_millis(500);

/// The number of messages handled at once.
const BATCH: usize = 1_024;

/// Reports changes until the receiver is gone.
pub async fn watch_routes(changes: mpsc::Sender<()>) -> anyhow::Result<()> {
    let groups =
        [MulticastGroup::Ipv4Route, MulticastGroup::Ipv6Route, MulticastGroup::Ipv4Rule, MulticastGroup::Ipv6Rule];
    let (socket, _, messages) =
        rtnetlink::new_multicast_connection(&groups).context("subscribe to changes of routes")?;
    tokio::select! {
        () = socket => bail!("the netlink socket for changes of routes failed"),
        result = follow(messages.map(|(message, _)| message), changes) => result,
    }
}

async fn follow(
    messages: impl Stream<Item = NetlinkMessage<RouteNetlinkMessage>> + Unpin,
    changes: mpsc::Sender<()>,
) -> anyhow::Result<()> {
    let mut messages = messages.ready_chunks(BATCH);
    let mut news = false;
    let pause = sleep(Duration::ZERO);
    tokio::pin!(pause);
    loop {
        tokio::select! {
            () = changes.closed() => return Ok(()),
            // Messages are read at any time, because no limit bounds the queue in which they wait.
            batch = messages.next() => {
                news |= batch.context("the netlink socket for changes of routes closed")?.iter().any(is_news);
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

/// Returns true for a change to report. Lost messages may have been any change.
fn is_news(message: &NetlinkMessage<RouteNetlinkMessage>) -> bool {
    match &message.payload {
        NetlinkPayload::InnerMessage(message) => match message {
            RouteNetlinkMessage::NewRoute(route) | RouteNetlinkMessage::DelRoute(route) => !is_ours(route),
            RouteNetlinkMessage::NewRule(_) | RouteNetlinkMessage::DelRule(_) => true,
            _ => false,
        },
        NetlinkPayload::Overrun(_) => true,
        _ => false,
    }
}

fn is_ours(route: &RouteMessage) -> bool {
    route.header.protocol == RouteProtocol::Other(PROTOCOL)
}
