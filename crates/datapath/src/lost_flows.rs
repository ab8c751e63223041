//! Marks TCP flows to backends on lost nodes as ended: the programs answer the client's next packet
//! with a RST. For half-open flows, a retransmitted SYN opens a new flow.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use anyhow::{Context, Result, bail};
use aya::maps::{HashMap, Map, MapData};
use proxy_common::addr::{Addr4, Addr6, Proto};
use proxy_common::flow::{Flow, FlowKey, Hook, Kind, Seen};
use proxy_core::health::Path;
use proxy_net::sock_diag;

use crate::clock::boot_secs;
use crate::flows::{BATCH, FlowMaps, read};
use crate::maps::FamilyNames;
use crate::sys::map_walk::{Rows, Walk};

/// The seconds for which a backend counts as alive after an answer, even if the cluster has lost
/// its node.
const HEARD_SECS: u32 = 3;

/// The flag of linux/bpf.h to update only an existing row, so that a flow closed by a program stays
/// closed.
pub(crate) const BPF_EXIST: u64 = 2;

/// A scan of the flow tables for the flows of some backends.
pub struct LostFlows {
    v4: Family<Addr4>,
    v6: Family<Addr6>,
}

/// A family's flow table: a scan, and a handle for changes.
pub(crate) struct Family<A: FamilyNames> {
    pub(crate) walk: Walk<FlowKey<A>, Flow<A>>,
    pub(crate) flows: HashMap<MapData, FlowKey<A>, Flow<A>>,
}

/// The suspect backends to which flows of this node exist.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The suspects with live flows.
    pub open: BTreeSet<Path>,
    /// The suspects that answered recently, through any Service.
    pub heard: BTreeSet<SocketAddr>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndedFlow {
    pub path: Path,
    pub client: SocketAddr,
    pub frontend: SocketAddr,
    /// True if a socket of this node opened the connection.
    pub is_hosts: bool,
    /// True if the connection was half-open: its client retransmits and reaches another backend.
    pub is_half_open: bool,
}

impl FlowMaps {
    /// Returns a scan that ends flows, independent of the sweep.
    pub fn lost(&self) -> Result<LostFlows> {
        Ok(LostFlows {
            v4: Family::new(&self.tables.v4)?,
            v6: Family::new(&self.tables.v6)?,
        })
    }
}

impl LostFlows {
    /// Finds the live flows to these backends.
    pub fn find(&mut self, suspects: &BTreeSet<Path>) -> Result<Found> {
        let now_secs = boot_secs()?;
        let mut found = Found::default();
        self.v4.find(suspects, now_secs, &mut found)?;
        self.v6.find(suspects, now_secs, &mut found)?;
        Ok(found)
    }

    /// Marks all flows to these backends as ended, and returns the flows.
    pub fn end(&mut self, lost: &BTreeSet<Path>) -> Result<Vec<EndedFlow>> {
        let mut ended = self.v4.end(lost)?;
        ended.extend(self.v6.end(lost)?);
        Ok(ended)
    }

    /// Removes the marks of all flows to these backends, which are alive.
    pub fn spare(&mut self, back: &BTreeSet<Path>) -> Result<()> {
        self.v4.spare(back)?;
        self.v6.spare(back)
    }
}

impl<A: FamilyNames> Family<A> {
    pub(crate) fn new(rows: &Rows<FlowKey<A>, Flow<A>>) -> Result<Self> {
        let opened = || {
            let map = Map::from_map_data(MapData::from_fd(rows.map()?)?)?;
            anyhow::Ok(Self {
                walk: rows.walk(BATCH)?,
                flows: HashMap::try_from(map)?,
            })
        };
        opened().with_context(|| format!("open {}", A::MAPS.flows))
    }

    fn find(&mut self, suspects: &BTreeSet<Path>, now_secs: u32, found: &mut Found) -> Result<()> {
        let backends: BTreeSet<_> = suspects.iter().map(|path| path.backend).collect();
        self.walk.restart();
        while let Some(batch) = self
            .walk
            .next_batch()
            .with_context(|| format!("read {}", A::MAPS.flows))?
        {
            for (key, flow) in batch.filter(|(key, _)| key.proto() == Proto::TCP) {
                let backend = flow.backend.socket_addr();
                let has_spoken = flow.kind == Kind::UNDNAT && flow.rx.has(Seen::PACKET);
                if has_spoken
                    && flow.idle_secs(now_secs) < HEARD_SECS
                    && backends.contains(&backend)
                {
                    found.heard.insert(backend);
                }
                if is_live(&key, &flow) && suspects.contains(&path(&flow)) {
                    found.open.insert(path(&flow));
                }
            }
        }
        Ok(())
    }

