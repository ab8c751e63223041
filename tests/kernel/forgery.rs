//! Spoofed sources: the node's own address, or an address whose route leads through another device.
//! Such packets open no flow and change none.

use anyhow::{Result, ensure};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::device::Device;
use proxy_common::names::INGRESS;
use testbed::test_run::Verdict::{Drop, Pass, Redirect};

use crate::fixture::{fixtures, fixtures_of};
use crate::packets::packet_tests;
use crate::reuse::Setup;

/// The interface index of lo.
const LO: u32 = 1;

packet_tests! {
    forgery:
    pod_opens_nothing_in_anothers_name,
    pod_ends_no_connection_of_another_pod,
    pod_ends_no_connection_of_host,
    uplink_lets_no_client_speak_for_pod_or_node,
    uplink_lets_no_client_speak_for_pod_on_bridge,
    default_route_makes_no_spoofed_source_genuine,
    pod_whose_routes_name_another_device_is_served,
    pod_is_no_forger_without_detection,
    pod_of_another_node_is_external_client,
    nobody_speaks_for_backend_at_nodes_address,
}

/// A pod may set any priority class on its packets; the programs must not read it as their own
/// mark.
#[test]
fn class_of_pods_packet_is_ignored() -> Result<()> {
    for mut fixture in fixtures("note")? {
        let edge = Device::new(
            Device::POD | Device::EDGE,
            Addr4::UNSPECIFIED,
            Addr6::UNSPECIFIED,
        );
        fixture.set_device(edge)?;
        let frame = fixture.names.frame("tcp S client:1000 > web:80")?;
        let noted = fixture
            .netns
            .run(|| fixture.bench.run_marked(INGRESS, &frame, LO, 0xe000))?;
        ensure!(noted.verdict == Pass, "{:?}", noted.verdict);
        let text = fixture.names.text(&noted.packet)?;
        ensure!(text == "tcp S client:1000 > pod:8080", "became {text}");
    }
    Ok(())
}

/// RFC 1122 §3.2.2: answers to broadcast frames, or to frames for another host, would let one
/// packet draw many answers to a victim.
#[test]
fn only_frame_for_this_host_is_answered() -> Result<()> {
    for fixture in fixtures("frame")? {
        let frame = fixture.names.frame("tcp S client:1000 > none:80")?;
        for (mac, verdict) in [
            ([2, 0, 0, 0, 0, 2], Redirect),
            ([0xff; 6], Drop),
            ([2, 0, 0, 0, 0, 0x77], Drop),
        ] {
            let frame = [&mac[..], &frame[6..]].concat();
            let before = fixture.counts()?;
            let outcome = fixture.run(INGRESS, &frame)?;
            ensure!(
                outcome.verdict == verdict,
                "to {mac:x?}: {:?}",
                outcome.verdict
            );
            if verdict == Redirect {
                ensure!(
                    outcome.packet[6..12] == mac,
                    "the answer comes from {:x?}",
                    &outcome.packet[6..12]
                );
            } else {
                ensure!(fixture.counts()?["unanswered"] == before["unanswered"] + 1);
            }
        }
    }
    Ok(())
}

/// A flood with a victim's address must not become a flood of answers, nor use up the limit for
/// answers to the host itself.
#[test]
fn flood_of_refused_packets_is_answered_up_to_limit() -> Result<()> {
    const LIMIT: u32 = 3;
    const SENT: u64 = 20;
    for mut fixture in fixtures_of(
        "answers",
        Setup {
            answers_per_sec: Some(LIMIT),
            ..Setup::default()
        },
    )? {
        let frame = fixture.names.frame("udp client:1000 > none:80")?;
        let before = fixture.counts()?;
        for _ in 0..SENT {
            fixture.run(INGRESS, &frame)?;
        }
        let now = fixture.counts()?;
        let answered = now["rejected"] - before["rejected"];
        let unanswered = now["unanswered"] - before["unanswered"];
        // Several CPUs may see the packets, and a new second may begin.
        ensure!(
            answered >= LIMIT.into() && unanswered > 0 && answered + unanswered == SENT,
            "{answered}, {unanswered}"
        );
        fixture.rows("forgery::flood_of_refused_packets_is_answered_up_to_limit/host")?;
    }
    Ok(())
}
