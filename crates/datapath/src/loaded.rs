//! Lists the loaded maps and programs by kernel id, for clients that inspect a running datapath.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{Map, MapData, MapError};
use aya::programs::{ProgramInfo, loaded_programs};
use serde::{Deserialize, Serialize};

/// The maps and programs of one datapath.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// The maps' ids, by name.
    pub maps: BTreeMap<String, u32>,
    /// The maps' maximum numbers of entries, by name.
    pub max_entries: BTreeMap<String, u32>,
    pub programs: BTreeMap<String, LoadedProgram>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LoadedProgram {
    pub id: u32,
    /// The kernel's hash of the instructions, as `bpftool prog` shows it.
    pub tag: String,
}

impl Loaded {
    /// Reads the ids. Call this after loading the programs `names`, and before a map is taken out
    /// of `ebpf`.
    pub(super) fn of(ebpf: &Ebpf, names: &[&str]) -> Result<Self> {
        let mut maps = BTreeMap::new();
        let mut max_entries = BTreeMap::new();
        for (name, data) in ebpf
            .maps()
            .filter_map(|(name, map)| Some((name, data(map)?)))
        {
            let info = data
                .info()
                .with_context(|| format!("read information about map {name}"))?;
            maps.insert(name.to_owned(), info.id());
            // Socket storage has no limit: it grows with the number of sockets.
            if info.max_entries() > 0 {
                max_entries.insert(name.to_owned(), info.max_entries());
            }
        }
        let programs = names.iter().map(|&name| {
            let program = ebpf
                .program(name)
                .with_context(|| format!("no program {name} in the BPF object"))?;
            let info = program
                .info()
                .with_context(|| format!("read information about program {name}"))?;
            Ok((name.to_owned(), LoadedProgram::of(&info)))
        });
        Ok(Self {
            maps,
            max_entries,
            programs: programs.collect::<Result<_>>()?,
        })
    }
}

impl LoadedProgram {
    fn of(info: &ProgramInfo) -> Self {
        Self {
            id: info.id(),
            tag: format!("{:016x}", info.tag()),
        }
    }
}

/// Returns true if this process may open programs and maps by id, which requires CAP_SYS_ADMIN.
pub fn may_open_by_id() -> bool {
    !matches!(loaded_programs().next(), Some(Err(_)))
}

/// Opens a map of a running datapath by its id in `ids`, and checks its type.
pub fn open<M: TryFrom<Map, Error = MapError>>(
    ids: &BTreeMap<String, u32>,
    name: &str,
) -> Result<M> {
    open_or_pinned(ids, None, name)
}

/// Opens a map like [`open`]. A process without CAP_SYS_ADMIN, such as in a container, opens the
/// pin in `pins` if the pinned map has the same id.
pub fn open_or_pinned<M: TryFrom<Map, Error = MapError>>(
    ids: &BTreeMap<String, u32>,
    pins: Option<&Path>,
    name: &str,
) -> Result<M> {
    let id = *ids
        .get(name)
        .with_context(|| format!("the running kpx has no map {name}"))?;
    let pinned = || {
        let data = MapData::from_pin(pins?.join(name)).ok()?;
        data.info()
            .is_ok_and(|info| info.id() == id)
            .then_some(data)
    };
    let data = MapData::from_id(id).or_else(|error| pinned().ok_or(error));
    let data = data.with_context(|| {
        format!("open map {name}, id {id}, which takes CAP_SYS_ADMIN, or the BPF file system with the map's pin")
    })?;
    Map::from_map_data(data)
        .and_then(M::try_from)
        .with_context(|| format!("map {name}, id {id}"))
}

/// Returns `None` for a map type that the datapath does not use.
fn data(map: &Map) -> Option<&MapData> {
    match map {
        Map::Array(data)
        | Map::HashMap(data)
        | Map::LpmTrie(data)
        | Map::LruHashMap(data)
        | Map::PerCpuArray(data)
        | Map::ProgramArray(data)
        | Map::Queue(data) => Some(data),
        _ => None,
    }
}
