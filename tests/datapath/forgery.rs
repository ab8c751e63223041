//! Packets in another's name: their source is the node's own, or the way back to it leads through another device. They open
//! no flow and touch none.

use anyhow::{Result, ensure};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::device::{Device, Node};
use proxy_common::names::{ANCHOR, EGRESS, INGRESS};
use testbed::test_run::Verdict::{Drop, Pass, Redirect};

use crate::lab::{Lab, labs, labs_of};
use crate::reuse::Setup;

/// An uplink, and whether the kernel is strict there.
fn uplink(is_strict: bool) -> Device {
    let flags = if is_strict { Device::STRICT4 } else { 0 };
    Device::new(flags, Addr4::UNSPECIFIED, Addr6::UNSPECIFIED)
}

fn is_v4(lab: &Lab) -> Result<bool> {
    Ok(lab.names.addr("web")?.is_ipv4())
}

#[test]
fn a_pod_opens_nothing_in_anothers_name() -> Result<()> {
    for mut lab in labs("name")? {
        lab.check(&[
            // Of the node; of a pod behind another device; of a stranger behind the uplink; of an address without a way back.
            (INGRESS, "tcp S node:45001 > own:443", Drop, "-", "forged"),
            (INGRESS, "udp uplink:1000 > web:53", Drop, "-", "forged"),
            (INGRESS, "tcp S lost:1000 > web:80", Drop, "-", "forged"),
            // Its own.
            (INGRESS, "tcp S client:1000 > web:80", Pass, "tcp S client:1000 > pod:8080", "flow_opened forwarded"),
        ])?;
        lab.come_in_by("lo")?;
        lab.check(&[
            (INGRESS, "tcp S pod:1000 > web:80", Drop, "-", "forged"),
            (INGRESS, "tcp S far:1000 > web:80", Drop, "-", "forged"),
            // What is for no service is judged by the kernel alone.
            (INGRESS, "tcp S pod:1000 > stranger:80", Pass, "same", "not_ours"),
        ])?;
    }
    Ok(())
}

#[test]
fn a_pod_ends_no_connection_of_another_pod() -> Result<()> {
    for mut lab in labs("reset")? {
        lab.check(&[
            (INGRESS, "tcp S client:1000 > web:80", Pass, "tcp S client:1000 > pod:8080", "flow_opened forwarded"),
            (EGRESS, "tcp SA pod:8080 > client:1000", Pass, "tcp SA web:80 > client:1000", "returned"),
            (INGRESS, "tcp A client:1000 > web:80", Pass, "tcp A client:1000 > pod:8080", "forwarded"),
        ])?;
        lab.come_in_by("pod0")?;
        lab.check(&[
            (INGRESS, "tcp R client:1000 > web:80", Drop, "-", "forged"),
            (INGRESS, "tcp FA client:1000 > web:80", Drop, "-", "forged"),
            (INGRESS, "tcp S client:1000 > web:80", Drop, "-", "forged"),
        ])?;
        lab.come_in_by("lo")?;
        lab.check(&[(INGRESS, "tcp A client:1000 > web:80 +1", Pass, "tcp A client:1000 > pod:8080 +1", "forwarded")])?;
    }
    Ok(())
}

#[test]
fn a_pod_ends_no_connection_of_the_host() -> Result<()> {
    for mut lab in labs("host")? {
        lab.check(&[
            (ANCHOR, "tcp S node:1000 > web:80", Redirect, "tcp S node:$p > pod:8080", "flow_opened forwarded"),
            (INGRESS, "tcp SA pod:8080 > node:$p", Redirect, "tcp SA web:80 > node:1000", "returned"),
        ])?;
        lab.come_in_by("lo")?;
        lab.check(&[
            (INGRESS, "tcp R pod:8080 > node:$p", Drop, "-", "forged"),
            (INGRESS, "tcp PA pod:8080 > node:$p +5", Drop, "-", "forged"),
        ])?;
    }
    Ok(())
}

#[test]
fn an_uplink_lets_no_stranger_speak_for_pod_or_node() -> Result<()> {
    for is_strict in [false, true] {
        for mut lab in labs("uplink")? {
            lab.set_flags(Node::CLUSTER_IP_EXTERNAL)?;
            lab.set_device(uplink(is_strict))?;
            lab.check(&[
                (INGRESS, "tcp S pod:1000 > web:80", Drop, "-", "forged"),
                (INGRESS, "tcp S node:1000 > web:80", Drop, "-", "forged"),
                (
                    INGRESS,
                    "tcp S stranger:1000 > web:80",
                    Pass,
                    "tcp S stranger:1000 > pod:8080",
                    "flow_opened forwarded",
                ),
            ])?;
            // From behind another uplink: the kernel decides, as it was told to (`rp_filter`; IPv6 has none).
            let row = if is_strict && is_v4(&lab)? {
                (INGRESS, "tcp S far:1000 > web:80", Drop, "-", "forged")
            } else {
                (INGRESS, "tcp S far:1000 > web:80", Pass, "tcp S far:1000 > pod:8080", "flow_opened forwarded")
            };
            lab.check(&[row])?;
        }
    }
    Ok(())
}

/// A default route through the uplink is no way back to one who has a better one elsewhere.
#[test]
fn a_default_route_makes_no_stranger_honest() -> Result<()> {
    for mut lab in labs("default")? {
        lab.set_flags(Node::CLUSTER_IP_EXTERNAL)?;
        lab.set_device(uplink(true))?;
        let everywhere = if is_v4(&lab)? { "0.0.0.0/0" } else { "::/0" };
        lab.netns.ip(&format!("route add {everywhere} dev {}", crate::lab::FROM))?;
        lab.check(&[(INGRESS, "tcp S pod:1000 > web:80", Drop, "-", "forged")])?;
        if is_v4(&lab)? {
            lab.check(&[(INGRESS, "tcp S far:1000 > web:80", Drop, "-", "forged")])?;
        }
    }
    Ok(())
}

