//! The flow table, as the agent sees it: counted, and swept of flows that are over. What it counts for each backend is
//! the truth to which the programs' own counts are brought back.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use aya::maps::{HashMap, MapData, MapError};
use aya::{Ebpf, Pod};
use nix::time::{ClockId, clock_gettime};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::flow::{Flow, FlowKey, Kind, State};
use proxy_common::frontend::FrontendKey;
use proxy_common::service_counts::Passed;

use super::counts::{Counts, FamilyCounts, Ledger, returned};
use super::{Names, take};

/// An entry whose flow's opener is missing is left alone for this long: the programs make it before the opener.
const ORPHAN_SECS: u32 = 30;

/// What was counted is not counted again within this time: to look through a large table takes a while.
const COUNT_PERIOD: Duration = Duration::from_millis(500);

/// The flow tables of both families, and what is counted for services. Handles of the same tables; one at a time sweeps or
/// counts.
#[derive(Clone)]
pub struct FlowMaps(Arc<Mutex<Families>>);

struct Families {
    v4: Family<Addr4>,
    v6: Family<Addr6>,
    counted: Option<(Instant, Arc<Counts>)>,
}

struct Family<A: Names> {
    flows: Flows<A>,
    /// Open flows of a backend, which the key names as if it were a frontend.
    connections: HashMap<MapData, FrontendKey<A>, u32>,
    ledger: Ledger<A>,
}

pub(super) type Flows<A> = HashMap<MapData, FlowKey<A>, Flow<A>>;

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
        let families = Families { v4: Family::new(ebpf)?, v6: Family::new(ebpf)?, counted: None };
        Ok(Self(Arc::new(Mutex::new(families))))
    }

    /// Removes flows that have been silent for longer than their state allows, and says of each backend how many it has.
    pub fn sweep(&self) -> Result<BTreeMap<&'static str, Swept>> {
        let now_secs = boot_secs()?;
        let mut families = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Families { v4, v6, counted } = &mut *families;
        let swept = BTreeMap::from([(Addr4::FAMILY, v4.sweep(now_secs)?), (Addr6::FAMILY, v6.sweep(now_secs)?)]);
        let mut counts = Counts { v4: v4.count()?, v6: v6.count()? };
        v4.ledger.prune(&mut counts.v4)?;
        v6.ledger.prune(&mut counts.v6)?;
        *counted = Some((Instant::now(), Arc::new(counts)));
        Ok(swept)
    }

    /// What passed for the services up to now. Takes its time: not for the loop.
    pub fn counts(&self) -> Result<Arc<Counts>> {
        self.counts_since(Duration::ZERO)
    }

    /// What passed for the services up to now, or up to a moment ago if that has been counted already.
    pub fn recent_counts(&self) -> Result<Arc<Counts>> {
        self.counts_since(COUNT_PERIOD)
    }

    fn counts_since(&self, age: Duration) -> Result<Arc<Counts>> {
        let mut families = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Families { v4, v6, counted } = &mut *families;
        if let Some((at, counts)) = counted
            && at.elapsed() < age
        {
            return Ok(Arc::clone(counts));
        }
        let counts = Arc::new(Counts { v4: v4.count()?, v6: v6.count()? });
        *counted = Some((Instant::now(), Arc::clone(&counts)));
        Ok(counts)
    }
}

impl fmt::Debug for FlowMaps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FlowMaps")
    }
}

impl<A: Names> Family<A> {
    fn new(ebpf: &mut Ebpf) -> Result<Self> {
        let (flows, connections) = (take(ebpf, A::MAPS.flows)?, take(ebpf, A::MAPS.connections)?);
        Ok(Self { flows, connections, ledger: Ledger::new(ebpf)? })
    }

    fn count(&mut self) -> Result<FamilyCounts<A>> {
        self.ledger.count(&self.flows)
    }

    fn sweep(&mut self, now_secs: u32) -> Result<Swept> {
        let counted = self.connections()?;
        let mut open = BTreeMap::new();
        let swept = sweep(&mut self.flows, now_secs, &mut open, &mut self.ledger);
        let swept = swept.with_context(|| format!("sweep {}", A::MAPS.flows))?;
        self.correct_connections(&counted, &open).with_context(|| format!("correct {}", A::MAPS.connections))?;
        Ok(swept)
    }

    fn connections(&self) -> Result<BTreeMap<FrontendKey<A>, u32>> {
        self.connections.iter().collect::<Result<_, _>>().with_context(|| format!("read {}", A::MAPS.connections))
    }

