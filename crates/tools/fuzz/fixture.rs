//! Runs the programs on single packets, with their tables.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use anyhow::{Context, Result, ensure};
use aya::Pod;
use aya::maps::{Array, HashMap, MapData, PerCpuArray, PerCpuValues};
use aya::util::nr_cpus;
use nix::time::{ClockId, clock_gettime};
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto, SockAddr};
use proxy_common::balance::{Affinity, AffinityKey};
use proxy_common::counter::Event;
use proxy_common::cpu::Cpu;
use proxy_common::flow::{Flow, FlowKey, Hook, Kind, Seen};
use proxy_common::foreign_nat::ForeignNat;
use proxy_common::fragment::{FragmentKey, Ports};
use proxy_common::frontend::FrontendKey;
use proxy_common::half_open::{CLASSES, PaddedEnds};
use proxy_common::names::{ANCHOR, CPUS, EGRESS, FamilyMaps, INGRESS, IPV4, IPV6, LO};
use proxy_common::service_counts::ServiceCounts;
use proxy_datapath::test_run::{Field, SkBuff, test_run};
use proxy_datapath::{Options, Sizes};
use testbed::flow_table::older;
use testbed::reference::cluster::Cluster;
use testbed::reference::node::Node;
use testbed::reference::place::Device;
use testbed::test_run::{Bench, Verdict};

use crate::fast::Fast;
use crate::model::{self, At, Counts, Got, Leg, Model, Sent, Table, Tuple};

pub(crate) struct Fixture {
    pub(crate) node: Node,
    /// The size of each family's flow table.
    pub(crate) room: u32,
    /// True if the programs have the fast path.
    pub(crate) is_fast: bool,
    fast: Fast,
    v4: Tables<Addr4>,
    v6: Tables<Addr6>,
    clock: Clock,
    /// The counters at the last reading.
    counts: Counts,
    out: Vec<u8>,
    cb: u8,
}

struct Tables<A: Addr> {
    flows: Vec<HashMap<MapData, FlowKey<A>, Flow<A>>>,
    affinity: [HashMap<MapData, AffinityKey<A>, Affinity<A>>; 2],
    fragments: [HashMap<MapData, FragmentKey<A>, Ports>; 2],
    clients: HashMap<MapData, A, u32>,
    lasting: Array<MapData, u32>,
    foreign_nat: HashMap<MapData, FlowKey<A>, ForeignNat>,
    half_open_ends: Array<MapData, PaddedEnds>,
    connections: HashMap<MapData, FrontendKey<A>, u32>,
    counts: HashMap<MapData, FrontendKey<A>, ServiceCounts>,
}

/// The programs' clock until the kernel's next tick, which may come milliseconds late in a new
/// second.
struct Clock {
    cpus: PerCpuArray<MapData, Cpu>,
    second: u32,
}

/// An entry of the flow table: its action, and the state of its flow.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    leg: &'static str,
    peers: [SocketAddr; 4],
    passed: (u64, u64),
    is_bypass: bool,
    said: Option<(bool, bool, bool, bool, bool, u32)>,
}

impl Fixture {
    pub(crate) fn new(is_fast: bool, room: u32) -> Result<Self> {
        let sizes = Sizes {
            flows: Some(room),
            ..Sizes::default()
        };
        let node = Node::new(
            "here",
            Options {
                sizes,
                fast_path: is_fast,
                ..Options::default()
            },
        )?;
        let v4 = Tables::new(&node.bench, &IPV4)?;
        let v6 = Tables::new(&node.bench, &IPV6)?;
        let clock = Clock {
            cpus: node.bench.map(CPUS)?,
            second: 0,
        };
        let mut fixture = Self {
            node,
            room,
            is_fast,
            fast: Fast::NOTHING,
            v4,
            v6,
            clock,
            counts: Counts::default(),
            out: vec![0; 1 << 14],
            cb: 0,
        };
        fixture.counts = fixture.read_counts()?;
        Ok(fixture)
    }

