//! What is counted for each service port: by the flows while they live, by the service when they are over.

use anyhow::{Context, Result, ensure};
use proxy_common::addr::{Addr, Port, Proto};
use proxy_common::frontend::FrontendKey;
use proxy_common::names::{ANCHOR, EGRESS, INGRESS};
use proxy_common::service_counts::Passed;
use proxy_datapath::{FamilyCounts, Totals};
use testbed::test_run::Verdict::{Drop, Pass, Redirect};

use crate::lab::{Lab, labs};
use crate::policy::outside;

/// What was counted for a service port, and how many of its flows are open.
pub(crate) fn counted(lab: &Lab, service: &str, port: u16, proto: Proto) -> Result<(Totals, u64)> {
    let counts = lab.bench.datapath.flows.counts()?;
    if lab.names.addr("web")?.is_ipv4() {
        of_family(lab, &counts.v4, service, port, proto)
    } else {
        of_family(lab, &counts.v6, service, port, proto)
    }
}

fn of_family<A: Addr>(
    lab: &Lab,
    counts: &FamilyCounts<A>,
    service: &str,
    port: u16,
    proto: Proto,
) -> Result<(Totals, u64)> {
    let key = FrontendKey::new(A::from_ip(lab.names.addr(service)?).context("family")?, Port::new(port), proto);
    let flows = counts.flows.get(&key).map_or(0, |flows| flows.values().sum());
    Ok((counts.ports.get(&key).copied().unwrap_or_default(), flows))
}

/// As many packets, with all their headers.
fn passed(lab: &Lab, packets: &[&str]) -> Result<Passed> {
    let len = |packet: &&str| Ok(lab.names.frame(packet)?.len() as u64);
    let bytes = packets.iter().map(len).sum::<Result<u64>>()?;
    Ok(Passed { packets: packets.len() as u64, bytes })
}

#[test]
fn a_flow_counts_both_directions_and_its_service_keeps_them() -> Result<()> {
    for mut lab in labs("counts")? {
        lab.check(&[
            (INGRESS, "tcp S client:1000 > web:80", Pass, "tcp S client:1000 > pod:8080", "flow_opened forwarded"),
            (EGRESS, "tcp SA pod:8080 > client:1000", Pass, "tcp SA web:80 > client:1000", "returned"),
            (INGRESS, "tcp A client:1000 > web:80 +100", Pass, "tcp A client:1000 > pod:8080 +100", "forwarded"),
            (EGRESS, "tcp A pod:8080 > client:1000 +1400", Pass, "tcp A web:80 > client:1000 +1400", "returned"),
            (EGRESS, "tcp R pod:8080 > client:1000", Pass, "tcp R web:80 > client:1000", "returned"),
        ])?;
        let sent = ["tcp S client:1000 > web:80", "tcp A client:1000 > web:80 +100"];
        let back =
            ["tcp SA pod:8080 > client:1000", "tcp A pod:8080 > client:1000 +1400", "tcp R pod:8080 > client:1000"];
        let mut want =
            Totals { opened: 1, sent: passed(&lab, &sent)?, returned: passed(&lab, &back)?, ..Totals::default() };
        let found = counted(&lab, "web", 80, Proto::TCP)?;
        ensure!(found == (want, 0), "reset, but there: {found:?}, not {want:?}");
        // The next one takes its place.
        lab.check(&[(
            INGRESS,
            "tcp S client:1000 > web:80",
            Pass,
            "tcp S client:1000 > pod:8080",
            "flow_opened forwarded",
        )])?;
        want.opened = 2;
        want.sent += passed(&lab, &sent[..1])?;
        let found = counted(&lab, "web", 80, Proto::TCP)?;
        ensure!(found == (want, 1), "another in its place: {found:?}, not {want:?}");
    }
    Ok(())
}

#[test]
fn a_flow_of_four_entries_counts_once_and_for_the_service_behind_the_node_port() -> Result<()> {
    for mut lab in outside()? {
        lab.check(&[
            (
                INGRESS,
                "udp stranger:1000 > node:30053 +9",
                Pass,
                "udp stranger:$p > far:5353 +9",
                "flow_opened forwarded",
            ),
            (EGRESS, "udp stranger:$p > far:5353 +9", Pass, "udp uplink:$p > far:5353 +9", ""),
            (INGRESS, "udp far:5353 > uplink:$p +2", Pass, "udp far:5353 > stranger:$p +2", ""),
            (EGRESS, "udp far:5353 > stranger:$p +2", Pass, "udp node:30053 > stranger:1000 +2", "returned"),
        ])?;
        let sent = passed(&lab, &["udp stranger:1000 > node:30053 +9"])?;
        let returned = passed(&lab, &["udp far:5353 > uplink:1 +2"])?;
        let want = Totals { opened: 1, sent, returned, ..Totals::default() };
        let found = counted(&lab, "remote", 53, Proto::UDP)?;
        ensure!(found == (want, 1), "{found:?}, not {want:?}");
    }
    Ok(())
}

#[test]
fn what_opens_no_flow_is_counted_by_what_became_of_it() -> Result<()> {
    for mut lab in labs("refused")? {
        lab.check(&[
            (INGRESS, "tcp S client:1000 > none:80", Redirect, "tcp RA none:80 > client:1000", "no_endpoints rejected"),
            (INGRESS, "tcp S client:1000 > local:80", Drop, "-", "no_local_endpoints"),
            (INGRESS, "tcp S client:1001 > local:80", Drop, "-", "no_local_endpoints"),
            (ANCHOR, "tcp S node:1000 > nowhere:80", Redirect, "tcp RA nowhere:80 > node:1000", "no_route rejected"),
            // From the middle of a connection, and to no port of the service.
            (INGRESS, "tcp A client:1002 > local:80", Pass, "same", "no_flow"),
            (
                INGRESS,
                "tcp S client:1000 > local:81",
                Redirect,
                "tcp RA local:81 > client:1000",
                "unknown_port rejected",
            ),
        ])?;
        for (service, dropped, rejected) in [("none", 0, 1), ("local", 2, 0), ("nowhere", 0, 1)] {
            let found = counted(&lab, service, 80, Proto::TCP)?;
            let want = Totals { dropped, rejected, ..Totals::default() };
            ensure!(found == (want, 0), "{service}: {found:?}, not {want:?}");
        }
    }
    Ok(())
}
