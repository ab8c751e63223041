//! The kernel side of a node: loads programs, opens maps, attaches programs to devices.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use anyhow::{Context, Result};
use aya::Ebpf;
use aya::util::nr_cpus;
use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use proxy_common::flow::Timeouts;
use proxy_common::half_open::{Rings, all_places};
use proxy_common::hook::{PacketHook, SlowProgram};
use proxy_common::maps::FLOWS;
use proxy_common::names::{self, FamilyMaps};
use tokio::sync::Notify;
use tracing::{debug, warn};

use crate::attach::{Attachments, Mechanism};
use crate::counters::Counters;
use crate::fast_path_ways::FastPathWays;
use crate::flows::FlowMaps;
use crate::foreign_nat::ForeignNatPorts;
use crate::liberal_flows::LiberalFlows;
use crate::loaded::Loaded;
use crate::monitor_reader::Monitor;
use crate::node_maps::NodeMaps;
use crate::object;
use crate::persistence::Persistence;
use crate::pins::{PinPath, Resize, retired};
use crate::sizes::{MapSize, Sizes, half_open_places};
use crate::slow_path::{self, SlowPin};
use crate::sockets::{self, PodRows, SocketOptions, StaleSockets};
use crate::tables::KernelTables;
use crate::verifier;
use crate::vote_reader::VoteReader;

pub struct Datapath {
    pub tables: KernelTables,
    pub flows: FlowMaps,
    pub votes: VoteReader,
    pub node: NodeMaps,
    pub foreign_nat: ForeignNatPorts,
    /// The fast path's controls: epoch and deadline.
    pub ways: FastPathWays,
    /// The requests to let flows bypass the network stack although conntrack tracks them.
    pub liberal: LiberalFlows,
    pub counters: Counters,
    pub monitor: Monitor,
    pub attachments: Attachments,
    pub loaded: Loaded,
    /// The task that aborts stale UDP sockets, if UDP sockets are translated.
    pub stale_sockets: Option<StaleSockets>,
    /// The table of pods with socket load balancing; `None` if no pods are selected.
    pub pod_rows: Option<PodRows>,
}

/// The options of a load. Unset options have defaults.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// The mechanism that attaches programs; if unset, TCX, then clsact.
    pub mechanism: Option<Mechanism>,
    pub sizes: Sizes,
    /// The options of socket translation. If unset, only packet programs run.
    pub sockets: Option<SocketOptions>,
    /// Loads the programs that redirect packets past the network stack. [`NodeMaps::set_node`]
    /// enables and disables them.
    pub fast_path: bool,
    /// Set if the programs hand over packets of external clients.
    pub hands_over: bool,
    /// Loads the hooks' programs that contain the slow path, instead of one slow path for all hooks:
    /// see [`slow_path`].
    pub whole: bool,
    pub timeouts: Timeouts,
    /// Keeps the hooks' packet marks, so that BPF_PROG_TEST_RUN returns them, for tests of several
    /// hooks.
    pub exposes_packet_mark: bool,
    /// The maximum number of answers that a CPU sends in a second, instead of the object's value.
    /// For tests.
    pub answers_per_sec: Option<u32>,
    /// The table capacity from which clients' shares are calculated, instead of the table's size.
    /// For tests.
    pub flow_room: Option<u32>,
    /// The number of rings of the half-open queue, instead of one per CPU. For tests.
    pub half_open_rings: Option<u32>,
}

impl Datapath {
    /// Loads the programs of `object` into the kernel without attaching them. A drop unloads them.
    pub fn load(object: &[u8], mut options: Options) -> Result<Self> {
        let (ebpf, unfit) = load_fitting(object, &mut options, &[])?;
        let mut this = Self::new(ebpf, options, None)?;
        this.attachments
            .note_sockets_left(unfit.map(|why| format!("{why:#}")));
        Ok(this)
    }

    /// Loads the programs of `object` with a predecessor's maps, if any, and replaces the
    /// predecessor's programs. Maps and programs outlive the result.
    pub fn take_over(
        object: &[u8],
        mut options: Options,
        persistence: Persistence,
    ) -> Result<Self> {
        let mut pins = persistence.pins.plan(object, &options.map_sizes())?;
        let maps = persistence.pins.maps();
        sockets::remove_unused(&persistence.pins, options.sockets)?;
        let mut unused = sockets::unused_maps(options.sockets);
        unused.extend(options.unused_of_hand_over());
        persistence.pins.remove_maps(&unused)?;
        pins.retain(|pin| !unused.contains(&pin.name.as_str()));
        options.whole |= !persistence.pins.are_of_host() || persistence.pins.are_of_filters()?;
        let (ebpf, unfit) = load_fitting(object, &mut options, &pins)?;
        if unfit.is_some() {
            sockets::remove_unused(&persistence.pins, None)?;
        }
        // Before the first program is attached: see `slow_path`.
        let mut slow_pin = if options.whole {
            None
        } else {
            Some(SlowPin::new(&persistence.pins, &ebpf)?)
        };
        let slow = persistence.pins.slow();
        let resize = Resize::new(pins);
        resize.copy()?;
        let mut this = Self::new(ebpf, options, Some(persistence))?;
        slow_pin.iter_mut().for_each(SlowPin::keep);
        let has_all = this.attachments.adopt()?;
        if !has_all {
            this.flows.share();
        }
        if let Some(why) = unfit {
            this.attachments.leave_sockets(format!("{why:#}"));
        }
        // Packets have changed entries since the first copy.
        resize.copy()?;
        resize.finish()?;
        if has_all {
            slow_path::remove_pins(&slow, slow_pin.as_ref())?;
        }
        retired::remove(&maps)?;
        this.attachments.keep_maps()?;
        // A predecessor may have exited between the removal of an endpoint and the new generation.
        this.tables.begin_generation()?;
        Ok(this)
    }

