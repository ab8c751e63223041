//! Corrects the programs' counts of the entries that clients and namespaces hold in flows that are
//! not half-open: see [`proxy_common::share`].
//!
//! The programs count the flows that they close. The sweep counts again, because it closes flows
//! too and because the programs' additions are not atomic.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{Array, HashMap, MapData};
use proxy_common::addr::{Addr, Proto};
use proxy_common::flow::Flow;
use proxy_common::frontend::{Frontend, FrontendKey, Namespace};
use proxy_common::share;

use crate::flows::{read, remove};
use crate::maps::{FamilyNames, lend, take};

/// The number of entries below which a client's count is corrected only after the sweep has closed
/// one of its flows: such a client is far from any limit.
const MANY: u32 = 64;

pub(crate) struct Shares<A: FamilyNames> {
    clients: HashMap<MapData, A, u32>,
    lasting: Array<MapData, u32>,
    frontends: HashMap<MapData, FrontendKey<A>, Frontend<A>>,
    /// The namespaces of service ports with flows. They are kept after the Service is deleted.
    known: BTreeMap<FrontendKey<A>, Namespace>,
}

/// The number of entries of live flows that are not half-open, counted by a scan.
pub(crate) struct Held<A: Addr> {
    clients: BTreeMap<A, Holding>,
    services: BTreeMap<FrontendKey<A>, Holding>,
    entries: u32,
}

#[derive(Clone, Copy, Default)]
struct Holding {
    entries: u32,
    is_swept: bool,
}

impl Holding {
    fn add(&mut self, other: Self) {
        self.entries += other.entries;
        self.is_swept |= other.is_swept;
    }
}

impl<A: FamilyNames> Held<A> {
    pub(crate) fn new() -> Self {
        Self {
            clients: BTreeMap::new(),
            services: BTreeMap::new(),
            entries: 0,
        }
    }

    /// Counts a remaining flow by its original entry.
    pub(crate) fn add(&mut self, opener: &Flow<A>, proto: Proto) {
        let entries = opener.counted_entries(proto);
        if entries > 0 {
            self.entries += entries;
            self.note(
                opener,
                Holding {
                    entries,
                    is_swept: false,
                },
            );
        }
    }

    /// Records a flow that the sweep closed.
    pub(crate) fn swept(&mut self, opener: &Flow<A>) {
        self.note(
            opener,
            Holding {
                entries: 0,
                is_swept: true,
            },
        );
    }

    fn note(&mut self, opener: &Flow<A>, holding: Holding) {
        self.clients
            .entry(opener.holder())
            .or_default()
            .add(holding);
        self.services
            .entry(opener.service)
            .or_default()
            .add(holding);
    }
}

impl<A: FamilyNames> Shares<A> {
    pub(crate) fn new(ebpf: &mut Ebpf) -> Result<Self> {
        let frontends = lend(ebpf, A::MAPS.frontends)?;
        Ok(Self {
            clients: take(ebpf, A::MAPS.clients)?,
            lasting: take(ebpf, A::MAPS.lasting)?,
            frontends,
            known: BTreeMap::new(),
        })
    }

    /// Returns the entries held by clients, and by namespaces under their reserved keys.
    fn holders(&mut self, held: Held<A>) -> Result<BTreeMap<A, Holding>> {
        let mut holders = held.clients;
        self.known
            .retain(|service, _| held.services.contains_key(service));
        for (service, holding) in held.services {
            let row = read(&self.frontends, &service)
                .with_context(|| format!("read {}", A::MAPS.frontends))?;
            let named = row
                .map(|row| row.namespace)
                .filter(|namespace| !namespace.is_none());
            // A tenant that deletes its Service still holds the Service's flows.
            self.known
                .extend(named.map(|namespace| (service, namespace)));
            if let Some(namespace) = self.known.get(&service).copied() {
                holders
                    .entry(A::of_namespace(namespace))
                    .or_default()
                    .add(holding);
            }
        }
        Ok(holders)
    }

    /// Writes the counts of a scan of a table with a capacity of `room` entries. The next scan
    /// counts flows that opened or closed since.
    pub(crate) fn correct(&mut self, held: Held<A>, room: u32) -> Result<()> {
        let name = A::MAPS.lasting;
        let total = held.entries;
        self.lasting
            .set(0, total, 0)
            .with_context(|| format!("write {name}"))?;
        let holders = self.holders(held)?;
        let name = A::MAPS.clients;
        let looked_at = holders
            .iter()
            .filter(|(_, holding)| holding.is_swept || holding.entries >= MANY);
        for (client, Holding { entries, .. }) in looked_at {
            let counted = read(&self.clients, client).with_context(|| format!("read {name}"))?;
            if *entries == 0 {
                remove(&mut self.clients, client).with_context(|| format!("prune {name}"))?;
            } else if counted != Some(*entries) {
                self.clients
                    .insert(client, entries, 0)
                    .with_context(|| format!("write {name}"))?;
            }
        }
        // While no client can exceed its share, the row of a client without flows is harmless.
        if share::is_ample(total, room) {
            return Ok(());
        }
        let rows = self
            .clients
            .keys()
            .collect::<Result<Vec<A>, _>>()
            .with_context(|| format!("read {name}"))?;
        for client in rows.iter().filter(|client| !holders.contains_key(client)) {
            remove(&mut self.clients, client).with_context(|| format!("prune {name}"))?;
        }
        Ok(())
    }
}
