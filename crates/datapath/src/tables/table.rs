//! A hash map of the agent's tables, accessed by row or in batches.

use std::collections::BTreeMap;

use crate::sys::map_walk::{Rows, Stopped};
use anyhow::{Context, Result, bail};
use aya::maps::{HashMap, Map, MapData, MapError};
use aya::{Ebpf, Pod};
use tracing::debug;

use crate::maps::take;
use crate::sizes::refused;

/// The number of rows below which single writes are faster than a batch.
const FEW: usize = 8;
/// The maximum rows of a batch. After a stopped batch the remaining rows are collected again.
const MANY: usize = 1_024;
/// The bytes of a read.
const READ: usize = 64 << 10;

pub(super) struct Table<K, V> {
    name: &'static str,
    map: HashMap<MapData, K, V>,
    /// A second handle on the same map.
    rows: Rows<K, V>,
    /// True if the kernel refuses batches for this map or this process.
    one_by_one: bool,
}

impl<K: Pod + Ord, V: Pod> Table<K, V> {
    pub(super) fn new(ebpf: &mut Ebpf, name: &'static str) -> Result<Self> {
        let Some(Map::HashMap(data)) = ebpf.map(name) else {
            bail!("no hash map {name} in the BPF object")
        };
        let rows = Rows::new(data).with_context(|| format!("map {name}"))?;
        Ok(Self {
            name,
            map: take(ebpf, name)?,
            rows,
            one_by_one: false,
        })
    }

    pub(super) fn read(&self) -> Result<BTreeMap<K, V>> {
        let row = size_of::<K>() + size_of::<V>();
        let mut walk = self
            .rows
            .walk(READ / row)
            .with_context(|| format!("read {}", self.name))?;
        let mut found = BTreeMap::new();
        while let Some(batch) = walk
            .next_batch()
            .with_context(|| format!("read {}", self.name))?
        {
            found.extend(batch);
        }
        Ok(found)
    }

    pub(super) fn put(&mut self, key: &K, value: &V) -> Result<()> {
        self.map
            .insert(key, value, 0)
            .map_err(|error| refused(error, self.name))
    }

    pub(super) fn delete(&mut self, key: &K) -> Result<()> {
        deleted(self.map.remove(key), self.name)
    }

    /// Writes rows. Returns the number of leading rows written: all, those before a refused row, or
    /// 0 if batches are impossible.
    pub(super) fn put_all(&mut self, rows: impl Iterator<Item = (K, V)>) -> usize {
        if self.one_by_one {
            return 0;
        }
        let (keys, values): (Vec<K>, Vec<V>) = rows.take(MANY).unzip();
        if keys.len() < FEW {
            return 0;
        }
        let result = self.rows.put(&keys, &values);
        self.done(keys.len(), result)
    }

    /// Deletes rows. Returns the number of leading rows deleted: all, those before a missing row,
    /// or 0 if batches are impossible.
    pub(super) fn delete_all(&mut self, keys: impl Iterator<Item = K>) -> usize {
        if self.one_by_one {
            return 0;
        }
        let keys: Vec<K> = keys.take(MANY).collect();
        if keys.len() < FEW {
            return 0;
        }
        let result = self.rows.delete(&keys);
        self.done(keys.len(), result)
    }

    fn done(&mut self, all: usize, result: Result<(), Stopped>) -> usize {
        let Err(Stopped { done, error }) = result else {
            return all;
        };
        self.one_by_one = done == 0 && is_refusal(&error);
        debug!(map = self.name, done, all, %error, one_by_one = self.one_by_one, "a batch stopped");
        done
    }
}

/// Returns true if the kernel refuses batches rather than a row.
fn is_refusal(error: &std::io::Error) -> bool {
    const EPERM: i32 = 1;
    const EACCES: i32 = 13;
    const EINVAL: i32 = 22;
    const ENOSYS: i32 = 38;
    const EOPNOTSUPP: i32 = 95;
    /// The kernel's internal error number.
    const ENOTSUPP: i32 = 524;
    matches!(
        error.raw_os_error(),
        Some(EPERM | EACCES | EINVAL | ENOSYS | EOPNOTSUPP | ENOTSUPP)
    )
}

pub(super) fn deleted(result: Result<(), MapError>, name: &str) -> Result<()> {
    match result {
        // A missing row counts as deleted.
        Err(MapError::SyscallError(error))
            if error.io_error.kind() == std::io::ErrorKind::NotFound =>
        {
            Ok(())
        }
        result => result.with_context(|| format!("delete from {name}")),
    }
}
