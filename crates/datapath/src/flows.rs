//! Sweeps the flow table and counts flows. The agent's exact count for each backend corrects the
//! programs' own counts.
//!
//! Sweep and count share a scan in batches, which needs little memory and at most half a CPU.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::sys::map_walk::{Rows, Walk};
use anyhow::{Context, Result};
use aya::maps::{HashMap, MapData, MapError};
use aya::{Ebpf, Pod};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::flow::{Flow, FlowKey, Kind, Seen, Timeouts};
use proxy_common::frontend::FrontendKey;
use proxy_common::service_counts::Passed;

use super::clock::boot_secs;
use super::counts::{Counts, FamilyCounts, Ledger};
use super::ends::Ends;
use super::flow_reader::{FlowReader, ListedFlow, Times, is_opener};
use super::host_flows::HostFlows;
use super::maps::{FamilyNames, flow_table, take};
use super::pressure::Pressure;
use super::shares::{Held, Shares};

/// The number of entries in a read, which takes a fraction of a millisecond.
pub(super) const BATCH: usize = 1_024;
/// The idle time in seconds after which an orphan entry, an entry without original entry, is
/// removed. (The programs create the original entry last.)
const ORPHAN_SECS: u32 = 30;
/// The time for which a count is reused, because scanning a large table takes long.
const COUNT_PERIOD: Duration = Duration::from_millis(500);

/// The flow tables of both families, and the counters of service ports. Clones share the tables; a
/// lock serialises sweeps and counts.
#[derive(Clone)]
pub struct FlowMaps {
    families: Arc<Mutex<Families>>,
    /// Separate handles on the tables, so that readers do not wait for a sweep.
    pub(super) tables: Arc<Tables>,
    timeouts: Timeouts,
}

pub(super) struct Tables {
    pub(super) v4: Rows<FlowKey<Addr4>, Flow<Addr4>>,
    pub(super) v6: Rows<FlowKey<Addr6>, Flow<Addr6>>,
}

struct Families {
    v4: Family<Addr4>,
    v6: Family<Addr6>,
    ends: Ends,
    counted: Option<(Instant, Arc<Counts>)>,
}

struct Family<A: FamilyNames> {
    flows: HashMap<MapData, FlowKey<A>, Flow<A>>,
    walk: Walk<FlowKey<A>, Flow<A>>,
    max_entries: u32,
    pressure: Pressure,
    timeouts: Timeouts,
    /// The number of open flows of each backend. The key is the backend in the form of a frontend.
    connections: HashMap<MapData, FrontendKey<A>, u32>,
    shares: Shares<A>,
    ledger: Ledger<A>,
    /// The clients and service ports of flows that were closed since the last sweep.
    ended: Held<A>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Swept {
    /// The remaining entries: two or four for each flow.
    pub entries: usize,
    pub flows: usize,
    /// The remaining flows that have been neither closed by both sides nor reset.
    pub open: usize,
    /// The remaining half-open flows, which new flows may evict.
    pub half_open: usize,
    /// The remaining flows that affect the fast path.
    #[serde(skip)]
    pub fast: Remaining,
    /// The expired flows that the sweep removed.
    pub expired: usize,
    /// The orphan entries, without an original entry, that the sweep removed.
    pub orphans: usize,
    /// How full the table is with flows that cannot be evicted.
    pub pressure: Pressure,
}

/// The flows on the fast path that remain after a sweep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Remaining {
    /// Flows that bypass the network stack from their first packet.
    pub bypass: usize,
    /// Flows with a conntrack entry that may be liberal (ignoring TCP windows).
    pub liberal: usize,
}

struct Found<A: FamilyNames> {
    swept: Swept,
    /// The number of entries of flows that cannot be evicted.
    lasting: u32,
    held: Held<A>,
    counts: FamilyCounts<A>,
    /// The number of open flows that count for each backend.
    open: BTreeMap<FrontendKey<A>, u32>,
}

