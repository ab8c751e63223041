//! Reads and writes the agent's tables: frontends, services, backends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, MapData};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::frontend::{
    Backend, Endpoint, EndpointKey, Frontend, FrontendKey, Maglev, Service, SetKey, SlotKey,
    SourceRange,
};
use proxy_common::names;
use tokio::sync::Notify;

use super::maps::{FamilyNames, take};
use super::sizes::refused;
use proxy_core::diff::{Change, FamilyChange};
use proxy_core::tables::{FamilyTables, RangeKey, Tables};
use table::{Table, deleted};

mod table;

/// A store of tables: the kernel's maps, or a test's store.
pub trait Maps {
    fn read(&self) -> Result<Tables>;
    fn apply(&mut self, change: &Change) -> Result<()>;

    /// Applies changes in order until one is refused. Returns the number of applied changes, and
    /// the error.
    fn apply_all(&mut self, changes: &[Change]) -> (usize, Result<()>) {
        for (made, change) in changes.iter().enumerate() {
            if let Err(error) = self.apply(change) {
                return (made, Err(error));
            }
        }
        (changes.len(), Ok(()))
    }
}

/// The kernel's maps.
pub struct KernelTables {
    v4: Family<Addr4>,
    v6: Family<Addr6>,
    /// The number of deletions of endpoints and frontends. Flows of an older generation must
    /// recheck their backend.
    generation: Array<MapData, u32>,
    /// Notified of every new generation.
    endpoints_removed: Arc<Notify>,
}

impl KernelTables {
    pub(super) fn new(ebpf: &mut Ebpf, endpoints_removed: Arc<Notify>) -> Result<Self> {
        let generation = take(ebpf, names::GENERATION)?;
        Ok(Self {
            v4: Family::new(ebpf)?,
            v6: Family::new(ebpf)?,
            generation,
            endpoints_removed,
        })
    }
}

impl Maps for KernelTables {
    fn read(&self) -> Result<Tables> {
        Ok(Tables {
            v4: self.v4.read()?,
            v6: self.v6.read()?,
        })
    }

    fn apply(&mut self, change: &Change) -> Result<()> {
        match change {
            Change::V4(change) => self.v4.apply(change),
            Change::V6(change) => self.v6.apply(change),
        }
        .with_context(|| change.to_string())?;
        if ends_flows(change) {
            self.begin_generation()
        } else {
            Ok(())
        }
    }

    /// Applies changes in batches of one kind. After a stopped batch the next change is applied by
    /// itself: this reports a lasting error, or succeeds because the row is already as wanted.
    fn apply_all(&mut self, changes: &[Change]) -> (usize, Result<()>) {
        let mut made = 0;
        while let Some(change) = changes.get(made) {
            let at_once = self.apply_batch(&changes[made..]);
            made += at_once;
            let result = match at_once {
                0 => self.apply(change),
                _ if ends_flows(change) => self.begin_generation(),
                _ => Ok(()),
            };
            if let Err(error) = result {
                return (made, Err(error));
            }
            made += usize::from(at_once == 0);
        }
        (made, Ok(()))
    }
}

/// Returns true if the change may remove a backend from a frontend.
fn ends_flows(change: &Change) -> bool {
    fn ends<A: Addr>(change: &FamilyChange<A>) -> bool {
        use FamilyChange::{DelEndpoint, DelFrontend, MoveFrontend};
        matches!(change, DelEndpoint(_) | DelFrontend(..) | MoveFrontend(..))
    }
    match change {
        Change::V4(change) => ends(change),
        Change::V6(change) => ends(change),
    }
}

impl KernelTables {
    /// Applies the leading `changes` of one kind in a batch. Returns their number; 0 if batches are
    /// impossible.
    fn apply_batch(&mut self, changes: &[Change]) -> usize {
        match changes {
            [Change::V4(_), Change::V4(_), ..] => {
                self.v4
                    .apply_batch(changes.iter().map_while(|change| match change {
                        Change::V4(change) => Some(change),
                        Change::V6(_) => None,
                    }))
            }
            [Change::V6(_), Change::V6(_), ..] => {
                self.v6
                    .apply_batch(changes.iter().map_while(|change| match change {
                        Change::V6(change) => Some(change),
                        Change::V4(_) => None,
                    }))
            }
            _ => 0,
        }
    }

    /// Makes flows recheck their backends.
    pub(super) fn begin_generation(&mut self) -> Result<()> {
        let generation = self
            .generation
            .get(&0, 0)
            .with_context(|| format!("read {}", names::GENERATION))?;
        let next = generation.wrapping_add(1);
        self.endpoints_removed.notify_one();
        self.generation
            .set(0, next, 0)
            .with_context(|| format!("write {}", names::GENERATION))
    }
}

struct Family<A: FamilyNames> {
    frontends: Table<FrontendKey<A>, Frontend<A>>,
    services: Table<FrontendKey<A>, Service>,
    slots: Table<SlotKey<A>, Backend<A>>,
    endpoints: Table<EndpointKey<A>, Endpoint>,
    maglev: Table<SetKey<A>, Maglev>,
    source_ranges: LpmTrie<MapData, SourceRange<A>, u32>,
}

