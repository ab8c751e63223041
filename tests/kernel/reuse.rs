//! Loaded programs that serve one test after the other, with cleared maps. Verification takes most
//! of a test's time, and in a virtual machine nearly all of it.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, ensure};
use aya::Pod;
use aya::maps::{Array, HashMap, MapData, PerCpuArray, PerCpuValues};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::balance::{Affinity, AffinityKey};
use proxy_common::connect::Connects;
use proxy_common::cpu::Cpu;
use proxy_common::flow::{AnyKey, Flow, FlowKey};
use proxy_common::foreign_nat::ForeignNat;
use proxy_common::fragment::{FragmentKey, Ports};
use proxy_common::frontend::{EndpointKey, FrontendKey, SetKey};
use proxy_common::half_open::PaddedEnds;
use proxy_common::names::{COUNTERS, CPUS, FamilyMaps, HANDED_OVER, IPV4, IPV6, TOLERATED};
use proxy_common::peer::PeerKey;
use proxy_common::service_counts::ServiceCounts;
use proxy_common::ways::MARKS;
use proxy_core::diff::diff;
use proxy_core::tables::Tables;
use proxy_datapath::object;
use proxy_datapath::{Datapath, Maps, Options, Sizes, open};
use testbed::test_run::Bench;

/// The idle benches with their set-up, the most recently used last.
static IDLE: Mutex<Vec<(Setup, Box<Bench>)>> = Mutex::new(Vec::new());

/// Each bench has some sixty open files; the default limit of a process is 1,024.
const MOST_IDLE: usize = 8;

/// The options that programs are loaded with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Setup {
    /// The number of flow entries; None: the default of a node.
    pub(crate) flow_entries: Option<u32>,
    /// The programs can redirect packets past the stack.
    pub(crate) fast_path: bool,
    pub(crate) kernel: Kernel,
    /// The limit of answers per CPU and second; None: unlimited.
    pub(crate) answers_per_sec: Option<u32>,
    /// The rings of the half-open queue; None: one for all CPUs.
    pub(crate) half_open_rings: Option<u32>,
    /// The programs hand over packets of external clients.
    pub(crate) hands_over: bool,
    /// One client may fill the flow table.
    pub(crate) knows_no_shares: bool,
}

/// What the kernel does for the programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Kernel {
    #[default]
    Usual,
    /// It refuses checksum changes, so that no packet can be rewritten.
    RefusesChecksums,
    /// It refuses programs with tail calls, so that each hook's program has the slow path itself.
    RefusesTailCalls,
}

impl Kernel {
    /// Returns the object with other instructions in place of helper calls.
    fn object(self) -> Result<Vec<u8>> {
        const L4_CSUM_REPLACE: u8 = 11;
        const TAIL_CALL: u8 = 12;
        const NO_HELPER: u8 = 0xff;
        const R0_IS_ENOMEM: [u8; 8] = [0xb7, 0, 0, 0, 0xf4, 0xff, 0xff, 0xff];
        let object = object::embedded()?;
        match self {
            Self::Usual => Ok(object.to_vec()),
            Self::RefusesChecksums => replaced(object, call(L4_CSUM_REPLACE), R0_IS_ENOMEM),
            Self::RefusesTailCalls => replaced(object, call(TAIL_CALL), call(NO_HELPER)),
        }
    }
}

/// A bench that returns to the idle ones on drop, unless its test has panicked or retired it.
pub(crate) struct Reused {
    setup: Setup,
    /// The bench, present until the drop.
    bench: Option<Box<Bench>>,
    is_retired: bool,
}

impl Reused {
    /// Takes or loads a bench with empty tables and counters.
    pub(crate) fn get(setup: Setup) -> Result<Self> {
        let Setup {
            flow_entries,
            fast_path,
            kernel,
            answers_per_sec,
            half_open_rings,
            hands_over,
            knows_no_shares,
        } = setup;
        let idle = take_idle(setup);
        let sizes = Sizes {
            flows: flow_entries,
            ..Sizes::default()
        };
        let flow_room = knows_no_shares.then_some(u32::MAX);
        let options = Options {
            sizes,
            fast_path,
            answers_per_sec,
            half_open_rings,
            hands_over,
            flow_room,
            ..Options::default()
        };
        let load = || Bench::load_object(&kernel.object()?, options).map(Box::new);
        let mut bench = idle.map_or_else(load, Ok)?;
        clear_all(&mut bench.datapath).context("clear the maps of the last test")?;
        // Tests share the programs, and devices of two namespaces may share an index.
        bench.datapath.ways.begin_epoch()?;
        Ok(Self {
            setup,
            bench: Some(bench),
            is_retired: false,
        })
    }

    /// Keeps the bench from later tests: its test leaves a state that clearing does not undo.
    pub(crate) fn retire(&mut self) {
        self.is_retired = true;
    }
}

/// The call of a helper: opcode, registers, offset, and the immediate in native byte order.
fn call(helper: u8) -> [u8; 8] {
    [0x85, 0, 0, 0, helper, 0, 0, 0]
}