impl FlowMaps {
    pub(super) fn new(ebpf: &mut Ebpf, timeouts: Timeouts) -> Result<Self> {
        // Open these handles before the families take the maps out of `ebpf`.
        let tables = Tables {
            v4: rows(ebpf)?,
            v6: rows(ebpf)?,
        };
        let ends = Ends::new(ebpf)?;
        let families = Families {
            v4: Family::new(ebpf, timeouts)?,
            v6: Family::new(ebpf, timeouts)?,
            ends,
            counted: None,
        };
        Ok(Self {
            families: Arc::new(Mutex::new(families)),
            tables: Arc::new(tables),
            timeouts,
        })
    }

    /// Records that programs of another load may open flows too.
    pub(super) fn share(&self) {
        self.lock().ends.share();
    }

    /// Marks every end as having flows, for a later agent of another version. Waits for a running
    /// sweep.
    pub fn leave(&self) -> Result<()> {
        self.lock().ends.leave()
    }

    fn lock(&self) -> MutexGuard<'_, Families> {
        self.families.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a reader of single flows that is independent of the sweep.
    pub fn host_flows(&self) -> Result<HostFlows> {
        let Tables { v4, v6 } = &*self.tables;
        HostFlows::new(v4.map()?, v6.map()?)
    }

    pub fn reader(&self) -> Result<FlowReader> {
        let Tables { v4, v6 } = &*self.tables;
        let open = |name: &str| format!("walk through {name}");
        let v4 = v4.walk(BATCH).with_context(|| open(Addr4::MAPS.flows))?;
        Ok(FlowReader::new(
            self.timeouts,
            v4,
            v6.walk(BATCH).with_context(|| open(Addr6::MAPS.flows))?,
        ))
    }

    /// Removes flows that exceed the idle timeout of their state, and corrects each backend's flow
    /// count.
    pub fn sweep(&self) -> Result<BTreeMap<&'static str, Swept>> {
        self.sweep_at(boot_secs()?)
    }

    /// Sweeps as if `now_secs` seconds had passed since boot.
    pub fn sweep_at(&self, now_secs: u32) -> Result<BTreeMap<&'static str, Swept>> {
        let Families {
            v4,
            v6,
            ends,
            counted,
        } = &mut *self.lock();
        ends.begin()?;
        let (swept4, counts4) = v4.sweep(now_secs, ends)?;
        let (swept6, counts6) = v6.sweep(now_secs, ends)?;
        ends.end()?;
        // The scan's counts may miss flows that it removed.
        let is_whole = [&swept4, &swept6]
            .iter()
            .all(|swept| swept.expired == 0 && swept.orphans == 0);
        *counted = is_whole.then(|| {
            (
                Instant::now(),
                Arc::new(Counts {
                    v4: counts4,
                    v6: counts6,
                }),
            )
        });
        Ok(BTreeMap::from([
            (Addr4::FAMILY, swept4),
            (Addr6::FAMILY, swept6),
        ]))
    }

    /// Removes the flows that `picks` selects, on any path, and returns their number. Waits for a
    /// running sweep.
    pub fn end(&self, picks: impl Fn(&ListedFlow) -> bool) -> Result<usize> {
        let times = Times {
            now_secs: boot_secs()?,
            timeouts: self.timeouts,
        };
        let Families {
            v4, v6, counted, ..
        } = &mut *self.lock();
        *counted = None;
        Ok(v4.end(&picks, times)? + v6.end(&picks, times)?)
    }

    /// Returns the current traffic of service ports. Scans the table: do not call this in the
    /// agent's loop.
    pub fn counts(&self) -> Result<Arc<Counts>> {
        self.counts_since(Duration::ZERO).map(|(_, counts)| counts)
    }

    /// Returns the traffic of service ports, counted at most half a second ago.
    pub fn recent_counts(&self) -> Result<Arc<Counts>> {
        self.counts_since(COUNT_PERIOD).map(|(_, counts)| counts)
    }

    /// Returns the traffic of service ports, counted at most `age` ago, and the time of the count
    /// (or sweep).
    pub fn counts_since(&self, age: Duration) -> Result<(Instant, Arc<Counts>)> {
        let Families {
            v4, v6, counted, ..
        } = &mut *self.lock();
        if let Some((at, counts)) = counted
            && at.elapsed() < age
        {
            return Ok((*at, Arc::clone(counts)));
        }
        let at = Instant::now();
        let counts = Arc::new(Counts {
            v4: v4.count()?,
            v6: v6.count()?,
        });
        *counted = Some((at, Arc::clone(&counts)));
        Ok((at, counts))
    }
}

