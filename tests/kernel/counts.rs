//! Counts of each service port: flows have their own while they live, and the Service keeps those
//! of ended flows.

use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
use proxy_common::addr::{Addr, Port, Proto};
use proxy_common::connect::{Connects, UNIT_NANOS, Votes};
use proxy_common::frontend::FrontendKey;
use proxy_common::service_counts::Passed;
use proxy_core::udp::UdpOutcomes;
use proxy_datapath::{FamilyCounts, Totals};

use crate::fixture::{Fixture, fixtures};
use crate::policy::external;
use crate::sweep::later;

/// Returns the counts of a service port, and the number of its open flows.
pub(crate) fn counted(
    fixture: &Fixture,
    service: &str,
    port: u16,
    proto: Proto,
) -> Result<(Totals, u64)> {
    let counts = fixture.bench.datapath.flows.counts()?;
    if fixture.names.addr("web")?.is_ipv4() {
        of_family(fixture, &counts.v4, service, port, proto)
    } else {
        of_family(fixture, &counts.v6, service, port, proto)
    }
}

fn of_family<A: Addr>(
    fixture: &Fixture,
    counts: &FamilyCounts<A>,
    service: &str,
    port: u16,
    proto: Proto,
) -> Result<(Totals, u64)> {
    let key = FrontendKey::new(
        A::from_ip(fixture.names.addr(service)?).context("family")?,
        Port::new(port),
        proto,
    );
    let flows = counts
        .flows
        .get(&key)
        .map_or(0, |flows| flows.values().map(|flows| flows.open).sum());
    Ok((counts.ports.get(&key).copied().unwrap_or_default(), flows))
}

/// Returns the packets and bytes of these packets, headers included.
fn passed(fixture: &Fixture, packets: &[&str]) -> Result<Passed> {
    let len = |packet: &&str| Ok(fixture.names.frame(packet)?.len() as u64);
    let bytes = packets.iter().map(len).sum::<Result<u64>>()?;
    Ok(Passed {
        packets: packets.len() as u64,
        bytes,
    })
}

#[test]
fn flow_counts_both_directions_and_its_service_keeps_them() -> Result<()> {
    for mut fixture in fixtures("counts")? {
        fixture.rows("counts::flow_counts_both_directions_and_its_service_keeps_them/reset")?;
        let sent = [
            "tcp S client:1000 > web:80",
            "tcp A client:1000 > web:80 +100",
        ];
        let back = [
            "tcp SA pod:8080 > client:1000",
            "tcp A pod:8080 > client:1000 +1400",
            "tcp R pod:8080 > client:1000",
        ];
        let mut want = Totals {
            opened: 1,
            sent: passed(&fixture, &sent)?,
            returned: passed(&fixture, &back)?,
            ..Totals::default()
        };
        let found = counted(&fixture, "web", 80, Proto::TCP)?;
        ensure!(
            found == (want, 0),
            "reset, but kept: {found:?}, not {want:?}"
        );
        // The next flow takes the entry of the closed flow.
        fixture.rows("counts::flow_counts_both_directions_and_its_service_keeps_them/reopened")?;
        want.opened = 2;
        want.sent += passed(&fixture, &sent[..1])?;
        let found = counted(&fixture, "web", 80, Proto::TCP)?;
        ensure!(
            found == (want, 1),
            "another in its place: {found:?}, not {want:?}"
        );
    }
    Ok(())
}

#[test]
fn flow_of_four_entries_counts_once_for_service_behind_node_port() -> Result<()> {
    for mut fixture in external()? {
        fixture.rows("counts::flow_of_four_entries_counts_once_for_service_behind_node_port")?;
        let sent = passed(&fixture, &["udp stranger:1000 > node:30053 +9"])?;
        let returned = passed(&fixture, &["udp far:5353 > uplink:1 +2"])?;
        let want = Totals {
            opened: 1,
            sent,
            returned,
            ..Totals::default()
        };
        let found = counted(&fixture, "remote", 53, Proto::UDP)?;
        ensure!(found == (want, 1), "{found:?}, not {want:?}");
    }
    Ok(())
}

