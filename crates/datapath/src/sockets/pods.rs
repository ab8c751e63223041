//! Tells the programs which pods' sockets are led.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{HashMap, MapData};
use proxy_common::names;
use proxy_common::socket::{LED, PODS_MAX};

use super::{Cgroup, kubepods};
use crate::maps::take;

/// The rows of the pods whose sockets are led, and the cgroups by which the programs know them.
pub struct PodSockets {
    rows: PodRows,
    cgroup: Cgroup,
}

/// The table of the pods whose sockets are led, by the ids of their cgroups.
pub type PodRows = HashMap<MapData, u64, u32>;

/// The place of a pod that is to be led.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodRow {
    Led,
    /// It has no cgroup, or none yet.
    NoCgroup,
    /// The table is full.
    NoRoom,
}

/// Takes the table out of the object.
pub(crate) fn rows(ebpf: &mut Ebpf) -> Result<PodRows> {
    take(ebpf, names::SOCKET_PODS)
}

impl PodSockets {
    pub(crate) fn new(rows: PodRows, cgroup: Cgroup) -> Self {
        Self { rows, cgroup }
    }

    /// Makes the programs lead the sockets of the pods with these uids, and of no other. A row goes
    /// before another one comes, so that the table has room.
    pub fn lead(&mut self, uids: &BTreeSet<Box<str>>) -> Result<BTreeMap<Box<str>, PodRow>> {
        let cgroups = if uids.is_empty() {
            BTreeMap::new()
        } else {
            kubepods::find(&self.cgroup)?
        };
        let wanted: BTreeSet<u64> = uids
            .iter()
            .filter_map(|uid| cgroups.get(uid))
            .copied()
            .collect();
        let mut known: BTreeSet<u64> = BTreeSet::new();
        for row in self.rows.iter() {
            let (cgroup, value) = row.with_context(|| format!("read {}", names::SOCKET_PODS))?;
            if value == LED {
                known.insert(cgroup);
            }
        }
        for cgroup in &known - &wanted {
            self.rows
                .remove(&cgroup)
                .with_context(|| format!("delete from {}", names::SOCKET_PODS))?;
            known.remove(&cgroup);
        }
        let mut pods = BTreeMap::new();
        for uid in uids {
            let row = match cgroups.get(uid) {
                None => PodRow::NoCgroup,
                Some(cgroup) if known.contains(cgroup) => PodRow::Led,
                Some(_) if known.len() >= PODS_MAX as usize => PodRow::NoRoom,
                Some(cgroup) => {
                    self.rows
                        .insert(cgroup, LED, 0)
                        .with_context(|| format!("write {}", names::SOCKET_PODS))?;
                    known.insert(*cgroup);
                    PodRow::Led
                }
            };
            pods.insert(uid.clone(), row);
        }
        Ok(pods)
    }
}
