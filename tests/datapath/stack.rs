//! Packets of open connections that take the stack, where others skip it.

use anyhow::{Result, ensure};
use nix::time::{ClockId, clock_gettime};
use proxy_common::device::Node;
use proxy_common::names::{EGRESS, INGRESS};
use testbed::agent::wait_until;

use crate::fast_bed::*;
use crate::lab::{counted_since, labs_of, words};
use crate::offload::{Notes, Wire};

#[test]
fn the_stack_sees_connections_open_and_end() -> Result<()> {
    for mut bed in beds()? {
        bed.check(&TCP)?;
        bed.check(&[
            // What comes back is fast only where what goes there is.
            TCP_BACK_SLOW,
            TCP_THERE,
            TCP_BACK,
            // An opener sent again.
            (INGRESS, "cli0", "tcp S client:1000 > web:80", "tcp S client:1000 > pod:8080", "forwarded"),
            TCP_THERE,
            (INGRESS, "pod0", "tcp FA pod:8080 > client:1000", "same", "no_flow"),
            (EGRESS, "cli0", "tcp FA pod:8080 > client:1000", "tcp FA web:80 > client:1000", "returned"),
            TCP_THERE_SLOW,
            TCP_BACK_SLOW,
        ])?;
        bed.forget()?;
        bed.check(&TCP)?;
        bed.check(&[
            TCP_THERE,
            (INGRESS, "cli0", "tcp FA client:1000 > web:80", "tcp FA client:1000 > pod:8080", "forwarded"),
            TCP_BACK_SLOW,
        ])?;
        for reset in ["tcp R", "tcp RA"] {
            bed.forget()?;
            bed.check(&TCP)?;
            bed.check(&[
                TCP_THERE,
                (INGRESS, "pod0", &format!("{reset} pod:8080 > client:1000"), "same", "no_flow"),
                (
                    INGRESS,
                    "cli0",
                    &format!("{reset} client:1000 > web:80"),
                    &format!("{reset} client:1000 > pod:8080"),
                    "forwarded",
                ),
                TCP_BACK_SLOW,
            ])?;
        }
        bed.check(&[
            (
                INGRESS,
                "cli0",
                "sctp INIT client:1 > web:3868",
                "sctp INIT client:1 > pod:13868",
                "flow_opened forwarded",
            ),
            (INGRESS, "pod0", "sctp INIT-ACK pod:13868 > client:1", "same", "no_flow"),
            (EGRESS, "cli0", "sctp INIT-ACK pod:13868 > client:1", "sctp INIT-ACK web:3868 > client:1", "returned"),
            (
                INGRESS,
                "cli0",
                "sctp COOKIE-ECHO client:1 > web:3868",
                "sctp COOKIE-ECHO client:1 > pod:13868",
                "forwarded",
            ),
            (INGRESS, "cli0", "sctp ABORT client:1 > web:3868", "sctp ABORT client:1 > pod:13868", "forwarded"),
        ])?;
    }
    Ok(())
}

#[test]
fn odd_packets_take_the_stack() -> Result<()> {
    for mut bed in beds()? {
        bed.check(&UDP)?;
        bed.check(&[
            UDP_THERE,
            (
                INGRESS,
                "cli0",
                "[options] udp client:1000 > web:53 +7",
                "[options] udp client:1000 > pod:5353 +7",
                "forwarded",
            ),
            (
                INGRESS,
                "cli0",
                "[first=7] udp client:1000 > web:53 +64",
                "[first=7] udp client:1000 > pod:5353 +64",
                "forwarded",
            ),
            (INGRESS, "cli0", "[later=7] udp client > web +64", "[later=7] udp client > pod +64", "forwarded"),
            (INGRESS, "pod0", "[options] udp pod:5353 > client:1000 +7", "same", "not_ours"),
            // The stack tells the client that no hop is left.
            (INGRESS, "cli0", "hops=1 udp client:1000 > web:53", "udp client:1000 > pod:5353", "forwarded"),
            (INGRESS, "pod0", "hops=1 udp pod:5353 > client:1000", "same", "not_ours"),
            (INGRESS, "cli0", "hops=2 udp client:1000 > web:53", "udp client:1000 > pod:5353", "fast_local forwarded"),
            (INGRESS, "pod0", "hops=2 udp pod:5353 > client:1000", "udp web:53 > client:1000", "fast_local returned"),
            (
                INGRESS,
                "cli0",
                "hops=255 udp client:1000 > web:53",
                "udp client:1000 > pod:5353",
                "fast_local forwarded",
            ),
        ])?;
        // To another machine's link address.
        bed.lab.netns.ip("link set cli0 address 02:00:00:00:00:99")?;
        bed.check(&[UDP_THERE_SLOW])?;
    }
    Ok(())
}

