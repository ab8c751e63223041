//! The cost of a packet in each program: BPF_PROG_TEST_RUN, against a program that does nothing, in
//! one run.
//!
//! Before that the hooks against the least that they could do, in real traffic and without: see
//! `tools::programs`.
//!
//! Medians of interleaved rounds, in nanoseconds. Caches are warm, nothing else happens, and taking
//! the time costs as much as the least program. Only the last column counts, which compares
//! programs with each other instead of with a network.

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto};
use proxy_common::device::Device;
use proxy_common::frontend::{Backend, Frontend, FrontendKey, FrontendKind, Service, Set, SlotKey};
use proxy_common::names::{EGRESS, EMPTY, INGRESS};
use proxy_core::diff::{Change, FamilyChange};
use proxy_datapath::{Maps, Options};
use testbed::test_run::{Bench, Verdict};
use testbed::text::Names;
use tools::programs::{self, Row as Against};

use crate::record::{self, Record, Writer, show};

/// Interface index of lo, in every network namespace: where packets of BPF_PROG_TEST_RUN are.
const LO: u32 = 1;

#[derive(clap::Parser)]
pub(crate) struct Args {
    /// Rounds; each measures every row once.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Runs of a program in a row, each on a fresh packet.
    #[arg(long, default_value_t = 20_000)]
    runs: u32,
    /// Turns that two sockets take while the kernel takes the time.
    #[arg(long, default_value_t = 10_000)]
    turns: u32,
}

struct Row {
    what: &'static str,
    program: &'static str,
    packet: &'static str,
    times: Vec<Duration>,
}

const ROWS: [(&str, &str, &str); 6] = [
    (
        "a program that does nothing",
        EMPTY,
        "tcp A client:1000 > web:80 +1",
    ),
    (
        "ingress, hit: rewrite the destination",
        INGRESS,
        "tcp A client:1000 > web:80 +1",
    ),
    (
        "ingress, miss: from the middle of a connection",
        INGRESS,
        "tcp A client:1000 > stranger:80 +1",
    ),
    (
        "ingress, miss: UDP to no service",
        INGRESS,
        "udp client:1000 > stranger:53 +1",
    ),
    (
        "egress, hit: rewrite the source",
        EGRESS,
        "tcp A pod:8080 > client:1000 +1",
    ),
    ("egress, miss", EGRESS, "tcp A stranger:80 > client:1000 +1"),
];

pub(crate) fn run(cli: &Args, results: &Path) -> Result<()> {
    let mut writer = Writer::create(results, "programs")?;
    for (how, rows) in [
        (
            "while sockets talk, ns",
            programs::live(cli.rounds, cli.turns)?,
        ),
        ("again and again, ns", programs::warm(cli.rounds)?),
    ] {
        let table = against(how, &rows);
        show(&table);
        writer.write(&Record::Table(table))?;
    }
    let families = [
        [
            ("client", "10.244.1.10"),
            ("web", "10.96.0.10"),
            ("pod", "10.244.1.11"),
            ("stranger", "192.0.2.1"),
        ],
        [
            ("client", "fd00:1::10"),
            ("web", "fd00:96::10"),
            ("pod", "fd00:1::11"),
            ("stranger", "2001:db8::1"),
        ],
    ];
    for addrs in families {
        let addrs = addrs.map(|(name, addr)| Ok((name, addr.parse::<IpAddr>()?)));
        let table = measure(
            cli,
            &Names::new(addrs.into_iter().collect::<Result<Vec<_>>>()?),
        )?;
        show(&table);
        writer.write(&Record::Table(table))?;
    }
    writer.finish()
}

