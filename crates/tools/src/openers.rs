//! Measures whether openers of flows hinder each other on two CPUs, as under a flood: each one
//! takes a place in the half-open queue, and the flow that it pushes out is forgotten.
//! BPF_PROG_TEST_RUN runs a program on prepared packets, each in another client's name, on one CPU
//! (beside one that runs a program that does nothing), and on two.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use aya::programs::{SchedClassifier, TestRun, TestRunOptions};
use etherparse::PacketBuilder;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto};
use proxy_common::device::Device;
use proxy_common::frontend::{Backend, Frontend, FrontendKey, FrontendKind, Service, Set, SlotKey};
use proxy_common::names::{EMPTY, INGRESS};
use proxy_core::diff::{Change, FamilyChange};
use proxy_datapath::{Maps, Options, Sizes};
use testbed::test_run::{Bench, Verdict};

/// The interface index of lo, where packets of BPF_PROG_TEST_RUN are.
const LO: u32 = 1;
/// The CPUs.
const CPUS: [usize; 2] = [0, 1];
/// The packets of one CPU: more than the half-open queue has places, so that no name that comes
/// again has a flow.
const PACKETS: u16 = 20_000;
const PORT: u16 = 80;
/// The entries of the flow table.
const FLOWS: u32 = 32_768;

/// A line of the table.
#[derive(Clone, Debug)]
pub struct Row {
    pub what: &'static str,
    /// The rounds on each of the CPUs alone.
    pub alone: Vec<Speed>,
    /// The rounds on both at the same time.
    pub together: Vec<Speed>,
}

/// The speed of a round.
#[derive(Clone, Copy, Debug)]
pub struct Speed {
    /// The runs in a second, on all CPUs together, with the system call of each.
    pub per_second: f64,
    /// The mean time in the program.
    pub in_program: Duration,
}

impl Row {
    /// Returns how much of the double throughput two CPUs reach: 1 if openers do not hinder each
    /// other.
    pub fn scaling(&self) -> f64 {
        median(&self.together, |speed| speed.per_second)
            / (2.0 * median(&self.alone, |speed| speed.per_second))
    }
}

/// Returns the median of one figure of the rounds.
pub fn median(rounds: &[Speed], figure: impl Fn(&Speed) -> f64) -> f64 {
    let mut figures: Vec<_> = rounds.iter().map(figure).collect();
    figures.sort_unstable_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Measures the program that does nothing, and the openers of each family. Rounds take turns.
pub fn openers(rounds: usize) -> Result<Vec<Row>> {
    ensure!(
        thread::available_parallelism()?.get() >= CPUS.len(),
        "this machine has a single CPU"
    );
    let sizes = Sizes {
        flows: Some(FLOWS),
        ..Sizes::default()
    };
    // Each CPU has rings of its own, as on a node.
    let half_open_rings = Some(u32::try_from(CPUS.len())?);
    let mut bench = Bench::load(Options {
        sizes,
        half_open_rings,
        ..Options::default()
    })?;
    // A pod's, as whose ClusterIPs may be dialled.
    let device = Device::new(Device::POD, Addr4::UNSPECIFIED, Addr6::UNSPECIFIED);
    bench.datapath.node.set_devices(&[(LO, device)].into())?;
    serve(
        &mut bench,
        Addr4::from_ip(web(true)),
        Addr4::from_ip(backend(true)),
        Change::V4,
    )?;
    serve(
        &mut bench,
        Addr6::from_ip(web(false)),
        Addr6::from_ip(backend(false)),
        Change::V6,
    )?;
    let packets = [true, false].map(|v4| CPUS.map(|cpu| packets(v4, cpu)));
    let programs = [
        ("a program that does nothing", EMPTY, 0),
        ("an opener, IPv4", INGRESS, 0),
        ("an opener, IPv6", INGRESS, 1),
    ];
    let mut rows = programs.map(|(what, ..)| Row {
        what,
        alone: Vec::new(),
        together: Vec::new(),
    });
    for round in 0..=rounds {
        for (row, (what, name, family)) in rows.iter_mut().zip(programs) {
            let opened = opened(&bench)?;
            let mut alone = Vec::new();
            for (cpu, packets) in CPUS.iter().zip(&packets[family]) {
                alone.push(run(&bench, name, &[(*cpu, packets)]).with_context(|| what.to_owned())?);
            }
            let both: Vec<_> = CPUS
                .into_iter()
                .zip(packets[family].iter().map(Vec::as_slice))
                .collect();
            let together = run(&bench, name, &both).with_context(|| what.to_owned())?;
            let opened = self::opened(&bench)? - opened;
            let expected = if name == EMPTY {
                0
            } else {
                4 * u64::from(PACKETS)
            };
            ensure!(
                opened == expected,
                "{what}: {opened} flows were opened, not {expected}"
            );
            // The first round fills the queue.
            if round > 0 {
                row.alone.extend(alone);
                row.together.push(together);
            }
        }
    }
    Ok(rows.into())
}

fn opened(bench: &Bench) -> Result<u64> {
    let events = bench.datapath.counters.events()?;
    let opened = events
        .iter()
        .find(|(event, _)| event.name() == "flow_opened");
    opened
        .map(|(_, count)| *count)
        .context("a counter of opened flows")
}

/// Runs the program on the packets of each of these CPUs, at the same time. Another CPU runs the
/// program that does nothing, so that it is as busy.
fn run(bench: &Bench, program: &str, work: &[(usize, &[Vec<u8>])]) -> Result<Speed> {
    let program = bench.program(program)?;
    let nothing = bench.program(EMPTY)?;
    let start = Barrier::new(CPUS.len());
    let stop = AtomicBool::new(false);
    let start = &start;
    let stop = &stop;
    let idle = CPUS
        .into_iter()
        .filter(|cpu| work.iter().all(|(busy, _)| busy != cpu));
    let times = thread::scope(|scope| {
        let packet = &work[0].1[0];
        let until_stopped = move || std::iter::repeat(packet).take_while(|_| !stop.load(Relaxed));
        let idle: Vec<_> = idle
            .map(|cpu| scope.spawn(move || on_cpu(nothing, cpu, until_stopped(), start)))
            .collect();
        let busy = work.iter().map(|&(cpu, packets)| {
            scope.spawn(move || on_cpu(program, cpu, packets.iter(), start))
        });
        let busy = busy
            .collect::<Vec<_>>()
            .into_iter()
            .map(joined)
            .collect::<Result<Vec<_>>>();
        stop.store(true, Relaxed);
        idle.into_iter()
            .try_for_each(|thread| joined(thread).map(drop))?;
        busy
    })?;
    let runs: usize = work.iter().map(|(_, packets)| packets.len()).sum();
    let longest = times.iter().map(|(time, _)| *time).max().context("a CPU")?;
    let in_program: Duration = times.iter().map(|(_, in_program)| *in_program).sum();
    Ok(Speed {
        per_second: runs as f64 / longest.as_secs_f64(),
        in_program: in_program / u32::try_from(runs)?,
    })
}

fn joined<T>(thread: ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    thread.join().map_err(|_| anyhow!("a thread panicked"))?
}

/// Returns the time for all packets, and the part of it in the program.
fn on_cpu<'a>(
    program: &SchedClassifier,
    cpu: usize,
    packets: impl Iterator<Item = &'a Vec<u8>>,
    start: &Barrier,
) -> Result<(Duration, Duration)> {
    let mut cpus = CpuSet::new();
    cpus.set(cpu)?;
    sched_setaffinity(Pid::from_raw(0), &cpus).context("keep to a CPU")?;
    start.wait();
    let started = Instant::now();
    let mut in_program = Duration::ZERO;
    for packet in packets {
        let mut options = TestRunOptions::new();
        options.data_in = Some(packet);
        let ran = program.test_run(options)?;
        in_program += ran.duration;
        ensure!(
            Verdict::from(ran.return_value.cast_signed()) == Verdict::Pass,
            "verdict {}",
            ran.return_value
        );
    }
    Ok((started.elapsed(), in_program))
}

