//! The kernel side of a node: programs loaded, maps taken, devices attached.

mod adopt;
mod attach;
mod counts;
mod drain;
mod flow_reader;
mod flows;
mod loaded;
mod monitor;
mod node;
mod pins;
mod pressure;
mod sizes;
mod sockets;
mod tables;
pub mod verifier;
mod verify;

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::maps::{MapData, PerCpuArray};
use aya::programs::SchedClassifier;
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::counter::{Counter, Event, Reason};
use proxy_common::names::{self, FamilyMaps};
use tokio::sync::Notify;
use tracing::debug;

use pins::{Place, Resize};
use sizes::Room;

pub use attach::{Attached, Attachments, Hooks, Keeper, Mechanism, Stays};
pub use counts::{Counts, FamilyCounts, Totals};
pub use drain::Drain;
pub use flow_reader::{FlowReader, ListedFlow};
pub use flows::{FlowMaps, Swept};
pub use loaded::{Loaded, LoadedProgram, open};
pub use monitor::{AnyRecord, Monitor};
pub use node::NodeMaps;
pub use pins::{
    BPF_DIR, Orphan, Pins, check_netns, ensure_bpf_fs, ensure_no_hidden_links, find, lock_if_there, may_open_by_id,
    remove, serves,
};
pub use pressure::Pressure;
pub use sizes::Sizes;
pub use sockets::{Cgroup, SocketOptions, StaleSockets};
pub use tables::{KernelTables, Maps};
pub use verify::Missing;

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
    /// Where sockets of UDP are led.
    pub stale_sockets: Option<StaleSockets>,
}

/// The programs that a datapath has.
const PROGRAMS: [&str; 4] = [names::INGRESS, names::EGRESS, names::ANCHOR, names::LO];

/// How to load the programs; unset means the default.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// How to attach; by default each device is tried with TCX first.
    pub mechanism: Option<Mechanism>,
    pub sizes: Sizes,
    /// Lead sockets that dial services to backends; unset, they send packets to the services.
    pub sockets: Option<SocketOptions>,
    /// Load what it takes to deliver packets past the stack, which [`NodeMaps::set_node`] then switches on and off.
    pub fast_path: bool,
    /// Keep the hooks' notes where BPF_PROG_TEST_RUN shows them: for tests of more than one hook.
    pub notes_in_mark: bool,
    /// How many packets each CPU may answer in a second, instead of what the object says; for tests.
    pub answers_per_sec: Option<u32>,
}

impl Datapath {
    /// Loads the programs of `object` into the kernel. Nothing is attached yet, and nothing outlives the result.
    pub fn load(object: &[u8], options: Options) -> Result<Self> {
        Self::new(load(object, options, &[])?, options, None)
    }

    /// Loads the programs of `object` over the maps of a predecessor, as far as there are any, and puts them where its
    /// programs are. All that stays when the result goes.
    pub fn take_over(object: &[u8], options: Options, stays: Stays) -> Result<Self> {
        let mut places = stays.pins.plan(object, &options.room())?;
        sockets::remove_unused(&stays.pins, options.sockets)?;
        let unused = sockets::unused_maps(options.sockets);
        places.retain(|place| !unused.contains(&place.name.as_str()));
        let ebpf = load(object, options, &places)?;
        let resize = Resize::new(places);
        resize.copy()?;
        let mut this = Self::new(ebpf, options, Some(stays))?;
        this.attachments.adopt()?;
        // What passed since then.
        resize.copy()?;
        resize.finish()?;
        // A predecessor may have ended between an endpoint's removal and this.
        this.tables.begin_generation()?;
        Ok(this)
    }

    fn new(mut ebpf: Ebpf, options: Options, stays: Option<Stays>) -> Result<Self> {
        let endpoints_removed = Arc::new(Notify::new());
        let leads_udp = options.sockets.is_some_and(|sockets| sockets.udp);
        let stale_sockets = leads_udp.then(|| StaleSockets::new(&ebpf, Arc::clone(&endpoints_removed)));
        Ok(Self {
            stale_sockets: stale_sockets.transpose()?,
            loaded: Loaded::of(&ebpf, &options.programs())?,
            // Before the tables are taken, which it looks into.
            flows: FlowMaps::new(&mut ebpf)?,
            tables: KernelTables::new(&mut ebpf, endpoints_removed)?,
            node: NodeMaps::new(&mut ebpf)?,
            counters: Counters::new(&mut ebpf)?,
            monitor: Monitor::new(&mut ebpf)?,
            attachments: Attachments::new(ebpf, options.mechanism, stays),
        })
    }
}

impl Options {
    /// What is loaded.
    fn programs(&self) -> Vec<&'static str> {
        PROGRAMS.into_iter().chain(self.sockets.into_iter().flat_map(sockets::programs)).collect()
    }

    /// By map, where not what the object says.
    fn room(&self) -> BTreeMap<&'static str, Room> {
        let mut room = self.sizes.room();
        // What nobody looks into takes no room.
        room.extend(sockets::unused_maps(self.sockets).into_iter().map(|name| (name, Room::exactly(1))));
        room
    }
}

/// With the maps of `places` pinned there.
fn load(object: &[u8], options: Options, places: &[Place]) -> Result<Ebpf> {
    raise_memlock();
    let mut loader = verifier::loader();
    for (name, room) in options.room() {
        loader.map_max_entries(name, room.entries);
    }
    for place in places {
        loader.map_pin_path(&place.name, place.target.as_path());
    }
    if options.fast_path {
        loader.override_global(names::FAST_PATH, &1_u32, true);
    }
    let told = options.sockets.map(sockets::Told::of).transpose()?;
    if let Some(told) = &told {
        told.tell(&mut loader);
    }
    if let Some(answers) = &options.answers_per_sec {
        loader.override_global(names::ANSWERS_PER_SEC, answers, true);
    }
    if options.notes_in_mark {
        loader.override_global(names::NOTES_IN_MARK, &1_u32, true);
    }
    let mut ebpf = loader.load(object).context("load the BPF object")?;
    for name in PROGRAMS {
        let program = program(&mut ebpf, name)?;
        verifier::load(|| program.load()).with_context(|| format!("load program {name}"))?;
    }
    if let Some(options) = options.sockets {
        sockets::load(&mut ebpf, options)?;
    }
    #[cfg(feature = "log")]
    log_packets(&mut ebpf)?;
    Ok(ebpf)
}

/// Before Linux 5.11 maps and programs count as locked memory, of which a process may have little by default. Later ones
/// do not ask, so a failure is none: what is too little, the kernel says when it makes a map.
fn raise_memlock() {
    if let Err(error) = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY) {
        debug!(%error, "the limit on locked memory stays");
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

    pub fn event(&self, event: Event) -> Result<u64> {
        self.sum(event.into())
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
