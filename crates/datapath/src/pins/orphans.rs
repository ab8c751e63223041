//! Finds maps without a pin. A clsact filter holds its program, and the program its maps. If the
//! pins disappeared with a container, the next start finds the maps through the filters and pins
//! them again.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use anyhow::{Context, Result, ensure};
use aya::maps::{Array, HashMap, Map, MapData};
use aya::programs::{ProgramInfo, SchedClassifier, TcAttachType, loaded_programs};
use aya_obj::generated::bpf_prog_type;
use nix::net::if_::if_nameindex;
use nix::unistd::geteuid;
use proxy_common::addr::{Addr4, Addr6};
use proxy_common::device::Node;
use proxy_common::frontend::{Frontend, FrontendKey};
use proxy_common::hook::SlowProgram;
use proxy_common::layout::LAYOUT;
use proxy_common::names;
use tracing::{info, warn};

use super::{Definition, Pins, definitions};
use crate::adopt::is_program_at;
use crate::loaded::may_open_by_id;
use proxy_net::anchor;
use proxy_net::filter::{Filter, HANDLE, Hook};

/// The number of bytes of a name that the kernel stores.
const NAME_BYTES: usize = 15;

/// A map that kpx's programs use.
pub struct Orphan {
    pub name: String,
    max_entries: u32,
    pub map: MapData,
}

/// Returns the maps of the programs in `filters`, which are pairs of device name and filter. After
/// an interrupted resize, two maps have the same name. If even their sizes are equal, the map of
/// the newer program counts.
///
/// A filter is kpx's by its priority and handle, on a device of this network namespace, where
/// adding a filter requires CAP_NET_ADMIN. Its program must have the name, type and loader of kpx's
/// program at that hook, and its maps must match `object`.
pub fn find(object: &[u8], filters: &[(String, Filter)]) -> Result<Vec<Orphan>> {
    maps_of(object, &programs(filters)?)
}

/// Returns true if the anchor's programs have Services and open new flows, with or without an
/// agent.
pub fn serves(object: &[u8], filters: &[(String, Filter)]) -> Result<bool> {
    let at_anchor: Vec<_> = filters
        .iter()
        .filter(|(device, _)| device == anchor::NAME)
        .cloned()
        .collect();
    let mut programs = programs(&at_anchor)?;
    programs.extend(linked());
    programs.extend(slow_path_of(&programs)?);
    let mut opens = false;
    let mut has_services = false;
    for Orphan { name, map, .. } in maps_of(object, &programs)? {
        let map = Map::from_map_data(map).with_context(|| format!("open {name}"))?;
        if name == names::NODE {
            let node: Array<_, Node> = map.try_into()?;
            opens = !node.get(&0, 0).context("read NODE")?.has(Node::DRAINING);
        } else if name == names::IPV4.frontends {
            has_services |= !is_empty::<FrontendKey<Addr4>, Frontend<Addr4>>(map)?;
        } else if name == names::IPV6.frontends {
            has_services |= !is_empty::<FrontendKey<Addr6>, Frontend<Addr6>>(map)?;
        }
    }
    Ok(opens && has_services)
}

/// Returns true if any version of kpx has programs at the anchor, with or without an agent.
pub fn is_attached(filters: &[(String, Filter)]) -> bool {
    filters.iter().any(|(device, _)| device == anchor::NAME) || !linked().is_empty()
}

/// Returns the anchor's programs that are attached through TCX.
fn linked() -> Vec<ProgramInfo> {
    // A kernel without TCX, or without this device, has no such links.
    let (_, programs) =
        SchedClassifier::query_tcx(anchor::NAME, TcAttachType::Egress).unwrap_or_default();
    programs
        .into_iter()
        .filter(|program| is_ours(program, names::ANCHOR))
        .collect()
}

/// Returns the programs of the slow path of the same load, which share maps with `programs`.
fn slow_path_of(programs: &[ProgramInfo]) -> Result<Vec<ProgramInfo>> {
    let mut maps = BTreeSet::new();
    for program in programs {
        maps.extend(map_ids(program)?);
    }
    let mut found = Vec::new();
    for program in loaded_programs().flatten() {
        let is_slow_path = SlowProgram::ALL
            .into_iter()
            .any(|slow| is_ours(&program, slow.program()));
        if is_slow_path && map_ids(&program)?.iter().any(|id| maps.contains(id)) {
            found.push(program);
        }
    }
    Ok(found)
}

fn map_ids(program: &ProgramInfo) -> Result<Vec<u32>> {
    let ids = program.map_ids().context("read a program's maps")?;
    Ok(ids.unwrap_or_default())
}

fn is_empty<K: aya::Pod, V: aya::Pod>(map: Map) -> Result<bool> {
    let map: HashMap<_, K, V> = map.try_into()?;
    Ok(map
        .keys()
        .next()
        .transpose()
        .context("read the frontends")?
        .is_none())
}

