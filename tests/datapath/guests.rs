//! Ports on the node's own addresses that other programs' connections have: netfilter's masquerading, above all.

use anyhow::{Result, ensure};
use proxy_common::device::Node;
use proxy_common::names::{EGRESS, INGRESS};
use testbed::test_run::Verdict::Pass;

use crate::lab::{Lab, Row};
use crate::policy::outside;

/// A stranger's connection by a ClusterIP to a pod of another node: kpx draws a port for it.
const MASQUERADED: [Row; 4] = [
    (INGRESS, "tcp S stranger:1000 > remote:80", Pass, "tcp S stranger:$p > far:8080", "flow_opened forwarded"),
    (EGRESS, "tcp S stranger:$p > far:8080", Pass, "tcp S uplink:$p > far:8080", ""),
    (INGRESS, "tcp SA far:8080 > uplink:$p", Pass, "tcp SA far:8080 > stranger:$p", ""),
    (EGRESS, "tcp SA far:8080 > stranger:$p", Pass, "tcp SA remote:80 > stranger:1000", "returned"),
];
const GOES_ON: Row = (INGRESS, "tcp A stranger:1000 > remote:80", Pass, "tcp A stranger:$p > far:8080", "forwarded");

fn labs() -> Result<Vec<Lab>> {
    let mut labs = outside()?;
    labs.iter_mut().try_for_each(|lab| lab.set_flags(Node::CLUSTER_IP_EXTERNAL))?;
    Ok(labs)
}

#[test]
fn a_connection_beside_a_flow_with_its_tuple_gets_another_port() -> Result<()> {
    for mut lab in labs()? {
        lab.check(&MASQUERADED)?;
        lab.check(&[
            GOES_ON,
            (EGRESS, "tcp S uplink:$p > far:8080", Pass, "tcp S uplink:$q > far:8080", "flow_opened port_moved"),
            // Sent again, it keeps that port.
            (EGRESS, "tcp S uplink:$p > far:8080", Pass, "tcp S uplink:$q > far:8080", ""),
            (INGRESS, "tcp SA far:8080 > uplink:$q", Pass, "tcp SA far:8080 > uplink:$p", ""),
            (EGRESS, "tcp A uplink:$p > far:8080", Pass, "tcp A uplink:$q > far:8080", ""),
            // Each hears its own replies.
            (INGRESS, "tcp A far:8080 > uplink:$p", Pass, "tcp A far:8080 > stranger:$p", ""),
            (INGRESS, "tcp A far:8080 > uplink:$q", Pass, "tcp A far:8080 > uplink:$p", ""),
        ])?;
    }
    Ok(())
}

#[test]
fn a_datagram_beside_a_flow_with_its_tuple_gets_another_port() -> Result<()> {
    for mut lab in labs()? {
        lab.check(&[
            (INGRESS, "udp stranger:1000 > remote:53", Pass, "udp stranger:$p > far:5353", "flow_opened forwarded"),
            (EGRESS, "udp stranger:$p > far:5353", Pass, "udp uplink:$p > far:5353", ""),
            (EGRESS, "udp uplink:$p > far:5353", Pass, "udp uplink:$q > far:5353", "flow_opened port_moved"),
            (INGRESS, "udp far:5353 > uplink:$q", Pass, "udp far:5353 > uplink:$p", ""),
            (INGRESS, "udp far:5353 > uplink:$p", Pass, "udp far:5353 > stranger:$p", ""),
        ])?;
    }
    Ok(())
}

#[test]
fn a_flow_that_is_over_takes_no_packet_of_another_connection() -> Result<()> {
    for mut lab in labs()? {
        lab.check(&MASQUERADED)?;
        lab.check(&[
            (INGRESS, "tcp R stranger:1000 > remote:80", Pass, "tcp R stranger:$p > far:8080", "forwarded"),
            (EGRESS, "tcp S uplink:$p > far:8080", Pass, "same", "not_ours"),
            (INGRESS, "tcp SA far:8080 > uplink:$p", Pass, "same", "no_flow"),
        ])?;
    }
    Ok(())
}

#[test]
fn no_flow_draws_the_port_of_another_connection() -> Result<()> {
    for mut lab in labs()? {
        // Every fourth port, all of them opened before.
        for port in (61_000..=65_535_u16).step_by(4) {
            for flags in ["S", "A"] {
                let frame = lab.names.frame(&format!("tcp {flags} uplink:{port} > far:8080"))?;
                ensure!(lab.run(EGRESS, &frame)?.packet == frame, "port {port}");
            }
        }
        for client in 1_000..1_400_u16 {
            let port = drawn(&mut lab, client)?;
            ensure!(port % 4 != 0, "client {client} got port {port} (61,000 is divisible by four)");
        }
    }
    Ok(())
}

/// The port that a new flow gets.
fn drawn(lab: &mut Lab, client: u16) -> Result<u16> {
    let frame = lab.names.frame(&format!("tcp S stranger:{client} > remote:80"))?;
    let outcome = lab.run(INGRESS, &frame)?;
    ensure!(outcome.verdict == Pass, "{:?}", outcome.verdict);
    let at = if frame[12] == 0x08 { 34 } else { 54 };
    Ok(u16::from_be_bytes([outcome.packet[at], outcome.packet[at + 1]]))
}

/// A bridge's hook is before its port's: what the first has rewritten is no other program's to the second.
#[test]
fn a_flows_own_packet_is_no_other_programs_at_a_bridges_port() -> Result<()> {
    for mut lab in labs()? {
        lab.set_flags(Node::CLUSTER_IP_EXTERNAL | Node::STACKED)?;
        lab.check(&MASQUERADED[..2])?;
        // As the first hook, on lo here, has put it out, with its note.
        lab.check(&[(EGRESS, "tcp S uplink:$p > far:8080", Pass, "same", "not_ours")])?;
    }
    Ok(())
}