#[test]
fn refused_packets_are_counted_by_outcome() -> Result<()> {
    for mut fixture in fixtures("refused")? {
        fixture.rows("counts::refused_packets_are_counted_by_outcome")?;
        for (service, dropped, rejected) in [("none", 0, 1), ("local", 2, 0), ("nowhere", 0, 1)] {
            let found = counted(&fixture, service, 80, Proto::TCP)?;
            let want = Totals {
                dropped,
                rejected,
                ..Totals::default()
            };
            ensure!(found == (want, 0), "{service}: {found:?}, not {want:?}");
        }
    }
    Ok(())
}

#[test]
fn connection_outcomes_are_counted_for_service() -> Result<()> {
    for mut fixture in fixtures("outcomes")? {
        fixture.rows("counts::connection_outcomes_are_counted_for_service/open")?;
        let found = connects(&fixture, 80, Proto::TCP)?;
        let numbers = (
            found.answered(),
            found.refused,
            found.unanswered,
            found.retransmitted,
        );
        ensure!(numbers == (1, 1, 0, 1), "{found:?}");
        // The machine may be slow, but the packets follow each other closely.
        ensure!(found.units < 20_000_000_000 / UNIT_NANOS, "{found:?}");
        fixture.bench.datapath.flows.sweep_at(later()?)?;
        let swept = connects(&fixture, 80, Proto::TCP)?;
        ensure!(
            (swept.unanswered, swept.answered(), swept.units) == (1, 1, found.units),
            "{swept:?}"
        );
        fixture.bench.datapath.flows.sweep_at(later()?)?;
        let summed = connects(&fixture, 80, Proto::TCP)?;
        ensure!(
            (summed.unanswered, summed.answered(), summed.units) == (1, 1, found.units),
            "of silence: {summed:?}"
        );
    }
    Ok(())
}

#[test]
fn refused_datagrams_are_counted_for_service() -> Result<()> {
    for mut fixture in fixtures("refused-udp")? {
        fixture.rows("counts::refused_datagrams_are_counted_for_service/refused")?;
        let counts = fixture.bench.datapath.flows.counts()?;
        let found = connects(&fixture, 53, Proto::UDP)?;
        ensure!(
            (found.refused, found.failed()) == (2, 2),
            "{found:?} {:?} {:?}",
            counts.v4.connects,
            counts.v6.connects
        );
        ensure!(found.votes == Votes::NONE, "{found:?}");
    }
    Ok(())
}

#[test]
fn udp_flows_are_counted_by_outcome() -> Result<()> {
    for mut fixture in fixtures("udp-outcomes")? {
        fixture.rows("counts::udp_flows_are_counted_by_outcome/open")?;
        let found = datagrams(&fixture, 53)?;
        ensure!(
            (found.answered, found.unanswered) == (1, 0),
            "open: {found:?}"
        );
        let want = UdpOutcomes {
            answered: 1,
            unanswered: 1,
            refused: 1,
        };
        for swept in 0..2 {
            fixture.bench.datapath.flows.sweep_at(later()?)?;
            let found = datagrams(&fixture, 53)?;
            ensure!(found == want, "after {swept} sweeps more: {found:?}");
        }
    }
    Ok(())
}

fn datagrams(fixture: &Fixture, port: u16) -> Result<UdpOutcomes> {
    let counts = fixture.bench.datapath.flows.counts()?;
    let web = fixture.names.addr("web")?;
    let port = Port::new(port);
    Ok(match web {
        IpAddr::V4(web) => counts
            .v4
            .datagrams_of(&FrontendKey::new(web.into(), port, Proto::UDP)),
        IpAddr::V6(web) => counts
            .v6
            .datagrams_of(&FrontendKey::new(web.into(), port, Proto::UDP)),
    })
}

/// Returns what became of the flows to a port of `web`.
fn connects(fixture: &Fixture, port: u16, proto: Proto) -> Result<Connects> {
    let counts = fixture.bench.datapath.flows.counts()?;
    let web = fixture.names.addr("web")?;
    Ok(if web.is_ipv4() {
        of(&counts.v4, web, port, proto)?
    } else {
        of(&counts.v6, web, port, proto)?
    })
}

fn of<A: Addr>(counts: &FamilyCounts<A>, web: IpAddr, port: u16, proto: Proto) -> Result<Connects> {
    Ok(counts.connects_of(&FrontendKey::new(
        A::from_ip(web).context("family")?,
        Port::new(port),
        proto,
    )))
}
