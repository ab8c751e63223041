//! The kernel side of a node: programs loaded, maps taken, devices attached.

mod attach;
mod counts;
mod flows;
mod loaded;
mod monitor;
mod node;
mod tables;

use anyhow::{Context, Result};
use aya::maps::{MapData, PerCpuArray};
use aya::programs::SchedClassifier;
use aya::{Ebpf, EbpfLoader};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::counter::{Counter, Event, Reason};
use proxy_common::names::{self, FamilyMaps};

pub use attach::{Attached, Attachments, Hooks, Mechanism};
pub use counts::{Counts, FamilyCounts, Totals};
pub use flows::{FlowMaps, Swept};
pub use loaded::{Loaded, LoadedProgram, open};
pub use monitor::{AnyRecord, Monitor};
pub use node::NodeMaps;
pub use tables::{KernelTables, Maps};

/// The programs, loaded, and their maps.
pub struct Datapath {
    /// The maps that the agent's tables are written to.
    pub tables: KernelTables,
    pub flows: FlowMaps,
    pub node: NodeMaps,
    pub counters: Counters,
    pub monitor: Monitor,
    pub attachments: Attachments,
    pub loaded: Loaded,
}

/// The programs that a datapath has.
const PROGRAMS: [&str; 4] = [names::INGRESS, names::EGRESS, names::ANCHOR, names::LO];

/// How to load the programs; unset means the default.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// How to attach; by default each device is tried with TCX first.
    pub mechanism: Option<Mechanism>,
    /// Room in each family's flow table, in entries: two or four a flow.
    pub flow_entries: Option<u32>,
    /// Keep the hooks' notes where BPF_PROG_TEST_RUN shows them: for tests of more than one hook.
    pub notes_in_mark: bool,
}

impl Datapath {
    /// Loads the programs of `object` into the kernel. Nothing is attached yet.
    pub fn load(object: &[u8], options: Options) -> Result<Self> {
        let mut loader = EbpfLoader::new();
        if let Some(flow_entries) = options.flow_entries {
            loader.map_max_entries(names::IPV4.flows, flow_entries).map_max_entries(names::IPV6.flows, flow_entries);
        }
        if options.notes_in_mark {
            loader.override_global(names::NOTES_IN_MARK, &1_u32, true);
        }
        let mut ebpf = loader.load(object).context("load the BPF object")?;
        for name in PROGRAMS {
            program(&mut ebpf, name)?.load().with_context(|| format!("load program {name}"))?;
        }
        #[cfg(feature = "log")]
        log_packets(&mut ebpf)?;
        Ok(Self {
            loaded: Loaded::of(&ebpf, &PROGRAMS)?,
            // Before the tables are taken, which it looks into.
            flows: FlowMaps::new(&mut ebpf)?,
            tables: KernelTables::new(&mut ebpf)?,
            node: NodeMaps::new(&mut ebpf)?,
            counters: Counters::new(&mut ebpf)?,
            monitor: Monitor::new(&mut ebpf)?,
            attachments: Attachments::new(ebpf, options.mechanism),
        })
    }
}

fn program<'a>(ebpf: &'a mut Ebpf, name: &str) -> Result<&'a mut SchedClassifier> {
    let program = ebpf.program_mut(name).with_context(|| format!("no program {name} in the BPF object"))?;
    program.try_into().with_context(|| format!("program {name}"))
}

/// Takes a map out of the object; its type is checked against the kernel's.
fn take<M: TryFrom<aya::maps::Map, Error = aya::maps::MapError>>(ebpf: &mut Ebpf, name: &str) -> Result<M> {
    let map = ebpf.take_map(name).with_context(|| format!("no map {name} in the BPF object"))?;
    M::try_from(map).with_context(|| format!("map {name}"))
}

/// Hands what the programs log of single packets to the agent's own log.
#[cfg(feature = "log")]
fn log_packets(ebpf: &mut Ebpf) -> Result<()> {
    let logger = aya_log::EbpfLogger::init(ebpf).context("the BPF object was built without its feature `log`")?;
    let mut logger = tokio::io::unix::AsyncFd::with_interest(logger, tokio::io::Interest::READABLE)?;
    tokio::spawn(async move {
        while let Ok(mut guard) = logger.readable_mut().await {
            guard.get_inner_mut().flush();
            guard.clear_ready();
        }
    });
    Ok(())
}

/// What the programs have counted since they were loaded.
pub struct Counters(PerCpuArray<MapData, u64>);

impl Counters {
    fn new(ebpf: &mut Ebpf) -> Result<Self> {
        Ok(Self(take(ebpf, names::COUNTERS)?))
    }

    pub fn events(&self) -> Result<Vec<(Event, u64)>> {
        Event::ALL.iter().map(|event| Ok((*event, self.sum((*event).into())?))).collect()
    }

    pub fn reasons(&self) -> Result<Vec<(Reason, u64)>> {
        Reason::ALL.iter().map(|reason| Ok((*reason, self.sum((*reason).into())?))).collect()
    }

    fn sum(&self, counter: Counter) -> Result<u64> {
        let values = self.0.get(&counter.index(), 0).context("read COUNTERS")?;
        Ok(values.iter().sum())
    }
}

/// The names of a family's maps.
pub(crate) trait Names: Addr + aya::Pod {
    const MAPS: FamilyMaps;
}

impl Names for Addr4 {
    const MAPS: FamilyMaps = names::IPV4;
}

impl Names for Addr6 {
    const MAPS: FamilyMaps = names::IPV6;
}
