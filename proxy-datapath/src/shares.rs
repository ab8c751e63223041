//! Corrects the programs' counts of the entries that clients hold beyond half-open flows: see [`proxy_common::share`].
//!
//! The programs count flows that they close. The sweep counts again, because it closes flows as well, and because the
//! programs' adds are not atomic.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{Array, HashMap, MapData};
use proxy_common::addr::Proto;
use proxy_common::flow::Flow;
use proxy_common::share;

use crate::flows::{read, remove};
use crate::maps::{FamilyNames, take};

/// A client with fewer entries is far from any limit, and its count is corrected only after the sweep has closed a flow of it.
const MANY: u32 = 64;

/// The programs' counts of a family.
pub(crate) struct Shares<A: FamilyNames> {
    clients: HashMap<MapData, A, u32>,
    lasting: Array<MapData, u32>,
}

/// The entries of flows beyond half-open that go on, as a walk through the table has counted them.
pub(crate) struct Held<A> {
    clients: BTreeMap<A, Holding>,
    entries: u32,
}

#[derive(Clone, Copy, Default)]
struct Holding {
    entries: u32,
    is_swept: bool,
}

impl<A: FamilyNames> Held<A> {
    pub(crate) fn new() -> Self {
        Self { clients: BTreeMap::new(), entries: 0 }
    }

    /// Counts a flow that stays, by its opener's entry.
    pub(crate) fn add(&mut self, opener: &Flow<A>, proto: Proto) {
        let entries = opener.counted_entries(proto);
        if entries > 0 {
            self.entries += entries;
            self.clients.entry(opener.holder()).or_default().entries += entries;
        }
    }

    /// Notes a flow that the sweep has closed.
    pub(crate) fn swept(&mut self, opener: &Flow<A>) {
        self.clients.entry(opener.holder()).or_default().is_swept = true;
    }
}

impl<A: FamilyNames> Shares<A> {
    pub(crate) fn new(ebpf: &mut Ebpf) -> Result<Self> {
        Ok(Self { clients: take(ebpf, A::MAPS.clients)?, lasting: take(ebpf, A::MAPS.lasting)? })
    }

    /// Writes what a walk has counted, of a table with so many entries. Flows that opened or ended since count from the next walk on.
    pub(crate) fn correct(&mut self, held: &Held<A>, room: u32) -> Result<()> {
        let name = A::MAPS.lasting;
        self.lasting.set(0, held.entries, 0).with_context(|| format!("write {name}"))?;
        let name = A::MAPS.clients;
        let looked_at = held.clients.iter().filter(|(_, holding)| holding.is_swept || holding.entries >= MANY);
        for (client, Holding { entries, .. }) in looked_at {
            let counted = read(&self.clients, client).with_context(|| format!("read {name}"))?;
            if *entries == 0 {
                remove(&mut self.clients, client).with_context(|| format!("prune {name}"))?;
            } else if counted != Some(*entries) {
                self.clients.insert(client, entries, 0).with_context(|| format!("write {name}"))?;
            }
        }
        // While no client can have used up its share, a row without flows does no harm.
        if share::is_ample(held.entries, room) {
            return Ok(());
        }
        let rows = self.clients.keys().collect::<Result<Vec<A>, _>>().with_context(|| format!("read {name}"))?;
        for client in rows.iter().filter(|client| !held.clients.contains_key(client)) {
            remove(&mut self.clients, client).with_context(|| format!("prune {name}"))?;
        }
        Ok(())
    }
}
