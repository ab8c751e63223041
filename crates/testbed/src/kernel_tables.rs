//! The tables of a running kpx in the kernel, read from outside.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Arc;

use anyhow::{Context, Result};
use aya::Pod;
use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, HashMap, Map, MapData, MapInfo};
use nix::unistd::Pid;
use proxy_common::addr::Addr;
use proxy_common::frontend::{Maglev, SetKey, SourceRange};
use proxy_common::names::{FamilyMaps, GENERATION, IPV4, IPV6};
use proxy_core::tables::{FamilyTables, RangeKey, Tables};

/// Returns the tables of the process `pid`.
pub fn of(pid: Pid) -> Result<Tables> {
    let maps = maps_of(pid)?;
    Ok(Tables {
        v4: family(&maps, IPV4)?,
        v6: family(&maps, IPV6)?,
    })
}

/// Returns the number of endpoint deletions by the process; a batch counts once.
pub fn generation(pid: Pid) -> Result<u32> {
    let map: Array<MapData, u32> = open(&maps_of(pid)?, GENERATION)?.try_into()?;
    Ok(map.get(&0, 0)?)
}

/// Returns the ids of the maps that a process holds, by name.
fn maps_of(pid: Pid) -> Result<BTreeMap<String, u32>> {
    let dir = format!("/proc/{pid}/fd");
    let entries = fs::read_dir(&dir).with_context(|| format!("list {dir}"))?;
    let mut ids = BTreeSet::new();
    for entry in entries {
        let entry = entry?;
        // Reading a TCX link's fdinfo would take RTNL.
        if fs::read_link(entry.path()).is_ok_and(|what| what.as_os_str() != "anon_inode:bpf-map") {
            continue;
        }
        // A descriptor may be closed during the listing.
        let Ok(text) = fs::read_to_string(format!("{dir}info/{}", entry.file_name().display()))
        else {
            continue;
        };
        let id = text
            .lines()
            .find_map(|line| line.strip_prefix("map_id:"))
            .map(|id| id.trim().parse::<u32>());
        ids.extend(id.transpose()?);
    }
    ids.into_iter()
        .map(|id| {
            let info = MapInfo::from_id(id).with_context(|| format!("map {id}"))?;
            Ok((info.name_as_str().unwrap_or_default().to_owned(), id))
        })
        .collect()
}

fn family<A: Addr + Pod>(
    maps: &BTreeMap<String, u32>,
    names: FamilyMaps,
) -> Result<FamilyTables<A>> {
    let maglev: BTreeMap<SetKey<A>, Maglev> = contents(maps, names.maglev)?;
    Ok(FamilyTables {
        frontends: contents(maps, names.frontends)?,
        services: contents(maps, names.services)?,
        slots: contents(maps, names.slots)?,
        endpoints: contents(maps, names.endpoints)?,
        maglev: maglev
            .into_iter()
            .map(|(key, table)| (key, Arc::new(table)))
            .collect(),
        source_ranges: ranges(maps, names.source_ranges)?,
    })
}

fn ranges<A: Addr + Pod>(
    maps: &BTreeMap<String, u32>,
    name: &str,
) -> Result<BTreeSet<RangeKey<A>>> {
    let map: LpmTrie<MapData, SourceRange<A>, u32> = open(maps, name)?.try_into()?;
    let key = |key: Key<SourceRange<A>>| RangeKey {
        range: key.data(),
        bits: key.prefix_len(),
    };
    map.keys()
        .map(|found| found.map(key))
        .collect::<Result<_, _>>()
        .with_context(|| format!("read {name}"))
}

fn open(maps: &BTreeMap<String, u32>, name: &str) -> Result<Map> {
    let id = *maps.get(name).with_context(|| format!("no map {name}"))?;
    Ok(Map::from_map_data(MapData::from_id(id)?)?)
}

fn contents<K: Pod + Ord, V: Pod>(
    maps: &BTreeMap<String, u32>,
    name: &str,
) -> Result<BTreeMap<K, V>> {
    let map: HashMap<MapData, K, V> = open(maps, name)?.try_into()?;
    map.iter()
        .collect::<Result<_, _>>()
        .with_context(|| format!("read {name}"))
}