impl fmt::Debug for FlowMaps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FlowMaps")
    }
}

fn rows<A: FamilyNames>(ebpf: &Ebpf) -> Result<Rows<FlowKey<A>, Flow<A>>> {
    Rows::new(flow_table::<A>(ebpf)?).with_context(|| format!("open {}", A::MAPS.flows))
}

impl<A: FamilyNames> Family<A> {
    fn new(ebpf: &mut Ebpf, timeouts: Timeouts) -> Result<Self> {
        let name = A::MAPS.flows;
        let data = flow_table::<A>(ebpf)?;
        let max_entries = data
            .info()
            .with_context(|| format!("read information about map {name}"))?
            .max_entries();
        let walk = Walk::new(data, BATCH).with_context(|| format!("walk through {name}"))?;
        let flows = take(ebpf, name)?;
        let connections = take(ebpf, A::MAPS.connections)?;
        let shares = Shares::new(ebpf)?;
        let ledger = Ledger::new(ebpf)?;
        let ended = Held::new();
        let pressure = Pressure::default();
        Ok(Self {
            flows,
            walk,
            max_entries,
            pressure,
            timeouts,
            connections,
            shares,
            ledger,
            ended,
        })
    }

    fn end(&mut self, picks: impl Fn(&ListedFlow) -> bool, times: Times) -> Result<usize> {
        let picked = |key: &FlowKey<A>, flow: &Flow<A>| {
            is_opener(key, flow) && picks(&ListedFlow::of(*key, flow, times))
        };
        let mut keys = Vec::new();
        let mut ended = 0;
        self.walk.restart();
        while let Some(batch) = self
            .walk
            .next_batch()
            .with_context(|| format!("read {}", A::MAPS.flows))?
        {
            keys.extend(
                batch
                    .filter(|(key, flow)| picked(key, flow))
                    .map(|(key, _)| key),
            );
        }
        for key in keys {
            // The client may have dialled another backend since the scan visited the flow.
            let Some(flow) = read(&self.flows, &key)?.filter(|flow| picked(&key, flow)) else {
                continue;
            };
            if close(&mut self.flows, &key, flow, &mut self.ledger)? {
                self.ended.swept(&flow);
                ended += 1;
            }
        }
        Ok(ended)
    }

    fn count(&mut self) -> Result<FamilyCounts<A>> {
        let mut counts = self.ledger.begin()?;
        self.walk.restart();
        while let Some(batch) = self
            .walk
            .next_batch()
            .with_context(|| format!("read {}", A::MAPS.flows))?
        {
            batch.for_each(|(key, flow)| {
                counts.add(&flow);
                if is_opener(&key, &flow) {
                    counts.add_flow(&flow);
                }
            });
        }
        self.ledger.end(&mut counts);
        Ok(counts)
    }

    /// Sweeps the table. If the table becomes nearly full, sweeps again at once with shorter
    /// timeouts.
    fn sweep(&mut self, now_secs: u32, ends: &mut Ends) -> Result<(Swept, FamilyCounts<A>)> {
        let (swept, counts) = self.sweep_once(now_secs, ends)?;
        let before = std::mem::replace(&mut self.pressure, swept.pressure);
        if swept.pressure != Pressure::Emergency || before == Pressure::Emergency {
            return Ok((swept, counts));
        }
        let (again, counts) = self.sweep_once(now_secs, ends)?;
        self.pressure = again.pressure;
        let expired = swept.expired + again.expired;
        let orphans = swept.orphans + again.orphans;
        Ok((
            Swept {
                expired,
                orphans,
                ..again
            },
            counts,
        ))
    }

