//! Reads and prunes the programs' counts of TCP connections for each service port and backend.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{HashMap, Map, MapData};
use proxy_common::addr::{Port, SockAddr};
use proxy_common::connect::Connects;
use proxy_common::flow::Flow;
use proxy_common::frontend::{EndpointKey, FrontendKey};

use super::counts::FamilyCounts;
use super::flows::{read, remove};
use super::maps::{FamilyNames, take};
use crate::sys::map_walk::Walk;

/// The number of rows in a read.
const BATCH: usize = 256;

/// The idle time in seconds after which a backend's counts move to the row of its service port.
const SILENCE_SECS: u32 = 3_600;
/// The idle time in seconds while the map is more than three quarters full.
const SILENCE_SECS_WHEN_FULL: u32 = 60;

/// The rows of each service port, by backend.
type Rows<A> = BTreeMap<FrontendKey<A>, BTreeMap<SockAddr<A>, Connects>>;

pub(super) struct ConnectLedger<A: FamilyNames> {
    map: HashMap<MapData, EndpointKey<A>, Connects>,
    walk: Walk<EndpointKey<A>, Connects>,
    max_entries: usize,
    /// The number of swept flows that the backend never answered.
    unanswered: BTreeMap<(FrontendKey<A>, SockAddr<A>), u64>,
}

impl<A: FamilyNames> ConnectLedger<A> {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self> {
        let name = A::MAPS.connects;
        let Some(Map::HashMap(data)) = ebpf.map(name) else {
            anyhow::bail!("no hash map {name} in the BPF object")
        };
        let walk = Walk::new(data, BATCH).with_context(|| format!("walk through {name}"))?;
        let info = data
            .info()
            .with_context(|| format!("read information about map {name}"))?;
        let max_entries = info.max_entries() as usize;
        Ok(Self {
            map: take(ebpf, name)?,
            walk,
            max_entries,
            unanswered: BTreeMap::new(),
        })
    }

    pub(super) fn read(&mut self) -> Result<Rows<A>> {
        let mut rows = Rows::new();
        self.walk.restart();
        while let Some(batch) = self
            .walk
            .next_batch()
            .with_context(|| format!("read {}", A::MAPS.connects))?
        {
            for (EndpointKey { service, at }, connects) in batch {
                rows.entry(service).or_default().insert(at, connects);
            }
        }
        Ok(rows)
    }

    pub(super) fn close_unanswered(&mut self, flow: &Flow<A>) {
        if !flow.service.addr.is_unspecified() {
            let at = SockAddr::new(flow.backend.addr, flow.backend.port);
            *self.unanswered.entry((flow.service, at)).or_default() += 1;
        }
    }

    /// Writes the agent's own counts and merges the rows of idle backends. Counts that a program
    /// adds at the same time are lost, as are the agent's counts if the map is full.
    pub(super) fn settle(&mut self, rows: &Rows<A>, now_secs: u32) -> Result<()> {
        for ((service, at), unanswered) in std::mem::take(&mut self.unanswered) {
            let mut more = Connects::NOTHING;
            (more.unanswered, more.last_secs) = (unanswered, now_secs);
            let _lost = self.add(service, at, more);
        }
        let number: usize = rows.values().map(BTreeMap::len).sum();
        let is_full = number > self.max_entries / 4 * 3;
        let silence_secs = if is_full {
            SILENCE_SECS_WHEN_FULL
        } else {
            SILENCE_SECS
        };
        for (service, backends) in rows {
            let is_silent =
                |connects: &Connects| now_secs.saturating_sub(connects.last_secs) > silence_secs;
            for (at, _) in backends
                .iter()
                .filter(|(at, connects)| !at.addr.is_unspecified() && is_silent(connects))
            {
                let key = EndpointKey::new(*service, *at);
                // A client may have dialled the backend since the read.
                if let Some(connects) = read(&self.map, &key)?.filter(is_silent) {
                    let rest = SockAddr::new(A::UNSPECIFIED, Port::ANY);
                    let add = |ledger: &mut Self| ledger.add(*service, rest, connects);
                    move_counts(self, add, |ledger| remove(&mut ledger.map, &key).map(drop))?;
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, service: FrontendKey<A>, at: SockAddr<A>, more: Connects) -> Result<()> {
        let key = EndpointKey::new(service, at);
        let mut connects = read(&self.map, &key)?.unwrap_or_default();
        connects += more;
        self.map.insert(key, connects, 0).map_err(Into::into)
    }

    /// Removes the rows of service ports that have neither a Service nor flows.
    pub(super) fn prune(
        &mut self,
        found: &mut FamilyCounts<A>,
        exists: impl Fn(&FrontendKey<A>) -> Result<bool>,
    ) -> Result<()> {
        for service in found.connects.keys().copied().collect::<Vec<_>>() {
            if !found.flows.contains_key(&service) && !exists(&service)? {
                for at in found
                    .connects
                    .remove(&service)
                    .into_iter()
                    .flat_map(BTreeMap::into_keys)
                {
                    remove(&mut self.map, &EndpointKey::new(service, at))?;
                }
            }
        }
        Ok(())
    }
}

/// Adds counts to another row, then removes the old row. A crash in between duplicates counts
/// instead of losing them.
fn move_counts<T>(
    map: &mut T,
    mut add: impl FnMut(&mut T) -> Result<()>,
    remove: impl FnOnce(&mut T) -> Result<()>,
) -> Result<()> {
    let is_added = add(map).is_ok();
    remove(map)?;
    if !is_added {
        // In a full map a new row fits after the removal of the old row.
        let _lost = add(map);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use anyhow::ensure;

    use super::*;

    #[test]
    fn counts_are_in_the_other_row_before_their_own_goes() {
        for (capacity, expected) in [(2, "+rest -own"), (1, "-own +rest")] {
            let mut rows = vec!["own"];
            let mut done = Vec::new();
            let mut map = (&mut rows, &mut done);
            let add = |(rows, done): &mut (&mut Vec<&str>, &mut Vec<&str>)| {
                ensure!(rows.len() < capacity, "full");
                rows.push("rest");
                done.push("+rest");
                Ok(())
            };
            let remove = |(rows, done): &mut (&mut Vec<&str>, &mut Vec<&str>)| {
                rows.retain(|row| *row != "own");
                done.push("-own");
                Ok(())
            };
            move_counts(&mut map, add, remove).unwrap();
            assert_eq!((done.join(" ").as_str(), rows), (expected, vec!["rest"]));
        }
    }
}
