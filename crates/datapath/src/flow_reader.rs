//! Reads the flow tables for listings, independent of the sweep and its lock.

use std::net::SocketAddr;

use anyhow::{Context, Result};
use proxy_common::addr::{Addr4, Addr6, Proto};
use proxy_common::flow::{Flow, FlowKey, Hook, Kind, State, Timeouts};

use crate::clock::boot_secs;
use crate::maps::FamilyNames;
use crate::sys::map_walk::Walk;

/// A flow from a client to a frontend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedFlow {
    pub proto: Proto,
    pub client: SocketAddr,
    pub frontend: SocketAddr,
    pub backend: SocketAddr,
    /// The client's address and port as the backend receives them.
    pub source: SocketAddr,
    /// True if the backend receives another source address than the client's.
    pub masqueraded: bool,
    /// True if a socket of this node opened the flow.
    pub from_node: bool,
    pub state: State,
    /// The seconds since the client's last packet.
    pub idle_secs: u32,
    /// The idle timeout of this state, in seconds.
    pub timeout_secs: u32,
}

/// A reader of both families' flows. It needs the memory of one batch, for any number of flows.
#[derive(Debug)]
pub struct FlowReader {
    timeouts: Timeouts,
    v4: Walk<FlowKey<Addr4>, Flow<Addr4>>,
    v6: Walk<FlowKey<Addr6>, Flow<Addr6>>,
}

impl FlowReader {
    pub(super) fn new(
        timeouts: Timeouts,
        v4: Walk<FlowKey<Addr4>, Flow<Addr4>>,
        v6: Walk<FlowKey<Addr6>, Flow<Addr6>>,
    ) -> Self {
        Self { timeouts, v4, v6 }
    }

    /// Returns the flows of the next batch, which may be empty; `None` after the last batch.
    pub fn next_batch(&mut self) -> Result<Option<Vec<ListedFlow>>> {
        let times = Times {
            now_secs: boot_secs()?,
            timeouts: self.timeouts,
        };
        match listed(&mut self.v4, times)? {
            None => listed(&mut self.v6, times),
            some => Ok(some),
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Times {
    pub(super) now_secs: u32,
    pub(super) timeouts: Timeouts,
}

fn listed<A: FamilyNames>(
    walk: &mut Walk<FlowKey<A>, Flow<A>>,
    times: Times,
) -> Result<Option<Vec<ListedFlow>>> {
    let batch = walk
        .next_batch()
        .with_context(|| format!("read {}", A::MAPS.flows))?;
    let listed = |(key, flow): (FlowKey<A>, Flow<A>)| {
        is_opener(&key, &flow).then(|| ListedFlow::of(key, &flow, times))
    };
    Ok(batch.map(|entries| entries.filter_map(listed).collect()))
}

/// Returns true for the original entry of a flow, by which it is listed. An original entry at
/// egress belongs to a connection of another program. Each flow has two or four entries.
pub(super) fn is_opener<A: FamilyNames>(key: &FlowKey<A>, flow: &Flow<A>) -> bool {
    flow.kind == Kind::DNAT && key.hook() != Hook::EGRESS
}

impl ListedFlow {
    pub(super) fn of<A: FamilyNames>(key: FlowKey<A>, flow: &Flow<A>, times: Times) -> Self {
        Self {
            proto: key.proto(),
            client: flow.client.socket_addr(),
            frontend: flow.frontend.socket_addr(),
            backend: flow.backend.socket_addr(),
            source: flow.source.socket_addr(),
            masqueraded: flow.is_snat(),
            from_node: flow.has(Flow::<A>::HOST),
            state: flow.state(),
            idle_secs: flow.idle_secs(times.now_secs),
            timeout_secs: flow.state().timeout_secs(key.proto(), times.timeouts),
        }
    }
}
