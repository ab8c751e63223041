//! Reads what speaks against backends, beside the sweeps.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::Map;
use proxy_common::addr::{Addr4, Addr6};
use proxy_common::connect::{Asked, Connects, Votes};
use proxy_common::frontend::EndpointKey;
use proxy_core::health::{Owed, Path, Reading, Readings};

use super::clock::boot_ns;
use super::maps::FamilyNames;
use crate::sys::map_walk::Walk;

/// The number of rows in one read.
const BATCH: usize = 512;

/// A reader of the backends that have failed, or were sent a SYN, since their last answer. No sweep holds it up.
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

    /// Returns the counts of the backends with votes, of those that were sent a SYN of late, and of those that `knows` names. With them
    /// comes the time in nanoseconds since boot, at which all of it was so.
    pub fn read(&mut self, knows: impl Fn(&Path) -> bool) -> Result<(Readings, u64)> {
        let mut readings = Readings::new();
        add(&mut self.v4, &knows, &mut readings)?;
        add(&mut self.v6, &knows, &mut readings)?;
        // No moment in the rows is later.
        Ok((readings, boot_ns()?))
    }
}

fn walk<A: FamilyNames>(ebpf: &Ebpf) -> Result<Walk<EndpointKey<A>, Connects>> {
    let name = A::MAPS.connects;
    let Some(Map::HashMap(data)) = ebpf.map(name) else { anyhow::bail!("no hash map {name} in the BPF object") };
    Walk::new(data, BATCH).with_context(|| format!("walk through {name}"))
}

/// A row that counts, as far as it matters here.
struct Counted {
    path: Path,
    heard: u64,
    is_prompt: bool,
    reading: Reading,
}

impl Counted {
    fn new(path: Path, row: &Connects) -> Self {
        let reading = Reading { votes: row.votes, answered: row.answered(), owed: None };
        Self { path, heard: Connects::heard(row.units, row.refused), is_prompt: row.is_prompt(), reading }
    }

    /// Returns the reading with what the backend owes, as the row of its SYNs has it.
    fn with_asked(self, asked: Option<&Connects>) -> Reading {
        let owed = asked.map(|row| {
            let (asked, last) = row.asked();
            Owed {
                asked: if row.units == self.heard { asked } else { Asked::NOTHING },
                last,
                is_prompt: self.is_prompt,
            }
        });
        Reading { owed, ..self.reading }
    }
}

fn add<A: FamilyNames>(
    walk: &mut Walk<EndpointKey<A>, Connects>,
    knows: impl Fn(&Path) -> bool,
    readings: &mut Readings,
) -> Result<()> {
    let (mut counted, mut asked) = (Vec::new(), BTreeMap::new());
    walk.restart();
    while let Some(batch) = walk.next_batch().with_context(|| format!("read {}", A::MAPS.connects))? {
        // The row of the backend without address is of many.
        for (key, row) in batch.filter(|(key, _)| !key.at.addr.is_unspecified()) {
            let path = Path::new(&key.service, &key.at);
            if key.service.proto == Asked::PROTO {
                asked.insert(path, row);
            } else {
                counted.push(Counted::new(path, &row));
            }
        }
    }
    let with_asked = |counted: Counted| {
        let asked = asked.get(&counted.path);
        (counted.path, counted.with_asked(asked))
    };
    let is_wanted =
        |(path, reading): &(Path, Reading)| reading.votes != Votes::NONE || reading.owed.is_some() || knows(path);
    readings.extend(counted.into_iter().map(with_asked).filter(is_wanted));
    Ok(())
}
