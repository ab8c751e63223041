//! Half-open flows: the packets that establish them, and their eviction.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use aya::maps::{HashMap, MapData};
use proxy_common::addr::{Addr, Addr4, Addr6, Proto};
use proxy_common::flow::{CLIENT_PORT_FIRST, CLIENT_PORT_LAST, Flow, FlowKey, Kind};
use proxy_common::frontend::FrontendKey;
use proxy_common::names::{EGRESS, FamilyMaps, INGRESS, IPV4, IPV6};
use testbed::test_run::Verdict::{Drop, Pass};

use crate::counts::counted;
use crate::fixture::{Fixture, fixtures_of, fixtures_with_room};
use crate::packets::packet_tests;
use crate::policy::{external_with_room, services_with_room};
use crate::reuse::Setup;

/// Entries for 16 half-open flows of two entries each.
const SMALL: Option<u32> = Some(64);
const HALF_OPEN: u16 = 16;

/// Opens this many flows, each from its own port. The backend answers every SYN, because it cannot
/// see that the source is spoofed.
pub(crate) fn flood(fixture: &Fixture, first_port: u16, count: u16) -> Result<()> {
    for port in (first_port..).take(count.into()) {
        let syn = fixture
            .names
            .frame(&format!("tcp S burglar:{port} > web:80"))?;
        ensure!(
            fixture.run(INGRESS, &syn)?.verdict == Pass,
            "a SYN from port {port}: {:?}",
            fixture.counts()?
        );
        fixture.run(
            EGRESS,
            &fixture
                .names
                .frame(&format!("tcp SA pod:8080 > burglar:{port}"))?,
        )?;
    }
    Ok(())
}

packet_tests! {
    half_open:
    answering_client_survives_flood_and_answered_one_makes_room,
    client_that_acknowledges_what_was_not_sent_stays_half_open,
    datagram_after_answer_or_five_answers_keep_udp_flow,
    accepted_cookie_keeps_association,
    hosts_own_flows_are_half_open_as_well,
}

#[test]
fn oldest_flow_makes_room_first_with_all_its_entries() -> Result<()> {
    for mut fixture in external_with_room(SMALL)? {
        // Flows of four entries take two places each.
        const WIDE: u16 = HALF_OPEN / 2;
        let opener = |port| format!("udp stranger:{port} > node:30053");
        for port in 1..=WIDE {
            fixture.run(INGRESS, &fixture.names.frame(&opener(port))?)?;
        }
        ensure!(
            openers(&fixture)? == (1..=WIDE).collect(),
            "{:?}",
            openers(&fixture)?
        );
        let before = fixture.counts()?;
        fixture.rows("half_open::oldest_flow_makes_room_first_with_all_its_entries")?;
        ensure!(
            openers(&fixture)? == (2..=WIDE).chain([100]).collect(),
            "{:?}",
            openers(&fixture)?
        );
        ensure!(
            entries(&fixture)?.len() == usize::from(WIDE) * 4,
            "{:?}",
            entries(&fixture)?
        );
        ensure!(
            fixture.counts()?["flows_full"] == before["flows_full"],
            "full"
        );
        // The packets of the evicted flow still count for the Service.
        let (totals, open) = counted(&fixture, "remote", 53, Proto::UDP)?;
        ensure!(
            totals.sent.packets == u64::from(WIDE) + 1 && open == u64::from(WIDE),
            "{totals:?}, {open}"
        );
    }
    Ok(())
}

#[test]
fn flood_fills_no_more_than_half_open_queue() -> Result<()> {
    for mut fixture in fixtures_with_room("flood", Some(4_096))? {
        for port in 1..=100 {
            establish(&fixture, "client", port)?;
        }
        flood(&fixture, 10_000, 4_000)?;
        // The flood gets half of the table, in flows of two entries.
        let entries = entries(&fixture)?.len();
        ensure!(entries == 2 * 100 + 2 * 1_024, "{entries} entries");
        ensure!(
            fixture.counts()?["flow_forgotten"] == 4_000 - 1_024,
            "{:?}",
            fixture.counts()?
        );
        for port in 1..=100 {
            let frame = fixture
                .names
                .frame(&format!("tcp A client:{port} > web:80"))?;
            let out = fixture.names.text(&fixture.run(INGRESS, &frame)?.packet)?;
            ensure!(out == format!("tcp A client:{port} > pod:8080"), "{out}");
        }
        // A handshake in the middle of the flood has as many openers between its packets as there
        // is room for.
        fixture.rows("half_open::flood_fills_no_more_than_half_open_queue/opens")?;
        flood(&fixture, 40_000, 1_000)?;
        fixture.rows("half_open::flood_fills_no_more_than_half_open_queue/goes_on")?;
    }
    Ok(())
}

#[test]
fn half_open_flows_alone_make_room_in_full_table() -> Result<()> {
    let setup = Setup {
        flow_entries: SMALL,
        knows_no_shares: true,
        ..Setup::default()
    };
    for mut fixture in fixtures_of("room", setup)? {
        // Half-open flows, too few to evict each other.
        flood(&fixture, 30_000, 8)?;
        let refused =
            |fixture: &Fixture| Ok::<_, anyhow::Error>(fixture.counts()?["flows_full"] != 0);
        let mut established = 0;
        for port in 1..100 {
            if !establish(&fixture, "client", port)? {
                break;
            }
            established = port;
        }
        ensure!(
            refused(&fixture)? && established > 20,
            "{established} established"
        );
        let counts = fixture.counts()?;
        ensure!(counts["flow_forgotten"] == 8, "{counts:?}");
        for port in 1..=established {
            let packet = format!("tcp A client:{port} > web:80");
            let out = fixture
                .names
                .text(&fixture.run(INGRESS, &fixture.names.frame(&packet)?)?.packet)?;
            ensure!(out == format!("tcp A client:{port} > pod:8080"), "{out}");
        }
        fixture.rows("half_open::half_open_flows_alone_make_room_in_full_table")?;
    }
    Ok(())
}

