//! Corrects the programs' counts of the entries that clients and namespaces hold beyond half-open
//! flows: see [`proxy_common::share`].
//!
//! The programs count flows that they close. The sweep counts again, because it closes flows as
//! well, and because the programs' adds are not atomic.

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

/// A client with fewer entries is far from any limit, and its count is corrected only after the
/// sweep has closed a flow of it.
const MANY: u32 = 64;

/// The programs' counts of a family.
pub(crate) struct Shares<A: FamilyNames> {
    clients: HashMap<MapData, A, u32>,
    lasting: Array<MapData, u32>,
    frontends: HashMap<MapData, FrontendKey<A>, Frontend<A>>,
    /// The namespaces of service ports that have flows: these outlive the Service.
    known: BTreeMap<FrontendKey<A>, Namespace>,
}

/// The entries of flows beyond half-open that go on, as a walk through the table has counted them.
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

    /// Counts a flow that stays, by its opener's entry.
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

    /// Notes a flow that the sweep has closed.
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

    /// Returns the holdings of the clients, and of the namespaces in their places among them.
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

    /// Writes what a walk has counted, of a table with so many entries. Flows that opened or ended
    /// since count from the next walk on.
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
        // While no client can have used up its share, a row without flows does no harm.
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
