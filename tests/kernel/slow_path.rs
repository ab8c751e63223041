//! The slow path's programs, which the hooks' programs call.

use anyhow::{Result, ensure};
use aya::maps::ProgramArray;
use proxy_common::hook::SlowProgram;
use proxy_common::names::{ANCHOR, INGRESS, SLOW};
use proxy_datapath::open;
use testbed::test_run::Verdict::{Drop, Pass};

use crate::fixture::{fixtures, fixtures_of};
use crate::packets::run_with;
use crate::reuse::{Kernel, Setup};

/// Another program can empty the array of the slow path, or remove its pin while no agent runs.
#[test]
fn packets_pass_without_slow_path_until_the_agent_restores_it() -> Result<()> {
    for mut fixture in fixtures("slow")? {
        let mut slow: ProgramArray<_> = open(&fixture.bench.datapath.loaded.maps, SLOW)?;
        slow.clear_index(&SlowProgram::Ethernet.index())?;
        let from_client = fixture.names.frame("tcp S client:1000 > web:80")?;
        let outcome = fixture.run(INGRESS, &from_client)?;
        ensure!(
            outcome.verdict == Pass && outcome.packet == from_client,
            "{outcome:?}"
        );
        let from_host = fixture.names.frame("tcp S node:1000 > web:80")?;
        ensure!(fixture.run(ANCHOR, &from_host)?.verdict == Drop);
        let counts = fixture.counts()?;
        ensure!(counts.get("slow_path_missing") == Some(&2), "{counts:?}");
        fixture.bench.datapath.attachments.restore_pins()?;
        fixture.run(INGRESS, &from_client)?;
        let counts = fixture.counts()?;
        ensure!(
            counts.get("slow_path_missing") == Some(&2) && counts["flow_opened"] == 1,
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
            loaded.contains_key(INGRESS) && !loaded.contains_key(SlowProgram::Ethernet.program()),
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
