//! The programs' requests to let flows bypass the network stack although conntrack tracks them, and
//! the agent's answers.

use std::net::SocketAddr;
use std::os::fd::AsFd;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{HashMap, Map, MapData, MapError, Queue};
use proxy_common::addr::{Addr4, Addr6, Proto};
use proxy_common::flow::{AnyKey, Flow, FlowKey, Offer, Seen, State};
use proxy_common::names;

use crate::flows::{read, remove};
use crate::maps::{FamilyNames, flow_table, take};

/// The queue of requests (`OFFERS`), and the grants (`TOLERATED`).
pub struct LiberalFlows {
    offers: Queue<MapData, Offer>,
    rows: HashMap<MapData, AnyKey, u32>,
    v4: HashMap<MapData, FlowKey<Addr4>, Flow<Addr4>>,
    v6: HashMap<MapData, FlowKey<Addr6>, Flow<Addr6>>,
}

/// An open flow with the addresses that conntrack tracks, between kpx's hooks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenFlow {
    pub client: SocketAddr,
    pub backend: SocketAddr,
    pub proto: Proto,
    /// True if the client is behind an uplink.
    pub is_far: bool,
    /// The time of the last packet, in seconds since boot.
    pub last_secs: u32,
}

impl LiberalFlows {
    /// Opens the maps. Call this before the flow tables are taken out of `ebpf`.
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self> {
        let v4 = again(ebpf)?;
        let v6 = again(ebpf)?;
        Ok(Self {
            offers: take(ebpf, names::OFFERS)?,
            rows: take(ebpf, names::TOLERATED)?,
            v4,
            v6,
        })
    }

    /// Returns the next request; `None` if the queue is empty.
    pub fn offered(&mut self) -> Result<Option<Offer>> {
        match self.offers.pop(0) {
            Ok(offer) => Ok(Some(offer)),
            Err(MapError::ElementNotFound) => Ok(None),
            Err(error) => Err(error).with_context(|| format!("read {}", names::OFFERS)),
        }
    }

    /// Returns the flow with this key of its original entry, if it is open and goes through the
    /// network stack.
    pub fn open_flow(&self, key: &AnyKey) -> Result<Option<OpenFlow>> {
        if let Some(key) = key.v4() {
            return open_flow(&self.v4, &key);
        }
        key.v6().map_or(Ok(None), |key| open_flow(&self.v6, &key))
    }

    /// Grants a request.
    pub fn make_liberal(&mut self, offer: &Offer) -> Result<()> {
        self.rows
            .insert(offer.key, offer.secs, 0)
            .with_context(|| format!("write {}", names::TOLERATED))
    }

    /// Revokes a grant: within a second the flow's packets go through the network stack.
    pub fn forget(&mut self, key: &AnyKey) -> Result<()> {
        remove(&mut self.rows, key)
            .map(drop)
            .with_context(|| format!("write {}", names::TOLERATED))
    }
}

fn again<A: FamilyNames>(ebpf: &Ebpf) -> Result<HashMap<MapData, FlowKey<A>, Flow<A>>> {
    let opened = || {
        let data = MapData::from_fd(flow_table::<A>(ebpf)?.fd().as_fd().try_clone_to_owned()?)?;
        anyhow::Ok(HashMap::try_from(Map::HashMap(data))?)
    };
    opened().with_context(|| format!("open {}", A::MAPS.flows))
}

fn open_flow<A: FamilyNames>(
    map: &HashMap<MapData, FlowKey<A>, Flow<A>>,
    key: &FlowKey<A>,
) -> Result<Option<OpenFlow>> {
    let flow = read(map, key).with_context(|| format!("read {}", A::MAPS.flows))?;
    let is_open = |flow: &Flow<A>| flow.state() == State::Established && !flow.rx.has(Seen::BYPASS);
    Ok(flow.filter(is_open).map(|flow| OpenFlow {
        client: flow.client_between().socket_addr(),
        backend: flow.backend.socket_addr(),
        proto: key.proto(),
        is_far: flow.is_far(),
        last_secs: flow.last_secs,
    }))
}