    /// Runs the program of the packet's hook. Returns the second of the run too, if it is
    /// unambiguous.
    pub(crate) fn run(&mut self, sent: &Sent) -> Result<(Got, Option<u32>)> {
        let (program, device) = match sent.at {
            At::Ingress(device) => (INGRESS, device),
            At::Egress(device) => (EGRESS, device),
            At::Anchor => (ANCHOR, Device::Anchor),
            At::Lo => (LO, Device::Lo),
        };
        let ifindex = self.node.ifindexes[&device];
        // The mark shows whether the packet came in by a device.
        let came_in_by = match sent.at {
            At::Egress(_) | At::Lo => sent.by.map_or(0, |device| self.node.ifindexes[&device]),
            _ if sent.came_in => ifindex,
            _ => 0,
        };
        // Other programs may have left values in the control block.
        self.cb = self.cb.wrapping_add(1);
        let cb = Field::CB.map(|field| (field, u32::from_ne_bytes([self.cb; 4])));
        let fields = [
            (Field::MARK, sent.mark),
            (Field::INGRESS_IFINDEX, came_in_by),
            (Field::IFINDEX, ifindex),
            (Field::GSO_SEGS, sent.segments),
        ];
        let context = SkBuff::new(fields.into_iter().chain(cb));
        let program = self.node.bench.datapath.attachments.program(program)?;
        let before = self.clock.now_secs()?;
        let ran = test_run(program, &sent.frame, Some(&context), &mut self.out)?;
        let second = Some(before).filter(|before| now_secs().is_ok_and(|after| after == *before));
        let got = Got {
            verdict: Verdict::from(ran.action),
            mark: ran.context.get(Field::MARK),
            frame: self.out[..ran.len].to_vec(),
        };
        Ok((got, second))
    }

    /// Sets the objects and the node to those of `cluster`.
    pub(crate) fn enter(&mut self, cluster: &Cluster) -> Result<()> {
        self.node.fast = self.fast.facts();
        self.node.enter(cluster)?;
        // Longer than a run.
        self.node
            .bench
            .datapath
            .ways
            .open_for(self.fast.has(Fast::LEASE).then_some(1_000_000))?;
        self.node.bench.datapath.ways.begin_epoch()
    }

    /// Sets the fast path, and returns the settings that the programs get.
    pub(crate) fn set_fast(&mut self, fast: Fast, cluster: &Cluster) -> Result<Fast> {
        self.fast = fast;
        self.enter(cluster)?;
        Ok(if self.is_fast { fast } else { Fast::NOTHING })
    }

    /// Clears the state of all clients.
    pub(crate) fn forget(&mut self) -> Result<()> {
        self.take_answers_back()?;
        self.v4.forget()?;
        self.v6.forget()
    }

    /// Ages the tables by `secs` without packets.
    pub(crate) fn age(&mut self, secs: u32) -> Result<()> {
        self.v4.age(secs)?;
        self.v6.age(secs)
    }

    /// Returns backend and source of the flow with this opener.
    pub(crate) fn chosen(
        &self,
        table: Table,
        proto: u8,
        src: SocketAddr,
        dst: SocketAddr,
    ) -> Result<(SocketAddr, SocketAddr)> {
        if src.is_ipv4() {
            self.v4.chosen(table, proto, src, dst)
        } else {
            self.v6.chosen(table, proto, src, dst)
        }
    }

    /// Returns the counts since the last call.
    pub(crate) fn counted(&mut self) -> Result<Counts> {
        let now = self.read_counts()?;
        let before = std::mem::replace(&mut self.counts, now.clone());
        let mut since = Counts::default();
        let grown = |now: u64, before: Option<&u64>| now - before.copied().unwrap_or(0);
        since.events.extend(
            now.events
                .iter()
                .map(|(event, n)| (*event, grown(*n, before.events.get(event)))),
        );
        since.reasons.extend(
            now.reasons
                .iter()
                .map(|(reason, n)| (*reason, grown(*n, before.reasons.get(reason)))),
        );
        // The warning to the operator is not modelled, nor the event that needs 0.3 s.
        since
            .events
            .retain(|event, n| *n > 0 && *event != Event::PodOutside);
        since.reasons.retain(|_, n| *n > 0);
        // The counts of Services are cleared between sessions.
        since.services = now.services;
        Ok(since)
    }

    fn read_counts(&self) -> Result<Counts> {
        let counters = &self.node.bench.datapath.counters;
        let mut services = self.v4.counts()?;
        services.extend(self.v6.counts()?);
        Ok(Counts {
            events: counters.events()?.into_iter().collect(),
            reasons: counters.reasons()?.into_iter().collect(),
            services,
        })
    }

