//! ICMP errors about packets of flows. Each row verifies the checksums of the error, its IP header
//! and the quoted header.

use anyhow::{Context, Result, ensure};
use aya::maps::{HashMap, MapData};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::flow::{Flow, FlowKey};
use proxy_common::names::EGRESS;
use testbed::test_run::Verdict::Pass;
use testbed::test_run::let_seconds_pass;

use crate::fixture::{Fixture, fixtures};
use crate::packets::packet_tests;

packet_tests! {
    icmp:
    error_from_backends_side_comes_from_service,
    error_from_clients_side_reaches_backend,
    errors_follow_changed_source_in_both_directions,
    direct_connection_with_another_port_has_errors_too,
    host_hears_errors_about_its_own_packets,
    error_about_no_flow_is_left_alone_and_never_answered,
    error_without_route_is_dropped,
}

#[test]
fn error_keeps_no_flow_alive() -> Result<()> {
    for mut fixture in fixtures("icmplife")? {
        fixture.rows("icmp::error_keeps_no_flow_alive/open")?;
        let before = flows(&fixture)?;
        ensure!(before.len() == 2, "{before:?}");
        let_seconds_pass(1)?;
        fixture.rows("icmp::error_keeps_no_flow_alive/errors")?;
        ensure!(
            flows(&fixture)? == before,
            "{:?}, not {before:?}",
            flows(&fixture)?
        );
        // A reply keeps the flow alive.
        fixture.rows("icmp::error_keeps_no_flow_alive/reply")?;
        ensure!(flows(&fixture)? != before, "a reply changed nothing");
    }
    Ok(())
}

/// Returns all entries of the flow table as text.
fn flows(fixture: &Fixture) -> Result<Vec<String>> {
    if fixture.names.addr("web")?.is_ipv4() {
        entries::<Addr4>(fixture, "FLOWS4")
    } else {
        entries::<Addr6>(fixture, "FLOWS6")
    }
}

fn entries<A: Addr>(fixture: &Fixture, name: &str) -> Result<Vec<String>> {
    let map: HashMap<MapData, FlowKey<A>, Flow<A>> = fixture.bench.map(name)?;
    let mut entries = map
        .iter()
        .map(|entry| Ok(format!("{:?}", entry?)))
        .collect::<Result<Vec<_>>>()?;
    entries.sort();
    Ok(entries)
}

#[test]
fn cut_or_lying_quote_is_left_alone() -> Result<()> {
    for mut fixture in fixtures("quote")? {
        fixture.rows("icmp::cut_or_lying_quote_is_left_alone")?;
        let v4 = fixture.names.addr("web")?.is_ipv4();
        let whole = fixture
            .names
            .frame("unreachable tcp client:1000 > pod:8080")?;
        let quote = if v4 { 14 + 20 + 8 } else { 14 + 40 + 8 };
        // The IP header's length ends the packet; more bytes follow.
        let ending = |at: usize| {
            let mut frame = whole.clone();
            let len = if v4 { at - 14 } else { at - 14 - 40 };
            let field = if v4 { 16 } else { 18 };
            frame[field..field + 2].copy_from_slice(&(len as u16).to_be_bytes());
            frame
        };
        let set = |at: usize, byte: u8| {
            let mut frame = whole.clone();
            frame[at] = byte;
            frame
        };
        let mut frames: Vec<_> = (quote - 8..whole.len())
            .map(|end| (format!("ends at {end}"), ending(end)))
            .collect();
        frames.push((
            "another version".to_owned(),
            set(quote, if v4 { 0x65 } else { 0x40 }),
        ));
        if v4 {
            frames.push(("a header of 16 bytes".to_owned(), set(quote, 0x44)));
            frames.push(("a header beyond the end".to_owned(), set(quote, 0x4f)));
        } else {
            frames.push(("an extension beyond the end".to_owned(), set(quote + 6, 60)));
        }
        frames.extend(
            (whole.len() - 20..whole.len())
                .map(|end| (format!("cut at {end}"), whole[..end].to_vec())),
        );
        for (name, frame) in frames {
            let outcome = fixture
                .bench
                .run(EGRESS, &frame)
                .with_context(|| name.clone())?;
            ensure!(
                outcome.verdict == Pass && outcome.packet == frame,
                "{name}: {:?}",
                outcome.verdict
            );
        }
    }
    Ok(())
}
