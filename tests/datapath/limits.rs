//! What happens where there is no room, and how much the programs need themselves.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aya::Ebpf;
use aya::programs::SchedClassifier;
use kpx_tests::bench::Verdict::{Drop, Pass};
use nix::time::{ClockId, clock_gettime};
use proxy_agent::datapath::Options;
use proxy_agent::object;
use proxy_common::names::{EGRESS, INGRESS};

use crate::lab::{labs, labs_with};

#[test]
fn where_all_ports_are_taken_a_flow_that_is_over_makes_room() -> Result<()> {
    for lab in labs("evict")? {
        // Twice as many connections as there are ports, one after the other.
        for port in 1_000..10_000_u16 {
            for (program, packet) in [(INGRESS, "tcp S client"), (INGRESS, "tcp R client")] {
                let frame = lab.names.frame(&format!("{packet}:{port} > self:80"))?;
                let verdict = lab.bench.run(program, &frame)?.verdict;
                ensure!(verdict == Pass, "{packet}:{port}: {verdict:?} {:?}", lab.counts()?);
            }
        }
        ensure!(lab.counts()?.get("flow_opened") == Some(&9_000), "{:?}", lab.counts()?);
    }
    Ok(())
}

#[test]
fn a_full_table_refuses_new_flows_and_keeps_the_old() -> Result<()> {
    let options = Options { flow_entries: Some(64), ..Options::default() };
    for mut lab in labs_with("full", options)? {
        lab.check(&[(INGRESS, "tcp S client:1 > web:80", Pass, "tcp S client:1 > pod:8080", "flow_opened forwarded")])?;
        let full = (2..200).find_map(|port| {
            let frame = lab.names.frame(&format!("tcp S client:{port} > web:80")).ok()?;
            (lab.bench.run(INGRESS, &frame).ok()?.verdict == Drop).then_some(port)
        });
        ensure!(full.is_some_and(|port| port > 20), "refused at {full:?}");
        ensure!(lab.counts()?.get("flows_full") == Some(&1), "{:?}", lab.counts()?);
        lab.check(&[
            (EGRESS, "tcp SA pod:8080 > client:1", Pass, "tcp SA web:80 > client:1", "returned"),
            (INGRESS, "tcp A client:1 > web:80", Pass, "tcp A client:1 > pod:8080", "forwarded"),
        ])?;
    }
    Ok(())
}

#[test]
fn source_ports_are_never_given_twice_and_can_run_out() -> Result<()> {
    for lab in labs("ports")? {
        let mut given = BTreeMap::new();
        let mut refused = 0;
        for port in 1..=8_000_u16 {
            let frame = lab.names.frame(&format!("udp client:{port} > self:53"))?;
            let outcome = lab.bench.run(INGRESS, &frame)?;
            if outcome.verdict == Drop {
                refused += 1;
                continue;
            }
            let text = lab.names.text(&outcome.packet)?;
            let other = given.insert(text.clone(), port);
            ensure!(other.is_none(), "{text} for ports {other:?} and {port}");
        }
        let range = usize::from(u16::MAX - 61_000) + 1;
        ensure!(given.len() > range * 9 / 10 && given.len() <= range, "{} ports given", given.len());
        ensure!(refused > 0 && lab.counts()?.get("no_source_port") == Some(&refused), "{refused} refused");
    }
    Ok(())
}

#[test]
fn every_program_is_verified_in_half_a_second() -> Result<()> {
    let mut ebpf = Ebpf::load(object::embedded()?)?;
    // Of this thread: what else the machine does is not the programs' fault.
    let cpu_time = || -> Result<Duration> { Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?.into()) };
    let mut count = 0;
    for (name, program) in ebpf.programs_mut() {
        let program: &mut SchedClassifier = program.try_into()?;
        let started = cpu_time()?;
        program.load().with_context(|| format!("load {name}"))?;
        let took = cpu_time()? - started;
        ensure!(took < Duration::from_millis(500), "{name}: {took:?}");
        count += 1;
    }
    ensure!(count >= 4, "only {count} programs");
    Ok(())
}