    /// Returns an error for a difference between the flow tables and the model's flows.
    pub(crate) fn compare_flows(&self, model: &Model) -> Result<()> {
        let mut entries = self.v4.entries()?;
        entries.extend(self.v6.entries()?);
        let mut wanted = BTreeMap::new();
        for flow in model.flows.values() {
            wanted.extend(
                flow.legs()
                    .into_iter()
                    .map(|(tuple, leg)| (tuple, Entry::of(flow, leg))),
            );
        }
        for (tuple, want) in &wanted {
            let found = entries
                .get(tuple)
                .with_context(|| format!("no entry {tuple:?}, which should be {want:?}"))?;
            ensure!(
                found == want,
                "the entry {tuple:?} is\n{found:?} and should be\n{want:?}"
            );
        }
        let odd = entries
            .iter()
            .find(|(tuple, _)| !wanted.contains_key(tuple));
        ensure!(odd.is_none(), "an entry of no flow: {odd:?}");
        Ok(())
    }
}

/// Returns seconds since boot, like the programs.
fn now_secs() -> Result<u32> {
    Ok(u32::try_from(
        clock_gettime(ClockId::CLOCK_BOOTTIME)?.tv_sec(),
    )?)
}

impl Clock {
    /// Returns the time as [`now_secs`] does; the programs read the clock again in a new second.
    fn now_secs(&mut self) -> Result<u32> {
        let now = now_secs()?;
        if now != self.second {
            let cpus = nr_cpus()
                .map_err(|(_, error)| error)
                .context("count CPUs")?;
            let never = PerCpuValues::try_from(vec![Cpu::default(); cpus])?;
            self.cpus
                .set(0, never, 0)
                .context("let the programs forget the time")?;
            self.second = now;
        }
        Ok(now)
    }
}

impl Entry {
    fn of(flow: &model::Flow, leg: Leg) -> Self {
        let nothing = (0, 0);
        let (passed, said) = match leg {
            Leg::ToBackend => {
                let client = flow.client_said;
                let backend = flow.backend_said;
                let said = (
                    client.goodbye,
                    client.reset,
                    backend.anything,
                    backend.goodbye,
                    backend.reset,
                    flow.last_secs,
                );
                ((flow.sent.packets, flow.sent.bytes), Some(said))
            }
            Leg::ToClient => ((flow.returned.packets, flow.returned.bytes), None),
            Leg::AsNode | Leg::FromNode => (nothing, None),
        };
        Self {
            leg: name(leg),
            peers: [flow.client, flow.frontend, flow.backend, flow.source],
            passed,
            is_bypass: flow.is_bypass,
            said,
        }
    }
}

fn name(leg: Leg) -> &'static str {
    match leg {
        Leg::ToBackend => "to backend",
        Leg::AsNode => "as node",
        Leg::FromNode => "from node",
        Leg::ToClient => "to client",
    }
}

