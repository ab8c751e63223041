//! Aborts connected UDP sockets whose backend no longer serves. No program can translate their
//! packets again, so the sockets would keep sending to the old backend. A client that reconnects
//! gets a serving backend.

use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use crate::sys::map_walk::Walk;
use anyhow::{Context, Result, bail};
use aya::Ebpf;
use aya::maps::{HashMap, Map, MapData, MapError};
use proxy_common::addr::{Addr4, Addr6, SockAddr};
use proxy_common::frontend::{Endpoint, EndpointKey};
use proxy_common::socket::{Side, Socket, SocketKey};
use tokio::sync::Notify;
use tokio::time::sleep;
use tracing::{info, warn};

use crate::maps::FamilyNames;
use proxy_net::sock_diag;

/// The time for which removals are collected before a scan.
const PAUSE: Duration = Duration::from_millis(200);

/// The number of rows in a read.
const BATCH: usize = 1_024;

/// A socket's cookie, and its backend.
type SocketPeer = (u64, SocketAddr);

/// The scans for stale sockets after endpoints were removed.
pub struct StaleSockets {
    v4: Family<Addr4>,
    v6: Family<Addr6>,
    removed: Arc<Notify>,
}

struct Family<A: FamilyNames> {
    sockets: Walk<SocketKey<A>, Socket<A>>,
    endpoints: HashMap<MapData, EndpointKey<A>, Endpoint>,
}

impl StaleSockets {
    /// Opens the maps. Call this before the maps are taken out of `ebpf`. `removed` signals removed
    /// endpoints.
    pub(crate) fn new(ebpf: &Ebpf, removed: Arc<Notify>) -> Result<Self> {
        Ok(Self {
            v4: Family::new(ebpf)?,
            v6: Family::new(ebpf)?,
            removed,
        })
    }

    /// Runs until an error. Sockets that could not be aborted are retried with the next removal.
    pub async fn abort(mut self) -> Result<()> {
        loop {
            self.removed.notified().await;
            sleep(PAUSE).await;
            let (this, found) = tokio::task::spawn_blocking(move || {
                let found = self.find();
                (self, found)
            })
            .await
            .context("find sockets to removed backends")?;
            self = this;
            let aborted = match found {
                Ok(found) => abort(&found).await,
                Err(error) => Err(error),
            };
            match aborted {
                Ok(0) => {}
                Ok(aborted) => info!(aborted, "aborted UDP sockets to removed backends"),
                Err(error) => {
                    warn!(
                        error = format!("{error:#}"),
                        "UDP sockets may still send to removed backends"
                    )
                }
            }
        }
    }

    fn find(&mut self) -> Result<BTreeSet<SocketPeer>> {
        let mut found = self.v4.find()?;
        found.extend(self.v6.find()?);
        Ok(found)
    }
}

impl<A: FamilyNames> Family<A> {
    fn new(ebpf: &Ebpf) -> Result<Self> {
        let sockets = A::MAPS.udp_sockets;
        let endpoints = A::MAPS.endpoints;
        let Some(Map::LruHashMap(data)) = ebpf.map(sockets) else {
            bail!("no LRU hash map {sockets} in the BPF object")
        };
        let sockets = Walk::new(data, BATCH).with_context(|| format!("walk through {sockets}"))?;
        let Some(Map::HashMap(data)) = ebpf.map(endpoints) else {
            bail!("no hash map {endpoints} in the BPF object")
        };
        let data = MapData::from_fd(std::os::fd::AsFd::as_fd(data.fd()).try_clone_to_owned()?)?;
        let endpoints =
            HashMap::try_from(Map::HashMap(data)).with_context(|| format!("map {endpoints}"))?;
        Ok(Self { sockets, endpoints })
    }

    /// Returns the sockets that were translated to backends that no longer serve. Such a socket may
    /// be closed by now, or connected elsewhere.
    fn find(&mut self) -> Result<BTreeSet<SocketPeer>> {
        let Self { sockets, endpoints } = self;
        let mut found = BTreeSet::new();
        // Sockets share backends, and rows outlive their sockets.
        let mut serves = BTreeMap::new();
        sockets.restart();
        while let Some(rows) = sockets
            .next_batch()
            .with_context(|| format!("read {}", A::MAPS.udp_sockets))?
        {
            for (key, socket) in rows.filter(|(key, _)| key.side == Side::BACKEND) {
                let endpoint = EndpointKey::new(socket.service, SockAddr::new(key.addr, key.port));
                let serves = match serves.entry(endpoint) {
                    Entry::Occupied(known) => *known.get(),
                    Entry::Vacant(unknown) => match endpoints.get(unknown.key(), 0) {
                        Ok(_) => *unknown.insert(true),
                        Err(MapError::KeyNotFound) => *unknown.insert(false),
                        Err(error) => {
                            return Err(error)
                                .with_context(|| format!("read {}", A::MAPS.endpoints));
                        }
                    },
                };
                if !serves {
                    found.insert((key.cookie(), SocketAddr::new(key.addr.ip(), key.port.get())));
                }
            }
        }
        Ok(found)
    }
}

/// Aborts the sockets of this network namespace that are still connected to these backends. Returns
/// their number.
async fn abort(stale: &BTreeSet<SocketPeer>) -> Result<usize> {
    if stale.is_empty() {
        return Ok(0);
    }
    let (connection, handle) = sock_diag::connect().context("open a netlink socket")?;
    let work = async {
        let mut aborted = 0;
        for socket in handle.list().await.context("list UDP sockets")? {
            let peer = (socket.cookie(), socket.peer());
            if stale.contains(&peer) {
                let was_there = handle.abort(&socket).await;
                aborted += usize::from(
                    was_there.with_context(|| format!("abort a socket connected to {}", peer.1))?,
                );
            }
        }
        Ok(aborted)
    };
    tokio::select! {
        aborted = work => aborted,
        () = connection => bail!("the netlink socket has failed"),
    }
}