fn measure(cli: &Args, names: &Names) -> Result<record::Table> {
    let mut bench = Bench::load(Options::default())?;
    // A pod's, as whose cluster IPs may be dialled.
    let device = Device::new(Device::POD, Addr4::UNSPECIFIED, Addr6::UNSPECIFIED);
    bench.datapath.node.set_devices(&[(LO, device)].into())?;
    let v4 = names.addr("web")?.is_ipv4();
    let changes: Vec<Change> = if v4 {
        service::<Addr4>(names)?
            .into_iter()
            .map(Change::V4)
            .collect()
    } else {
        service::<Addr6>(names)?
            .into_iter()
            .map(Change::V6)
            .collect()
    };
    for change in changes {
        bench.datapath.tables.apply(&change)?;
    }
    let outcome = bench.run(INGRESS, &names.frame("tcp S client:1000 > web:80")?)?;
    anyhow::ensure!(
        outcome.verdict == Verdict::Pass,
        "the opener: {:?}",
        outcome.verdict
    );
    let mut rows = ROWS.map(|(what, program, packet)| Row {
        what,
        program,
        packet,
        times: Vec::new(),
    });
    for _ in 0..cli.rounds {
        for row in &mut rows {
            row.times
                .push(bench.cost(row.program, &names.frame(row.packet)?, cli.runs)?);
        }
    }
    check(&bench, cli, v4)?;
    Ok(table(
        &mut rows,
        if v4 { Addr4::FAMILY } else { Addr6::FAMILY },
    ))
}

fn service<A: Addr>(names: &Names) -> Result<[FamilyChange<A>; 3]> {
    let addr = |name| -> Result<A> { A::from_ip(names.addr(name)?).context("family") };
    let key = FrontendKey::new(addr("web")?, Port::new(80), Proto::TCP);
    let backend = Backend::new(addr("pod")?, Port::new(8080), Backend::<A>::LOCAL);
    Ok([
        FamilyChange::PutSlot(SlotKey::new(key, Set::CLUSTER, 0), backend),
        FamilyChange::PutService(key, Service::new(1, 0, Service::HAS_ENDPOINTS)),
        FamilyChange::PutFrontend(key, Frontend::new(key, FrontendKind::CLUSTER_IP)),
    ])
}

/// The hits must have been hits, and nothing else may have happened.
fn check(bench: &Bench, cli: &Args, v4: bool) -> Result<()> {
    let runs = u64::try_from(cli.rounds)? * u64::from(cli.runs);
    let events = bench.datapath.counters.events()?;
    let reasons = bench.datapath.counters.reasons()?;
    let counted = |name: &str| {
        let events = events.iter().map(|(event, n)| (event.name(), *n));
        events
            .chain(reasons.iter().map(|(reason, n)| (reason.name(), *n)))
            .find(|(found, _)| *found == name)
    };
    for (name, expected) in [
        ("forwarded", runs + 1),
        ("returned", runs),
        ("no_flow", runs),
        ("not_ours", 2 * runs),
        ("flow_opened", 1),
    ] {
        let (_, found) = counted(name).context("a counter of that name")?;
        anyhow::ensure!(
            found == expected,
            "{name} {found}, not {expected} (IPv4: {v4})"
        );
    }
    Ok(())
}

fn against(how: &str, rows: &[Against]) -> record::Table {
    let header = [how, "nothing", "minimal", "kpx", "kpx / minimal"]
        .map(str::to_owned)
        .to_vec();
    let rows = rows.iter().map(|row| {
        let [nothing, minimal, kpx] = row.medians().map(|time| time.as_nanos().to_string());
        vec![
            row.what.clone(),
            nothing,
            minimal,
            kpx,
            format!("{:.2}", row.ratio()),
        ]
    });
    record::Table {
        header,
        rows: rows.collect(),
    }
}

fn table(rows: &mut [Row], family: &str) -> record::Table {
    let median = |times: &mut Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2].as_nanos()
    };
    let empty = median(&mut rows[0].times);
    let figures = rows.iter_mut().map(|row| {
        let middle = median(&mut row.times);
        let least = row.times[0].as_nanos();
        let most = row.times[row.times.len() - 1].as_nanos();
        let above = middle.saturating_sub(empty);
        [row.what.to_owned()]
            .into_iter()
            .chain([middle, least, most, above].map(|ns| ns.to_string()))
            .collect()
    });
    let header = [family, "median ns", "least", "most", "above nothing"]
        .map(str::to_owned)
        .to_vec();
    record::Table {
        header,
        rows: figures.collect(),
    }
}
