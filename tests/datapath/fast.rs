//! Packets of open connections that skip the stack: what leaves as what.

use anyhow::{Context, Result};
use proxy_common::device::Node;
use proxy_common::names::{EGRESS, INGRESS};

use crate::fast_bed::*;

#[test]
fn what_is_assured_goes_to_a_pod_at_once_and_so_do_its_answers() -> Result<()> {
    for mut bed in beds()? {
        bed.check(&TCP)?;
        bed.check(&[TCP_THERE, TCP_BACK, TCP_THERE, TCP_BACK])?;
        bed.check(&UDP)?;
        bed.check(&[UDP_THERE, UDP_BACK, UDP_THERE, UDP_BACK])?;
        bed.check(&[
            (
                INGRESS,
                "cli0",
                "sctp INIT client:1000 > web:3868 +16",
                "sctp INIT client:1000 > pod:13868 +16",
                "flow_opened forwarded",
            ),
            (INGRESS, "pod0", "sctp INIT-ACK pod:13868 > client:1000 +20", "same", "no_flow"),
            (
                EGRESS,
                "cli0",
                "sctp INIT-ACK pod:13868 > client:1000 +20",
                "sctp INIT-ACK web:3868 > client:1000 +20",
                "returned",
            ),
            (
                INGRESS,
                "cli0",
                "sctp COOKIE-ECHO client:1000 > web:3868 +8",
                "sctp COOKIE-ECHO client:1000 > pod:13868 +8",
                "forwarded",
            ),
            (
                INGRESS,
                "cli0",
                "sctp DATA client:1000 > web:3868 +40",
                "sctp DATA client:1000 > pod:13868 +40",
                "fast_local forwarded",
            ),
            (
                INGRESS,
                "pod0",
                "sctp DATA pod:13868 > client:1000 +99",
                "sctp DATA web:3868 > client:1000 +99",
                "fast_local returned",
            ),
        ])?;
    }
    Ok(())
}

/// Who is served by itself sees the node, and both its address and its port are given and taken back in one go.
#[test]
fn what_is_masqueraded_on_its_way_to_a_pod_is_so_at_once() -> Result<()> {
    for mut bed in beds()? {
        bed.check(&[
            (INGRESS, "cli0", "tcp S client:1000 > self:80", "tcp S client:$p > client:8080", "flow_opened forwarded"),
            (EGRESS, "cli0", "tcp S client:$p > client:8080", "tcp S node:$p > client:8080", ""),
            (INGRESS, "cli0", "tcp SA client:8080 > node:$p", "tcp SA client:8080 > client:$p", ""),
            (EGRESS, "cli0", "tcp SA client:8080 > client:$p", "tcp SA self:80 > client:1000", "returned"),
            (INGRESS, "cli0", "tcp A client:1000 > self:80", "tcp A client:$p > client:8080", "forwarded"),
            (
                INGRESS,
                "cli0",
                "tcp PA client:1000 > self:80 +5",
                "tcp PA node:$p > client:8080 +5",
                "fast_local forwarded",
            ),
            (
                INGRESS,
                "cli0",
                "tcp A client:8080 > node:$p +7",
                "tcp A self:80 > client:1000 +7",
                "fast_local returned",
            ),
        ])?;
    }
    Ok(())
}