/// Open vSwitch: routes to its pods name another port of it, never the pods' own.
#[test]
fn a_pod_whose_routes_name_another_device_is_served() -> Result<()> {
    for mut lab in labs("loose")? {
        let device = Device::new(Device::POD | Device::LOOSE, Addr4::UNSPECIFIED, Addr6::UNSPECIFIED);
        lab.set_device(device)?;
        lab.check(&[
            (INGRESS, "tcp S far:1000 > web:80", Pass, "tcp S far:1000 > pod:8080", "flow_opened forwarded"),
            (INGRESS, "tcp S pod:1000 > web:80", Drop, "-", "forged"),
            (INGRESS, "tcp S node:1000 > web:80", Drop, "-", "forged"),
        ])?;
    }
    Ok(())
}

/// A pod may write any class on its packets; it must not be taken for a note of ours.
#[test]
fn a_pods_own_note_is_ignored() -> Result<()> {
    for mut lab in labs("note")? {
        let edge = Device::new(Device::POD | Device::EDGE, Addr4::UNSPECIFIED, Addr6::UNSPECIFIED);
        lab.set_device(edge)?;
        let frame = lab.names.frame("tcp S client:1000 > web:80")?;
        let noted = lab.netns.run(|| lab.bench.run_noted(INGRESS, &frame, 0xe000))?;
        ensure!(noted.verdict == Pass, "{:?}", noted.verdict);
        let text = lab.names.text(&noted.packet)?;
        ensure!(text == "tcp S client:1000 > pod:8080", "became {text}");
    }
    Ok(())
}

/// RFC 1122 §3.2.2: one frame for all, or for another host, must not make many hosts answer one victim.
#[test]
fn only_a_frame_for_the_host_is_answered() -> Result<()> {
    for lab in labs("frame")? {
        let frame = lab.names.frame("tcp S client:1000 > none:80")?;
        for (mac, verdict) in [([2, 0, 0, 0, 0, 2], Redirect), ([0xff; 6], Drop), ([2, 0, 0, 0, 0, 0x77], Drop)] {
            let frame = [&mac[..], &frame[6..]].concat();
            let before = lab.counts()?;
            let outcome = lab.run(INGRESS, &frame)?;
            ensure!(outcome.verdict == verdict, "to {mac:x?}: {:?}", outcome.verdict);
            if verdict == Redirect {
                ensure!(outcome.packet[6..12] == mac, "the answer comes from {:x?}", &outcome.packet[6..12]);
            } else {
                ensure!(lab.counts()?["unanswered"] == before["unanswered"] + 1);
            }
        }
    }
    Ok(())
}

/// Without a way to tell pods, kube-proxy's own default: what came in by the device that its address is routed to is no lie.
#[test]
fn a_pod_is_no_forger_where_detection_knows_none() -> Result<()> {
    for mut lab in crate::policy::pods()? {
        lab.set_flags(Node::COMPAT)?;
        lab.check(&[(
            INGRESS,
            "tcp S pod:1000 > node:30080",
            Pass,
            "tcp S pod:$p > pod:8080",
            "flow_opened forwarded",
        )])?;
    }
    Ok(())
}

/// KEP-2086: under externalTrafficPolicy Local a node without endpoints is silent, to pods of other nodes as well.
#[test]
fn a_pod_of_another_node_is_a_client_from_elsewhere() -> Result<()> {
    for mut lab in crate::policy::pods()? {
        lab.bench.datapath.node.set_pods(&["10.244.0.0/16".parse()?, "fd00:10:244::/48".parse()?], &[])?;
        for mode in [0, Node::COMPAT] {
            lab.set_flags(mode | Node::DETECTS4 | Node::DETECTS6)?;
            lab.check(&[(INGRESS, "tcp S far:1000 > distant:80", Drop, "-", "no_local_endpoints")])?;
        }
        // A pod of this node is served.
        let pod = (INGRESS, "tcp S pod:1001 > distant:80", Pass, "tcp S pod:1001 > far:8080", "flow_opened forwarded");
        lab.check(&[pod])?;
    }
    Ok(())
}

/// A flood in a victim's name must not become a flood of answers, nor take the host's own.
#[test]
fn a_flood_of_refused_packets_is_answered_no_more_than_the_limit() -> Result<()> {
    const LIMIT: u32 = 3;
    const SENT: u64 = 20;
    for mut lab in labs_of("answers", Setup { answers_per_sec: Some(LIMIT), ..Setup::default() })? {
        let frame = lab.names.frame("udp client:1000 > none:80")?;
        let before = lab.counts()?;
        for _ in 0..SENT {
            lab.run(INGRESS, &frame)?;
        }
        let now = lab.counts()?;
        let (answered, unanswered) = (now["rejected"] - before["rejected"], now["unanswered"] - before["unanswered"]);
        // The packets may meet several CPUs, and a new second.
        ensure!(
            answered >= LIMIT.into() && unanswered > 0 && answered + unanswered == SENT,
            "{answered}, {unanswered}"
        );
        lab.check(&[(
            ANCHOR,
            "tcp S node:1000 > none:80",
            Redirect,
            "tcp RA none:80 > node:1000",
            "no_endpoints rejected",
        )])?;
    }
    Ok(())
}
