//! What the programs tell of single packets, while somebody watches.

use anyhow::{Context, Result, ensure};
use kpx_tests::bench::Verdict::{Drop, Pass, Redirect};
use proxy_agent::datapath::AnyRecord;
use proxy_common::addr::{Addr, Proto};
use proxy_common::counter::Reason;
use proxy_common::monitor::{Record, What};
use proxy_common::names::{ANCHOR, EGRESS, INGRESS};
use proxy_common::policy::Decision;

use crate::lab::{Lab, labs, labs_of};
use crate::reuse::Setup;

/// As the tests speak of packets: who, whom, what and why.
fn told(lab: &mut Lab) -> Result<Vec<String>> {
    let mut told = Vec::new();
    while let Some(record) = lab.bench.datapath.monitor.record() {
        told.push(match record {
            AnyRecord::V4(record) => text(lab, &record)?,
            AnyRecord::V6(record) => text(lab, &record)?,
        });
    }
    Ok(told)
}

fn text<A: Addr>(lab: &Lab, record: &Record<A>) -> Result<String> {
    let what = match record.what {
        What::DECIDED => "decided".to_owned(),
        _ => Reason::from_index(record.reason.into()).context("a reason")?.name().to_owned(),
    };
    let place = record.hook_id.name();
    if record.proto == Proto::ANY {
        return Ok(format!("{what} at {place}"));
    }
    let name = |ip| lab.names.name(ip);
    let decision = &record.decision;
    let service = decision.has(Decision::<A>::FRONTEND).then(|| name(decision.service.addr.ip()));
    let backend = decision.has(Decision::<A>::BACKEND).then(|| name(decision.backend.addr.ip()));
    Ok(format!(
        "{what} at {place}: {}:{} > {}:{} {}{}",
        name(record.src.addr.ip()),
        record.src.port.get(),
        name(record.dst.addr.ip()),
        record.dst.port.get(),
        service.unwrap_or_else(|| "-".to_owned()),
        backend.map(|backend| format!(" => {backend}")).unwrap_or_default(),
    ))
}

#[test]
fn openers_and_refusals_are_told_of_and_nothing_else() -> Result<()> {
    for mut lab in labs("monitor")? {
        let openers = [
            (INGRESS, "tcp S client:1000 > web:80", Pass, "tcp S client:1000 > pod:8080", "flow_opened forwarded"),
            (ANCHOR, "tcp S node:1000 > web:80", Redirect, "tcp S node:$p > pod:8080", "flow_opened forwarded"),
        ];
        lab.check(&openers)?;
        ensure!(told(&mut lab)?.is_empty(), "nobody watches");
        lab.bench.datapath.monitor.watch(true)?;
        lab.check(&[
            (INGRESS, "tcp A client:1000 > web:80 +5", Pass, "tcp A client:1000 > pod:8080 +5", "forwarded"),
            (EGRESS, "tcp A pod:8080 > client:1000 +5", Pass, "tcp A web:80 > client:1000 +5", "returned"),
            (INGRESS, "tcp S client:1000 > stranger:80", Pass, "same", "not_ours"),
        ])?;
        ensure!(told(&mut lab)?.is_empty(), "of no packet of an open flow, and none that is not ours");
        lab.check(&[
            (INGRESS, "tcp S client:2000 > web:80", Pass, "tcp S client:2000 > pod:8080", "flow_opened forwarded"),
            (ANCHOR, "tcp S node:2000 > web:80", Redirect, "tcp S node:$q > pod:8080", "flow_opened forwarded"),
            (INGRESS, "tcp S client:2000 > none:80", Redirect, "tcp RA none:80 > client:2000", "no_endpoints rejected"),
            (INGRESS, "tcp S client:2000 > local:80", Drop, "-", "no_local_endpoints"),
            (ANCHOR, "tcp A node:2001 > web:80", Redirect, "tcp R web:80 > node:2001", "no_flow rejected"),
        ])?;
        ensure!(lab.names.port("$p") != lab.names.port("$q"), "two open flows have one tuple");
        let found = told(&mut lab)?;
        let want = [
            "decided at ingress: client:2000 > web:80 web => pod",
            "decided at anchor: node:2000 > web:80 web => pod",
            "no_endpoints at ingress: client:2000 > none:80 none",
            "no_local_endpoints at ingress: client:2000 > local:80 local",
            "no_flow at anchor: node:2001 > web:80 -",
        ];
        ensure!(found == want, "{found:#?}");
        lab.bench.datapath.monitor.watch(false)?;
        lab.check(&[(INGRESS, "tcp S client:2002 > local:80", Drop, "-", "no_local_endpoints")])?;
        ensure!(told(&mut lab)?.is_empty(), "nobody watches any more");
        ensure!(lab.bench.datapath.monitor.lost()? == 0, "nothing was lost");
    }
    Ok(())
}

/// Whichever way it goes through the programs.
#[test]
fn a_packet_that_the_kernel_does_not_let_change_is_told_of_as_it_came() -> Result<()> {
    for mut lab in labs_of("refused", Setup { refuses: true, ..Setup::default() })? {
        lab.bench.datapath.monitor.watch(true)?;
        let other = (INGRESS, "tcp S stranger:7 > local:80");
        for (program, packet) in [
            (INGRESS, "tcp S client:1000 > web:80"),
            other,
            // Of an open flow.
            (INGRESS, "tcp A client:1000 > web:80 +5"),
            other,
            (EGRESS, "tcp SA pod:8080 > client:1000"),
            other,
            (EGRESS, "tcp A pod:8080 > client:1000 +7"),
            other,
            (INGRESS, "[options] tcp A client:1000 > web:80"),
        ] {
            let frame = lab.names.frame(packet)?;
            let outcome = lab.netns.run(|| lab.bench.run(program, &frame))?;
            ensure!(outcome.verdict == Drop, "{packet}: {:?}", outcome.verdict);
        }
        let found = told(&mut lab)?;
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
fn a_flood_is_cut_off_and_counted() -> Result<()> {
    for mut lab in labs("flood")? {
        lab.bench.datapath.monitor.watch(true)?;
        let frame = lab.names.frame("tcp S client:1000 > local:80")?;
        let runs = 30_000;
        lab.netns.run(|| (0..runs).try_for_each(|_| lab.bench.run(INGRESS, &frame).map(drop)))?;
        let mut told = 0;
        while lab.bench.datapath.monitor.record().is_some() {
            told += 1;
        }
        let lost = lab.bench.datapath.monitor.lost()?;
        ensure!(told + lost == runs && lost > 0, "{told} told, {lost} lost");
    }
    Ok(())
}
