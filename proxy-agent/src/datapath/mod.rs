//! The kernel side of a node: programs loaded, maps taken, devices attached.

mod attach;
mod flows;
mod tables;

use anyhow::{Context, Result};
use aya::maps::{Array, HashMap, MapData, PerCpuArray};
use aya::programs::SchedClassifier;
use aya::{Ebpf, EbpfLoader};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::counter::{Counter, Event, Reason};
use proxy_common::device::{Device, Node};
use proxy_common::names::{self, FamilyMaps};

pub use attach::{Attached, Attachments, Hooks, Mechanism};
pub use flows::{FlowMaps, Swept};
pub use tables::{KernelTables, Maps};

/// The programs, loaded, and their maps.
pub struct Datapath {
    /// The maps that the agent's tables are written to.
    pub tables: KernelTables,
    pub flows: FlowMaps,
    pub node: NodeMaps,
    pub counters: Counters,
    pub attachments: Attachments,
}

/// How to load the programs; unset means the default.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// How to attach; by default each device is tried with TCX first.
    pub mechanism: Option<Mechanism>,
    /// Room in each family's flow table, in entries: two or four a flow.
    pub flow_entries: Option<u32>,
}

impl Datapath {
    /// Loads the programs of `object` into the kernel. Nothing is attached yet.
    pub fn load(object: &[u8], options: Options) -> Result<Self> {
        let mut loader = EbpfLoader::new();
        if let Some(flow_entries) = options.flow_entries {
            loader.map_max_entries(names::IPV4.flows, flow_entries).map_max_entries(names::IPV6.flows, flow_entries);
        }
        let mut ebpf = loader.load(object).context("load the BPF object")?;
        for name in [names::INGRESS, names::EGRESS, names::ANCHOR] {
            program(&mut ebpf, name)?.load().with_context(|| format!("load program {name}"))?;
        }
        #[cfg(feature = "log")]
        log_packets(&mut ebpf)?;
        Ok(Self {
            tables: KernelTables::new(&mut ebpf)?,
            flows: FlowMaps::new(&mut ebpf)?,
            node: NodeMaps::new(&mut ebpf)?,
            counters: Counters::new(&mut ebpf)?,
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

/// What the programs know of this node.
pub struct NodeMaps {
    node: Array<MapData, Node>,
    devices: HashMap<MapData, u32, Device>,
    addrs4: HashMap<MapData, Addr4, u32>,
    addrs6: HashMap<MapData, Addr6, u32>,
}

impl NodeMaps {
    fn new(ebpf: &mut Ebpf) -> Result<Self> {
        Ok(Self {
            node: take(ebpf, names::NODE)?,
            devices: take(ebpf, names::DEVICES)?,
            addrs4: take(ebpf, names::IPV4.addrs)?,
            addrs6: take(ebpf, names::IPV6.addrs)?,
        })
    }

    pub fn set_node(&mut self, node: Node) -> Result<()> {
        self.node.set(0, node, 0).context("write NODE")
    }

    /// Makes the kernel's devices equal to `want`.
    pub fn set_devices(&mut self, want: &std::collections::BTreeMap<u32, Device>) -> Result<()> {
        replace(&mut self.devices, want, names::DEVICES)
    }

    /// Makes the kernel's list of the node's own addresses, each with its device, equal to `want`.
    pub fn set_addrs(&mut self, want: &std::collections::BTreeMap<std::net::IpAddr, u32>) -> Result<()> {
        replace(&mut self.addrs4, &of_family(want), names::IPV4.addrs)?;
        replace(&mut self.addrs6, &of_family(want), names::IPV6.addrs)
    }
}

fn of_family<A: Addr>(addrs: &std::collections::BTreeMap<std::net::IpAddr, u32>) -> std::collections::BTreeMap<A, u32> {
    addrs.iter().filter_map(|(addr, ifindex)| Some((A::from_ip(*addr)?, *ifindex))).collect()
}

/// Writes what differs: puts first, so that nothing known is missing for a moment.
fn replace<K, V>(map: &mut HashMap<MapData, K, V>, want: &std::collections::BTreeMap<K, V>, name: &str) -> Result<()>
where
    K: aya::Pod + Ord,
    V: aya::Pod + PartialEq,
{
    let now: std::collections::BTreeMap<K, V> =
        map.iter().collect::<Result<_, _>>().with_context(|| format!("read {name}"))?;
    for (key, value) in want.iter().filter(|(key, value)| now.get(key) != Some(value)) {
        map.insert(key, value, 0).with_context(|| format!("write {name}"))?;
    }
    for key in now.keys().filter(|key| !want.contains_key(key)) {
        map.remove(key).with_context(|| format!("delete from {name}"))?;
    }
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
trait Names: Addr {
    const MAPS: FamilyMaps;
}

impl Names for Addr4 {
    const MAPS: FamilyMaps = names::IPV4;
}

impl Names for Addr6 {
    const MAPS: FamilyMaps = names::IPV6;
}
