//! Measures the cost of an open flow's packet in each program. The baseline is a program that finds
//! the flow, rewrites the packet, and does nothing else. And what a packet costs that is none of
//! kpx's.
//!
//! [`live`] has the kernel take the time of every run (BPF_STATS_RUN_TIME) while two sockets talk
//! through a node: between two packets the machine does everything else that packets cost, as it
//! does in a cluster, and caches are as cold as that. [`warm`] runs a program many times in a row
//! on one packet, and nothing else: two flows give it each other's address, so that it is rewritten
//! every time. What an ingress hook has rewritten it notes, and does not take for a client's again,
//! so its hits cannot be repeated.

mod fixture;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aya::maps::HashMap;
use aya::programs::{
    LinkOrder, SchedClassifier, TcAttachType, TestRun, TestRunOptions, tc::TcAttachOptions,
};
use aya::sys::{Stats, enable_stats};
use aya::{Ebpf, Pod};
use nix::time::{ClockId, clock_gettime};
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto, SockAddr};
use proxy_common::flow::{Flow, FlowKey, Kind, Seen};
use proxy_common::names::{EGRESS, EMPTY, FamilyMaps, INGRESS, IPV4, IPV6, MINIMAL, MINIMAL_OUT};
use proxy_datapath::verifier;

use fixture::Fixture;
use testbed::netns::NetNs;
use testbed::test_run::object;
use testbed::text::Names;

/// The variants to compare: at ingress, and at egress.
const VARIANTS: [(&str, [&str; 2]); 3] = [
    ("nothing", [EMPTY, EMPTY]),
    ("minimal", [MINIMAL, MINIMAL_OUT]),
    ("kpx", [INGRESS, EGRESS]),
];
const HOOKS: [TcAttachType; 2] = [TcAttachType::Ingress, TcAttachType::Egress];

/// Runs of a program in a row, of [`warm`].
const REPEAT: u32 = 100_000;

/// A line of a table: what one packet costs in each of the variants.
#[derive(Clone, Debug)]
pub struct Row {
    /// The hook, the kind of packets, and if a flow was found.
    pub what: String,
    /// The times of each round; one for each of the variants.
    pub rounds: [Vec<Duration>; 3],
}

impl Row {
    fn new(what: String) -> Self {
        Self {
            what,
            rounds: [const { Vec::new() }; 3],
        }
    }

    /// Medians of nothing, minimal and kpx.
    pub fn medians(&self) -> [Duration; 3] {
        self.rounds.clone().map(|mut times| {
            times.sort_unstable();
            times.get(times.len() / 2).copied().unwrap_or_default()
        })
    }

    /// How many times the least it costs, what a program that does nothing seems to cost left out.
    pub fn ratio(&self) -> f64 {
        let [nothing, minimal, kpx] = self.medians();
        kpx.saturating_sub(nothing).as_secs_f64() / minimal.saturating_sub(nothing).as_secs_f64()
    }
}

/// A client, what it dials, and who answers.
#[derive(Clone, Copy)]
struct Peers {
    proto: Proto,
    client: SocketAddr,
    frontend: SocketAddr,
    backend: SocketAddr,
}

impl Peers {
    /// Returns the flows of both families, by TCP and UDP.
    fn all() -> Result<Vec<Self>> {
        let mut all = Vec::new();
        for addrs in [
            ["10.244.1.10", "10.96.0.10", "10.244.2.10"],
            ["fd00:1::10", "fd00:96::10", "fd00:2::10"],
        ] {
            for proto in [Proto::TCP, Proto::UDP] {
                let [client, frontend, backend] = addrs;
                let at =
                    |addr: &str, port| Ok::<_, anyhow::Error>(SocketAddr::new(addr.parse()?, port));
                let client = at(client, 40_000)?;
                let frontend = at(frontend, 80)?;
                let backend = at(backend, 8_080)?;
                all.push(Self {
                    proto,
                    client,
                    frontend,
                    backend,
                });
            }
        }
        Ok(all)
    }

    fn name(&self) -> String {
        format!(
            "{} {}",
            if self.client.is_ipv4() {
                Addr4::FAMILY
            } else {
                Addr6::FAMILY
            },
            self.proto
        )
    }