    fn new(mut ebpf: Ebpf, options: Options, persistence: Option<Persistence>) -> Result<Self> {
        let endpoints_removed = Arc::new(Notify::new());
        let leads_udp = options.sockets.is_some_and(|sockets| sockets.udp);
        let stale_sockets =
            leads_udp.then(|| StaleSockets::new(&ebpf, Arc::clone(&endpoints_removed)));
        let leads_pods = options.sockets.is_some_and(|sockets| sockets.pods);
        let loaded = Loaded::of(&ebpf, &options.programs())?;
        // Each constructor opens maps that a later constructor takes out of `ebpf`.
        let liberal = LiberalFlows::new(&mut ebpf)?;
        let votes = VoteReader::new(&ebpf)?;
        let flows = FlowMaps::new(&mut ebpf, options.timeouts)?;
        let ways = FastPathWays::new(&mut ebpf)?;
        Ok(Self {
            pod_rows: leads_pods
                .then(|| sockets::pods::rows(&mut ebpf))
                .transpose()?,
            stale_sockets: stale_sockets.transpose()?,
            loaded,
            liberal,
            votes,
            flows,
            tables: KernelTables::new(&mut ebpf, endpoints_removed)?,
            node: NodeMaps::new(&mut ebpf, ways.clone())?,
            foreign_nat: ForeignNatPorts::new(&ebpf)?,
            ways,
            counters: Counters::new(&mut ebpf)?,
            monitor: Monitor::new(&mut ebpf)?,
            attachments: Attachments::new(ebpf, options.mechanism, persistence),
        })
    }
}

impl Options {
    fn programs(&self) -> Vec<&'static str> {
        let slow = if self.whole {
            &[][..]
        } else {
            &slow_path::COMMON
        };
        PacketHook::common_programs()
            .chain(slow.iter().map(|slow| slow.program()))
            .chain(self.sockets.into_iter().flat_map(sockets::programs))
            .collect()
    }

    /// Returns the sizes of maps that differ from the object's sizes.
    fn map_sizes(&self) -> BTreeMap<&'static str, MapSize> {
        let mut sizes = self.sizes.map_sizes();
        // A map that no program uses gets the minimum size.
        let unused = sockets::unused_tables(self.sockets).chain(self.unused_of_hand_over());
        sizes.extend(unused.map(|name| (name, MapSize::exactly(1))));
        sizes
    }

    /// Returns the maps that only a node which hands packets over uses, unless it does.
    fn unused_of_hand_over(&self) -> impl Iterator<Item = &'static str> {
        [names::PEERS, names::HANDED_OVER]
            .into_iter()
            .filter(|_| !self.hands_over)
    }

    /// Returns a map's maximum number of entries, for the family with fewer. A pinned map may be
    /// larger than the wanted size.
    fn room(&self, map: fn(&FamilyMaps) -> &'static str, of_object: u32, pins: &[PinPath]) -> u32 {
        let sizes = self.map_sizes();
        let of_family = |names: &FamilyMaps| {
            let pinned = pins
                .iter()
                .find(|pin| pin.name == map(names))
                .map(|pin| pin.entries);
            pinned
                .or_else(|| sizes.get(map(names)).map(|size| size.entries))
                .unwrap_or(of_object)
        };
        of_family(&names::IPV4).min(of_family(&names::IPV6))
    }

    /// Divides the half-open queue among the CPUs.
    fn rings(&self, flows: u32, pins: &[PinPath]) -> Result<Rings> {
        let waiting = half_open_places(flows);
        let all = self.room(|names| names.half_open, all_places(FLOWS / 4), pins);
        // The rings may be older or newer than a resized flow table.
        let places = waiting
            .min((u64::from(waiting) * u64::from(all) / u64::from(all_places(waiting))) as u32);
        let cpus = || {
            nr_cpus()
                .map_err(|(file, error)| anyhow::Error::from(error).context(format!("read {file}")))
        };
        let rings = self
            .half_open_rings
            .map_or_else(cpus, |rings| Ok(rings as usize))?;
        Ok(Rings::new(places, u32::try_from(rings).unwrap_or(u32::MAX)))
    }
}

/// The context of errors in socket programs.
#[derive(Debug)]
struct OfSockets;

impl fmt::Display for OfSockets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the programs for sockets")
    }
}

