//! Writes the table of pods with socket load balancing.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{HashMap, MapData};
use proxy_common::names;
use proxy_common::socket::{LED, PODS_MAX};

use super::{Cgroup, kubepods};
use crate::maps::take;

/// The table of pods with socket load balancing, and the root cgroup above the pods' cgroups.
pub struct PodSockets {
    rows: PodRows,
    cgroup: Cgroup,
}

/// The table of pods with socket load balancing, by cgroup id.
pub type PodRows = HashMap<MapData, u64, u32>;

/// The result for a pod that is selected for socket load balancing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodRow {
    Written,
    /// The pod has no cgroup yet.
    NoCgroup,
    NoRoom,
}

pub(crate) fn rows(ebpf: &mut Ebpf) -> Result<PodRows> {
    take(ebpf, names::SOCKET_PODS)
}

impl PodSockets {
    pub(crate) fn new(rows: PodRows, cgroup: Cgroup) -> Self {
        Self { rows, cgroup }
    }

    /// Makes the programs translate the sockets of exactly these pods (by UID). Old rows are
    /// deleted before new rows are written, so that the new rows fit.
    pub fn select(&mut self, uids: &BTreeSet<Box<str>>) -> Result<BTreeMap<Box<str>, PodRow>> {
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
                Some(cgroup) if known.contains(cgroup) => PodRow::Written,
                Some(_) if known.len() >= PODS_MAX as usize => PodRow::NoRoom,
                Some(cgroup) => {
                    self.rows
                        .insert(cgroup, LED, 0)
                        .with_context(|| format!("write {}", names::SOCKET_PODS))?;
                    known.insert(*cgroup);
                    PodRow::Written
                }
            };
            pods.insert(uid.clone(), row);
        }
        Ok(pods)
    }
}