fn replaced(object: &[u8], from: [u8; 8], to: [u8; 8]) -> Result<Vec<u8>> {
    let mut object = object.to_vec();
    let mut count = 0;
    for instruction in object
        .chunks_exact_mut(from.len())
        .filter(|chunk| *chunk == from)
    {
        instruction.copy_from_slice(&to);
        count += 1;
    }
    ensure!(count > 4, "only {count} instructions {from:?}");
    Ok(object)
}

fn take_idle(setup: Setup) -> Option<Box<Bench>> {
    let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
    let at = idle.iter().rposition(|(of, _)| *of == setup)?;
    Some(idle.remove(at).1)
}

impl Deref for Reused {
    type Target = Bench;

    fn deref(&self) -> &Bench {
        self.bench
            .as_ref()
            .expect("it is there until it is dropped")
    }
}

impl DerefMut for Reused {
    fn deref_mut(&mut self) -> &mut Bench {
        self.bench
            .as_mut()
            .expect("it is there until it is dropped")
    }
}

impl Drop for Reused {
    fn drop(&mut self) {
        if !std::thread::panicking() && !self.is_retired {
            let bench = self.bench.take().map(|bench| (self.setup, bench));
            let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
            idle.extend(bench);
            if idle.len() > MOST_IDLE {
                idle.remove(0);
            }
        }
    }
}

fn clear_all(datapath: &mut Datapath) -> Result<()> {
    let attached: Vec<u32> = datapath.attachments.devices().keys().copied().collect();
    attached
        .into_iter()
        .for_each(|ifindex| drop(datapath.attachments.detach(ifindex)));
    for change in diff(&datapath.tables.read()?, &Tables::default()) {
        datapath.tables.apply(&change)?;
    }
    datapath.node.set_devices(&BTreeMap::new())?;
    datapath.node.set_addrs(&BTreeMap::new())?;
    datapath.node.set_pods(&[], &[], &[])?;
    datapath.node.set_service_cidrs(&[])?;
    datapath.monitor.watch(false)?;
    let maps = &datapath.loaded.maps;
    zero::<u64>(maps, COUNTERS)?;
    zero::<Cpu>(maps, CPUS)?;
    clear_family::<Addr4>(maps, IPV4)?;
    clear_family::<Addr6>(maps, IPV6)?;
    clear::<AnyKey, u32>(maps, TOLERATED)?;
    clear::<AnyKey, PeerKey>(maps, HANDED_OVER)?;
    // A sweep without flows forgets the namespaces of services. The marks of the last test's ends
    // expire after this many rounds.
    for _ in 0..MARKS {
        datapath.flows.sweep()?;
    }
    Ok(())
}

/// Clears the maps that the programs write.
fn clear_family<A: Addr + Pod>(maps: &BTreeMap<String, u32>, names: FamilyMaps) -> Result<()> {
    clear::<FlowKey<A>, Flow<A>>(maps, names.flows)?;
    clear::<FlowKey<A>, ForeignNat>(maps, names.foreign_nat)?;
    clear::<AffinityKey<A>, Affinity<A>>(maps, names.affinity)?;
    clear::<AffinityKey<A>, Affinity<A>>(maps, names.new_affinity)?;
    clear::<A, u32>(maps, names.clients)?;
    let mut lasting: Array<MapData, u32> = open(maps, names.lasting)?;
    lasting
        .set(0, 0, 0)
        .context("clear the count of lasting flows")?;
    clear::<SetKey<A>, u32>(maps, names.cursors)?;
    clear::<FrontendKey<A>, u32>(maps, names.connections)?;
    clear::<FragmentKey<A>, Ports>(maps, names.fragments)?;
    clear::<FragmentKey<A>, Ports>(maps, names.far_fragments)?;
    let mut ends: Array<MapData, PaddedEnds> = open(maps, names.half_open_ends)?;
    (0..ends.len())
        .try_for_each(|ring| ends.set(ring, PaddedEnds::EMPTY, 0))
        .context("empty the half-open rings")?;
    clear::<EndpointKey<A>, Connects>(maps, names.connects)?;
    clear::<FrontendKey<A>, ServiceCounts>(maps, names.service_counts)
}

fn clear<K: Pod, V: Pod>(maps: &BTreeMap<String, u32>, name: &str) -> Result<()> {
    let mut map: HashMap<MapData, K, V> = open(maps, name)?;
    let keys: Vec<K> = map
        .keys()
        .collect::<Result<_, _>>()
        .with_context(|| format!("read {name}"))?;
    keys.iter()
        .try_for_each(|key| map.remove(key))
        .with_context(|| format!("clear {name}"))
}

/// Zeroes a map on all CPUs.
fn zero<V: Pod + Default>(maps: &BTreeMap<String, u32>, name: &str) -> Result<()> {
    let mut map: PerCpuArray<MapData, V> = open(maps, name)?;
    for index in 0..map.len() {
        let zeros = map
            .get(&index, 0)?
            .iter()
            .map(|_| V::default())
            .collect::<Vec<V>>();
        map.set(index, PerCpuValues::try_from(zeros)?, 0)
            .with_context(|| format!("write {name}"))?;
    }
    Ok(())
}
