//! The flow table, as the agent sees it: counted, and swept of flows that are over.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{HashMap, MapData, MapError};
use nix::time::{ClockId, clock_gettime};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::flow::{Flow, FlowKey, Kind, State};

use super::{Names, take};

/// An entry whose flow's opener is missing is left alone for this long: the programs make it before the opener.
const ORPHAN_SECS: u32 = 30;

/// The flow tables of both families.
pub struct FlowMaps {
    v4: HashMap<MapData, FlowKey<Addr4>, Flow<Addr4>>,
    v6: HashMap<MapData, FlowKey<Addr6>, Flow<Addr6>>,
}

/// What a sweep found and did.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Swept {
    /// Entries that remain: two or four a flow.
    pub entries: usize,
    /// Flows that remain.
    pub flows: usize,
    /// Flows that were over, and removed.
    pub expired: usize,
    /// Entries without a flow, removed.
    pub orphans: usize,
}

impl FlowMaps {
    pub(super) fn new(ebpf: &mut Ebpf) -> Result<Self> {
        Ok(Self { v4: take(ebpf, Addr4::MAPS.flows)?, v6: take(ebpf, Addr6::MAPS.flows)? })
    }

    /// Removes flows that have been silent for longer than their state allows.
    pub fn sweep(&mut self) -> Result<BTreeMap<&'static str, Swept>> {
        let now_secs = boot_secs()?;
        Ok(BTreeMap::from([
            (Addr4::FAMILY, sweep(&mut self.v4, now_secs).context("sweep FLOWS4")?),
            (Addr6::FAMILY, sweep(&mut self.v6, now_secs).context("sweep FLOWS6")?),
        ]))
    }
}

/// The programs' clock: seconds since boot, sleep included.
fn boot_secs() -> Result<u32> {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).context("read the boot clock")?;
    u32::try_from(now.tv_sec()).context("the boot clock is past 2^32 s")
}

fn sweep<A: Names>(map: &mut HashMap<MapData, FlowKey<A>, Flow<A>>, now_secs: u32) -> Result<Swept> {
    let mut swept = Swept::default();
    // Deleting while iterating makes the kernel start over, so the keys are gathered first.
    let keys: Vec<FlowKey<A>> = map.keys().collect::<Result<_, _>>()?;
    for key in keys {
        let Some(flow) = read(map, &key)? else { continue };
        if flow.kind == Kind::DNAT {
            if is_over(&flow, &key, now_secs) && is_still_over(map, &key, now_secs)? {
                swept.expired += 1;
                remove_flow(map, &key, flow)?;
            } else {
                swept.flows += 1;
                swept.entries += 1;
            }
        } else if flow.idle_secs(now_secs) > ORPHAN_SECS && !has_opener(map, &key, &flow)? {
            swept.orphans += 1;
            remove(map, &key)?;
        } else {
            swept.entries += 1;
        }
    }
    Ok(swept)
}

fn is_over<A: Addr>(opener: &Flow<A>, key: &FlowKey<A>, now_secs: u32) -> bool {
    let state: State = opener.state();
    opener.idle_secs(now_secs) > state.timeout_secs(key.proto())
}

/// A packet may have passed since the flow was read.
fn is_still_over<A: Names>(
    map: &HashMap<MapData, FlowKey<A>, Flow<A>>,
    key: &FlowKey<A>,
    now_secs: u32,
) -> Result<bool> {
    Ok(read(map, key)?.is_some_and(|flow| is_over(&flow, key, now_secs)))
}

fn has_opener<A: Names>(map: &HashMap<MapData, FlowKey<A>, Flow<A>>, key: &FlowKey<A>, flow: &Flow<A>) -> Result<bool> {
    let opener = read(map, &flow.opener_key(key.proto()))?;
    // The opener may have been opened anew since, towards another backend or from another port.
    Ok(opener.is_some_and(|opener| opener.backend == flow.backend && opener.source == flow.source))
}

/// Removes a flow's entries in the order in which they were made: the opener's last, for as long as it stands the
/// programs take the flow for whole.
fn remove_flow<A: Names>(
    map: &mut HashMap<MapData, FlowKey<A>, Flow<A>>,
    key: &FlowKey<A>,
    flow: Flow<A>,
) -> Result<()> {
    for kind in flow.kinds() {
        remove(map, &flow.key_as(*kind, key.proto()))?;
    }
    Ok(())
}

fn read<A: Names>(map: &HashMap<MapData, FlowKey<A>, Flow<A>>, key: &FlowKey<A>) -> Result<Option<Flow<A>>> {
    match map.get(key, 0) {
        Ok(flow) => Ok(Some(flow)),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn remove<A: Names>(map: &mut HashMap<MapData, FlowKey<A>, Flow<A>>, key: &FlowKey<A>) -> Result<()> {
    match map.remove(key) {
        Ok(()) | Err(MapError::KeyNotFound) => Ok(()),
        Err(MapError::SyscallError(error)) if error.io_error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error.into()),
    }
}
