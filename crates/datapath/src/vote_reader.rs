//! Reads the evidence that backends fail to answer, independent of the sweeps.

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::Map;
use proxy_common::addr::{Addr4, Addr6, Proto};
use proxy_common::connect::{Connects, Votes};
use proxy_common::frontend::EndpointKey;
use proxy_core::health::{Path, Reading, Readings};

use super::maps::FamilyNames;
use crate::sys::map_walk::Walk;

/// The number of rows in a read.
const BATCH: usize = 512;

/// A reader of the backends that have failed since their last answer. Reads do not wait for a
/// sweep.
#[derive(Debug)]
pub struct VoteReader {
    v4: Walk<EndpointKey<Addr4>, Connects>,
    v6: Walk<EndpointKey<Addr6>, Connects>,
}

impl VoteReader {
    /// Opens the maps. Call this before the maps are taken out of `ebpf`.
    pub(super) fn new(ebpf: &Ebpf) -> Result<Self> {
        Ok(Self {
            v4: walk(ebpf)?,
            v6: walk(ebpf)?,
        })
    }

    /// Returns the counts of backends with failures.
    pub fn read(&mut self) -> Result<Readings> {
        let mut readings = Readings::new();
        add(&mut self.v4, &mut readings)?;
        add(&mut self.v6, &mut readings)?;
        Ok(readings)
    }
}

fn walk<A: FamilyNames>(ebpf: &Ebpf) -> Result<Walk<EndpointKey<A>, Connects>> {
    let name = A::MAPS.connects;
    let Some(Map::HashMap(data)) = ebpf.map(name) else {
        anyhow::bail!("no hash map {name} in the BPF object")
    };
    Walk::new(data, BATCH).with_context(|| format!("walk through {name}"))
}

fn add<A: FamilyNames>(
    walk: &mut Walk<EndpointKey<A>, Connects>,
    readings: &mut Readings,
) -> Result<()> {
    walk.restart();
    while let Some(batch) = walk
        .next_batch()
        .with_context(|| format!("read {}", A::MAPS.connects))?
    {
        for (EndpointKey { service, at }, row) in batch {
            // UDP needs no answer, and the unspecified address stands for many backends.
            if service.proto == Proto::TCP && row.votes != Votes::NONE && !at.addr.is_unspecified()
            {
                let reading = Reading {
                    votes: row.votes,
                    answered: row.answered(),
                };
                readings.insert(Path::new(&service, &at), reading);
            }
        }
    }
    Ok(())
}
