//! Reads the flow tables of a running agent.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use aya::maps::{HashMap, MapData, MapError};
use nix::time::{ClockId, clock_gettime};
use proxy_common::addr::{Addr, SockAddr};
use proxy_common::flow::{Flow, FlowKey, Hook, Kind};

use super::{FlowService, FlowView, state_name};
use crate::view::Names;
use proxy_datapath::{self as datapath, FamilyNames};

/// Which flows are asked for.
pub(super) struct Wanted<'a> {
    /// Namespace and name.
    pub(super) service: Option<(&'a str, &'a str)>,
    pub(super) client: Option<IpAddr>,
    pub(super) backend: Option<IpAddr>,
    pub(super) names: &'a Names,
}

/// Those of one family, by client: at most `limit`. A flow's opener has its place at ingress or at the anchor, and its
/// key alone says most of what is asked for, so that few of many entries need to be read.
pub(super) fn flows<A: FamilyNames>(
    maps: &BTreeMap<String, u32>,
    wanted: &Wanted<'_>,
    limit: usize,
) -> Result<Vec<FlowView>> {
    let name = A::MAPS.flows;
    let map: HashMap<MapData, FlowKey<A>, Flow<A>> = datapath::open(maps, name)?;
    // The programs delete meanwhile, so that the kernel may start over: a set has each key once.
    let keys = map.keys().filter(|key| key.as_ref().map_or(true, |key| wanted.has_key(key)));
    let keys: BTreeSet<_> = keys.collect::<Result<_, _>>().with_context(|| format!("read {name}"))?;
    let now_secs = boot_secs()?;
    let mut flows = Vec::new();
    for key in keys {
        if flows.len() == limit {
            break;
        }
        match map.get(&key, 0) {
            Ok(flow) if flow.kind == Kind::DNAT && wanted.has(&flow) => {
                flows.push(view(&key, &flow, now_secs, wanted.names));
            }
            Ok(_) | Err(MapError::KeyNotFound) => {}
            Err(error) => return Err(error).with_context(|| format!("read {name}")),
        }
    }
    Ok(flows)
}

impl Wanted<'_> {
    fn has_key<A: Addr>(&self, key: &FlowKey<A>) -> bool {
        key.hook() != Hook::EGRESS
            && self.client.is_none_or(|client| key.src().addr.ip() == client)
            && self.service.is_none_or(|(namespace, name)| {
                let found = self.names.find(socket(key.dst()), &key.proto().to_string());
                found.is_some_and(|found| found.namespace == namespace && found.name == name)
            })
    }

    fn has<A: Addr>(&self, flow: &Flow<A>) -> bool {
        self.backend.is_none_or(|backend| flow.backend.addr.ip() == backend)
    }
}

fn view<A: Addr>(key: &FlowKey<A>, flow: &Flow<A>, now_secs: u32, names: &Names) -> FlowView {
    let (proto, frontend) = (key.proto(), socket(flow.frontend));
    FlowView {
        protocol: proto.to_string().to_uppercase(),
        client: socket(flow.client),
        frontend,
        backend: socket(flow.backend),
        source: socket(flow.source),
        masqueraded: flow.is_snat(),
        from_node: flow.has(Flow::<A>::HOST),
        state: state_name(flow.state()),
        idle_secs: flow.idle_secs(now_secs),
        timeout_secs: flow.state().timeout_secs(proto),
        service: names.find(frontend, &proto.to_string()).map(FlowService::new),
    }
}

fn socket<A: Addr>(at: SockAddr<A>) -> SocketAddr {
    SocketAddr::new(at.addr.ip(), at.port.get())
}

/// The programs' clock: seconds since boot, sleep included.
fn boot_secs() -> Result<u32> {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).context("read the boot clock")?;
    u32::try_from(now.tv_sec()).context("the boot clock is past 2^32 s")
}
