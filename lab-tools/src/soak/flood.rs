//! Handshakes from random sources, as many as one core can send.

use std::net::SocketAddrV4;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::Scale;
use super::fixture::{BACKENDS, Fixture, NODE_PORT};
use super::memory::Memory;
use super::report::Report;
use crate::load::Flood;

/// Before the flood.
const CALM: Duration = Duration::from_secs(1);
/// Between looks at the memory.
const LOOK: Duration = Duration::from_secs(1);
/// The memory that an agent may need more at one time than at another. Its need for looking through full tables shows early.
const AGENT_SLACK: u64 = 8 << 20;

/// At a node port of the very Service that others dial, for as long as the scale says.
pub fn flood(scale: Scale) -> Result<Report> {
    let fixture = Fixture::build(scale.place)?;
    // Nor do the CNI's rules: with them the node's own connection tracking would be what is flooded.
    for node in fixture.lab.nodes() {
        node.host.ns.nft("delete table inet cni")?;
    }
    // Answers to sources that do not exist end here, without an error.
    fixture.lab.fabric.ns.ip("route add blackhole 198.18.0.0/15")?;
    let agent = fixture.kpx(&[])?;
    let load = fixture.load(scale.rate, |exchange| BACKENDS.contains(&exchange.backend))?;
    thread::sleep(CALM);
    let before = Memory::of(agent.pid())?;
    let to = SocketAddrV4::new(fixture.lab.n1.host.addrs.v4, NODE_PORT);
    let flood = Flood::start(&fixture.lab.xl, &fixture.lab.n1.host.ns, to)?;
    let started = Instant::now();
    let mut looks = Vec::new();
    while started.elapsed() < scale.at_least {
        thread::sleep(LOOK);
        looks.push(Memory::of(agent.pid())?);
    }
    let (sent, lasted) = flood.finish()?;
    let seen = load.finish()?;
    let status = agent.status()?;
    agent.stop()?;

    let rate = sent as f64 / lasted.as_secs_f64();
    let what = format!(
        "{sent} SYNs from random sources, each with a blind ACK behind it, in {lasted:.1?}, {rate:.0} a second"
    );
    let mut report = Report::new("flood", what, &seen);
    let (early, late) = looks.split_at(looks.len().div_ceil(3));
    let [early, late] = [early, late].map(|looks| looks.iter().fold(before, |most, look| most.max(*look)));
    report.note(format!("memory before: {before}"));
    report.note(format!("memory at most: {early} in the first third, {late} later"));
    let reasons = status["reasons"].as_object().context("a status without reasons")?;
    let counted = reasons.iter().filter(|(_, count)| count.as_u64() > Some(0));
    report.note(format!(
        "not translated: {}",
        counted.map(|(reason, n)| format!("{n} {reason}")).collect::<Vec<_>>().join(", ")
    ));
    let constant = late.maps == before.maps && late.agent <= early.agent + AGENT_SLACK;
    report.promise(constant, format!("memory grew from {before} to {early} and on to {late}"));
    report.promise(status["healthy"] == true, format!("unhealthy: {}", status["problems"]));
    report.promise(sent > 0, "there was no flood".to_owned());
    Ok(report)
}