#[test]
fn who_goes_on_talking_has_not_been_reset() -> Result<()> {
    for mut bed in beds()? {
        bed.check(&TCP)?;
        bed.check(&[
            TCP_THERE,
            TCP_BACK,
            (INGRESS, "pod0", "tcp R pod:8080 > client:1000", "same", "no_flow"),
            (EGRESS, "cli0", "tcp R pod:8080 > client:1000", "tcp R web:80 > client:1000", "returned"),
            TCP_THERE_SLOW,
            TCP_THERE,
            TCP_BACK,
        ])?;
    }
    Ok(())
}

/// Such as a bridge's port gets, and a device that takes every frame.
#[test]
fn what_is_for_other_machines_takes_the_stack() -> Result<()> {
    for mut bed in beds()? {
        for end in ["tcp FA", "tcp R"] {
            bed.forget()?;
            bed.check(&TCP)?;
            bed.check(&[TCP_THERE, TCP_BACK])?;
            bed.is_for_others = true;
            let (there, out) = (format!("{end} client:1000 > web:80"), format!("{end} client:1000 > pod:8080"));
            bed.check(&[TCP_THERE_SLOW, TCP_BACK_SLOW, (INGRESS, "cli0", &there, &out, "forwarded")])?;
            bed.is_for_others = false;
            // The flow has heard of its end all the same.
            bed.check(&[TCP_BACK_SLOW])?;
        }
    }
    Ok(())
}

#[test]
fn what_is_longer_than_the_next_link_takes_is_for_the_stack() -> Result<()> {
    const MTU: usize = 1_500;
    for mut bed in beds()? {
        let ip_len = if bed.is_v4() { 20 } else { 40 };
        bed.check(&UDP)?;
        bed.check(&TCP)?;
        for (proto, flags, header_len, from, to, back) in [
            ("udp", "", 8, "client:1000 > web:53", "client:1000 > pod:5353", "pod:5353 > client:1000"),
            ("tcp", "A ", 20, "client:1000 > web:80", "client:1000 > pod:8080", "pod:8080 > client:1000"),
        ] {
            let longest = MTU - ip_len - header_len;
            let packet = |peers: &str, len: usize| format!("{proto} {flags}{peers} +{len}");
            let (fast, slow) = ("fast_local forwarded", "forwarded");
            let unknown = if proto == "udp" { "not_ours" } else { "no_flow" };
            for (len, counted) in [(longest, fast), (longest + 1, slow)] {
                bed.check(&[(INGRESS, "cli0", &packet(from, len), &packet(to, len), counted)])?;
            }
            bed.check(&[(INGRESS, "pod0", &packet(back, longest + 1), "same", unknown)])?;
            // What is to be cut up is as long as its segments are.
            for (size, counted) in [(1_000, fast), (longest, fast), (longest + 1, slow)] {
                bed.segment_size = u32::try_from(size)?;
                bed.check(&[(INGRESS, "cli0", &packet(from, 3_000), &packet(to, 3_000), counted)])?;
            }
            bed.segment_size = 0;
        }
        bed.lab.netns.ip(&format!("route replace {} dev pod0 mtu lock 1400", bed.lab.names.addr("pod")?))?;
        let (peers, became) = ("udp client:1000 > web:53", "udp client:1000 > pod:5353");
        for (len, counted) in [(1_400, "fast_local forwarded"), (1_401, "forwarded")] {
            let payload = len - ip_len - 8;
            let (packet, out) = (format!("{peers} +{payload}"), format!("{became} +{payload}"));
            bed.check(&[(INGRESS, "cli0", &packet, &out, counted)])?;
        }
    }
    Ok(())
}