    fn sweep_once(&mut self, now_secs: u32, ends: &mut Ends) -> Result<(Swept, FamilyCounts<A>)> {
        let counted = self.connections()?;
        let found = self
            .walk(now_secs, ends)
            .with_context(|| format!("sweep {}", A::MAPS.flows))?;
        let Found {
            swept,
            mut counts,
            open,
            held,
            ..
        } = found;
        self.shares.correct(held, self.max_entries)?;
        self.correct_connections(&counted, &open)
            .with_context(|| format!("correct {}", A::MAPS.connections))?;
        self.ledger.end(&mut counts);
        self.ledger.settle(&counts, now_secs, self.timeouts.udp)?;
        self.ledger.prune(&mut counts)?;
        Ok((swept, counts))
    }

    /// Scans the table. Between batches the scan pauses for as long as the last batch took, except
    /// in an emergency.
    fn walk(&mut self, now_secs: u32, ends: &mut Ends) -> Result<Found<A>> {
        let counts = self.ledger.begin()?;
        let held = std::mem::replace(&mut self.ended, Held::new());
        let mut found = Found {
            swept: Swept::default(),
            lasting: 0,
            held,
            counts,
            open: BTreeMap::new(),
        };
        let pressure = self.pressure;
        let times = Times {
            now_secs,
            timeouts: self.timeouts,
        };
        self.walk.restart();
        loop {
            let started = Instant::now();
            let Some(batch) = self.walk.next_batch()? else {
                break;
            };
            let flows = &mut self.flows;
            let ledger = &mut self.ledger;
            let mut batch = batch.inspect(|(key, flow)| ends.meet(key, flow));
            batch.try_for_each(|entry| found.meet(entry, flows, ledger, pressure, times))?;
            if self.pressure != Pressure::Emergency {
                thread::sleep(started.elapsed());
            }
        }
        found.swept.pressure = Pressure::of(found.lasting, self.max_entries);
        Ok(found)
    }

    fn connections(&self) -> Result<BTreeMap<FrontendKey<A>, u32>> {
        self.connections
            .iter()
            .collect::<Result<_, _>>()
            .with_context(|| format!("read {}", A::MAPS.connections))
    }

