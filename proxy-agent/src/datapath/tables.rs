//! The maps that say where packets go, read and written.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::{Context, Result};
use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, HashMap, MapData, MapError};
use aya::{Ebpf, Pod};
use proxy_common::addr::{Addr4, Addr6};
use proxy_common::frontend::{
    Backend, Endpoint, EndpointKey, Frontend, FrontendKey, Maglev, Service, SetKey, SlotKey, SourceRange,
};
use proxy_common::names;

use super::{Names, take};
use crate::diff::{Change, FamilyChange};
use crate::tables::{FamilyTables, RangeKey, Tables};

/// Where tables live: the kernel's maps, or a test's.
pub trait Maps {
    fn read(&self) -> Result<Tables>;
    fn apply(&mut self, change: &Change) -> Result<()>;
}

/// The kernel's maps.
pub struct KernelTables {
    v4: Family<Addr4>,
    v6: Family<Addr6>,
    /// How many endpoints have been deleted: flows that chose an older generation's must look again.
    generation: Array<MapData, u32>,
}

impl KernelTables {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self> {
        Ok(Self { v4: Family::new(ebpf)?, v6: Family::new(ebpf)?, generation: take(ebpf, names::GENERATION)? })
    }
}

impl Maps for KernelTables {
    fn read(&self) -> Result<Tables> {
        Ok(Tables { v4: self.v4.read()?, v6: self.v6.read()? })
    }

    fn apply(&mut self, change: &Change) -> Result<()> {
        match change {
            Change::V4(change) => self.v4.apply(change),
            Change::V6(change) => self.v6.apply(change),
        }
        .with_context(|| change.to_string())?;
        if let Change::V4(FamilyChange::DelEndpoint(_)) | Change::V6(FamilyChange::DelEndpoint(_)) = change {
            self.begin_generation()?;
        }
        Ok(())
    }
}

impl KernelTables {
    fn begin_generation(&mut self) -> Result<()> {
        let generation = self.generation.get(&0, 0).with_context(|| format!("read {}", names::GENERATION))?;
        let next = generation.wrapping_add(1);
        self.generation.set(0, next, 0).with_context(|| format!("write {}", names::GENERATION))
    }
}

struct Family<A: Names> {
    frontends: HashMap<MapData, FrontendKey<A>, Frontend<A>>,
    services: HashMap<MapData, FrontendKey<A>, Service>,
    slots: HashMap<MapData, SlotKey<A>, Backend<A>>,
    endpoints: HashMap<MapData, EndpointKey<A>, Endpoint>,
    maglev: HashMap<MapData, SetKey<A>, Maglev>,
    source_ranges: LpmTrie<MapData, SourceRange<A>, u32>,
}

impl<A: Names> Family<A> {
    fn new(ebpf: &mut Ebpf) -> Result<Self> {
        Ok(Self {
            frontends: take(ebpf, A::MAPS.frontends)?,
            services: take(ebpf, A::MAPS.services)?,
            slots: take(ebpf, A::MAPS.slots)?,
            endpoints: take(ebpf, A::MAPS.endpoints)?,
            maglev: take(ebpf, A::MAPS.maglev)?,
            source_ranges: take(ebpf, A::MAPS.source_ranges)?,
        })
    }

    fn read(&self) -> Result<FamilyTables<A>> {
        Ok(FamilyTables {
            frontends: contents(&self.frontends).context(A::MAPS.frontends)?,
            services: contents(&self.services).context(A::MAPS.services)?,
            slots: contents(&self.slots).context(A::MAPS.slots)?,
            endpoints: contents(&self.endpoints).context(A::MAPS.endpoints)?,
            maglev: shared(contents(&self.maglev).context(A::MAPS.maglev)?),
            source_ranges: ranges(&self.source_ranges).context(A::MAPS.source_ranges)?,
        })
    }

    fn apply(&mut self, change: &FamilyChange<A>) -> Result<()> {
        match change {
            FamilyChange::PutSourceRange(key) => {
                let put = self.source_ranges.insert(&lpm_key(key), 1, 0);
                put.with_context(|| format!("write {}", A::MAPS.source_ranges))
            }
            FamilyChange::PutEndpoint(key, value) => put(&mut self.endpoints, key, value, A::MAPS.endpoints),
            FamilyChange::PutSlot(key, value) => put(&mut self.slots, key, value, A::MAPS.slots),
            FamilyChange::PutMaglev(key, value) => put(&mut self.maglev, key, value, A::MAPS.maglev),
            FamilyChange::PutService(key, value) => put(&mut self.services, key, value, A::MAPS.services),
            FamilyChange::PutFrontend(key, value) | FamilyChange::MoveFrontend(key, value, _) => {
                put(&mut self.frontends, key, value, A::MAPS.frontends)
            }
            FamilyChange::DelFrontend(key, _) => deleted(self.frontends.remove(key), A::MAPS.frontends),
            FamilyChange::DelService(key) => deleted(self.services.remove(key), A::MAPS.services),
            FamilyChange::DelMaglev(key) => deleted(self.maglev.remove(key), A::MAPS.maglev),
            FamilyChange::DelSlot(key) => deleted(self.slots.remove(key), A::MAPS.slots),
            FamilyChange::DelSourceRange(key) => {
                deleted(self.source_ranges.remove(&lpm_key(key)), A::MAPS.source_ranges)
            }
            FamilyChange::DelEndpoint(key) => deleted(self.endpoints.remove(key), A::MAPS.endpoints),
        }
    }
}

fn contents<K: Pod + Ord, V: Pod>(map: &HashMap<MapData, K, V>) -> Result<BTreeMap<K, V>> {
    map.iter().collect::<Result<_, _>>().context("read")
}

fn shared<K: Ord>(tables: BTreeMap<K, Maglev>) -> BTreeMap<K, Arc<Maglev>> {
    tables.into_iter().map(|(key, table)| (key, Arc::new(table))).collect()
}

fn ranges<A: Names>(map: &LpmTrie<MapData, SourceRange<A>, u32>) -> Result<BTreeSet<RangeKey<A>>> {
    let key = |key: Key<SourceRange<A>>| RangeKey { range: key.data(), bits: key.prefix_len() };
    map.keys().map(|found| found.map(key)).collect::<Result<_, _>>().context("read")
}

fn lpm_key<A: Names>(key: &RangeKey<A>) -> Key<SourceRange<A>> {
    Key::new(key.bits, key.range)
}

fn put<K: Pod, V: Pod>(map: &mut HashMap<MapData, K, V>, key: &K, value: &V, name: &str) -> Result<()> {
    map.insert(key, value, 0).with_context(|| format!("write {name}"))
}

fn deleted(result: Result<(), MapError>, name: &str) -> Result<()> {
    match result {
        // Gone already is as wanted.
        Err(MapError::SyscallError(error)) if error.io_error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        result => result.with_context(|| format!("delete from {name}")),
    }
}