    /// The frontend serves for the backend, and the reverse.
    fn swapped(self) -> Self {
        Self {
            frontend: self.backend,
            backend: self.frontend,
            ..self
        }
    }
}

/// The programs, with flows of their own.
struct Programs(Ebpf);

impl Programs {
    fn load() -> Result<Self> {
        let mut ebpf = verifier::loader()
            .load(object()?)
            .context("load the BPF object")?;
        for name in VARIANTS.iter().flat_map(|(_, names)| names) {
            let program = ebpf
                .program_mut(name)
                .with_context(|| format!("no program {name}"))?;
            let program: &mut SchedClassifier = program.try_into()?;
            if program.fd().is_err() {
                verifier::load(|| program.load()).with_context(|| format!("load {name}"))?;
            }
        }
        Ok(Self(ebpf))
    }

    fn program(&self, name: &str) -> Result<&SchedClassifier> {
        Ok(self
            .0
            .program(name)
            .with_context(|| format!("no program {name}"))?
            .try_into()?)
    }

    /// Returns the kernel's counters: runs, and how long they took.
    fn runs(&self, name: &str) -> Result<(u64, Duration)> {
        let info = self.program(name)?.info()?;
        Ok((info.run_count(), info.run_time()))
    }

    /// Opens a flow, as if both sides had spoken.
    fn open(&mut self, peers: &Peers) -> Result<()> {
        if peers.client.is_ipv4() {
            self.open_as::<Addr4>(peers, IPV4)
        } else {
            self.open_as::<Addr6>(peers, IPV6)
        }
    }

    fn open_as<A: Addr>(&mut self, peers: &Peers, maps: FamilyMaps) -> Result<()>
    where
        FlowKey<A>: Pod,
        Flow<A>: Pod,
    {
        let end = |at: SocketAddr| {
            Ok::<_, anyhow::Error>(SockAddr::new(
                A::from_ip(at.ip()).context("family")?,
                port(at),
            ))
        };
        let client = end(peers.client)?;
        let frontend = end(peers.frontend)?;
        let backend = end(peers.backend)?;
        let now_secs = u32::try_from(clock_gettime(ClockId::CLOCK_BOOTTIME)?.tv_sec())?;
        let mut flow = Flow::new(client, frontend, backend, client, 0, now_secs);
        flow.tx = Seen::PACKET.with(Seen::ASSURED);
        flow.rx = Seen::PACKET;
        let map = self.0.map_mut(maps.flows).context("no flow table")?;
        let mut flows: HashMap<_, FlowKey<A>, Flow<A>> = map.try_into()?;
        for kind in [Kind::UNDNAT, Kind::DNAT] {
            flow.kind = kind;
            flows.insert(flow.key(peers.proto), flow, 0)?;
        }
        Ok(())
    }

    /// Puts two of the programs on a device of this thread's namespace, as long as the result is
    /// there.
    fn attach(
        &mut self,
        device: &str,
        names: [&str; 2],
    ) -> Result<Vec<aya::programs::tc::SchedClassifierLink>> {
        let links = HOOKS.into_iter().zip(names).map(|(hook, name)| {
            let program = self
                .0
                .program_mut(name)
                .with_context(|| format!("no program {name}"))?;
            let program: &mut SchedClassifier = program.try_into()?;
            let link = program.attach_with_options(
                device,
                hook,
                TcAttachOptions::TcxOrder(LinkOrder::first()),
            )?;
            Ok(program.take_link(link)?)
        });
        links.collect()
    }
}

fn port(at: SocketAddr) -> Port {
    Port::new(at.port())
}