fn maps_of(object: &[u8], programs: &[ProgramInfo]) -> Result<Vec<Orphan>> {
    let wanted = definitions(object)?;
    let mut found = BTreeMap::new();
    for program in programs {
        for id in map_ids(program)? {
            let map = MapData::from_id(id).with_context(|| format!("open map {id}"))?;
            let info = map
                .info()
                .with_context(|| format!("read information about map {id}"))?;
            let name = info.name_as_str().unwrap_or_default();
            let Some(want) = wanted.iter().find(|want| kernel_name(&want.name) == name) else {
                continue;
            };
            let is = Definition::of_map(&want.name, &info).with_context(|| format!("map {id}"))?;
            ensure!(
                is.fits(want),
                "map {id} of the programs on this node differs from {name} of this kpx: {is} instead of {want}. Start the version that made it, or remove its state and all flows with `kpx cleanup`"
            );
            let max_entries = is.max_entries;
            found.insert(
                (want.name.clone(), max_entries),
                Orphan {
                    name: want.name.clone(),
                    max_entries,
                    map,
                },
            );
        }
    }
    Ok(found.into_values().collect())
}

/// Returns the programs, oldest first.
fn programs(filters: &[(String, Filter)]) -> Result<Vec<ProgramInfo>> {
    ensure!(
        filters.is_empty() || may_open_by_id(),
        "finding the maps of programs by id takes CAP_SYS_ADMIN"
    );
    let mut wanted = BTreeMap::new();
    for (device, filter) in filters {
        ensure!(
            filter.layout() == HANDLE,
            "{device} has the filter {} of another version of kpx with layout {}; this version takes over layout {LAYOUT} only: start that version again, or remove its state with `kpx cleanup`",
            filter.name,
            filter.layout()
        );
        let attach_type = match filter.hook {
            Hook::Ingress => TcAttachType::Ingress,
            Hook::Egress => TcAttachType::Egress,
        };
        match filter
            .program
            .filter(|_| is_program_at(device, attach_type, &filter.name))
        {
            Some(id) => drop(wanted.insert(id, filter.name.as_str())),
            None => warn!(
                device,
                filter = filter.name,
                "another program's filter has kpx's priority and handle"
            ),
        }
    }
    let mut programs = Vec::new();
    // A program that vanishes during the listing is in no filter.
    for program in loaded_programs().flatten() {
        let Some(name) = wanted.get(&program.id()) else {
            continue;
        };
        if is_ours(&program, name) {
            programs.push(program);
        } else {
            warn!(
                program = program.id(),
                name, "a foreign program has the name of a kpx program"
            );
        }
    }
    programs.sort_by_key(ProgramInfo::id);
    Ok(programs)
}

fn is_ours(program: &ProgramInfo, name: &str) -> bool {
    program.program_type() == bpf_prog_type::BPF_PROG_TYPE_SCHED_CLS
        && program.name_as_str() == Some(name)
        && program
            .created_by_uid()
            .is_none_or(|uid| uid == geteuid().as_raw())
}

fn kernel_name(name: &str) -> &str {
    &name[..name.len().min(NAME_BYTES)]
}

/// Returns an error if TCX links of a kpx instance with invisible pins exist here: both instances
/// would translate.
pub fn ensure_no_hidden_links() -> Result<()> {
    for device in if_nameindex().context("list the devices")?.iter() {
        let name = device.name().to_string_lossy();
        for attach_type in [TcAttachType::Ingress, TcAttachType::Egress] {
            // A kernel without TCX has no links.
            let (_, programs) = SchedClassifier::query_tcx(&name, attach_type).unwrap_or_default();
            let is_ours = |program: &ProgramInfo| {
                program
                    .name_as_str()
                    .is_some_and(|program| is_program_at(&name, attach_type, program))
            };
            ensure!(
                !programs.iter().any(is_ours),
                "an earlier kpx left programs attached to {name} through TCX links, and this container does not see their \
                 pins: mount the node's /sys/fs/bpf (docs/migration.md), or run `kpx cleanup` on the node"
            );
        }
    }
    Ok(())
}

impl Pins {
    /// Pins the maps of the programs in `filters` atomically. The directory must have no pins.
    pub fn recover(&self, object: &[u8], filters: &[(String, Filter)]) -> Result<()> {
        if filters.is_empty() {
            return Ok(());
        }
        let found = find(object, filters)?;
        let new = self.dir.join("found");
        if new.exists() {
            fs::remove_dir_all(&new).with_context(|| format!("remove {}", new.display()))?;
        }
        fs::create_dir(&new).with_context(|| format!("create {}", new.display()))?;
        let mut taken = BTreeSet::new();
        for Orphan {
            name,
            max_entries,
            map,
        } in &found
        {
            let file = if taken.insert(name) {
                name.clone()
            } else {
                format!("{name}-{max_entries}")
            };
            map.pin(new.join(&file))
                .with_context(|| format!("pin {file}"))?;
        }
        fs::rename(&new, self.maps()).with_context(|| format!("rename {}", new.display()))?;
        info!(
            maps = found.len(),
            filters = filters.len(),
            "found the maps of a kpx without pins"
        );
        Ok(())
    }

    pub fn has_maps(&self) -> Result<bool> {
        Ok(!super::names(&self.maps())?.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_names_distinguish_the_maps() {
        let maps = include_str!("../../../../proxy-common/src/layout/v2-maps.txt");
        let names: Vec<_> = maps
            .lines()
            .skip(1)
            .filter_map(|line| line.split_whitespace().next())
            .collect();
        let short: BTreeSet<_> = names.iter().map(|name| kernel_name(name)).collect();
        assert!(
            short.contains("FLOWS4") && short.len() == names.len(),
            "{names:?}"
        );
    }
}
