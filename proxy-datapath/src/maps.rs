//! The maps of the object, by name.

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{Map, MapData};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::names::{self, FamilyMaps};

/// Takes a map out of the object; its type is checked against the kernel's.
pub(crate) fn take<M: TryFrom<aya::maps::Map, Error = aya::maps::MapError>>(ebpf: &mut Ebpf, name: &str) -> Result<M> {
    let map = ebpf.take_map(name).with_context(|| format!("no map {name} in the BPF object"))?;
    M::try_from(map).with_context(|| format!("map {name}"))
}

/// Lends a family's flow table, which stays in the object.
pub(crate) fn flow_table<A: FamilyNames>(ebpf: &Ebpf) -> Result<&MapData> {
    let name = A::MAPS.flows;
    let Some(Map::HashMap(data)) = ebpf.map(name) else { anyhow::bail!("no hash map {name} in the BPF object") };
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