impl<A: Addr + Pod> Tables<A>
where
    FlowKey<A>: Pod,
    Flow<A>: Pod,
    AffinityKey<A>: Pod,
    Affinity<A>: Pod,
    ForeignNat: Pod,
    FragmentKey<A>: Pod,
    FrontendKey<A>: Pod,
{
    fn new(bench: &Bench, maps: &FamilyMaps) -> Result<Self> {
        Ok(Self {
            flows: vec![bench.map(maps.flows)?],
            affinity: [bench.map(maps.affinity)?, bench.map(maps.new_affinity)?],
            fragments: [bench.map(maps.fragments)?, bench.map(maps.far_fragments)?],
            clients: bench.map(maps.clients)?,
            lasting: bench.map(maps.lasting)?,
            foreign_nat: bench.map(maps.foreign_nat)?,
            half_open_ends: bench.map(maps.half_open_ends)?,
            connections: bench.map(maps.connections)?,
            counts: bench.map(maps.service_counts)?,
        })
    }

    fn forget(&mut self) -> Result<()> {
        self.flows.iter_mut().try_for_each(clear)?;
        self.affinity.iter_mut().try_for_each(clear)?;
        self.fragments.iter_mut().try_for_each(clear)?;
        clear(&mut self.clients)?;
        self.lasting.set(0, 0, 0)?;
        clear(&mut self.foreign_nat)?;
        // The rings still hold flows that are gone.
        (0..CLASSES).try_for_each(|ring| self.half_open_ends.set(ring, PaddedEnds::EMPTY, 0))?;
        clear(&mut self.connections)?;
        clear(&mut self.counts)
    }

    fn age(&mut self, secs: u32) -> Result<()> {
        for flows in &mut self.flows {
            let entries: Vec<_> = flows.iter().collect::<Result<_, _>>()?;
            for (key, flow) in entries {
                flows.insert(key, older(flow, key.proto(), secs), 0)?;
            }
        }
        for row in self.foreign_nat.iter().collect::<Result<Vec<_>, _>>()? {
            let (key, mut foreign_nat) = row;
            foreign_nat.until_secs = foreign_nat.until_secs.saturating_sub(secs);
            self.foreign_nat.insert(key, foreign_nat, 0)?;
        }
        Ok(())
    }

    fn chosen(
        &self,
        table: Table,
        proto: u8,
        src: SocketAddr,
        dst: SocketAddr,
    ) -> Result<(SocketAddr, SocketAddr)> {
        let hook = match table {
            Table::Arriving => Hook::INGRESS,
            Table::Leaving => Hook::EGRESS,
            Table::Starting => Hook::ANCHOR,
        };
        let key = FlowKey::new(hook, Proto(proto), sock_addr(src)?, sock_addr(dst)?);
        let flow = self
            .flows
            .iter()
            .find_map(|flows| flows.get(&key, 0).ok())
            .context("no flow was opened")?;
        Ok((plain(flow.backend), plain(flow.source)))
    }

    fn counts(&self) -> Result<BTreeMap<(SocketAddr, u8), ServiceCounts>> {
        let counts = self.counts.iter().map(|row| {
            let (key, counts) = row?;
            Ok((
                (SocketAddr::new(key.addr.ip(), key.port.get()), key.proto.0),
                counts,
            ))
        });
        // A row with count 0 may be present or not.
        counts
            .filter(|row| {
                row.as_ref()
                    .map_or(true, |(_, counts)| *counts != ServiceCounts::NOTHING)
            })
            .collect()
    }

    fn entries(&self) -> Result<BTreeMap<Tuple, Entry>> {
        let mut entries = BTreeMap::new();
        for row in self.flows.iter().flat_map(|flows| flows.iter()) {
            let (key, flow) = row?;
            let table = match key.hook() {
                Hook::INGRESS => Table::Arriving,
                Hook::EGRESS => Table::Leaving,
                _ => Table::Starting,
            };
            let leg = match flow.kind {
                Kind::DNAT => Leg::ToBackend,
                Kind::SNAT => Leg::AsNode,
                Kind::UNSNAT => Leg::FromNode,
                _ => Leg::ToClient,
            };
            let tx = flow.tx;
            let rx = flow.rx;
            let said = (
                tx.has(Seen::FIN),
                tx.has(Seen::RST),
                rx.has(Seen::PACKET),
                rx.has(Seen::FIN),
                rx.has(Seen::RST),
                flow.last_secs,
            );
            let entry = Entry {
                leg: name(leg),
                peers: [flow.client, flow.frontend, flow.backend, flow.source].map(plain),
                passed: match leg {
                    Leg::ToBackend | Leg::ToClient => (flow.passed.packets, flow.passed.bytes),
                    Leg::AsNode | Leg::FromNode => (0, 0),
                },
                is_bypass: rx.has(Seen::BYPASS),
                said: (leg == Leg::ToBackend).then_some(said),
            };
            let tuple = (table, key.proto().0, plain(key.src()), plain(key.dst()));
            ensure!(
                entries.insert(tuple, entry).is_none(),
                "{tuple:?} is there twice"
            );
        }
        Ok(entries)
    }
}

pub(crate) fn clear<K: Pod, V: Pod>(map: &mut HashMap<MapData, K, V>) -> Result<()> {
    let keys: Vec<K> = map.keys().collect::<Result<_, _>>()?;
    keys.iter().try_for_each(|key| Ok(map.remove(key)?))
}

fn sock_addr<A: Addr>(at: SocketAddr) -> Result<SockAddr<A>> {
    Ok(SockAddr::new(
        A::from_ip(at.ip()).context("an address of the family")?,
        Port::new(at.port()),
    ))
}

fn plain<A: Addr>(at: SockAddr<A>) -> SocketAddr {
    SocketAddr::new(at.addr.ip(), at.port.get())
}
