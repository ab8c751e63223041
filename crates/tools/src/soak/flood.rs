//! Handshakes and datagrams from random sources, at the full speed of a core.

use std::net::SocketAddrV4;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use proxy_common::names::{IPV4, IPV6};
use proxy_view::status::Status;
use serde_json::Value;

use super::Scale;
use super::fixture::{BACKENDS, Fixture, NODE_PORT};
use super::memory::Memory;
use super::report::Report;
use crate::load::{Flood, Pair};

/// The time before the flood.
const CALM: Duration = Duration::from_secs(1);
/// The fill from which on sweeps run continuously.
const HIGH_MARK: f64 = 0.95;
/// Time between two readings of the memory.
const LOOK: Duration = Duration::from_secs(1);
/// The allowed growth of the agent's memory. Its need during sweeps of full tables shows early.
const AGENT_SLACK: u64 = 8 << 20;
/// The same for maps: some allocate memory with their entries.
const MAPS_SLACK: u64 = 1 << 20;

/// Floods a node port of the Service that other clients dial, for the scale's duration.
pub fn flood(scale: Scale) -> Result<Report> {
    let fixture = Fixture::build(scale.place)?;
    // The CNI's rules would make the node's own conntrack table the flood's target.
    for node in fixture.lab.nodes() {
        node.host.ns.nft("delete table inet cni")?;
    }
    // Answers to non-existent sources end here, without an error.
    fixture
        .lab
        .fabric
        .ns
        .ip("route add blackhole 198.18.0.0/15")?;
    let agent = fixture.kpx(&[])?;
    let load = fixture
        .load_with_clients_outside(scale.rate, |exchange| BACKENDS.contains(&exchange.backend))?;
    thread::sleep(CALM);
    let before = Memory::of(agent.pid())?;
    let to = SocketAddrV4::new(fixture.lab.n1.host.addrs.v4, NODE_PORT);
    let kinds = [Pair::Handshake, Pair::Datagrams];
    let flood = Flood::start(&fixture.lab.xl, &fixture.lab.n1.host.ns, to, &kinds)?;
    let started = Instant::now();
    let mut looks = Vec::new();
    let mut fill = 0.0_f64;
    while started.elapsed() < scale.at_least {
        thread::sleep(LOOK);
        looks.push(Memory::of(agent.pid())?);
        fill = fill.max(fill_of_flows(&agent.status()?)?);
    }
    let (sent, lasted) = flood.finish()?;
    let seen = load.finish()?;
    let status = agent.status()?;
    agent.stop()?;

    let [syns, datagrams] = sent[..] else {
        bail!("not two kinds of pairs: {sent:?}")
    };
    let rate = |sent: u64| sent as f64 / lasted.as_secs_f64();
    let what = format!(
        "in {lasted:.1?} from random sources {syns} SYNs, each with a blind ACK behind it, {:.0} a second, and {datagrams} pairs of \
         datagrams, {:.0} a second",
        rate(syns),
        rate(datagrams)
    );
    let mut report = Report::new("flood", what, &seen);
    let (early, late) = looks.split_at(looks.len().div_ceil(3));
    let [early, late] =
        [early, late].map(|looks| looks.iter().fold(before, |most, look| most.max(*look)));
    report.note(format!("memory before: {before}"));
    report.note(format!(
        "memory at most: {early} in the first third, {late} later"
    ));
    let reasons = status["reasons"]
        .as_object()
        .context("a status without reasons")?;
    let counted = reasons.iter().filter(|(_, count)| count.as_u64() > Some(0));
    report.note(format!(
        "not translated: {}",
        counted
            .map(|(reason, n)| format!("{n} {reason}"))
            .collect::<Vec<_>>()
            .join(", ")
    ));
    let constant = late.maps <= before.maps + MAPS_SLACK && late.agent <= early.agent + AGENT_SLACK;
    report.promise(
        constant,
        format!("memory grew from {before} to {early} and on to {late}"),
    );
    report.promise(
        status["healthy"] == true,
        format!("unhealthy: {}", status["problems"]),
    );
    report.promise(syns > 0 && datagrams > 0, "there was no flood".to_owned());
    report.note(format!(
        "the flow table was filled to {:.1} % at most",
        fill * 100.0
    ));
    report.promise(
        fill < HIGH_MARK,
        format!("the flow table was filled to {:.1} %", fill * 100.0),
    );
    let full = reasons
        .get("flows_full")
        .and_then(Value::as_u64)
        .unwrap_or_default();
    report.promise(
        full == 0,
        format!("{full} packets found the flow table full"),
    );
    Ok(report)
}

/// Returns the fill of the fuller flow table at the last sweep.
fn fill_of_flows(status: &Value) -> Result<f64> {
    let status: Status = serde_json::from_value(status.clone()).context("read the status")?;
    let fill = [IPV4, IPV6]
        .into_iter()
        .filter_map(|maps| status.map_fill.get(maps.flows));
    let fill = fill.map(|fill| fill.entries.unwrap_or_default() as f64 / fill.max_entries as f64);
    Ok(fill.fold(0.0, f64::max))
}
