//! The maps that say where packets go, read and written.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use aya::maps::{HashMap, MapData, MapError};
use aya::{Ebpf, Pod};
use proxy_common::addr::{Addr4, Addr6};
use proxy_common::frontend::{Backend, Frontend, FrontendKey, Service, SlotKey};

use super::{Names, take};
use crate::diff::{Change, FamilyChange};
use crate::tables::{FamilyTables, Tables};

/// Where tables live: the kernel's maps, or a test's.
pub trait Maps {
    fn read(&self) -> Result<Tables>;
    fn apply(&mut self, change: &Change) -> Result<()>;
}

/// The kernel's maps.
pub struct KernelTables {
    v4: Family<Addr4>,
    v6: Family<Addr6>,
}

impl KernelTables {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self> {
        Ok(Self { v4: Family::new(ebpf)?, v6: Family::new(ebpf)? })
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
        .with_context(|| change.to_string())
    }
}

struct Family<A: Names> {
    frontends: HashMap<MapData, FrontendKey<A>, Frontend<A>>,
    services: HashMap<MapData, FrontendKey<A>, Service>,
    slots: HashMap<MapData, SlotKey<A>, Backend<A>>,
}

impl<A: Names> Family<A> {
    fn new(ebpf: &mut Ebpf) -> Result<Self> {
        Ok(Self {
            frontends: take(ebpf, A::MAPS.frontends)?,
            services: take(ebpf, A::MAPS.services)?,
            slots: take(ebpf, A::MAPS.slots)?,
        })
    }

    fn read(&self) -> Result<FamilyTables<A>> {
        Ok(FamilyTables {
            frontends: contents(&self.frontends).context(A::MAPS.frontends)?,
            services: contents(&self.services).context(A::MAPS.services)?,
            slots: contents(&self.slots).context(A::MAPS.slots)?,
        })
    }

    fn apply(&mut self, change: &FamilyChange<A>) -> Result<()> {
        match change {
            FamilyChange::PutSlot(key, value) => put(&mut self.slots, key, value, A::MAPS.slots),
            FamilyChange::PutService(key, value) => put(&mut self.services, key, value, A::MAPS.services),
            FamilyChange::PutFrontend(key, value) => put(&mut self.frontends, key, value, A::MAPS.frontends),
            FamilyChange::DelFrontend(key) => del(&mut self.frontends, key, A::MAPS.frontends),
            FamilyChange::DelService(key) => del(&mut self.services, key, A::MAPS.services),
            FamilyChange::DelSlot(key) => del(&mut self.slots, key, A::MAPS.slots),
        }
    }
}

fn contents<K: Pod + Ord, V: Pod>(map: &HashMap<MapData, K, V>) -> Result<BTreeMap<K, V>> {
    map.iter().collect::<Result<_, _>>().context("read")
}

fn put<K: Pod, V: Pod>(map: &mut HashMap<MapData, K, V>, key: &K, value: &V, name: &str) -> Result<()> {
    map.insert(key, value, 0).with_context(|| format!("write {name}"))
}

fn del<K: Pod, V: Pod>(map: &mut HashMap<MapData, K, V>, key: &K, name: &str) -> Result<()> {
    match map.remove(key) {
        // Gone already is as wanted.
        Err(MapError::SyscallError(error)) if error.io_error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        result => result.with_context(|| format!("delete from {name}")),
    }
}
