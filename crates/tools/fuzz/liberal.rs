//! The agent's answers to flows that request to skip the stack with a liberal conntrack entry:
//! always granted.

use std::net::SocketAddr;

use anyhow::Result;
use aya::maps::HashMap;
use proxy_common::addr::{Addr, SockAddr};
use proxy_common::flow::{AnyKey, FlowKey};
use proxy_common::names::TOLERATED;

use crate::fixture::{Fixture, clear};

/// A protocol, and the ends of a flow as its client sees them.
pub(crate) type Opener = (u8, SocketAddr, SocketAddr);

impl Fixture {
    /// Grants all requests, and returns them.
    pub(crate) fn answer(&mut self) -> Result<Vec<Opener>> {
        let liberal = &mut self.node.bench.datapath.liberal;
        let mut openers = Vec::new();
        while let Some(offer) = liberal.offered()? {
            if liberal.open_flow(&offer.key)?.is_some() {
                liberal.make_liberal(&offer)?;
                openers.extend(opener(&offer.key));
            }
        }
        Ok(openers)
    }

    /// Withdraws all grants, and drops pending requests.
    pub(crate) fn take_answers_back(&mut self) -> Result<()> {
        while self.node.bench.datapath.liberal.offered()?.is_some() {}
        let mut rows: HashMap<_, AnyKey, u32> = self.node.bench.map(TOLERATED)?;
        clear(&mut rows)
    }
}

fn opener(key: &AnyKey) -> Option<Opener> {
    key.v4()
        .map(|key| ends(&key))
        .or_else(|| key.v6().map(|key| ends(&key)))
}

fn ends<A: Addr>(key: &FlowKey<A>) -> Opener {
    let at = |at: SockAddr<A>| SocketAddr::new(at.addr.ip(), at.port.get());
    (key.proto().0, at(key.src()), at(key.dst()))
}
