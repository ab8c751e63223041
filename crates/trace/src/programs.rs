//! A copy of the kernel programs with maps of its own. Real traffic is unaffected.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::SocketAddr;

use anyhow::{Context, Result, bail};
use aya::maps::lpm_trie::{Key, LpmTrie};
use aya::maps::{Array, HashMap, MapData, MapError, PerCpuArray, PerCpuValues};
use aya::programs::SchedClassifier;
use aya::util::nr_cpus;
use aya::{Ebpf, Pod};
use proxy_common::addr::{Addr, Port, Proto, SockAddr};
use proxy_common::counter::{Counter, Event, Reason};
use proxy_common::flow::{Flow, FlowKey, Hook};
use proxy_common::frontend::{Backend, FrontendKey, FrontendKind, Set};
use proxy_common::hook::{PacketHook, SlowProgram};
use proxy_common::names::{self, FamilyMaps};
use proxy_common::policy::{Decision, Origin};

use crate::input::{Entry, Family, Net, TraceInput};
use crate::packet;
use proxy_datapath::object::with_contained_slow_path;
use proxy_datapath::test_run::{Field, SkBuff, test_run};
use proxy_datapath::{slow_path, verifier};

/// The program of a hook, with its own maps.
pub(crate) struct Programs<A: Addr> {
    ebpf: Ebpf,
    entry: Entry,
    /// The link address of the entry's device.
    mac: [u8; 6],
    mark: u32,
    /// The program of the slow path, if the entry's program calls it.
    slow_path: Option<SlowProgram>,
    /// The counters after the last packet, summed over all CPUs.
    counters: Vec<u64>,
    no_decision: Decision<A>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Disposition<A: Addr> {
    /// The packet was sent to a backend, and opened this flow.
    Forward(Flow<A>),
    /// The packet was sent unchanged to the node of this backend.
    HandOver(Backend<A>),
    Pass(Reason),
    Drop(Reason),
    /// The packet was rejected: the client got an answer.
    Reject(Reason),
}

/// The result of a packet's run through the programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run<A: Addr> {
    pub(crate) disposition: Disposition<A>,
    /// The programs' decision; `None` if no frontend matched the packet.
    pub(crate) decision: Option<Decision<A>>,
}

impl<A: Family> Programs<A> {
    /// Loads the program of the input's hook, with space for `packets` flows, and fills its maps.
    /// The program calls its slow path (`calls_slow_path`) or contains it.
    pub(crate) fn load(
        object: &[u8],
        input: &TraceInput<A>,
        packets: u32,
        calls_slow_path: bool,
    ) -> Result<Self> {
        let object = if calls_slow_path {
            Cow::Borrowed(object)
        } else {
            with_contained_slow_path(object)?.into()
        };
        let mut loader = verifier::loader();
        // Only these maps store state; the remaining maps cost nothing while they are empty. A flow
        // has up to four entries.
        for maps in [names::IPV4, names::IPV6] {
            loader.map_max_entries(maps.flows, (packets * 4).max(MEMORY_MIN));
            let affinity = [maps.affinity, maps.new_affinity];
            let fragments = [maps.fragments, maps.far_fragments];
            let counts = [maps.half_open, maps.clients, maps.cursors, maps.connections];
            for name in affinity.into_iter().chain(fragments).chain(counts) {
                loader.map_max_entries(name, MEMORY_MIN);
            }
        }
        loader.map_max_entries(names::HANDED_OVER, MEMORY_MIN);
        // The agent's maps may be larger than the object's defaults.
        let maps = A::MAPS;
        let tables = &input.tables;
        let rows = [
            (maps.frontends, tables.frontends.len()),
            (maps.services, tables.services.len()),
            (maps.slots, tables.slots.len()),
            (maps.endpoints, tables.endpoints.len()),
            (maps.maglev, tables.maglev.len()),
            (maps.source_ranges, tables.source_ranges.len()),
        ];
        for (name, rows) in rows {
            loader.map_max_entries(name, u32::try_from(rows)?.max(MEMORY_MIN));
        }
        if let Some(shares) = &input.shares {
            loader.override_global(names::FLOW_ROOM, &shares.room, true);
        }
        let hands_over = u32::from(input.hands_over());
        loader.override_global(names::HANDS_OVER, &hands_over, true);
        let mut ebpf = loader
            .load(&object)
            .context("load a copy of the kernel programs")?;
        let name = input.entry.program;
        let program: &mut SchedClassifier = ebpf
            .program_mut(name)
            .with_context(|| format!("no program {name} in the BPF object"))?
            .try_into()?;
        verifier::load(|| program.load()).with_context(|| format!("load a copy of {name}"))?;
        let hook = PacketHook::ALL
            .into_iter()
            .find(|hook| hook.program() == name)
            .with_context(|| format!("{name} is at no hook"))?;
        let [of_v4, of_v6] = hook.slow();
        let slow_path = calls_slow_path.then_some(if A::IS_IPV4 { of_v4 } else { of_v6 });
        slow_path::load(&mut ebpf, slow_path)?;
        let none = FrontendKey::address(A::UNSPECIFIED);
        let no_decision = Decision {
            frontend: none,
            service: none,
            kind: FrontendKind::ADDRESS,
            origin: Origin::EXTERNAL,
            set: Set::CLUSTER,
            flags: 0,
            backend: Backend::new(A::UNSPECIFIED, Port::ANY, 0),
        };
        let counters = vec![0; Counter::COUNT as usize];
        let mut programs = Self {
            ebpf,
            entry: input.entry.clone(),
            mac: input.mac(),
            mark: input.mark,
            slow_path,
            counters,
            no_decision,
        };
        programs.fill(input)?;
        Ok(programs)
    }