/// The context of errors in packet programs that call the slow path.
#[derive(Debug)]
struct OfSlowPath;

impl fmt::Display for OfSlowPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("programs that call the slow path")
    }
}

/// Loads the object. If the kernel refuses optional programs, loads the rest and returns the
/// kernel's error too.
fn load_fitting(
    object: &[u8],
    options: &mut Options,
    pins: &[PinPath],
) -> Result<(Ebpf, Option<anyhow::Error>)> {
    options.whole |= options.mechanism == Some(Mechanism::Clsact) || !slow_path::may_be_separate();
    let mut unfit = None;
    loop {
        match load(object, *options, pins) {
            Err(error)
                if error.is::<OfSockets>()
                    && options.sockets.is_some_and(|sockets| sockets.is_optional) =>
            {
                options.sockets = None;
                unfit = Some(error);
            }
            // A kernel without its compiler has no tail calls in programs with functions.
            Err(error) if error.is::<OfSlowPath>() && !options.whole => {
                warn!(
                    error = format!("{error:#}"),
                    "loading the slow path into each hook's program"
                );
                options.whole = true;
            }
            loaded => return Ok((loaded?, unfit)),
        }
    }
}

fn load(object: &[u8], options: Options, pins: &[PinPath]) -> Result<Ebpf> {
    raise_memlock();
    let mut loader = verifier::loader();
    for (name, size) in options.map_sizes() {
        loader.map_max_entries(name, size.entries);
    }
    for pin in pins {
        loader.map_pin_path(&pin.name, pin.target.as_path());
    }
    if options.hands_over {
        loader.override_global(names::HANDS_OVER, &1_u32, true);
    }
    if options.fast_path {
        loader.override_global(names::FAST_PATH, &1_u32, true);
    }
    let socket_globals = options
        .sockets
        .map(sockets::SocketGlobals::of)
        .transpose()
        .context(OfSockets)?;
    if let Some(socket_globals) = &socket_globals {
        socket_globals.set(&mut loader);
    }
    if let Some(answers) = &options.answers_per_sec {
        loader.override_global(names::ANSWERS_PER_SEC, answers, true);
    }
    for (name, secs) in [
        (
            names::TCP_ESTABLISHED_SECS,
            &options.timeouts.tcp_established,
        ),
        (
            names::TCP_HALF_CLOSED_SECS,
            &options.timeouts.tcp_half_closed,
        ),
        (names::UDP_SECS, &options.timeouts.udp),
        (names::UDP_STREAM_SECS, &options.timeouts.udp_stream),
    ] {
        loader.override_global(name, secs, true);
    }
    let flows = options.room(|names| names.flows, FLOWS, pins);
    let room = options.flow_room.unwrap_or(flows);
    loader.override_global(names::FLOW_ROOM, &room, true);
    let rings = options.rings(flows, pins)?;
    loader.override_global(names::HALF_OPEN_RINGS, &rings.count, true);
    loader.override_global(names::HALF_OPEN_PLACES, &rings.places, true);
    if options.exposes_packet_mark {
        loader.override_global(names::EXPOSES_PACKET_MARK, &1_u32, true);
    }
    let object = if options.whole {
        object::with_contained_slow_path(object)?.into()
    } else {
        Cow::Borrowed(object)
    };
    let mut ebpf = loader.load(&object).context("load the BPF object")?;
    if options.whole {
        verifier::load_all(&mut ebpf, PacketHook::common_programs())?;
    } else {
        // The slow path first: it takes the longest.
        let slow = slow_path::COMMON.into_iter().map(SlowProgram::program);
        let programs = slow.chain(PacketHook::common_programs());
        verifier::load_all(&mut ebpf, programs).context(OfSlowPath)?;
        slow_path::load(&mut ebpf, slow_path::COMMON).context(OfSlowPath)?;
    }
    if let Some(options) = options.sockets {
        sockets::load(&mut ebpf, options).context(OfSockets)?;
    }
    #[cfg(feature = "log")]
    log_packets(&mut ebpf)?;
    Ok(ebpf)
}

/// Raises the limit on locked memory. Before Linux 5.11 maps and programs count as locked memory,
/// and the default limit is low. A failure is ignored: later kernels have no such limit, and older
/// kernels report a low limit when a map is created.
fn raise_memlock() {
    if let Err(error) = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY) {
        debug!(%error, "the limit on locked memory stays");
    }
}

/// Forwards the programs' log lines about single packets to the agent's log.
#[cfg(feature = "log")]
fn log_packets(ebpf: &mut Ebpf) -> Result<()> {
    let logger = aya_log::EbpfLogger::init(ebpf)
        .context("the BPF object was built without its feature `log`")?;
    #[expect(
        deprecated,
        reason = "its successor is unsafe, for descriptors that change: the logger keeps its own"
    )]
    let mut logger =
        tokio::io::unix::AsyncFd::with_interest(logger, tokio::io::Interest::READABLE)?;
    tokio::spawn(async move {
        while let Ok(mut guard) = logger.readable_mut().await {
            guard.get_inner_mut().flush();
            guard.clear_ready();
        }
    });
    Ok(())
}
