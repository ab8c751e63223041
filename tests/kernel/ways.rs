//! Paths past the stack that a flow stores: they last until the agent reports changed routes, or
//! the second ends.

use anyhow::{Context, Result, ensure};
use proxy_common::names::{ANCHOR, INGRESS};
use testbed::agent::{DEADLINE, wait_until};
use testbed::test_run::Verdict;
use testbed::text::DST_MAC;

use crate::fast_fixture::{FastFixture, now_secs};
use crate::packets::{Runner, run_section};

/// The last byte of the pod's link address, before and after.
const BEFORE: u8 = 0x0b;
const AFTER: u8 = 0x1b;

#[test]
fn flow_keeps_its_way_until_the_epoch_moves() -> Result<()> {
    for mut fixture in FastFixture::both()? {
        run_section(&mut fixture, "fast::tcp_connection")?;
        // All of it must happen within one second.
        wait_until(DEADLINE, "a flow that keeps its way", || {
            move_pod(&mut fixture, BEFORE)?;
            fixture.fixture().bench.datapath.ways.begin_epoch()?;
            run_section(&mut fixture, "stack::senders_are_judged")?;
            let judged_secs = now_secs()?;
            move_pod(&mut fixture, AFTER)?;
            let kept = link_address(&mut fixture)?;
            if now_secs()? != judged_secs {
                return Ok(false);
            }
            ensure!(kept == Some(BEFORE), "the way was not kept: {kept:x?}");
            fixture.fixture().bench.datapath.ways.begin_epoch()?;
            let asked = link_address(&mut fixture)?;
            ensure!(
                asked == Some(AFTER),
                "the way was kept past its epoch: {asked:x?}"
            );
            Ok(true)
        })?;
    }
    Ok(())
}

#[test]
fn flow_asks_each_time_where_its_device_has_another_link_address() -> Result<()> {
    for mut fixture in FastFixture::both()? {
        run_section(&mut fixture, "fast::tcp_connection")?;
        run_section(&mut fixture, "stack::senders_are_judged")?;
        move_pod(&mut fixture, AFTER)?;
        // No epoch begins. The flow renews its path when its second ends, but the device's first
        // address stays until an epoch ends.
        wait_until(DEADLINE, "the second ends", || {
            Ok(link_address(&mut fixture)? == Some(AFTER))
        })?;
        for _ in 0..10 {
            let found = link_address(&mut fixture)?;
            ensure!(
                found.is_none_or(|found| found == AFTER),
                "the way of another address: {found:x?}"
            );
        }
    }
    Ok(())
}

#[test]
fn host_keeps_its_way_to_a_pod_until_the_epoch_moves() -> Result<()> {
    for mut fixture in FastFixture::both()? {
        open_from_host(&mut fixture)?;
        wait_until(DEADLINE, "the host's flow keeps its way", || {
            move_pod(&mut fixture, BEFORE)?;
            fixture.fixture().bench.datapath.ways.begin_epoch()?;
            let judged_secs = now_secs()?;
            let by_neighbour = host_link_address(&mut fixture)?;
            let found = host_link_address(&mut fixture)?;
            move_pod(&mut fixture, AFTER)?;
            let kept = host_link_address(&mut fixture)?;
            fixture.fixture().bench.datapath.ways.begin_epoch()?;
            let by_neighbour_again = host_link_address(&mut fixture)?;
            let asked = host_link_address(&mut fixture)?;
            if now_secs()? != judged_secs {
                return Ok(false);
            }
            // The first packet of a term leaves its link header to the kernel's neighbour look-up.
            let own = DST_MAC[5];
            ensure!(
                [by_neighbour, by_neighbour_again] == [own; 2],
                "{by_neighbour:x} {by_neighbour_again:x}"
            );
            ensure!(
                [found, kept, asked] == [BEFORE, BEFORE, AFTER],
                "{found:x} {kept:x} {asked:x}"
            );
            Ok(true)
        })?;
    }
    Ok(())
}

/// Opens a flow from the host to the pod, which answers.
fn open_from_host(fixture: &mut FastFixture) -> Result<()> {
    let fixture = fixture.fixture();
    let opener = fixture.names.frame("udp node:1000 > web:53 +1")?;
    let outcome = fixture.netns.run(|| fixture.bench.run(ANCHOR, &opener))?;
    fixture
        .names
        .learn(&outcome.packet, "udp node:$p > pod:5353 +1")?;
    let answer = fixture.names.frame("udp pod:5353 > node:$p +1")?;
    let ifindex = fixture.ifindex("pod0")?;
    let outcome = fixture
        .netns
        .run(|| fixture.bench.run_on(INGRESS, &answer, ifindex))?;
    ensure!(outcome.verdict == Verdict::Redirect, "{outcome:?}");
    Ok(())
}

/// Sends a datagram from the host to the pod, and returns the last byte of its destination's link
/// address.
fn host_link_address(fixture: &mut FastFixture) -> Result<u8> {
    let fixture = fixture.fixture();
    let frame = fixture.names.frame("udp node:1000 > web:53 +5")?;
    let outcome = fixture.netns.run(|| fixture.bench.run(ANCHOR, &frame))?;
    ensure!(outcome.verdict == Verdict::Redirect, "{outcome:?}");
    let text = fixture.names.text(&outcome.packet)?;
    ensure!(text == "udp node:$p > pod:5353 +5", "{text}");
    Ok(outcome.packet[5])
}

/// Gives the pod another link address.
fn move_pod(fixture: &mut FastFixture, last: u8) -> Result<()> {
    let fixture = fixture.fixture();
    let addr = fixture.names.addr("pod")?;
    fixture.netns.ip(&format!(
        "neigh replace {addr} dev pod0 lladdr 02:00:00:00:01:{last:02x} nud permanent"
    ))
}

/// Sends a packet to the pod, and returns the last byte of its destination's link address. None if
/// the packet takes its turn by the stack.
fn link_address(fixture: &mut FastFixture) -> Result<Option<u8>> {
    let fixture = fixture.fixture();
    let frame = fixture.names.frame("tcp PA client:1000 > web:80 +5")?;
    let ifindex = fixture.ifindex("cli0")?;
    let outcome = fixture
        .netns
        .run(|| fixture.bench.run_on(INGRESS, &frame, ifindex))?;
    let last = *outcome.packet.get(5).context("no frame")?;
    Ok((outcome.verdict == Verdict::Redirect).then_some(last))
}
