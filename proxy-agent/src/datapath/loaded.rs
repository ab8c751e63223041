//! What was loaded, by the kernel's own numbers: for those who look at a running datapath from outside.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{Map, MapData, MapType};
use aya::programs::{ProgramInfo, SchedClassifier};
use serde::{Deserialize, Serialize};

/// The maps and programs of one datapath.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// Ids, by name.
    pub maps: BTreeMap<String, u32>,
    /// For how many entries a map has room, by name; of arrays all are always there.
    pub max_entries: BTreeMap<String, u32>,
    /// By name.
    pub programs: BTreeMap<String, LoadedProgram>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LoadedProgram {
    pub id: u32,
    /// The kernel's hash of its instructions, as `bpftool prog` shows it: equal for equal programs.
    pub tag: String,
}

impl Loaded {
    /// Before anybody has taken a map out of `ebpf`, and after the programs `names` were loaded.
    pub(super) fn of(ebpf: &Ebpf, names: &[&str]) -> Result<Self> {
        let (mut maps, mut max_entries) = (BTreeMap::new(), BTreeMap::new());
        for (name, data) in ebpf.maps().filter_map(|(name, map)| Some((name, data(map)?))) {
            let info = data.info().with_context(|| format!("ask the kernel about map {name}"))?;
            maps.insert(name.to_owned(), info.id());
            if matches!(info.map_type(), Ok(MapType::Hash | MapType::LruHash | MapType::LpmTrie)) {
                max_entries.insert(name.to_owned(), info.max_entries());
            }
        }
        let programs = names.iter().map(|&name| {
            let program = ebpf.program(name).with_context(|| format!("no program {name} in the BPF object"))?;
            let program: &SchedClassifier = program.try_into().with_context(|| format!("program {name}"))?;
            let info = program.info().with_context(|| format!("ask the kernel about program {name}"))?;
            Ok((name.to_owned(), LoadedProgram::of(&info)))
        });
        Ok(Self { maps, max_entries, programs: programs.collect::<Result<_>>()? })
    }
}

impl LoadedProgram {
    fn of(info: &ProgramInfo) -> Self {
        Self { id: info.id(), tag: format!("{:016x}", info.tag()) }
    }
}

/// None for a map of a type that the datapath does not have.
fn data(map: &Map) -> Option<&MapData> {
    match map {
        Map::Array(data) | Map::HashMap(data) | Map::LpmTrie(data) | Map::LruHashMap(data) | Map::PerCpuArray(data) => {
            Some(data)
        }
        _ => None,
    }
}
