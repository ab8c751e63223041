//! Opens the maps of the BPF object by name.

use std::os::fd::AsFd;

use anyhow::{Context, Result};
use aya::maps::{HashMap, Map, MapData};
use aya::{Ebpf, Pod};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::names::{self, FamilyMaps};

/// Takes a map out of the object and checks its type.
pub(crate) fn take<M: TryFrom<aya::maps::Map, Error = aya::maps::MapError>>(
    ebpf: &mut Ebpf,
    name: &str,
) -> Result<M> {
    let map = ebpf
        .take_map(name)
        .with_context(|| format!("no map {name} in the BPF object"))?;
    M::try_from(map).with_context(|| format!("map {name}"))
}

/// Returns a further handle on a hash map, which stays in the object.
pub(crate) fn lend<K: Pod, V: Pod>(ebpf: &Ebpf, name: &str) -> Result<HashMap<MapData, K, V>> {
    let map = ebpf
        .map(name)
        .with_context(|| format!("no map {name} in the BPF object"))?;
    let (data, again): (_, fn(MapData) -> Map) = match map {
        Map::HashMap(data) => (data, Map::HashMap),
        Map::LruHashMap(data) => (data, Map::LruHashMap),
        _ => anyhow::bail!("{name} is not a hash map"),
    };
    let fd = data
        .fd()
        .as_fd()
        .try_clone_to_owned()
        .with_context(|| format!("map {name}"))?;
    HashMap::try_from(again(MapData::from_fd(fd)?)).with_context(|| format!("map {name}"))
}

/// Returns a family's flow table, which stays in the object.
pub(crate) fn flow_table<A: FamilyNames>(ebpf: &Ebpf) -> Result<&MapData> {
    let name = A::MAPS.flows;
    let Some(Map::HashMap(data)) = ebpf.map(name) else {
        anyhow::bail!("no hash map {name} in the BPF object")
    };
    Ok(data)
}

/// The names of a family's maps.
pub trait FamilyNames: Addr + aya::Pod {
    const MAPS: FamilyMaps;
}

impl FamilyNames for Addr4 {
    const MAPS: FamilyMaps = names::IPV4;
}

impl FamilyNames for Addr6 {
    const MAPS: FamilyMaps = names::IPV6;
}
