//! The tables that a running kpx holds in the kernel, read from outside.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context, Result};
use aya::Pod;
use aya::maps::{HashMap, Map, MapData, MapInfo};
use nix::unistd::Pid;
use proxy_agent::tables::{FamilyTables, Tables};
use proxy_common::addr::Addr;
use proxy_common::names::{FamilyMaps, IPV4, IPV6};

/// The tables of the process `pid`.
pub fn of(pid: Pid) -> Result<Tables> {
    let maps = maps_of(pid)?;
    Ok(Tables { v4: family(&maps, IPV4)?, v6: family(&maps, IPV6)? })
}

/// The ids of the maps that a process holds, by name.
fn maps_of(pid: Pid) -> Result<BTreeMap<String, u32>> {
    let dir = format!("/proc/{pid}/fdinfo");
    let entries = fs::read_dir(&dir).with_context(|| format!("list {dir}"))?;
    let mut ids = BTreeSet::new();
    for entry in entries {
        // A descriptor may be closed while we look.
        let Ok(text) = fs::read_to_string(entry?.path()) else { continue };
        let id = text.lines().find_map(|line| line.strip_prefix("map_id:")).map(|id| id.trim().parse::<u32>());
        ids.extend(id.transpose()?);
    }
    ids.into_iter()
        .map(|id| {
            let info = MapInfo::from_id(id).with_context(|| format!("map {id}"))?;
            Ok((info.name_as_str().unwrap_or_default().to_owned(), id))
        })
        .collect()
}

fn family<A: Addr + Pod>(maps: &BTreeMap<String, u32>, names: FamilyMaps) -> Result<FamilyTables<A>> {
    Ok(FamilyTables {
        frontends: contents(maps, names.frontends)?,
        services: contents(maps, names.services)?,
        slots: contents(maps, names.slots)?,
    })
}

fn contents<K: Pod + Ord, V: Pod>(maps: &BTreeMap<String, u32>, name: &str) -> Result<BTreeMap<K, V>> {
    let id = *maps.get(name).with_context(|| format!("no map {name}"))?;
    let map: HashMap<MapData, K, V> = Map::from_map_data(MapData::from_id(id)?)?.try_into()?;
    map.iter().collect::<Result<_, _>>().with_context(|| format!("read {name}"))
}
