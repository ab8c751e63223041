//! Reports changes that affect `bpf_fib_lookup`: devices, neighbours, routes and rules of this
//! network namespace.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use futures::{Stream, StreamExt};
use netlink_packet_core::{NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use rtnetlink::MulticastGroup;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep};

/// The minimum time between two reports. A pod can change its own link address at any rate, and
/// each report costs every flow on the fast path a few look-ups.
const PAUSE: Duration = Duration::from_millis(50);

const BATCH: usize = 1_024;

/// Calls `changed` after changes, until `changed` fails or the receiver of `stop` is gone.
pub async fn watch_ways(stop: mpsc::Sender<()>, changed: impl FnMut() -> Result<()>) -> Result<()> {
    use MulticastGroup::{Ipv4Route, Ipv4Rule, Ipv6Route, Ipv6Rule, Link, Neigh};
    let groups = [Link, Neigh, Ipv4Route, Ipv6Route, Ipv4Rule, Ipv6Rule];
    let (socket, _, messages) = rtnetlink::new_multicast_connection(&groups)
        .context("subscribe to changes of routes and neighbours")?;
    tokio::select! {
        // Check this first, because the socket fails when a runtime shuts down.
        biased;
        () = stop.closed() => Ok(()),
        () = socket => bail!("the netlink socket for changes of routes and neighbours failed"),
        result = follow(messages.map(|(message, _)| message), changed) => result,
    }
}

async fn follow(
    messages: impl Stream<Item = NetlinkMessage<RouteNetlinkMessage>> + Unpin,
    mut changed: impl FnMut() -> Result<()>,
) -> Result<()> {
    let mut messages = messages.ready_chunks(BATCH);
    let mut neighbours = Neighbours::default();
    let mut news = false;
    let pause = sleep(Duration::ZERO);
    tokio::pin!(pause);
    loop {
        tokio::select! {
            // Read messages at any time, because the queue is unbounded.
            batch = messages.next() => {
                let batch = batch.context("the netlink socket for changes of routes and neighbours closed")?;
                for message in &batch {
                    news |= neighbours.is_change(message);
                }
            }
            () = &mut pause, if news => {}
        }
        if news && pause.is_elapsed() {
            changed()?;
            news = false;
            pause.as_mut().reset(Instant::now() + PAUSE);
        }
    }
}

/// The usable neighbours: link addresses by interface index and address.
#[derive(Default)]
struct Neighbours(BTreeMap<(u32, IpAddr), Vec<u8>>);

impl Neighbours {
    /// Returns true for a change to report. Lost messages count, because they may contain any
    /// change.
    fn is_change(&mut self, message: &NetlinkMessage<RouteNetlinkMessage>) -> bool {
        let message = match &message.payload {
            NetlinkPayload::InnerMessage(message) => message,
            NetlinkPayload::Overrun(_) => return true,
            _ => return false,
        };
        match message {
            RouteNetlinkMessage::NewNeighbour(neighbour) => self.put(neighbour),
            RouteNetlinkMessage::DelNeighbour(neighbour) => {
                named(neighbour).is_some_and(|name| self.0.remove(&name).is_some())
            }
            _ => true,
        }
    }

    /// Returns true if the neighbour's link address changed, or the neighbour became unusable. The
    /// kernel reports each probe too.
    fn put(&mut self, neighbour: &NeighbourMessage) -> bool {
        let Some(name) = named(neighbour) else {
            return false;
        };
        let link_address = neighbour
            .attributes
            .iter()
            .find_map(|attribute| match attribute {
                NeighbourAttribute::LinkLayerAddress(address) => Some(address.clone()),
                _ => None,
            });
        match link_address {
            Some(address) if is_usable(neighbour.header.state) => self
                .0
                .insert(name, address.clone())
                .is_none_or(|before| before != address),
            _ => self.0.remove(&name).is_some(),
        }
    }
}

/// The states in which the kernel sends to a neighbour (NUD_VALID of net/neighbour.h).
fn is_usable(state: NeighbourState) -> bool {
    use NeighbourState::{Delay, Noarp, Permanent, Probe, Reachable, Stale};
    matches!(state, Permanent | Noarp | Reachable | Probe | Stale | Delay)
}

/// Returns the interface index and the address; `None` for an entry of a bridge's forwarding table.
fn named(neighbour: &NeighbourMessage) -> Option<(u32, IpAddr)> {
    let address = neighbour
        .attributes
        .iter()
        .find_map(|attribute| match attribute {
            NeighbourAttribute::Destination(NeighbourAddress::Inet(address)) => {
                Some((*address).into())
            }
            NeighbourAttribute::Destination(NeighbourAddress::Inet6(address)) => {
                Some((*address).into())
            }
            _ => None,
        })?;
    Some((neighbour.header.ifindex, address))
}

#[cfg(test)]
mod tests {
    use netlink_packet_route::link::LinkMessage;

    use super::*;

    #[test]
    fn neighbour_is_news_when_its_link_address_changes() {
        let mut neighbours = Neighbours::default();
        let cases = [
            ("a new one", Some((1, NeighbourState::Reachable)), true),
            ("a probe", Some((1, NeighbourState::Probe)), false),
            ("the same again", Some((1, NeighbourState::Stale)), false),
            (
                "another link address",
                Some((2, NeighbourState::Reachable)),
                true,
            ),
            ("no answer", Some((2, NeighbourState::Failed)), true),
            ("no answer again", Some((2, NeighbourState::Failed)), false),
            ("removed, unusable", None, false),
            (
                "a new one again",
                Some((2, NeighbourState::Permanent)),
                true,
            ),
            ("removed", None, true),
        ];
        for (name, neighbour, is_change) in cases {
            let message = match neighbour {
                Some((last, state)) => RouteNetlinkMessage::NewNeighbour(message(last, state)),
                None => RouteNetlinkMessage::DelNeighbour(message(0, NeighbourState::None)),
            };
            assert_eq!(
                neighbours.is_change(&NetlinkMessage::from(message)),
                is_change,
                "{name}"
            );
        }
        assert!(
            neighbours.is_change(&NetlinkMessage::from(RouteNetlinkMessage::NewLink(
                LinkMessage::default()
            )))
        );
    }

    fn message(last: u8, state: NeighbourState) -> NeighbourMessage {
        let mut message = NeighbourMessage::default();
        message.header.ifindex = 7;
        message.header.state = state;
        message.attributes = vec![
            NeighbourAttribute::Destination(NeighbourAddress::Inet([10, 244, 1, 2].into())),
            NeighbourAttribute::LinkLayerAddress(vec![2, 0, 0, 0, 0, last]),
        ];
        message
    }

    #[tokio::test(start_paused = true)]
    async fn changes_in_a_burst_are_few_reports() {
        let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
        let receiver = futures::stream::unfold(receiver, |mut receiver| async {
            Some((receiver.recv().await?, receiver))
        });
        let began = Instant::now();
        let mut reports = Vec::new();
        let follow = follow(Box::pin(receiver), || {
            reports.push(began.elapsed());
            Ok(())
        });
        let change = async {
            for _ in 0..100 {
                let message = RouteNetlinkMessage::NewLink(LinkMessage::default());
                sender
                    .send(NetlinkMessage::from(message))
                    .expect("the receiver is there");
                sleep(Duration::from_millis(1)).await;
            }
            sleep(PAUSE).await;
        };
        tokio::select! {
            result = follow => panic!("{result:?}"),
            () = change => {}
        }
        assert_eq!(reports.first(), Some(&Duration::ZERO), "the first at once");
        assert!((3..=4).contains(&reports.len()), "{reports:?}");
    }
}