    /// Sends the first packet of a flow through the program.
    pub(crate) fn run(&mut self, from: SocketAddr, to: SocketAddr, proto: Proto) -> Result<Run<A>> {
        self.forget_decision()?;
        let action = self.test_run(&packet::opener(from, to, proto, self.mac)?)?;
        let counted = self.counted()?;
        let reason = Reason::ALL
            .into_iter()
            .find(|reason| counted(Counter::from(*reason)));
        let disposition = match reason {
            None if counted(Event::Forwarded.into()) => {
                Disposition::Forward(self.take_flow(from, to, proto)?)
            }
            None if counted(Event::HandedOver.into()) => {
                let decision = self.decision()?.context("a packet without a decision")?;
                Disposition::HandOver(decision.backend)
            }
            // No route of kpx covers such an address, so a packet of the host never reaches this
            // hook.
            Some(Reason::NotOurs) => Disposition::Pass(Reason::NotOurs),
            // A rejection may be counted as unanswered: many packets exceed the limit of answers per
            // second.
            Some(reason)
                if counted(Event::Rejected.into()) || counted(Event::Unanswered.into()) =>
            {
                Disposition::Reject(reason)
            }
            Some(reason) if action == ACTION_DROP => Disposition::Drop(reason),
            Some(reason) => Disposition::Pass(reason),
            None => bail!(
                "{} answered {action} and counted nothing",
                self.entry.program
            ),
        };
        Ok(Run {
            disposition,
            decision: self.decision()?,
        })
    }

    /// Returns the programs' names and tags: the kernel's hashes of their instructions, as in
    /// `kpx status`.
    pub(crate) fn tags(&self) -> Result<Vec<(&'static str, String)>> {
        let names = [self.entry.program]
            .into_iter()
            .chain(self.slow_path.map(SlowProgram::program));
        let tag = |name| {
            let program = self.ebpf.program(name).context("the program was loaded")?;
            let info = program
                .info()
                .with_context(|| format!("read information about {name}"))?;
            Ok((name, format!("{:016x}", info.tag())))
        };
        names.map(tag).collect()
    }

    /// Runs the program, and returns its action (linux/pkt_cls.h).
    fn test_run(&self, frame: &[u8]) -> Result<i32> {
        let name = self.entry.program;
        let fields = [
            (Field::IFINDEX, self.entry.ifindex),
            (Field::MARK, self.mark),
        ];
        let context = (self.entry.ifindex != LO).then(|| SkBuff::new(fields));
        let ran = test_run(self.program()?, frame, context.as_ref(), &mut []);
        Ok(ran
            .with_context(|| format!("run {name} as on device {}", self.entry.device))?
            .action)
    }

    fn program(&self) -> Result<&SchedClassifier> {
        Ok(self
            .ebpf
            .program(self.entry.program)
            .context("the program was loaded")?
            .try_into()?)
    }

    fn fill(&mut self, input: &TraceInput<A>) -> Result<()> {
        let FamilyMaps {
            frontends,
            services,
            slots,
            endpoints,
            maglev,
            addrs,
            affinity,
            connections,
            clients,
            lasting,
            ..
        } = A::MAPS;
        self.put_all(frontends, &input.tables.frontends)?;
        self.put_all(services, &input.tables.services)?;
        self.put_all(slots, &input.tables.slots)?;
        self.put_all(endpoints, &input.tables.endpoints)?;
        self.put_all(
            maglev,
            &input
                .tables
                .maglev
                .iter()
                .map(|(set, table)| (*set, **table))
                .collect(),
        )?;
        self.put_all(addrs, &input.addrs)?;
        self.put_all(names::DEVICES, &input.devices)?;
        self.put_all(affinity, &input.affinity)?;
        self.put_all(connections, &input.connections)?;
        if let Some(shares) = &input.shares {
            self.put_all(clients, &shares.held)?;
            self.set(lasting, shares.lasting)?;
        }
        let ranges = input
            .tables
            .source_ranges
            .iter()
            .map(|key| (Key::new(key.bits, key.range), 1));
        self.put_nets(A::MAPS.source_ranges, ranges)?;
        let key = |(bits, addr): &Net<A>| Key::new(*bits, *addr);
        self.put_nets(A::MAPS.pods, input.pods.iter().map(|net| (key(net), 1)))?;
        let service_nets = input
            .service_nets
            .iter()
            .map(|(net, value)| (key(net), *value));
        self.put_nets(A::MAPS.service_cidrs, service_nets)?;
        self.set(names::NODE, input.node)?;
        self.set(names::GENERATION, input.generation)
    }

