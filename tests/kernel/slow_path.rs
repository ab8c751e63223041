//! The slow path's programs, which the hooks' programs call.

use anyhow::{Result, ensure};
use aya::maps::ProgramArray;
use proxy_common::hook::{PacketHook, SlowProgram};
use proxy_common::names::{EGRESS, INGRESS, SLOW};
use testbed::test_run::Verdict::{Drop, Pass};

use crate::fixture::{fixtures, fixtures_of};
use crate::packets::run_with;
use crate::reuse::{Kernel, Setup};

/// Another program can empty the array of the slow path, or remove its pin while no agent runs.
#[test]
fn emptied_array_resets_no_connection_until_the_agent_fills_it() -> Result<()> {
    for mut fixture in fixtures("slow")? {
        let open_flow = fixture.names.frame("tcp S client:1000 > web:80")?;
        fixture.run(INGRESS, &open_flow)?;
        let mut slow: ProgramArray<_> = fixture.bench.map(SLOW)?;
        for program in PacketHook::Ingress.slow() {
            slow.clear_index(&program.index())?;
        }
        // The pod's answer, untranslated, would reset the client's connection.
        let answer = fixture.names.frame("tcp SA pod:8080 > client:1000")?;
        ensure!(fixture.run(EGRESS, &answer)?.verdict == Drop);
        let counts = fixture.counts()?;
        ensure!(counts.get("slow_path_missing") == Some(&1), "{counts:?}");
        // The node stays reachable.
        let other = fixture.names.frame("tcp S neighbour:7 > stranger:22")?;
        let outcome = fixture.run(INGRESS, &other)?;
        ensure!(
            outcome.verdict == Pass && outcome.packet == other,
            "{outcome:?}"
        );
        fixture.bench.datapath.attachments.restore_slow_path()?;
        ensure!(fixture.run(EGRESS, &answer)?.verdict == Pass);
        let counts = fixture.counts()?;
        ensure!(
            counts["slow_path_missing"] == 1 && counts["returned"] == 1 && counts["no_flow"] == 1,
            "{counts:?}"
        );
    }
    Ok(())
}

/// With clsact the programs are the same.
#[test]
fn kernel_without_tail_calls_gets_the_slow_path_in_each_program() -> Result<()> {
    let setup = Setup {
        kernel: Kernel::RefusesTailCalls,
        ..Setup::default()
    };
    for fixture in fixtures_of("whole", setup)? {
        let loaded = &fixture.bench.datapath.loaded.programs;
        ensure!(
            loaded.contains_key(INGRESS)
                && SlowProgram::ALL
                    .into_iter()
                    .all(|slow| !loaded.contains_key(slow.program())),
            "{loaded:?}"
        );
    }
    for (file, section) in [
        ("flows", "pod_reaches_backend_and_hears_back"),
        ("flows", "host_reaches_backends_through_anchor"),
        ("icmp", "host_hears_errors_about_its_own_packets"),
        ("verdicts", "missing_backend_is_reported_at_once"),
    ] {
        run_with(setup, file, section)?;
    }
    Ok(())
}
