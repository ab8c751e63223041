//! Reports of single packets, which the programs write while a monitor watches.

use anyhow::{Context, Result, ensure};
use proxy_common::addr::{Addr, Proto};
use proxy_common::counter::Reason;
use proxy_common::monitor::{Record, What};
use proxy_common::names::{EGRESS, INGRESS};
use proxy_common::policy::Decision;
use proxy_datapath::AnyRecord;
use testbed::test_run::Verdict::Drop;

use crate::fixture::{Fixture, fixtures, fixtures_of};
use crate::reuse::{Kernel, Setup};

/// Returns the reports so far as text: reason, hook, peers, Service and backend.
fn reports(fixture: &mut Fixture) -> Result<Vec<String>> {
    let mut reports = Vec::new();
    while let Some(record) = fixture.bench.datapath.monitor.record() {
        reports.push(match record {
            AnyRecord::V4(record) => text(fixture, &record)?,
            AnyRecord::V6(record) => text(fixture, &record)?,
        });
    }
    Ok(reports)
}

fn text<A: Addr>(fixture: &Fixture, record: &Record<A>) -> Result<String> {
    let what = match record.what {
        What::DECIDED => "decided".to_owned(),
        _ => Reason::from_index(record.reason.into())
            .context("a reason")?
            .name()
            .to_owned(),
    };
    let place = record.hook_id.name();
    if record.proto == Proto::ANY {
        return Ok(format!("{what} at {place}"));
    }
    let name = |ip| fixture.names.name(ip);
    let decision = &record.decision;
    let service = decision
        .has(Decision::<A>::FRONTEND)
        .then(|| name(decision.service.addr.ip()));
    let backend = decision
        .has(Decision::<A>::BACKEND)
        .then(|| name(decision.backend.addr.ip()));
    Ok(format!(
        "{what} at {place}: {}:{} > {}:{} {}{}",
        name(record.src.addr.ip()),
        record.src.port.get(),
        name(record.dst.addr.ip()),
        record.dst.port.get(),
        service.unwrap_or_else(|| "-".to_owned()),
        backend
            .map(|backend| format!(" => {backend}"))
            .unwrap_or_default(),
    ))
}

#[test]
fn monitor_reports_openers_and_refusals_only() -> Result<()> {
    for mut fixture in fixtures("monitor")? {
        fixture.rows("monitor::monitor_reports_openers_and_refusals_only/unwatched")?;
        ensure!(reports(&mut fixture)?.is_empty(), "no monitor watches");
        fixture.bench.datapath.monitor.watch(true)?;
        fixture.rows("monitor::monitor_reports_openers_and_refusals_only/silent")?;
        ensure!(
            reports(&mut fixture)?.is_empty(),
            "a report of an open flow's packet, or of a foreign one"
        );
        fixture.rows("monitor::monitor_reports_openers_and_refusals_only/reported")?;
        ensure!(
            fixture.names.port("$p") != fixture.names.port("$q"),
            "two open flows have one tuple"
        );
        let found = reports(&mut fixture)?;
        let want = [
            "decided at ingress: client:2000 > web:80 web => pod",
            "decided at anchor: node:2000 > web:80 web => pod",
            "no_endpoints at ingress: client:2000 > none:80 none",
            "no_local_endpoints at ingress: client:2000 > local:80 local",
            "no_flow at anchor: node:2001 > web:80 -",
        ];
        ensure!(found == want, "{found:#?}");
        fixture.bench.datapath.monitor.watch(false)?;
        fixture.rows("monitor::monitor_reports_openers_and_refusals_only/unwatched_again")?;
        ensure!(
            reports(&mut fixture)?.is_empty(),
            "no monitor watches any more"
        );
        ensure!(
            fixture.bench.datapath.monitor.lost()? == 0,
            "nothing was lost"
        );
    }
    Ok(())
}

/// Each packet takes another path through the programs.
#[test]
fn packet_that_kernel_refuses_to_change_is_reported_unchanged() -> Result<()> {
    for mut fixture in fixtures_of(
        "refused",
        Setup {
            kernel: Kernel::RefusesChecksums,
            ..Setup::default()
        },
    )? {
        fixture.bench.datapath.monitor.watch(true)?;
        let other = (INGRESS, "tcp S stranger:7 > local:80");
        for (program, packet) in [
            (INGRESS, "tcp S client:1000 > web:80"),
            other,
            // The next packets belong to an open flow.
            (INGRESS, "tcp A client:1000 > web:80 +5"),
            other,
            (EGRESS, "tcp SA pod:8080 > client:1000"),
            other,
            (EGRESS, "tcp A pod:8080 > client:1000 +7"),
            other,
            (INGRESS, "[options] tcp A client:1000 > web:80"),
        ] {
            let frame = fixture.names.frame(packet)?;
            let outcome = fixture.netns.run(|| fixture.bench.run(program, &frame))?;
            ensure!(outcome.verdict == Drop, "{packet}: {:?}", outcome.verdict);
        }
        let found = reports(&mut fixture)?;
        let others = "no_local_endpoints at ingress: stranger:7 > local:80 local";
        let want = [
            "decided at ingress: client:1000 > web:80 web => pod",
            "rewrite at ingress: client:1000 > web:80 web => pod",
            others,
            "rewrite at ingress: client:1000 > web:80 -",
            others,
            "rewrite at egress: pod:8080 > client:1000 -",
            others,
            "rewrite at egress: pod:8080 > client:1000 -",
            others,
            "rewrite at ingress: client:1000 > web:80 -",
        ];
        ensure!(found == want, "{found:#?}");
    }
    Ok(())
}

#[test]
fn lost_reports_of_flood_are_counted() -> Result<()> {
    for mut fixture in fixtures("flood")? {
        fixture.bench.datapath.monitor.watch(true)?;
        let frame = fixture.names.frame("tcp S client:1000 > local:80")?;
        let runs = 30_000;
        fixture
            .netns
            .run(|| (0..runs).try_for_each(|_| fixture.bench.run(INGRESS, &frame).map(drop)))?;
        let mut reported = 0;
        while fixture.bench.datapath.monitor.record().is_some() {
            reported += 1;
        }
        let lost = fixture.bench.datapath.monitor.lost()?;
        ensure!(
            reported + lost == runs && lost > 0,
            "{reported} reported, {lost} lost"
        );
    }
    Ok(())
}