    fn put_all<K: Pod, V: Pod>(&mut self, name: &str, rows: &BTreeMap<K, V>) -> Result<()> {
        let mut map: HashMap<&mut MapData, K, V> = self.map_mut(name)?;
        rows.iter()
            .try_for_each(|(key, value)| map.insert(key, value, 0))
            .with_context(|| format!("write {name}"))
    }

    fn put_nets<K: Pod>(
        &mut self,
        name: &str,
        mut nets: impl Iterator<Item = (Key<K>, u32)>,
    ) -> Result<()> {
        let mut map: LpmTrie<&mut MapData, K, u32> = self.map_mut(name)?;
        nets.try_for_each(|(net, value)| map.insert(&net, value, 0))
            .with_context(|| format!("write {name}"))
    }

    fn set<V: Pod>(&mut self, name: &str, value: V) -> Result<()> {
        let mut map: Array<&mut MapData, V> = self.map_mut(name)?;
        map.set(0, value, 0)
            .with_context(|| format!("write {name}"))
    }

    /// Returns a predicate for counters that have increased since the last call.
    fn counted(&mut self) -> Result<impl Fn(Counter) -> bool + use<A>> {
        let map: PerCpuArray<&MapData, u64> = self.map(names::COUNTERS)?;
        let sum = |index| Ok(map.get(&index, 0).context("read COUNTERS")?.iter().sum());
        let now: Vec<u64> = (0..Counter::COUNT).map(sum).collect::<Result<_>>()?;
        let up: Vec<bool> = now
            .iter()
            .zip(&self.counters)
            .map(|(now, before)| now > before)
            .collect();
        self.counters = now;
        Ok(move |counter: Counter| up[counter.index() as usize])
    }

    /// Returns the flow that a packet opened. Removes the flow from the map, so that the next
    /// packet finds the same source ports free.
    fn take_flow(&mut self, from: SocketAddr, to: SocketAddr, proto: Proto) -> Result<Flow<A>> {
        let mut map: HashMap<&mut MapData, FlowKey<A>, Flow<A>> = self.map_mut(A::MAPS.flows)?;
        let client = sock_addr(from)?;
        let frontend = sock_addr(to)?;
        for hook in [Hook::INGRESS, Hook::ANCHOR] {
            let flow = match map.get(&FlowKey::new(hook, proto, client, frontend), 0) {
                Err(MapError::KeyNotFound) => continue,
                flow => flow.with_context(|| format!("read {}", A::MAPS.flows))?,
            };
            for kind in flow.kinds() {
                map.remove(&flow.key_as(*kind, proto))
                    .with_context(|| format!("delete from {}", A::MAPS.flows))?;
            }
            return Ok(flow);
        }
        bail!("the packet was forwarded, but there is no flow")
    }

    fn forget_decision(&mut self) -> Result<()> {
        let nothing = vec![
            self.no_decision;
            nr_cpus()
                .map_err(|(_, error)| error)
                .context("count CPUs")?
        ];
        let mut map: PerCpuArray<&mut MapData, Decision<A>> = self.map_mut(A::MAPS.decisions)?;
        map.set(0, PerCpuValues::try_from(nothing)?, 0)
            .with_context(|| format!("write {}", A::MAPS.decisions))
    }

    /// Returns the decision from the slot of the CPU that ran the program.
    fn decision(&self) -> Result<Option<Decision<A>>> {
        let map: PerCpuArray<&MapData, Decision<A>> = self.map(A::MAPS.decisions)?;
        let decisions = map
            .get(&0, 0)
            .with_context(|| format!("read {}", A::MAPS.decisions))?;
        Ok(decisions
            .iter()
            .find(|decision| **decision != self.no_decision)
            .copied())
    }

    fn map<'a, M: TryFrom<&'a aya::maps::Map, Error = MapError>>(
        &'a self,
        name: &str,
    ) -> Result<M> {
        let map = self
            .ebpf
            .map(name)
            .with_context(|| format!("no map {name} in the BPF object"))?;
        M::try_from(map).with_context(|| format!("map {name}"))
    }

    fn map_mut<'a, M: TryFrom<&'a mut aya::maps::Map, Error = MapError>>(
        &'a mut self,
        name: &str,
    ) -> Result<M> {
        let map = self
            .ebpf
            .map_mut(name)
            .with_context(|| format!("no map {name} in the BPF object"))?;
        M::try_from(map).with_context(|| format!("map {name}"))
    }
}

/// The minimum size of the maps that store state: small, but sufficient for LRU maps on many CPUs.
const MEMORY_MIN: u32 = 16_384;

/// The interface index of lo, the same in every network namespace.
pub(crate) const LO: u32 = 1;

/// The action that drops a packet (linux/pkt_cls.h).
const ACTION_DROP: i32 = 2;

pub(crate) fn sock_addr<A: Addr>(addr: SocketAddr) -> Result<SockAddr<A>> {
    let ip = A::from_ip(addr.ip())
        .with_context(|| format!("{} is not an {} address", addr.ip(), A::FAMILY))?;
    Ok(SockAddr::new(ip, Port::new(addr.port())))
}
