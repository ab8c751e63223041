//! Reads what speaks against backends, beside the sweeps.

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::Map;
use proxy_common::addr::{Addr4, Addr6};
use proxy_common::connect::{Connects, Votes};
use proxy_common::frontend::EndpointKey;
use proxy_core::health::{Path, Reading};

use super::maps::FamilyNames;
use crate::sys::map_walk::Walk;

/// The number of rows in one read.
const BATCH: usize = 512;

/// A reader of the backends that have failed since their last answer. No sweep holds it up.
#[derive(Debug)]
pub struct VoteReader {
    v4: Walk<EndpointKey<Addr4>, Connects>,
    v6: Walk<EndpointKey<Addr6>, Connects>,
}

impl VoteReader {
    /// Opens the maps. Call this before they are taken out of `ebpf`.
    pub(super) fn new(ebpf: &Ebpf) -> Result<Self> {
        Ok(Self { v4: walk(ebpf)?, v6: walk(ebpf)? })
    }

    pub fn read(&mut self) -> Result<Vec<(Path, Reading)>> {
        let mut votes = Vec::new();
        add(&mut self.v4, &mut votes)?;
        add(&mut self.v6, &mut votes)?;
        Ok(votes)
    }
}

fn walk<A: FamilyNames>(ebpf: &Ebpf) -> Result<Walk<EndpointKey<A>, Connects>> {
    let name = A::MAPS.connects;
    let Some(Map::HashMap(data)) = ebpf.map(name) else { anyhow::bail!("no hash map {name} in the BPF object") };
    Walk::new(data, BATCH).with_context(|| format!("walk through {name}"))
}

fn add<A: FamilyNames>(walk: &mut Walk<EndpointKey<A>, Connects>, votes: &mut Vec<(Path, Reading)>) -> Result<()> {
    walk.restart();
    while let Some(batch) = walk.next_batch().with_context(|| format!("read {}", A::MAPS.connects))? {
        // The row of the backend without address is of many.
        let rows = batch.filter(|(key, row)| row.votes != Votes::NONE && !key.at.addr.is_unspecified());
        let reading = |row: Connects| Reading { votes: row.votes, answered: row.answered() };
        votes.extend(rows.map(|(key, row)| (Path::new(&key.service, &key.at), reading(row))));
    }
    Ok(())
}
