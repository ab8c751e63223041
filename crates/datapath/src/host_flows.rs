//! Looks up flows between two sockets of this host.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use aya::maps::{HashMap, Map, MapData};
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto, SockAddr};
use proxy_common::flow::{Flow, FlowKey, Hook, Kind};

use crate::flows::read;
use crate::maps::FamilyNames;

/// A reader of single flows in both families' flow tables.
pub struct HostFlows {
    v4: HashMap<MapData, FlowKey<Addr4>, Flow<Addr4>>,
    v6: HashMap<MapData, FlowKey<Addr6>, Flow<Addr6>>,
}

impl HostFlows {
    pub(super) fn new(v4: OwnedFd, v6: OwnedFd) -> Result<Self> {
        Ok(Self {
            v4: table(v4)?,
            v6: table(v6)?,
        })
    }

    /// Returns the flow of a TCP connection from a socket of this host to `backend`, also on this
    /// host. `source` is the client's address and port as the backend receives them. Returns `None`
    /// if there is no such flow.
    pub fn find(&self, source: SocketAddr, backend: SocketAddr) -> Result<Option<TranslatedFlow>> {
        if let Some(ends) = Ends::<Addr4>::of(source, backend) {
            return ends.find(&self.v4);
        }
        Ends::<Addr6>::of(source, backend).map_or(Ok(None), |ends| ends.find(&self.v6))
    }
}

/// A connection from this host that kpx translated to a socket of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TranslatedFlow {
    /// The connection's two ends, as the client's socket has them.
    pub client: SocketAddr,
    pub frontend: SocketAddr,
    /// The ClusterIP and port of the Service.
    pub service: SocketAddr,
}

struct Ends<A: Addr> {
    source: SockAddr<A>,
    backend: SockAddr<A>,
}

impl<A: FamilyNames> Ends<A> {
    fn of(source: SocketAddr, backend: SocketAddr) -> Option<Self> {
        let end = |at: SocketAddr| Some(SockAddr::new(A::from_ip(at.ip())?, Port::new(at.port())));
        Some(Self {
            source: end(source)?,
            backend: end(backend)?,
        })
    }

    fn find(
        &self,
        flows: &HashMap<MapData, FlowKey<A>, Flow<A>>,
    ) -> Result<Option<TranslatedFlow>> {
        let key = FlowKey::new(Hook::EGRESS, Proto::TCP, self.backend, self.source);
        let flow = read(flows, &key).with_context(|| format!("look into {}", A::MAPS.flows))?;
        let flow = flow.filter(|flow| {
            flow.has(Flow::<A>::HOST)
                && flow.has(Flow::<A>::HOST_BACKEND)
                && flow.kind == Kind::UNDNAT
        });
        Ok(flow.map(
            |Flow {
                 client,
                 frontend,
                 service,
                 ..
             }| TranslatedFlow {
                client: client.socket_addr(),
                frontend: frontend.socket_addr(),
                service: service.socket_addr(),
            },
        ))
    }
}

fn table<A: FamilyNames>(map: OwnedFd) -> Result<HashMap<MapData, FlowKey<A>, Flow<A>>> {
    let what = || format!("open {}", A::MAPS.flows);
    let map = MapData::from_fd(map)
        .and_then(Map::from_map_data)
        .with_context(what)?;
    HashMap::try_from(map).with_context(what)
}
