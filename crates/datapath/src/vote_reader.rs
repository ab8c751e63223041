//! Reads the evidence that backends fail to answer, independent of the sweeps.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::Map;
use proxy_common::addr::{Addr4, Addr6, Proto};
use proxy_common::connect::{Asked, Connects, Votes};
use proxy_common::frontend::EndpointKey;
use proxy_core::health::{Path, Reading, Readings, Unanswered};

use super::clock::boot_ns;
use super::maps::FamilyNames;
use crate::sys::map_walk::Walk;

/// The number of rows in a read.
const BATCH: usize = 512;

/// A reader of the backends that have failed since their last answer, or were recently sent a SYN.
/// Reads do not wait for a sweep.
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

    /// Returns the counts of backends with failures, with a recent SYN, or selected by `asks_for`,
    /// and the time of the read in nanoseconds since boot. A backend that answers before its row is
    /// read has no unanswered SYN.
    pub fn read(&mut self, asks_for: impl Fn(&Path) -> bool) -> Result<(Readings, u64)> {
        // Read the clock before the scan, so that a slow agent does not make backends look slow.
        let boot_ns = boot_ns()?;
        let now_secs =
            u32::try_from(boot_ns / 1_000_000_000).context("the boot clock is past 2^32 s")?;
        let mut readings = Readings::new();
        add(&mut self.v4, now_secs, &asks_for, &mut readings)?;
        add(&mut self.v6, now_secs, &asks_for, &mut readings)?;
        Ok((readings, boot_ns))
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
    now_secs: u32,
    asks_for: impl Fn(&Path) -> bool,
    readings: &mut Readings,
) -> Result<()> {
    let mut counted = Vec::new();
    let mut asked = BTreeMap::new();
    let is_old = |row: &Connects| now_secs.saturating_sub(row.last_secs) > Asked::OLD_SECS;
    walk.restart();
    while let Some(batch) = walk
        .next_batch()
        .with_context(|| format!("read {}", A::MAPS.connects))?
    {
        // The row with the unspecified address stands for many backends.
        for (key, row) in batch.filter(|(key, _)| !key.at.addr.is_unspecified()) {
            let path = Path::new(&key.service, &key.at);
            match key.service.proto {
                Asked::PROTO if is_old(&row) => {}
                Asked::PROTO => drop(asked.insert(path, row)),
                Proto::TCP => counted.push((path, row)),
                // UDP needs no answer, so rows of UDP contain no evidence.
                _ => {}
            }
        }
    }
    for (path, row) in counted {
        let unanswered = asked.get(&path).map(|syns| {
            let (asked, heard) = row.unanswered(syns);
            Unanswered {
                asked,
                heard,
                is_prompt: row.is_prompt(),
            }
        });
        if row.votes != Votes::NONE || unanswered.is_some() || asks_for(&path) {
            readings.insert(
                path,
                Reading {
                    votes: row.votes,
                    answered: row.answered(),
                    unanswered,
                },
            );
        }
    }
    Ok(())
}
