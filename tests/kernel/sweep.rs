//! The sweep: the flows that it removes, their timeouts, and its own cost.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Result, ensure};
use aya::maps::{HashMap, MapData};
use nix::time::{ClockId, clock_gettime};
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto, SockAddr};
use proxy_common::flow::{Flow, FlowKey, Kind, Seen};
use proxy_common::names::{IPV4, IPV6};
use proxy_datapath::Pressure;

use crate::reuse::{Reused, Setup};

type Flows<A> = HashMap<MapData, FlowKey<A>, Flow<A>>;

/// Loads programs with this many flow entries (default: as on a node), and opens their flow table.
fn bench<A: Addr>(name: &str, flow_entries: Option<u32>) -> Result<(Reused, Flows<A>)> {
    let bench = Reused::get(Setup {
        flow_entries,
        ..Setup::default()
    })?;
    let flows = bench.map(name)?;
    Ok((bench, flows))
}

/// Returns a time ten hours ahead: on a freshly booted machine, no flow can have been silent for
/// hours.
pub(crate) fn later() -> Result<u32> {
    const HOURS: u32 = 48 * 3_600;
    Ok(u32::try_from(clock_gettime(ClockId::CLOCK_BOOTTIME)?.tv_sec())? + HOURS)
}

/// Returns the nth established TCP connection, silent for this long.
fn established<A: Addr>(n: u32, idle_secs: u32) -> Result<Flow<A>> {
    let now_secs = later()?;
    let at = |host: u32, port| {
        let ip = match A::from_ip(std::net::Ipv4Addr::from(host).into()) {
            Some(addr) => addr,
            None => A::from_ip(std::net::Ipv6Addr::from(u128::from(host)).into())
                .expect("one of the two"),
        };
        SockAddr::new(ip, Port::new(port))
    };
    let client = at(0x0a00_0000 + n / 60_000, (n % 60_000) as u16);
    let mut flow = Flow::new(
        client,
        at(0x0b00_0001, 80),
        at(0x0c00_0001, 80),
        client,
        0,
        now_secs - idle_secs,
    );
    (flow.tx, flow.rx) = (Seen::PACKET.with(Seen::ASSURED), Seen::PACKET);
    Ok(flow)
}

fn put<A: Addr>(
    flows: &mut HashMap<MapData, FlowKey<A>, Flow<A>>,
    mut flow: Flow<A>,
) -> Result<()> {
    for kind in [Kind::UNDNAT, Kind::DNAT] {
        flow.kind = kind;
        flows.insert(flow.key(Proto::TCP), flow, 0)?;
    }
    Ok(())
}

#[test]
fn fuller_table_keeps_silent_flows_for_less_time() -> Result<()> {
    fuller::<Addr4>(IPV4.flows)?;
    fuller::<Addr6>(IPV6.flows)
}

fn fuller<A: Addr>(name: &str) -> Result<()> {
    let (bench, mut flows) = bench::<A>(name, Some(1_000))?;
    let swept = |now_secs| bench.datapath.flows.sweep_at(now_secs);
    let sweep =
        || Ok::<_, anyhow::Error>(swept(later()?)?.remove(A::FAMILY).expect("both families"));
    for n in 0..410 {
        put(
            &mut flows,
            established(n, if n < 10 { 100 } else { 4_100 })?,
        )?;
    }
    let swept = sweep()?;
    ensure!(
        swept.expired == 0 && swept.entries == 820 && swept.pressure == Pressure::High,
        "{swept:?}"
    );
    let swept = sweep()?;
    ensure!(
        swept.expired == 400 && swept.entries == 20 && swept.pressure == Pressure::None,
        "{swept:?}"
    );
    // The table is nearly full: a flow expires after a quarter of its timeout.
    for n in 10..480 {
        put(
            &mut flows,
            established(n, if n < 100 { 2_000 } else { 2_100 })?,
        )?;
    }
    let swept = sweep()?;
    ensure!(
        swept.expired == 380 && swept.entries == 200 && swept.pressure == Pressure::None,
        "{swept:?}"
    );
    Ok(())
}

#[test]
fn changing_table_is_walked_once() -> Result<()> {
    changing::<Addr4>(IPV4.flows)?;
    changing::<Addr6>(IPV6.flows)
}

/// The sweep visits each permanent flow once while other flows come and go.
fn changing<A: Addr>(name: &str) -> Result<()> {
    const STAY: u32 = 20_000;
    let (bench, mut flows) = bench::<A>(name, None)?;
    (0..STAY).try_for_each(|n| put(&mut flows, established(n, 0)?))?;
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let churn = scope.spawn(|| -> Result<()> {
            let mut n = STAY;
            while !done.load(Ordering::Relaxed) {
                let flow = established::<A>(n, 0)?;
                put(&mut flows, flow)?;
                flow.kinds()
                    .iter()
                    .try_for_each(|kind| flows.remove(&flow.key_as(*kind, Proto::TCP)))?;
                n += 1;
            }
            Ok(())
        });
        let swept = (0..20)
            .map(|_| bench.datapath.flows.sweep())
            .collect::<Result<Vec<_>>>();
        done.store(true, Ordering::Relaxed);
        churn.join().map_err(|_| anyhow::anyhow!("panicked"))??;
        for swept in swept? {
            let swept = &swept[A::FAMILY];
            ensure!(
                (STAY as usize..=STAY as usize + 100).contains(&swept.flows),
                "{swept:?}"
            );
        }
        Ok(())
    })
}

#[test]
fn large_table_is_swept_in_little_time() -> Result<()> {
    let (bench, mut flows) = bench::<Addr4>(IPV4.flows, None)?;
    (0..120_000).try_for_each(|n| put(&mut flows, established(n, 0)?))?;
    let cpu = || clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID);
    let started = (Instant::now(), cpu()?);
    let swept = bench.datapath.flows.sweep()?;
    let spent = cpu()? - started.1;
    println!(
        "{} entries: {:?} in all, {spent:?} of a CPU",
        swept[Addr4::FAMILY].entries,
        started.0.elapsed()
    );
    ensure!(swept[Addr4::FAMILY].flows == 120_000, "{swept:?}");
    // The walk by key takes two calls per entry.
    let started = cpu()?;
    ensure!(flows.iter().count() == 240_000);
    let by_key = cpu()? - started;
    ensure!(spent < by_key, "{spent:?}; entry by entry {by_key:?}");
    Ok(())
}
