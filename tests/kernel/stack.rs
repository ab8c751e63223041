//! Packets of open connections that take the stack although the fast path is on.

use anyhow::{Result, ensure};
use nix::time::{ClockId, clock_gettime};
use proxy_common::device::Node;
use testbed::agent::{DEADLINE, wait_until};
use testbed::rows::words;

use crate::fast_fixture::{FAST, FastFixture, TURN_SECS, hops};
use crate::fixture::{counted_since, fixtures_of};
use crate::offload::{Notes, Wire};
use crate::packets::{Runner, packet_tests, run_section};

packet_tests! {
    stack:
    stack_sees_connections_open_and_end,
    odd_packets_take_stack,
    client_that_goes_on_talking_has_not_been_reset,
    frames_for_other_hosts_take_stack,
    packets_above_mtu_take_stack,
    packets_to_unreached_peer_take_stack,
    first_packet_after_silence_takes_stack,
    packets_by_another_device_take_stack,
    old_judgement_does_not_count,
    sender_is_judged_again_when_routes_change,
}

/// The lower half of the seconds wraps around. A validation that nothing renews must not count
/// again in that second.
#[test]
fn stack_turn_ends_source_validation() -> Result<()> {
    for mut fixture in FastFixture::both()? {
        run_section(&mut fixture, "fast::tcp_connection")?;
        run_section(&mut fixture, "stack::senders_are_judged")?;
        let cached_route = fixture.fixture().cached_devices()?;
        ensure!(
            cached_route.len() == 2,
            "not one device for each direction: {cached_route:?}"
        );
        run_section(&mut fixture, "stack::both_directions_take_their_turn")?;
        let cached_route = fixture.fixture().cached_devices()?;
        ensure!(cached_route.is_empty(), "judged still: {cached_route:?}");
    }
    Ok(())
}

/// The stack strips an 802.1Q tag that names only a priority. On a packet that skips the stack the
/// tag would stay.
#[test]
fn frame_with_priority_takes_stack() -> Result<()> {
    for mut fixture in fixtures_of("tagged", FAST)? {
        fixture.set_flags(Node::FAST_PATH)?;
        let wire = Wire::new(&mut fixture)?;
        calm()?;
        let opening = [
            "tcp S client:1000 > web:80",
            "tcp SA pod:8080 > client:1000",
            "tcp A client:1000 > web:80",
        ];
        for packet in opening {
            wire.send(&fixture.names.frame(packet)?, Notes::default())?;
            wire.receive()?;
        }
        let packet = "tcp PA client:1000 > web:80 +64";
        for (priority, counted) in [
            (None, "fast_remote forwarded"),
            (Some(3), "forwarded"),
            (None, "fast_remote forwarded"),
        ] {
            let mut frame = fixture.names.frame(packet)?;
            if let Some(priority) = priority {
                frame.splice(12..12, [0x81, 0x00, priority << 5, 0]);
            }
            let before = fixture.counts()?;
            wire.send(&frame, Notes::default())?;
            let (frame, _) = wire.receive()?;
            let text = fixture.names.text(&frame)?;
            ensure!(
                text == "tcp PA client:1000 > pod:8080 +64",
                "priority {priority:?}: it became {text}"
            );
            ensure!(
                hops(&frame) == 63,
                "priority {priority:?}: {} hops",
                hops(&frame)
            );
            let mut found = counted_since(&before, &fixture.counts()?);
            // The kernel sends its own packets as well.
            found.retain(|name| name.starts_with("fast") || name == "forwarded");
            ensure!(found == words(counted), "priority {priority:?}: {found:?}");
        }
    }
    Ok(())
}

/// The kernel strips two tags, the second one behind the hook, where a spoofed end of a connection
/// could hide.
#[test]
fn frame_with_two_priorities_is_dropped_while_flows_skip_stack() -> Result<()> {
    for mut fixture in fixtures_of("tagged", FAST)? {
        let wire = Wire::new(&mut fixture)?;
        let packet = "tcp FA client:1000 > pod:8080";
        for (flags, vlan, is_spoofed) in [
            (0, 0, false),
            (Node::FAST_OPENED, 0, true),
            (Node::FAST_KEEP, 0, true),
            (Node::FAST_OPENED, 5, false),
        ] {
            fixture.set_flags(flags)?;
            for tag in [[0x81, 0x00], [0x88, 0xa8]] {
                let mut frame = fixture.names.frame(packet)?;
                frame.splice(12..12, [0x81, 0x00, 0x60, 0, tag[0], tag[1], 0x20, vlan]);
                let before = fixture.counts()?;
                wire.send(&frame, Notes::default())?;
                if flags == 0 {
                    let (frame, _) = wire.receive()?;
                    let text = fixture.names.text(&frame)?;
                    ensure!(text == packet, "tag {tag:x?}: it became {text}");
                }
                let counted = if is_spoofed { "spoofed" } else { "not_ip" };
                wait_until(
                    DEADLINE,
                    &format!("flags {flags} tag {tag:x?} VLAN {vlan}: the hook counts {counted}"),
                    || {
                        Ok(counted_since(&before, &fixture.counts()?)
                            .iter()
                            .any(|name| name == counted))
                    },
                )?;
            }
        }
    }
    Ok(())
}

/// Waits until no packet takes its turn by the stack within the next three seconds.
fn calm() -> Result<()> {
    wait_until(DEADLINE, "no packet takes its turn", || {
        let turn_secs = i64::from(TURN_SECS);
        Ok((1..turn_secs - 3)
            .contains(&(clock_gettime(ClockId::CLOCK_BOOTTIME)?.tv_sec() % turn_secs)))
    })
}