    /// Adds the difference between the old count `counted` and the scan's count `open`. Writing
    /// `open` itself would lose the flows that programs opened during the sweep.
    fn correct_connections(
        &mut self,
        counted: &BTreeMap<FrontendKey<A>, u32>,
        open: &BTreeMap<FrontendKey<A>, u32>,
    ) -> Result<()> {
        let now = self.connections()?;
        let number = |counts: &BTreeMap<FrontendKey<A>, u32>, backend| {
            counts.get(backend).copied().unwrap_or(0)
        };
        for backend in counted
            .keys()
            .chain(open.keys().filter(|backend| !counted.contains_key(backend)))
        {
            let was = number(counted, backend);
            let is = number(open, backend);
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

impl<A: FamilyNames> Found<A> {
    /// Counts an entry, or removes the flow if it has expired.
    fn meet(
        &mut self,
        (key, flow): (FlowKey<A>, Flow<A>),
        map: &mut HashMap<MapData, FlowKey<A>, Flow<A>>,
        ledger: &mut Ledger<A>,
        pressure: Pressure,
        times: Times,
    ) -> Result<()> {
        let is_over = |flow: &Flow<A>| is_over(flow, &key, pressure, times);
        self.counts.add(&flow);
        self.swept.fast.liberal +=
            usize::from(flow.kind == Kind::UNDNAT && flow.tx.has(Seen::LIBERAL));
        if flow.kind == Kind::DNAT {
            // A packet may have passed since the flow was read.
            if is_over(&flow) && read(map, &key)?.is_some_and(|flow| is_over(&flow)) {
                self.swept.expired += 1;
                if close(map, &key, flow, ledger)? {
                    self.held.swept(&flow);
                }
            } else {
                self.remains(&key, &flow);
            }
        } else if flow.idle_secs(times.now_secs) > ORPHAN_SECS && !has_opener(map, &key, &flow)? {
            // Another removal of the flow may have removed the entry since it was read.
            if remove(map, &key)? {
                self.swept.orphans += 1;
                if flow.kind == Kind::UNDNAT {
                    ledger.close(flow.service, Passed::NOTHING, flow.passed);
                }
            }
        }
        Ok(())
    }

    fn remains(&mut self, key: &FlowKey<A>, opener: &Flow<A>) {
        let entries = opener.kinds().len();
        if is_opener(key, opener) {
            self.counts.add_flow(opener);
            self.swept.flows += 1;
            self.swept.open += usize::from(!opener.state().is_terminal());
        }
        self.swept.entries += entries;
        self.swept.fast.bypass += usize::from(opener.rx.has(Seen::BYPASS));
        if opener.is_half_open(key.proto()) {
            self.swept.half_open += 1;
        } else {
            self.lasting += entries as u32;
            self.held.add(opener, key.proto());
        }
        if is_counted(opener) {
            let backend = FrontendKey::new(opener.backend.addr, opener.backend.port, key.proto());
            *self.open.entry(backend).or_default() += 1;
        }
    }
}

pub(super) fn is_over<A: Addr>(
    opener: &Flow<A>,
    key: &FlowKey<A>,
    pressure: Pressure,
    times: Times,
) -> bool {
    opener.idle_secs(times.now_secs)
        > pressure.timeout_secs(opener.state(), key.proto(), times.timeouts)
}

/// Returns true if the flow counts for its backend. As in the programs, a flow counts until both
/// sides have closed it or a side has reset it.
fn is_counted<A: Addr>(opener: &Flow<A>) -> bool {
    opener.has(Flow::<A>::COUNTED) && !opener.state().is_terminal()
}

fn has_opener<A: FamilyNames>(
    map: &HashMap<MapData, FlowKey<A>, Flow<A>>,
    key: &FlowKey<A>,
    flow: &Flow<A>,
) -> Result<bool> {
    let opener = read(map, &flow.opener_key(key.proto()))?;
    // The original entry may belong to a newer flow by now, with another backend or port.
    Ok(opener.is_some_and(|opener| opener.backend == flow.backend && opener.source == flow.source))
}

/// Removes a flow and keeps its counters. Returns false if a program has already removed the flow.
fn close<A: FamilyNames>(
    map: &mut HashMap<MapData, FlowKey<A>, Flow<A>>,
    key: &FlowKey<A>,
    flow: Flow<A>,
    ledger: &mut Ledger<A>,
) -> Result<bool> {
    let returned =
        read(map, &flow.undnat_key(key.proto()))?.map_or(Passed::NOTHING, |undnat| undnat.passed);
    let is_removed = remove_flow(map, key, flow)?;
    if is_removed {
        ledger.close(flow.service, flow.passed, returned);
        ledger.close_outcome(&flow, key.proto());
    }
    Ok(is_removed)
}

/// Removes a flow's entries in the order of their creation, the original entry last: the programs
/// consider a flow complete while that entry exists. Returns true if that entry still existed.
fn remove_flow<A: FamilyNames>(
    map: &mut HashMap<MapData, FlowKey<A>, Flow<A>>,
    key: &FlowKey<A>,
    flow: Flow<A>,
) -> Result<bool> {
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

/// Removes a row. Returns false if there was no such row.
pub(super) fn remove<K: Pod, V: Pod>(map: &mut HashMap<MapData, K, V>, key: &K) -> Result<bool> {
    match map.remove(key) {
        Ok(()) => Ok(true),
        Err(MapError::KeyNotFound) => Ok(false),
        Err(MapError::SyscallError(error))
            if error.io_error.kind() == std::io::ErrorKind::NotFound =>
        {
            Ok(false)
        }
        Err(error) => Err(error.into()),
    }
}