/// Writes a Service with one backend.
fn serve<A: Addr>(
    bench: &mut Bench,
    web: Option<A>,
    backend: Option<A>,
    change: fn(FamilyChange<A>) -> Change,
) -> Result<()> {
    let key = FrontendKey::new(web.context("family")?, Port::new(PORT), Proto::TCP);
    let backend = Backend::new(
        backend.context("family")?,
        Port::new(8080),
        Backend::<A>::LOCAL,
    );
    let changes = [
        FamilyChange::PutSlot(SlotKey::new(key, Set::CLUSTER, 0), backend),
        FamilyChange::PutService(key, Service::new(1, 0, Service::HAS_ENDPOINTS)),
        FamilyChange::PutFrontend(key, Frontend::new(key, FrontendKind::CLUSTER_IP)),
    ];
    changes
        .into_iter()
        .try_for_each(|row| bench.datapath.tables.apply(&change(row)))
}

fn web(v4: bool) -> IpAddr {
    if v4 {
        Ipv4Addr::new(10, 96, 0, 10).into()
    } else {
        Ipv6Addr::new(0xfd00, 0x96, 0, 0, 0, 0, 0, 0x10).into()
    }
}

fn backend(v4: bool) -> IpAddr {
    if v4 {
        Ipv4Addr::new(10, 244, 1, 11).into()
    } else {
        Ipv6Addr::new(0xfd00, 1, 0, 0, 0, 0, 0, 0x11).into()
    }
}

/// Returns SYNs to the Service, each from another client, which no other CPU has.
fn packets(v4: bool, cpu: usize) -> Vec<Vec<u8>> {
    let network = u16::try_from(cpu).unwrap_or(u16::MAX) + 2;
    let packet = |nth: u16| {
        let ethernet = PacketBuilder::ethernet2([0; 6], [0; 6]);
        let ip = match (web(v4), nth.to_be_bytes()) {
            (IpAddr::V4(web), [high, low]) => ethernet.ipv4(
                [10, 244 + network.to_be_bytes()[1], high, low],
                web.octets(),
                64,
            ),
            (IpAddr::V6(web), _) => ethernet.ipv6(
                Ipv6Addr::new(0xfd00, network, 0, 0, 0, 0, 0, nth).octets(),
                web.octets(),
                64,
            ),
        };
        let mut bytes = Vec::new();
        let written = ip
            .tcp(1_024 + nth, PORT, u32::from(nth), 64_240)
            .syn()
            .write(&mut bytes, &[]);
        written.expect("a vector takes all bytes");
        bytes
    };
    (1..=PACKETS).map(packet).collect()
}