    /// Takes the error out of the counts: the difference between what had been `counted` and what was `open` when the
    /// sweep began. The sweep takes its time and the programs count along, so that to write what was open would lose the
    /// flows that were opened meanwhile.
    fn correct_connections(
        &mut self,
        counted: &BTreeMap<FrontendKey<A>, u32>,
        open: &BTreeMap<FrontendKey<A>, u32>,
    ) -> Result<()> {
        let now = self.connections()?;
        let number = |counts: &BTreeMap<FrontendKey<A>, u32>, backend| counts.get(backend).copied().unwrap_or(0);
        for backend in counted.keys().chain(open.keys().filter(|backend| !counted.contains_key(backend))) {
            let (was, is) = (number(counted, backend), number(open, backend));
            let right = (number(&now, backend) + is).saturating_sub(was);
            if right == 0 {
                remove(&mut self.connections, backend)?;
            } else if was != is {
                self.connections.insert(backend, right, 0)?;
            }
        }
        Ok(())
    }
}

/// The programs' clock: seconds since boot, sleep included.
fn boot_secs() -> Result<u32> {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).context("read the boot clock")?;
    u32::try_from(now.tv_sec()).context("the boot clock is past 2^32 s")
}

/// Adds to `connections` what remains.
fn sweep<A: Names>(
    map: &mut Flows<A>,
    now_secs: u32,
    connections: &mut BTreeMap<FrontendKey<A>, u32>,
    ledger: &mut Ledger<A>,
) -> Result<Swept> {
    let mut swept = Swept::default();
    // Deleting while iterating makes the kernel start over, so the keys are gathered first; and once, though the programs
    // delete as well.
    let keys: BTreeSet<FlowKey<A>> = map.keys().collect::<Result<_, _>>()?;
    for key in keys {
        let Some(flow) = read(map, &key)? else { continue };
        if flow.kind == Kind::DNAT {
            if is_over(&flow, &key, now_secs) && is_still_over(map, &key, now_secs)? {
                swept.expired += 1;
                let returned = returned(map, &key, &flow)?;
                if remove_flow(map, &key, flow)? {
                    ledger.close(flow.service, flow.passed, returned);
                }
            } else {
                swept.flows += 1;
                swept.entries += 1;
                if is_counted(&flow) {
                    let backend = FrontendKey::new(flow.backend.addr, flow.backend.port, key.proto());
                    *connections.entry(backend).or_default() += 1;
                }
            }
        } else if flow.idle_secs(now_secs) > ORPHAN_SECS && !has_opener(map, &key, &flow)? {
            swept.orphans += 1;
            if remove(map, &key)? && flow.kind == Kind::UNDNAT {
                ledger.close(flow.service, Passed::NOTHING, flow.passed);
            }
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

/// As the programs do it: a flow no longer counts once both sides have closed it, or one has reset it.
fn is_counted<A: Addr>(opener: &Flow<A>) -> bool {
    opener.has(Flow::<A>::COUNTED) && !opener.state().is_end()
}

/// A packet may have passed since the flow was read.
fn is_still_over<A: Names>(map: &Flows<A>, key: &FlowKey<A>, now_secs: u32) -> Result<bool> {
    Ok(read(map, key)?.is_some_and(|flow| is_over(&flow, key, now_secs)))
}

fn has_opener<A: Names>(map: &Flows<A>, key: &FlowKey<A>, flow: &Flow<A>) -> Result<bool> {
    let opener = read(map, &flow.opener_key(key.proto()))?;
    // The opener may have been opened anew since, towards another backend or from another port.
    Ok(opener.is_some_and(|opener| opener.backend == flow.backend && opener.source == flow.source))
}

/// Removes a flow's entries in the order in which they were made: the opener's last, for as long as it stands the
/// programs take the flow for whole. True if that one was still there.
fn remove_flow<A: Names>(map: &mut Flows<A>, key: &FlowKey<A>, flow: Flow<A>) -> Result<bool> {
    let mut opener = false;
    for kind in flow.kinds() {
        opener = remove(map, &flow.key_as(*kind, key.proto()))?;
    }
    Ok(opener)
}

pub(super) fn read<K: Pod, V: Pod>(map: &HashMap<MapData, K, V>, key: &K) -> Result<Option<V>> {
    match map.get(key, 0) {
        Ok(value) => Ok(Some(value)),
        Err(MapError::KeyNotFound) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// False if it was gone.
pub(super) fn remove<K: Pod, V: Pod>(map: &mut HashMap<MapData, K, V>, key: &K) -> Result<bool> {
    match map.remove(key) {
        Ok(()) => Ok(true),
        Err(MapError::KeyNotFound) => Ok(false),
        Err(MapError::SyscallError(error)) if error.io_error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error.into()),
    }
}