    fn end(&mut self, lost: &BTreeSet<Path>) -> Result<Vec<EndedFlow>> {
        let is_ended =
            |key: &FlowKey<A>, flow: &Flow<A>| is_live(key, flow) && lost.contains(&path(flow));
        let mark = |flow: &mut Flow<A>| {
            flow.rx = flow.rx.with(Seen::LOST);
            // The short paths leave the first packet of each second to the full path, which checks
            // the mark.
            flow.last_secs = flow.last_secs.saturating_sub(1);
        };
        let ended = |flow: Flow<A>| {
            let client = flow.client.socket_addr();
            let frontend = flow.frontend.socket_addr();
            let is_half_open = flow.is_half_open(Proto::TCP);
            EndedFlow {
                path: path(&flow),
                client,
                frontend,
                is_hosts: flow.has(Flow::<A>::HOST),
                is_half_open,
            }
        };
        Ok(self
            .change(is_ended, mark)?
            .into_iter()
            .map(ended)
            .collect())
    }

    fn spare(&mut self, back: &BTreeSet<Path>) -> Result<()> {
        let is_spared = |key: &FlowKey<A>, flow: &Flow<A>| {
            key.hook() != Hook::EGRESS && flow.is_lost() && back.contains(&path(flow))
        };
        self.change(is_spared, |flow| flow.rx = flow.rx.without(Seen::LOST))
            .map(drop)
    }

    /// Changes the entries that `picks` selects, and returns the entries. If a program changes an
    /// entry at the same time, its change (a count, an acknowledged number) may be lost.
    fn change(
        &mut self,
        picks: impl Fn(&FlowKey<A>, &Flow<A>) -> bool,
        change: impl Fn(&mut Flow<A>),
    ) -> Result<Vec<Flow<A>>> {
        let mut keys = Vec::new();
        self.walk.restart();
        while let Some(batch) = self
            .walk
            .next_batch()
            .with_context(|| format!("read {}", A::MAPS.flows))?
        {
            keys.extend(
                batch
                    .filter(|(key, flow)| picks(key, flow))
                    .map(|(key, _)| key),
            );
        }
        let mut changed = Vec::new();
        for key in keys {
            // The client may have dialled another backend since the scan visited the flow.
            let Some(mut flow) = read(&self.flows, &key)?.filter(|flow| picks(&key, flow)) else {
                continue;
            };
            change(&mut flow);
            if self.flows.insert(key, flow, BPF_EXIST).is_ok() {
                changed.push(flow);
            }
        }
        Ok(changed)
    }
}

/// Returns true for the original entry of a TCP flow that neither a peer nor the agent has ended.
fn is_live<A: FamilyNames>(key: &FlowKey<A>, flow: &Flow<A>) -> bool {
    let is_opener =
        key.proto() == Proto::TCP && key.hook() != Hook::EGRESS && flow.kind == Kind::DNAT;
    is_opener && !flow.state().is_terminal() && !flow.is_lost()
}

fn path<A: FamilyNames>(flow: &Flow<A>) -> Path {
    Path::new(&flow.service, &flow.backend)
}

/// Aborts the clients' sockets on this host, which would otherwise notice only when they send.
/// Sockets that are still connecting are skipped.
pub async fn abort_sockets(ended: &[EndedFlow]) -> Result<()> {
    let of_host: Vec<_> = ended
        .iter()
        .filter(|flow| flow.is_hosts && !flow.is_half_open)
        .collect();
    if of_host.is_empty() {
        return Ok(());
    }
    let (connection, handle) = sock_diag::connect().context("open a netlink socket")?;
    let work = async {
        for EndedFlow {
            client, frontend, ..
        } in of_host
        {
            let aborted = handle.abort_tcp(*client, *frontend).await;
            aborted.with_context(|| format!("abort the socket of {client} to {frontend}"))?;
        }
        Ok(())
    };
    tokio::select! {
        aborted = work => aborted,
        () = connection => bail!("the netlink socket has failed"),
    }
}