impl<A: FamilyNames> Family<A> {
    fn new(ebpf: &mut Ebpf) -> Result<Self> {
        Ok(Self {
            frontends: Table::new(ebpf, A::MAPS.frontends)?,
            services: Table::new(ebpf, A::MAPS.services)?,
            slots: Table::new(ebpf, A::MAPS.slots)?,
            endpoints: Table::new(ebpf, A::MAPS.endpoints)?,
            maglev: Table::new(ebpf, A::MAPS.maglev)?,
            source_ranges: take(ebpf, A::MAPS.source_ranges)?,
        })
    }

    fn read(&self) -> Result<FamilyTables<A>> {
        Ok(FamilyTables {
            frontends: self.frontends.read()?,
            services: self.services.read()?,
            slots: self.slots.read()?,
            endpoints: self.endpoints.read()?,
            maglev: shared(self.maglev.read()?),
            source_ranges: ranges(&self.source_ranges).context(A::MAPS.source_ranges)?,
        })
    }

    fn apply(&mut self, change: &FamilyChange<A>) -> Result<()> {
        match change {
            FamilyChange::PutSourceRange(key) => {
                let put = self.source_ranges.insert(&lpm_key(key), 1, 0);
                put.map_err(|error| refused(error, A::MAPS.source_ranges))
            }
            FamilyChange::PutEndpoint(key, value) => self.endpoints.put(key, value),
            FamilyChange::PutSlot(key, value) => self.slots.put(key, value),
            FamilyChange::PutMaglev(key, value) => self.maglev.put(key, value),
            FamilyChange::PutService(key, value) => self.services.put(key, value),
            FamilyChange::PutFrontend(key, value) | FamilyChange::MoveFrontend(key, value, _) => {
                self.frontends.put(key, value)
            }
            FamilyChange::DelFrontend(key, _) => self.frontends.delete(key),
            FamilyChange::DelService(key) => self.services.delete(key),
            FamilyChange::DelMaglev(key) => self.maglev.delete(key),
            FamilyChange::DelSlot(key) => self.slots.delete(key),
            FamilyChange::DelSourceRange(key) => deleted(
                self.source_ranges.remove(&lpm_key(key)),
                A::MAPS.source_ranges,
            ),
            FamilyChange::DelEndpoint(key) => self.endpoints.delete(key),
        }
    }

    /// Applies the leading `changes` of one kind. Returns their number.
    fn apply_batch<'a>(&mut self, changes: impl Iterator<Item = &'a FamilyChange<A>>) -> usize {
        let mut changes = changes.peekable();
        match changes.peek() {
            Some(FamilyChange::PutEndpoint(..)) => {
                self.endpoints
                    .put_all(changes.map_while(|change| match change {
                        FamilyChange::PutEndpoint(key, value) => Some((*key, *value)),
                        _ => None,
                    }))
            }
            Some(FamilyChange::PutSlot(..)) => {
                self.slots.put_all(changes.map_while(|change| match change {
                    FamilyChange::PutSlot(key, value) => Some((*key, *value)),
                    _ => None,
                }))
            }
            Some(FamilyChange::PutService(..)) => {
                self.services
                    .put_all(changes.map_while(|change| match change {
                        FamilyChange::PutService(key, value) => Some((*key, *value)),
                        _ => None,
                    }))
            }
            Some(FamilyChange::PutFrontend(..)) => {
                self.frontends
                    .put_all(changes.map_while(|change| match change {
                        FamilyChange::PutFrontend(key, value) => Some((*key, *value)),
                        _ => None,
                    }))
            }
            Some(FamilyChange::DelFrontend(..)) => {
                self.frontends
                    .delete_all(changes.map_while(|change| match change {
                        FamilyChange::DelFrontend(key, _) => Some(*key),
                        _ => None,
                    }))
            }
            Some(FamilyChange::DelService(..)) => {
                self.services
                    .delete_all(changes.map_while(|change| match change {
                        FamilyChange::DelService(key) => Some(*key),
                        _ => None,
                    }))
            }
            Some(FamilyChange::DelSlot(..)) => {
                self.slots
                    .delete_all(changes.map_while(|change| match change {
                        FamilyChange::DelSlot(key) => Some(*key),
                        _ => None,
                    }))
            }
            Some(FamilyChange::DelEndpoint(..)) => {
                self.endpoints
                    .delete_all(changes.map_while(|change| match change {
                        FamilyChange::DelEndpoint(key) => Some(*key),
                        _ => None,
                    }))
            }
            // These changes are few, large, or to maps without batches before Linux 5.13.
            _ => 0,
        }
    }
}

fn shared<K: Ord>(tables: BTreeMap<K, Maglev>) -> BTreeMap<K, Arc<Maglev>> {
    tables
        .into_iter()
        .map(|(key, table)| (key, Arc::new(table)))
        .collect()
}

fn ranges<A: FamilyNames>(
    map: &LpmTrie<MapData, SourceRange<A>, u32>,
) -> Result<BTreeSet<RangeKey<A>>> {
    let key = |key: Key<SourceRange<A>>| RangeKey {
        range: key.data(),
        bits: key.prefix_len(),
    };
    map.keys()
        .map(|found| found.map(key))
        .collect::<Result<_, _>>()
        .context("read")
}

fn lpm_key<A: FamilyNames>(key: &RangeKey<A>) -> Key<SourceRange<A>> {
    Key::new(key.bits, key.range)
}