#[test]
fn who_is_not_reached_at_once_is_left_to_the_stack() -> Result<()> {
    for mut bed in beds()? {
        let (pod, client) = (bed.lab.names.addr("pod")?, bed.lab.names.addr("client")?);
        bed.check(&TCP)?;
        bed.check(&[TCP_THERE, TCP_BACK])?;
        // Nobody knows its link address.
        bed.lab.netns.ip(&format!("neigh del {pod} dev pod0"))?;
        bed.check(&[TCP_THERE_SLOW, TCP_BACK])?;
        bed.lab.netns.ip(&format!("neigh add {pod} dev pod0 lladdr 02:00:00:00:01:0b nud permanent"))?;
        bed.check(&[TCP_THERE])?;
        // There is no route to it, so that the stack has to judge what comes from it as well.
        bed.lab.netns.ip(&format!("route del {client} dev cli0"))?;
        bed.check(&[TCP_BACK_SLOW, TCP_THERE_SLOW])?;
        bed.lab.netns.ip(&format!("route replace {client} dev cli0"))?;
        // The device has no hooks; is no pair that may be passed by; is one again.
        bed.lab.set_devices(&[("cli0", Some(POD)), ("pod0", None)])?;
        bed.check(&[TCP_THERE_SLOW, TCP_BACK])?;
        bed.lab.set_devices(&[("cli0", Some(POD))])?;
        let (program, device, packet, out, _) = TCP_THERE;
        bed.check(&[
            (program, device, packet, out, "fast_remote forwarded"),
            (EGRESS, "pod0", out, "same", "not_ours"),
            TCP_BACK,
        ])?;
        bed.lab.set_devices(&[("cli0", Some(POD)), ("pod0", Some(POD))])?;
        bed.check(&[TCP_THERE, TCP_BACK])?;
    }
    Ok(())
}

/// So that conntrack does not forget what it does not see.
#[test]
fn after_a_silence_one_packet_takes_the_stack() -> Result<()> {
    for mut bed in beds()? {
        bed.check(&UDP)?;
        bed.check(&[UDP_THERE, UDP_BACK])?;
        bed.age(3)?;
        bed.check(&[UDP_THERE_SLOW, UDP_THERE])?;
        bed.age(3)?;
        bed.check(&[
            UDP_BACK_SLOW,
            (EGRESS, "cli0", "udp pod:5353 > client:1000 +4", "udp web:53 > client:1000 +4", "returned"),
            UDP_BACK,
        ])?;
    }
    Ok(())
}

/// Frames as they come in through a device. A tag of IEEE 802.1Q that tells a priority only is taken off by the stack, and
/// would stay on what skips it.
#[test]
fn a_frame_with_a_priority_takes_the_stack() -> Result<()> {
    for mut lab in labs_of("tagged", FAST)? {
        lab.set_flags(Node::FAST_PATH)?;
        let wire = Wire::new(&mut lab)?;
        calm()?;
        let opening = ["tcp S client:1000 > web:80", "tcp SA pod:8080 > client:1000", "tcp A client:1000 > web:80"];
        for packet in opening {
            wire.send(&lab.names.frame(packet)?, Notes::default())?;
            wire.receive()?;
        }
        let packet = "tcp PA client:1000 > web:80 +64";
        for (priority, counted) in
            [(None, "fast_remote forwarded"), (Some(3), "forwarded"), (None, "fast_remote forwarded")]
        {
            let mut frame = lab.names.frame(packet)?;
            if let Some(priority) = priority {
                frame.splice(12..12, [0x81, 0x00, priority << 5, 0]);
            }
            let before = lab.counts()?;
            wire.send(&frame, Notes::default())?;
            let (frame, _) = wire.receive()?;
            let text = lab.names.text(&frame)?;
            ensure!(text == "tcp PA client:1000 > pod:8080 +64", "priority {priority:?}: it became {text}");
            ensure!(hops(&frame) == 63, "priority {priority:?}: {} hops", hops(&frame));
            let mut found = counted_since(&before, &lab.counts()?);
            // The kernel sends packets of its own.
            found.retain(|name| name.starts_with("fast") || name == "forwarded");
            ensure!(found == words(counted), "priority {priority:?}: {found:?}");
        }
    }
    Ok(())
}

/// Not where the stack hears of a flow within these rows.
fn calm() -> Result<()> {
    wait_until(DEADLINE, "it is nobody's turn", || {
        let turn_secs = i64::from(TURN_SECS);
        Ok((1..turn_secs - 3).contains(&(clock_gettime(ClockId::CLOCK_BOOTTIME)?.tv_sec() % turn_secs)))
    })
}
