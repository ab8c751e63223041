//! Changing endpoints: the delay until the kernel has them.

use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use aya::maps::{HashMap, MapData};
use proxy_common::addr::Addr4;
use proxy_common::frontend::{Backend, SlotKey};
use serde::Serialize;
use serde_json::{Value, json};
use testbed::agent::Agent;

use super::cluster::{Cluster, newcomer};
use super::fixture::{Fixture, millis};
use super::process::{Memory, Process};

/// A phase with changes at a rate.
#[derive(Clone, Debug, Serialize)]
pub struct Changes {
    pub per_second: u32,
    /// The number of changes, each of one endpoint of one slice.
    pub count: usize,
    /// From the event to the map.
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
    /// The agent's CPU time as a share of a core. The CPU time per change follows.
    pub cpu_percent: f64,
    pub cpu_us_per_change: f64,
    pub bytes_per_change: f64,
    pub memory: Memory,
}

/// Time limit for a change.
const LOST: Duration = Duration::from_secs(20);
/// The pause between reads of the map. Reading without a pause would take a CPU from the measured
/// processes.
const LOOK: Duration = Duration::from_micros(20);
/// The addresses reserved per change a second: more than measured seconds. All are in the
/// cluster's pod range.
const APART: u32 = 100;
/// A prime, so that consecutive changes affect distant Services.
const STRIDE: u32 = 7_919;

/// An event: its number, and the time at which the server made it.
type Sent = (u64, Instant);

pub(crate) fn measure(
    fixture: &Fixture,
    kpx: &Agent,
    cluster: &Cluster,
    per_second: u32,
    duration: Duration,
) -> Result<Changes> {
    let process = Process(kpx.pid());
    let slots = fixture.slots()?;
    let events = fixture.server.meter().events();
    let (bytes_before, cpu_before, began) = (
        fixture.server.meter().bytes_sent(),
        process.cpu_of_threads()?,
        Instant::now(),
    );
    let (expected, expectations) = mpsc::channel();
    let mut times = thread::scope(|scope| {
        let interval = Duration::from_secs(1) / per_second;
        let count =
            u32::try_from(duration.as_nanos() / interval.as_nanos()).context("as many changes")?;
        let newest = newcomer(count + per_second * APART).into();
        let watcher = scope.spawn(move || watch(&slots, &events, &expectations, newest));
        for nth in 0..count {
            let service = nth.wrapping_mul(STRIDE) % cluster.services;
            let addr = newcomer(nth + per_second * APART);
            let mut slice = cluster.slice(service, Some(addr));
            thread::sleep((began + interval * nth).saturating_duration_since(Instant::now()));
            // No concurrent change is made, so this change has the next version.
            expected
                .send((
                    fixture.server.version() + 1,
                    cluster.last_slot(service, addr),
                ))
                .context("the watcher has ended")?;
            trigger(&mut slice);
            fixture.server.apply_as_is(&slice)?;
        }
        drop(expected);
        watcher
            .join()
            .map_err(|_| anyhow::anyhow!("the watcher panicked"))?
    })?;
    let took = began.elapsed();
    let cpu = process.cpu_of_threads()?.saturating_sub(cpu_before);
    fixture.server.meter().forget_events();
    times.sort_unstable();
    let count = times.len();
    let at = |part: f64| {
        times
            .get(((count as f64 * part) as usize).min(count - 1))
            .copied()
            .map_or(0.0, millis)
    };
    Ok(Changes {
        per_second,
        count,
        p50_ms: at(0.5),
        p99_ms: at(0.99),
        max_ms: at(1.0),
        cpu_percent: 100.0 * cpu.as_secs_f64() / took.as_secs_f64(),
        cpu_us_per_change: cpu.as_secs_f64() * 1e6 / count as f64,
        bytes_per_change: (fixture.server.meter().bytes_sent() - bytes_before) as f64
            / count as f64,
        memory: process.memory()?,
    })
}

/// Sets the trigger time annotation, like the EndpointSlice controller.
pub(crate) fn trigger(slice: &mut Value) {
    slice["metadata"]["annotations"]["endpoints.kubernetes.io/last-change-trigger-time"] =
        json!(jiff::Timestamp::now().to_string());
}

/// A row of `SLOTS4`.
type Row = (SlotKey<Addr4>, Backend<Addr4>);

/// Measures from each event to its row, or to the row of a later change of the same Service, which
/// has a higher address up to `newest`. Reads the map only while an event is pending.
fn watch(
    slots: &HashMap<MapData, SlotKey<Addr4>, Backend<Addr4>>,
    events: &mpsc::Receiver<Sent>,
    expectations: &mpsc::Receiver<(u64, Row)>,
    newest: Addr4,
) -> Result<Vec<Duration>> {
    let mut times = Vec::new();
    for (version, (key, backend)) in expectations {
        let (_, sent) = loop {
            let event = events
                .recv_timeout(LOST)
                .with_context(|| format!("version {version} was not sent"))?;
            if event.0 == version {
                break event;
            }
        };
        while !slots
            .get(&key, 0)
            .is_ok_and(|found| (backend.addr..=newest).contains(&found.addr))
        {
            if sent.elapsed() > LOST {
                bail!(
                    "{key:?} is {:?} for {LOST:?}, and not {backend:?}",
                    slots.get(&key, 0)
                );
            }
            thread::sleep(LOOK);
        }
        times.push(sent.elapsed());
    }
    Ok(times)
}
