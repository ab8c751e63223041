//! What happens where there is no room, and how much the programs need themselves.

use std::collections::BTreeMap;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use aya::programs::Program;
use nix::sys::pthread::{pthread_kill, pthread_self};
use nix::sys::signal::Signal;
use proxy_common::names::{EGRESS, FAST_PATH, INGRESS};
use proxy_datapath::object;
use proxy_datapath::verifier;
use testbed::test_run::Bench;
use testbed::test_run::Verdict::{Drop, Pass};
use tokio::signal::unix::{SignalKind, signal};

use crate::lab::{labs, labs_with_room};

#[test]
fn where_all_ports_are_taken_a_flow_that_is_over_makes_room() -> Result<()> {
    for lab in labs("evict")? {
        // Twice as many connections as there are ports, one after the other.
        for port in 1_000..10_000_u16 {
            for (program, packet) in [(INGRESS, "tcp S client"), (INGRESS, "tcp R client")] {
                let frame = lab.names.frame(&format!("{packet}:{port} > self:80"))?;
                let verdict = lab.run(program, &frame)?.verdict;
                ensure!(verdict == Pass, "{packet}:{port}: {verdict:?} {:?}", lab.counts()?);
            }
        }
        ensure!(lab.counts()?.get("flow_opened") == Some(&9_000), "{:?}", lab.counts()?);
    }
    Ok(())
}

#[test]
fn a_full_table_refuses_new_flows_and_keeps_the_old() -> Result<()> {
    for mut lab in labs_with_room("full", Some(64))? {
        let mut open = 0;
        for port in 1..200 {
            let frame = lab.names.frame(&format!("tcp S client:{port} > web:80"))?;
            if lab.run(INGRESS, &frame)?.verdict == Drop {
                break;
            }
            open = port;
            lab.run(EGRESS, &lab.names.frame(&format!("tcp SA pod:8080 > client:{port}"))?)?;
            lab.run(INGRESS, &lab.names.frame(&format!("tcp A client:{port} > web:80"))?)?;
        }
        ensure!((20..100).contains(&open), "{open} flows");
        let counts = lab.counts()?;
        ensure!(counts["flows_full"] == 1 && counts["flow_forgotten"] == 0, "{counts:?}");
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
            let outcome = lab.run(INGRESS, &frame)?;
            if outcome.verdict == Drop {
                refused += 1;
                continue;
            }
            let text = lab.names.text(&outcome.packet)?;
            let other = given.insert(text.clone(), port);
            ensure!(other.is_none(), "{text} for ports {other:?} and {port}");
            // Answered and asked again, it keeps its port.
            let source = text.split([':', ' ']).nth(2).context("a port")?;
            let answer = lab.names.frame(&format!("udp client:5353 > node:{source}"))?;
            lab.run(EGRESS, &lab.run(INGRESS, &answer)?.packet)?;
            lab.run(INGRESS, &frame)?;
        }
        let range = usize::from(u16::MAX - 61_000) + 1;
        ensure!(given.len() > range * 9 / 10 && given.len() <= range, "{} ports given", given.len());
        ensure!(refused > 0 && lab.counts()?.get("no_source_port") == Some(&refused), "{refused} refused");
    }
    Ok(())
}

/// Of the million that the kernel follows before it refuses a program, no more than a quarter: the rest is for kernels that
/// follow more ways.
#[test]
fn every_program_is_far_from_the_verifiers_limit() -> Result<()> {
    const MOST: u32 = 250_000;
    for fast_path in [0_u32, 1] {
        let mut loader = verifier::loader();
        let mut ebpf = loader.override_global(FAST_PATH, &fast_path, true).load(object::embedded()?)?;
        let mut count = 0;
        for (name, program) in ebpf.programs_mut() {
            let loaded = match program {
                Program::SchedClassifier(program) => verifier::load(|| program.load()).and_then(|()| program.info()),
                Program::CgroupSockAddr(program) => verifier::load(|| program.load()).and_then(|()| program.info()),
                _ => bail!("{name} is of a type that kpx does not have"),
            };
            // Kernels before 5.16 do not tell.
            let verified = loaded.with_context(|| format!("load {name}"))?.verified_instruction_count().unwrap_or(0);
            ensure!(verified <= MOST, "{name}: {verified} instructions");
            count += 1;
        }
        ensure!(count >= 4, "only {count} programs");
    }
    Ok(())
}

/// At any signal to the thread that loads a program the verifier gives up.
#[test]
fn programs_load_while_signals_arrive() -> Result<()> {
    const SIGNALS: usize = 8;
    const PAUSE: Duration = Duration::from_millis(30);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let _handled = runtime.block_on(async { signal(SignalKind::user_defined1()) })?;
    let loading = pthread_self();
    let (loaded, is_loaded) = channel::<()>();
    thread::scope(|scope| {
        let signals = scope.spawn(move || {
            let pauses = (0..SIGNALS).take_while(|_| is_loaded.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout));
            pauses.map(|_| pthread_kill(loading, Signal::SIGUSR1)).collect::<Result<Vec<_>, _>>()
        });
        let bench = Bench::load_small();
        drop(loaded);
        let sent = signals.join().expect("it does not panic")?;
        ensure!(!sent.is_empty(), "the programs were loaded in less than {PAUSE:?}");
        bench.map(drop)
    })
}