/// Measures packets while sockets talk: one row for each hook, for packets of a flow and of none.
pub fn live(rounds: usize, turns: u32) -> Result<Vec<Row>> {
    let _stats =
        enable_stats(Stats::RunTime).context("have the kernel take the time of programs")?;
    let fixture = Fixture::new()?;
    // Where the client is packets are of a flow; where the backend is, programs that know no flow
    // see the same ones.
    let mut hit = Programs::load()?;
    let mut miss = Programs::load()?;
    let mut rows = Vec::new();
    for peers in Peers::all()? {
        let mut of_these = [
            "ingress, hit",
            "egress, hit",
            "ingress, miss",
            "egress, miss",
        ]
        .map(|what| Row::new(format!("{what}: {}", peers.name())));
        for _ in 0..rounds {
            for (variant, (_, names)) in VARIANTS.iter().enumerate() {
                hit.open(&peers)?;
                let times = turn(&fixture, &mut hit, &mut miss, &peers, *names, turns)?;
                of_these
                    .iter_mut()
                    .zip(times)
                    .for_each(|(row, time)| row.rounds[variant].push(time));
            }
        }
        rows.extend(of_these);
    }
    Ok(rows)
}

/// Mean times of a run of each of the programs, at the client's device and at the backend's.
fn turn(
    fixture: &Fixture,
    hit: &mut Programs,
    miss: &mut Programs,
    peers: &Peers,
    names: [&str; 2],
    turns: u32,
) -> Result<[Duration; 4]> {
    // An empty program does not translate, so its client dials the backend.
    let dialled = if names[0] == EMPTY {
        peers.backend
    } else {
        peers.frontend
    };
    let _links = fixture.node.run(|| {
        Ok::<_, anyhow::Error>((
            hit.attach(fixture::CLIENT_DEVICE, names)?,
            miss.attach(fixture::BACKEND_DEVICE, names)?,
        ))
    })?;
    let runs = || {
        let runs = [
            (&*hit, names[0]),
            (&*hit, names[1]),
            (&*miss, names[0]),
            (&*miss, names[1]),
        ]
        .map(|(programs, name)| programs.runs(name));
        runs.into_iter().collect::<Result<Vec<_>>>()
    };
    let (before, after) = fixture.talk(
        peers.proto,
        peers.client,
        dialled,
        peers.backend,
        turns,
        runs,
    )?;
    let mut times = [Duration::ZERO; 4];
    for (n, ((runs_before, before), (runs_after, after))) in
        before?.into_iter().zip(after?).enumerate()
    {
        let runs = runs_after - runs_before;
        // One each way, and what keeps neighbours and connections alive; twice that where one
        // program has both hooks.
        let expected = u64::from(turns) * if names[0] == names[1] { 2 } else { 1 };
        ensure!(
            (expected..expected * 5 / 4).contains(&runs),
            "{}: {runs} runs, not {expected}",
            names[n % 2]
        );
        times[n] = (after - before) / u32::try_from(runs)?;
    }
    Ok(times)
}

/// Measures a packet when nothing else happens.
pub fn warm(rounds: usize) -> Result<Vec<Row>> {
    let mut programs = Programs::load()?;
    let mut rows = Vec::new();
    for peers in Peers::all()? {
        let stranger = SocketAddr::new(peers.client.ip(), 9);
        let ways = [
            ("egress, hit", 1, peers.backend, peers.client),
            ("egress, miss", 1, peers.backend, stranger),
            ("ingress, miss", 0, peers.backend, stranger),
        ];
        for (what, hook, src, dst) in ways {
            let mut row = Row::new(format!("{what}: {}", peers.name()));
            let packet = packet(peers.proto, src, dst)?;
            for _ in 0..rounds {
                for (variant, (_, names)) in VARIANTS.iter().enumerate() {
                    programs.open(&peers)?;
                    programs.open(&peers.swapped())?;
                    let mut options = TestRunOptions::new();
                    options.data_in = Some(&packet);
                    options.repeat = REPEAT;
                    row.rounds[variant]
                        .push(programs.program(names[hook])?.test_run(options)?.duration);
                }
            }
            rows.push(row);
        }
    }
    Ok(rows)
}

fn packet(proto: Proto, src: SocketAddr, dst: SocketAddr) -> Result<Vec<u8>> {
    let names = Names::new([("src", src.ip()), ("dst", dst.ip())] as [(&'static str, IpAddr); 2]);
    let ends = format!("src:{} > dst:{}", src.port(), dst.port());
    names.frame(&if proto == Proto::TCP {
        format!("tcp A {ends} +1")
    } else {
        format!("udp {ends} +1")
    })
}