/// Through a device that leads to no pod, its egress hook does its share.
#[test]
fn what_goes_on_to_another_node_is_translated_where_it_leaves() -> Result<()> {
    for mut bed in beds()? {
        bed.check(&[
            (INGRESS, "cli0", "udp client:1000 > remote:53", "udp client:1000 > far:5353", "flow_opened forwarded"),
            (INGRESS, "eth1", "udp far:5353 > client:1000", "same", "not_ours"),
            (EGRESS, "cli0", "udp far:5353 > client:1000", "udp remote:53 > client:1000", "returned"),
            (INGRESS, "cli0", "udp client:1000 > remote:53", "udp client:1000 > far:5353", "forwarded"),
            (
                INGRESS,
                "cli0",
                "udp client:1000 > remote:53 +9",
                "udp client:1000 > far:5353 +9",
                "fast_remote forwarded",
            ),
            (EGRESS, "eth1", "udp client:1000 > far:5353 +9", "same", "not_ours"),
            (INGRESS, "eth1", "udp far:5353 > client:1000 +2", "udp remote:53 > client:1000 +2", "fast_local returned"),
        ])?;
        // From outside to a pod there: masqueraded as this node.
        bed.check(&[
            (INGRESS, "eth1", "udp stranger:1 > node:30053", "udp stranger:$p > far:5353", "flow_opened forwarded"),
            (EGRESS, "eth1", "udp stranger:$p > far:5353", "udp uplink:$p > far:5353", ""),
            (INGRESS, "eth1", "udp far:5353 > uplink:$p", "udp far:5353 > stranger:$p", ""),
            (EGRESS, "eth1", "udp far:5353 > stranger:$p", "udp node:30053 > stranger:1", "returned"),
            (INGRESS, "eth1", "udp stranger:1 > node:30053 +1", "udp stranger:$p > far:5353 +1", "forwarded"),
            (
                INGRESS,
                "eth1",
                "udp stranger:1 > node:30053 +9",
                "udp stranger:$p > far:5353 +9",
                "fast_remote forwarded",
            ),
            (EGRESS, "eth1", "udp stranger:$p > far:5353 +9", "udp uplink:$p > far:5353 +9", ""),
            (INGRESS, "eth1", "udp far:5353 > uplink:$p +2", "udp far:5353 > stranger:$p +2", "fast_remote"),
            (EGRESS, "eth1", "udp far:5353 > stranger:$p +2", "udp node:30053 > stranger:1 +2", "returned"),
        ])?;
        // From outside to a pod here, which sees the client.
        bed.check(&[
            (INGRESS, "eth1", "tcp S stranger:2 > node:30080", "tcp S stranger:2 > pod:8080", "flow_opened forwarded"),
            (INGRESS, "pod0", "tcp SA pod:8080 > stranger:2", "same", "no_flow"),
            (EGRESS, "eth1", "tcp SA pod:8080 > stranger:2", "tcp SA node:30080 > stranger:2", "returned"),
            (INGRESS, "eth1", "tcp A stranger:2 > node:30080", "tcp A stranger:2 > pod:8080", "forwarded"),
            (
                INGRESS,
                "eth1",
                "tcp PA stranger:2 > node:30080 +5",
                "tcp PA stranger:2 > pod:8080 +5",
                "fast_local forwarded",
            ),
            (INGRESS, "pod0", "tcp A pod:8080 > stranger:2 +7", "same", "fast_remote"),
            (EGRESS, "eth1", "tcp A pod:8080 > stranger:2 +7", "tcp A node:30080 > stranger:2 +7", "returned"),
        ])?;
    }
    Ok(())
}

#[test]
fn it_comes_and_goes_with_the_nodes_flag() -> Result<()> {
    for mut bed in beds()? {
        bed.lab.set_flags(0)?;
        bed.check(&TCP)?;
        bed.check(&[TCP_THERE_SLOW, TCP_BACK_SLOW])?;
        bed.lab.set_flags(Node::FAST_PATH)?;
        // Of what comes back nothing is known yet.
        bed.check(&[TCP_THERE_SLOW, TCP_BACK_SLOW])?;
        // The opener's entry is told once a second (of which the programs hear a tick late).
        bed.age(2)?;
        bed.check(&[
            (EGRESS, "cli0", "tcp A pod:8080 > client:1000 +7", "tcp A web:80 > client:1000 +7", "returned"),
            TCP_THERE,
            TCP_BACK,
        ])?;
        bed.lab.set_flags(0)?;
        bed.check(&[TCP_THERE_SLOW, TCP_BACK_SLOW])?;
        bed.lab.set_flags(Node::FAST_PATH)?;
        bed.check(&[TCP_THERE, TCP_BACK])?;
        // An end that comes meanwhile.
        bed.lab.set_flags(0)?;
        bed.check(&[(INGRESS, "cli0", "tcp FA client:1000 > web:80", "tcp FA client:1000 > pod:8080", "forwarded")])?;
        bed.lab.set_flags(Node::FAST_PATH)?;
        bed.check(&[TCP_THERE_SLOW, TCP_BACK_SLOW])?;
    }
    Ok(())
}

/// Those between the hooks, as of what the stack forwards: what the client dialled it never sees.
#[test]
fn routes_may_hang_on_ports() -> Result<()> {
    for mut bed in beds()? {
        let (pod, ip) = (bed.lab.names.addr("pod")?, if bed.is_v4() { "" } else { "-6 " });
        // In a batch, a word for the family is not taken.
        let rule = |bed: &Bed, words: &str| {
            let line = format!("{ip}rule {words} lookup 77");
            let mut command = std::process::Command::new("ip");
            bed.lab.netns.exec(command.args(line.split_whitespace())).map(drop)
        };
        bed.lab.netns.ip(&format!(
            "neigh add {pod} dev eth1 lladdr 02:00:00:00:01:0e nud permanent
             route add {pod} dev eth1 table 77"
        ))?;
        bed.check(&TCP)?;
        for (words, is_meant) in [
            ("ipproto tcp dport 80", false),
            ("ipproto tcp sport 8080", false),
            ("ipproto udp dport 8080", false),
            ("ipproto tcp dport 8080", true),
            ("ipproto tcp sport 1000", true),
        ] {
            rule(&bed, &format!("add {words}"))?;
            let (program, device, packet, out, fast) = TCP_THERE;
            let counted = if is_meant { "fast_remote forwarded" } else { fast };
            bed.check(&[(program, device, packet, out, counted)]).with_context(|| words.to_owned())?;
            rule(&bed, &format!("del {words}"))?;
        }
    }
    Ok(())
}
