//! Backends that send nothing: the evidence against them, and the half-open flows that leave them.

use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
use aya::Pod;
use aya::maps::{HashMap, MapData};
use nix::time::{ClockId, clock_gettime};
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto};
use proxy_common::connect::{Connects, Votes};
use proxy_common::flow::{Flow, FlowKey};
use proxy_common::frontend::{EndpointKey, FrontendKey};
use proxy_common::names::{INGRESS, IPV4, IPV6};
use proxy_datapath::FamilyCounts;
use testbed::flow_table::older;

use crate::fixture::{Fixture, fixtures};
use crate::packets::packet_tests;
use crate::policy::{external, services};

packet_tests! {
    silent:
    half_open_flow_leaves_silent_backend_after_a_second,
    answered_flow_stays_with_its_backend,
    flow_of_only_backend_stays,
    masqueraded_flow_leaves_with_all_its_entries,
    flow_of_host_leaves_as_well,
    errors_to_host_count_if_they_come_from_where_backend_is,
}

#[test]
fn client_with_affinity_waits_longer_and_moves_for_good() -> Result<()> {
    for fixture in services()? {
        let dial = |port: u16| -> Result<String> {
            let frame = fixture
                .names
                .frame(&format!("tcp S client:{port} > sticky-twins:80"))?;
            let text = fixture.names.text(&fixture.run(INGRESS, &frame)?.packet)?;
            Ok(text.split_once("> ").context("a destination")?.1.to_owned())
        };
        let first = dial(1)?;
        fixture.be_silent(1)?;
        ensure!(dial(1)? == first, "after a second");
        fixture.be_silent(2)?;
        let second = dial(1)?;
        ensure!(second != first, "after three");
        for port in 2..40 {
            ensure!(dial(port)? == second, "the client stays with {second}");
        }
    }
    Ok(())
}

#[test]
fn failures_count_against_backend_until_it_answers() -> Result<()> {
    for mut fixture in fixtures("votes")? {
        fixture.rows("silent::failures_count_against_backend_until_it_answers/fails")?;
        let votes = votes(&fixture)?;
        ensure!((votes.failures(), votes.clients()) == (3, 2), "{votes:?}");
        fixture.rows("silent::failures_count_against_backend_until_it_answers/answers")?;
        ensure!(
            self::votes(&fixture)? == Votes::NONE,
            "{:?}",
            self::votes(&fixture)?
        );
    }
    Ok(())
}

/// DNS has a TCP and a UDP port at one address, whose rows come in any order.
#[test]
fn refused_datagrams_leave_evidence_of_connections_alone() -> Result<()> {
    for mut fixture in fixtures("protocols")? {
        fixture.rows("silent::failures_count_against_backend_until_it_answers/fails")?;
        let backends = match fixture.is_v4() {
            true => add_datagrams::<Addr4>(&fixture, IPV4.connects)?,
            false => add_datagrams::<Addr6>(&fixture, IPV6.connects)?,
        };
        let readings = fixture.bench.datapath.votes.read()?;
        let failed = readings.values().filter(|one| one.votes.failures() == 3);
        ensure!(failed.count() == backends, "{readings:?}");
    }
    Ok(())
}

/// Adds twins of the backend of `web` at other ports, each with refused datagrams. Returns the
/// number of backends.
fn add_datagrams<A: Addr>(fixture: &Fixture, name: &str) -> Result<usize>
where
    EndpointKey<A>: Pod,
{
    let mut connects: HashMap<MapData, EndpointKey<A>, Connects> = fixture.bench.map(name)?;
    let rows = connects.iter().collect::<Result<Vec<_>, _>>()?;
    let is_failed = |row: &Connects| row.votes.failures() == 3;
    let (key, row) = rows
        .into_iter()
        .find(|(key, row)| key.service.proto == Proto::TCP && is_failed(row))
        .context("a backend that failed")?;
    let ports = 9_000..9_016;
    for port in ports.clone() {
        let mut twin = key;
        twin.at.port = Port::new(port);
        connects.insert(twin, row, 0)?;
        twin.service.proto = Proto::UDP;
        let refused = Connects {
            refused: 1,
            last_secs: row.last_secs,
            ..Connects::default()
        };
        connects.insert(twin, refused, 0)?;
    }
    Ok(ports.len() + 1)
}

#[test]
fn errors_count_against_backend_until_it_sends_something() -> Result<()> {
    for mut fixture in fixtures("errors")? {
        fixture.rows("silent::errors_count_against_backend_until_it_sends_something/errors")?;
        let votes = votes(&fixture)?;
        ensure!((votes.failures(), votes.clients()) == (3, 2), "{votes:?}");
        fixture.rows("silent::errors_count_against_backend_until_it_sends_something/answers")?;
        ensure!(
            self::votes(&fixture)? == Votes::NONE,
            "{:?}",
            self::votes(&fixture)?
        );
    }
    Ok(())
}

/// A stranger can spoof SYNs from any number of sources, and malform them so that the backend does
/// not answer.
#[test]
fn clients_outside_count_as_one() -> Result<()> {
    for mut fixture in external()? {
        fixture.rows("silent::clients_outside_count_as_one")?;
        let votes = votes(&fixture)?;
        ensure!((votes.failures(), votes.clients()) == (4, 1), "{votes:?}");
    }
    Ok(())
}

/// A stranger repeats the client's SYN within the second of the first one, when the wait is just
/// over.
#[test]
fn spoofed_syn_moves_no_flow_in_the_second_of_the_first_one() -> Result<()> {
    for mut fixture in services()? {
        fixture.rows("silent::spoofed_syn_moves_no_flow_in_the_second_of_the_first_one/waits")?;
        // The first SYN was a second ago; all earlier packets were in this second.
        match fixture.is_v4() {
            true => age_first_syns::<Addr4>(&fixture, IPV4.flows)?,
            false => age_first_syns::<Addr6>(&fixture, IPV6.flows)?,
        }
        fixture.rows("silent::spoofed_syn_moves_no_flow_in_the_second_of_the_first_one/spoofed")?;
    }
    Ok(())
}

fn age_first_syns<A: Addr>(fixture: &Fixture, name: &str) -> Result<()>
where
    FlowKey<A>: Pod,
    Flow<A>: Pod,
{
    let mut flows: HashMap<MapData, FlowKey<A>, Flow<A>> = fixture.bench.map(name)?;
    let now_secs = u32::try_from(clock_gettime(ClockId::CLOCK_BOOTTIME)?.tv_sec())?;
    for (key, flow) in flows.iter().collect::<Result<Vec<_>, _>>()? {
        let mut aged = older(flow, key.proto(), 1);
        aged.last_secs = now_secs;
        flows.insert(key, aged, 0)?;
    }
    Ok(())
}

/// Returns the evidence against the backend of `web`.
fn votes(fixture: &Fixture) -> Result<Votes> {
    let counts = fixture.bench.datapath.flows.counts()?;
    let web = fixture.names.addr("web")?;
    if web.is_ipv4() {
        of(&counts.v4, web)
    } else {
        of(&counts.v6, web)
    }
}

fn of<A: Addr>(counts: &FamilyCounts<A>, web: IpAddr) -> Result<Votes> {
    let web = FrontendKey::new(
        A::from_ip(web).context("family")?,
        Port::new(80),
        Proto::TCP,
    );
    let rows = counts.connects.get(&web).context("a row")?;
    Ok(rows.values().next().context("a backend")?.votes)
}
