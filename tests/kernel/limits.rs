//! Full tables, and the limits of the programs themselves.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::pthread::{pthread_kill, pthread_self};
use nix::sys::signal::Signal;
use proxy_common::flow::{CLIENT_PORT_FIRST, CLIENT_PORT_LAST, SOURCE_PORT_FIRST};
use proxy_common::names::{ANCHOR, EGRESS, FAST_PATH, INGRESS};
use proxy_datapath::{object, verifier};
use testbed::test_run::Bench;
use testbed::test_run::Verdict::{Drop, Pass, Redirect};
use tokio::signal::unix::{SignalKind, signal};

use crate::fixture::{fixtures, fixtures_of};
use crate::reuse::Setup;

#[test]
fn ended_flow_makes_room_where_all_ports_are_taken() -> Result<()> {
    for fixture in fixtures("evict")? {
        // A third as many connections as ports, one after the other: some draws find a used port.
        for port in 1_000..10_000_u16 {
            for (program, packet) in [(INGRESS, "tcp S client"), (INGRESS, "tcp R client")] {
                let frame = fixture.names.frame(&format!("{packet}:{port} > self:80"))?;
                let verdict = fixture.run(program, &frame)?.verdict;
                ensure!(
                    verdict == Pass,
                    "{packet}:{port}: {verdict:?} {:?}",
                    fixture.counts()?
                );
            }
        }
        ensure!(
            fixture.counts()?.get("flow_opened") == Some(&9_000),
            "{:?}",
            fixture.counts()?
        );
    }
    Ok(())
}

#[test]
fn full_table_refuses_new_flows_and_keeps_old() -> Result<()> {
    let setup = Setup {
        flow_entries: Some(64),
        knows_no_shares: true,
        ..Setup::default()
    };
    for mut fixture in fixtures_of("full", setup)? {
        let mut open = 0;
        for port in 1..200 {
            let frame = fixture
                .names
                .frame(&format!("tcp S client:{port} > web:80"))?;
            if fixture.run(INGRESS, &frame)?.verdict == Drop {
                break;
            }
            open = port;
            fixture.run(
                EGRESS,
                &fixture
                    .names
                    .frame(&format!("tcp SA pod:8080 > client:{port}"))?,
            )?;
            fixture.run(
                INGRESS,
                &fixture
                    .names
                    .frame(&format!("tcp A client:{port} > web:80"))?,
            )?;
        }
        ensure!((20..100).contains(&open), "{open} flows");
        let counts = fixture.counts()?;
        ensure!(
            counts["flows_full"] == 1 && counts["flow_forgotten"] == 0,
            "{counts:?}"
        );
        fixture.rows("limits::full_table_refuses_new_flows_and_keeps_old")?;
    }
    Ok(())
}

#[test]
fn source_ports_are_never_drawn_twice_and_can_run_out() -> Result<()> {
    for fixture in fixtures("ports")? {
        let mut given = BTreeMap::new();
        let mut refused = 0;
        for port in 1..=8_000_u16 {
            let frame = fixture.names.frame(&format!("udp node:{port} > web:53"))?;
            let outcome = fixture.run(ANCHOR, &frame)?;
            if outcome.verdict == Drop {
                refused += 1;
                continue;
            }
            let text = fixture.names.text(&outcome.packet)?;
            let other = given.insert(text.clone(), port);
            ensure!(other.is_none(), "{text} for ports {other:?} and {port}");
            // After an answer and another packet, the flow keeps its port.
            let source = text.split([':', ' ']).nth(2).context("a port")?;
            let answer = fixture
                .names
                .frame(&format!("udp pod:5353 > node:{source}"))?;
            for (program, frame) in [(INGRESS, &answer), (ANCHOR, &frame)] {
                let verdict = fixture.run_from(program, frame, "udp pod:5353")?.verdict;
                ensure!(
                    verdict == Redirect,
                    "{text}: {verdict:?}, {:?}",
                    fixture.counts()?
                );
            }
        }
        let range = usize::from(u16::MAX - SOURCE_PORT_FIRST) + 1;
        ensure!(
            given.len() > range * 9 / 10 && given.len() <= range,
            "{} ports given",
            given.len()
        );
        ensure!(
            refused > 0 && fixture.counts()?.get("no_source_port") == Some(&refused),
            "{refused} refused"
        );
    }
    Ok(())
}

/// The host keeps its own range; masqueraded clients have more ports than one connection each could
/// use up.
#[test]
fn masqueraded_clients_have_ports_of_their_own() -> Result<()> {
    for fixture in fixtures("masqueraded")? {
        let mut given = BTreeSet::new();
        // More than the host's range has.
        for port in 1..=5_000_u16 {
            let frame = fixture
                .names
                .frame(&format!("udp client:{port} > self:53"))?;
            let outcome = fixture.run(INGRESS, &frame)?;
            ensure!(
                outcome.verdict == Pass,
                "port {port}: {:?}",
                fixture.counts()?
            );
            let text = fixture.names.text(&outcome.packet)?;
            let source: u16 = text.split([':', ' ']).nth(2).context("a port")?.parse()?;
            ensure!(
                (CLIENT_PORT_FIRST..=CLIENT_PORT_LAST).contains(&source) && given.insert(source),
                "{text}"
            );
        }
    }
    Ok(())
}

/// The kernel verifies a million instructions before it refuses a program. The limit here is less
/// than a fifth: some kernels follow more paths, and each start waits for all of them.
#[test]
fn every_program_is_far_from_verifiers_limit() -> Result<()> {
    const MOST: u32 = 240_000;
    for fast_path in [0_u32, 1] {
        let mut loader = verifier::loader();
        let mut ebpf = loader
            .override_global(FAST_PATH, &fast_path, true)
            .load(object::embedded()?)?;
        let mut count = 0;
        for (name, program) in ebpf.programs_mut() {
            let loaded = verifier::load_any(program).and_then(|()| program.info());
            // Kernels before 5.16 do not report the number.
            let verified = loaded
                .with_context(|| format!("load {name}"))?
                .verified_instruction_count()
                .unwrap_or(0);
            ensure!(verified <= MOST, "{name}: {verified} instructions");
            count += 1;
        }
        ensure!(count >= 4, "only {count} programs");
    }
    Ok(())
}

/// The verifier gives up at any signal to the loading thread.
#[test]
fn programs_load_while_signals_arrive() -> Result<()> {
    const SIGNALS: usize = 8;
    const PAUSE: Duration = Duration::from_millis(30);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    let _handled = runtime.block_on(async { signal(SignalKind::user_defined1()) })?;
    let loading = pthread_self();
    let (loaded, is_loaded) = channel::<()>();
    thread::scope(|scope| {
        let signals = scope.spawn(move || {
            let pauses = (0..SIGNALS)
                .take_while(|_| is_loaded.recv_timeout(PAUSE) == Err(RecvTimeoutError::Timeout));
            pauses
                .map(|_| pthread_kill(loading, Signal::SIGUSR1))
                .collect::<Result<Vec<_>, _>>()
        });
        let bench = Bench::load_small();
        drop(loaded);
        let sent = signals.join().expect("it does not panic")?;
        ensure!(
            !sent.is_empty(),
            "the programs were loaded in less than {PAUSE:?}"
        );
        bench.map(drop)
    })
}