#[test]
fn evicted_flows_no_longer_count_for_their_backend() -> Result<()> {
    for fixture in services_with_room(SMALL)? {
        // Ten times as many as there is room for.
        for port in 1..=10 * HALF_OPEN {
            fixture.run(
                INGRESS,
                &fixture
                    .names
                    .frame(&format!("tcp S client:{port} > least:80"))?,
            )?;
        }
        let v4 = fixture.names.addr("web")?.is_ipv4();
        let of_backends = if v4 {
            connections::<Addr4>(&fixture, IPV4)?
        } else {
            connections::<Addr6>(&fixture, IPV6)?
        };
        ensure!(
            of_backends == u32::from(HALF_OPEN),
            "{of_backends} connections"
        );
        let (_, open) = counted(&fixture, "least", 80, Proto::TCP)?;
        ensure!(open == u64::from(HALF_OPEN), "{open} open");
    }
    Ok(())
}

#[test]
fn half_open_flow_makes_room_where_all_ports_are_taken() -> Result<()> {
    const FLOWS: u16 = 31_000;
    for fixture in external_with_room(Some(262_144))? {
        // More flows than ports, fewer than places in the half-open queue.
        let open = |port| -> Result<()> {
            let frame = fixture
                .names
                .frame(&format!("udp stranger:{port} > node:30053"))?;
            ensure!(
                fixture.bench.run(INGRESS, &frame)?.verdict == Pass,
                "{port}: {:?}",
                fixture.counts()?
            );
            Ok(())
        };
        // Enter the namespace once: flows older than 30 s make room without being forgotten.
        fixture.netns.run(|| (1..=FLOWS).try_for_each(open))?;
        let counts = fixture.counts()?;
        let ports = CLIENT_PORT_LAST - CLIENT_PORT_FIRST + 1;
        ensure!(
            counts["no_source_port"] == 0 && counts["flow_forgotten"] >= u64::from(FLOWS - ports),
            "{counts:?}"
        );
        ensure!(
            entries(&fixture)?.len() % 4 == 0,
            "a flow has two or four entries"
        );
    }
    Ok(())
}

#[test]
fn two_cpus_evict_and_open_at_once_and_leave_no_part_of_flow() -> Result<()> {
    let setup = Setup {
        flow_entries: Some(256),
        half_open_rings: Some(2),
        ..Setup::default()
    };
    for fixture in fixtures_of("race", setup)? {
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        fixture
                            .netns
                            .run(|| (0..5).try_for_each(|_| flood(&fixture, 20_000, 400)))
                    })
                })
                .collect();
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().map_err(|_| anyhow::anyhow!("panicked"))?)
        })?;
        // A program preempted between the place in the queue and the entries loses the place before
        // the entries exist.
        let entries = entries(&fixture)?;
        let openers = entries
            .iter()
            .filter(|(kind, _)| *kind == Kind::DNAT)
            .count();
        ensure!(openers <= 64 + 16, "{openers} half-open flows");
        let orphans = entries.len() - 2 * openers;
        ensure!(orphans <= 4, "{orphans} entries without a flow");
    }
    Ok(())
}

/// Returns the number of connections of all backends, as least-connections counts them.
fn connections<A: Addr>(fixture: &Fixture, names: FamilyMaps) -> Result<u32> {
    let map: HashMap<MapData, FrontendKey<A>, u32> = fixture.bench.map(names.connections)?;
    map.iter().map(|entry| Ok(entry?.1)).sum()
}

/// Opens a client's connection; returns false if there is no room.
pub(crate) fn establish(fixture: &Fixture, client: &str, port: u16) -> Result<bool> {
    let packets = [
        (INGRESS, format!("tcp S {client}:{port} > web:80")),
        (EGRESS, format!("tcp SA pod:8080 > {client}:{port}")),
        (INGRESS, format!("tcp A {client}:{port} > web:80")),
    ];
    for (program, packet) in packets {
        if fixture
            .run(program, &fixture.names.frame(&packet)?)?
            .verdict
            == Drop
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns the client ports of all openers' entries.
fn openers(fixture: &Fixture) -> Result<BTreeSet<u16>> {
    Ok(entries(fixture)?
        .into_iter()
        .filter(|(kind, _)| *kind == Kind::DNAT)
        .map(|(_, port)| port)
        .collect())
}

/// Returns the kind and the client's port of each entry of the flow table.
fn entries(fixture: &Fixture) -> Result<Vec<(Kind, u16)>> {
    if fixture.names.addr("web")?.is_ipv4() {
        entries_of::<Addr4>(fixture, IPV4.flows)
    } else {
        entries_of::<Addr6>(fixture, IPV6.flows)
    }
}

fn entries_of<A: Addr>(fixture: &Fixture, name: &str) -> Result<Vec<(Kind, u16)>> {
    let map: HashMap<MapData, FlowKey<A>, Flow<A>> = fixture.bench.map(name)?;
    map.iter()
        .map(|entry| entry.map(|(_, flow)| (flow.kind, flow.client.port.get())))
        .collect::<Result<_, _>>()
        .context("read")
}
