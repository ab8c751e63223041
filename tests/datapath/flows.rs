//! Flows: opened, followed, closed; beside each other.

use anyhow::{Result, ensure};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::device::Node;
use proxy_common::names::{ANCHOR, EGRESS, INGRESS, LO};
use testbed::test_run::Verdict::{Drop, Pass, Redirect};

use crate::lab::{Row, check, labs};
use crate::policy::outside;

#[test]
fn a_pod_reaches_a_backend_and_hears_back() -> Result<()> {
    check(&[
        (INGRESS, "tcp S client:1000 > web:80", Pass, "tcp S client:1000 > pod:8080", "flow_opened forwarded"),
        (EGRESS, "tcp S client:1000 > pod:8080", Pass, "same", "not_ours"),
        (EGRESS, "tcp SA pod:8080 > client:1000", Pass, "tcp SA web:80 > client:1000", "returned"),
        (INGRESS, "tcp A client:1000 > web:80 +5", Pass, "tcp A client:1000 > pod:8080 +5", "forwarded"),
        (EGRESS, "tcp PA pod:8080 > client:1000 +1400", Pass, "tcp PA web:80 > client:1000 +1400", "returned"),
        // A SYN sent again is the same flow.
        (INGRESS, "tcp S client:1000 > web:80", Pass, "tcp S client:1000 > pod:8080", "forwarded"),
        (INGRESS, "udp client:1000 > web:53 +1", Pass, "udp client:1000 > pod:5353 +1", "flow_opened forwarded"),
        (EGRESS, "udp pod:5353 > client:1000 +512", Pass, "udp web:53 > client:1000 +512", "returned"),
        (INGRESS, "udp client:1000 > web:53 +3", Pass, "udp client:1000 > pod:5353 +3", "forwarded"),
    ])
}

#[test]
fn a_pod_that_is_its_own_backend_sees_the_node() -> Result<()> {
    check(&[
        (INGRESS, "tcp S client:1000 > self:80", Pass, "tcp S client:$p > client:8080", "flow_opened forwarded"),
        (EGRESS, "tcp S client:$p > client:8080", Pass, "tcp S node:$p > client:8080", ""),
        (INGRESS, "tcp SA client:8080 > node:$p", Pass, "tcp SA client:8080 > client:$p", ""),
        (EGRESS, "tcp SA client:8080 > client:$p", Pass, "tcp SA self:80 > client:1000", "returned"),
        (INGRESS, "tcp A client:1000 > self:80 +9", Pass, "tcp A client:$p > client:8080 +9", "forwarded"),
    ])
}

#[test]
fn between_the_hooks_a_masqueraded_flow_takes_nobody_elses_packets() -> Result<()> {
    // Of other conversations, which the client's own machine has from the port that ours was given: told by their length.
    let rows: &[Row] = &[
        (INGRESS, "udp stranger:1000 > node:30053", Pass, "udp stranger:$p > far:5353", "flow_opened forwarded"),
        (EGRESS, "udp stranger:$p > far:5353", Pass, "udp uplink:$p > far:5353", ""),
        (INGRESS, "udp stranger:$p > far:5353 +1", Pass, "same", "not_ours"),
        (EGRESS, "udp stranger:$p > far:5353 +1", Pass, "same", "not_ours"),
        (INGRESS, "udp far:5353 > stranger:$p +2", Pass, "same", "not_ours"),
        (EGRESS, "udp far:5353 > stranger:$p +2", Pass, "same", "not_ours"),
        // The flow's own answer.
        (INGRESS, "udp far:5353 > uplink:$p +3", Pass, "udp far:5353 > stranger:$p +3", ""),
        (EGRESS, "udp far:5353 > stranger:$p +3", Pass, "udp node:30053 > stranger:1000 +3", "returned"),
    ];
    for mut lab in outside()? {
        lab.check(rows)?;
        // What the host's firewall answers in the backend's name belongs to the flow, though no hook has seen it before.
        let frame = lab.names.frame("udp far:5353 > stranger:$p +4")?;
        let answer = lab.bench.run_own(EGRESS, &frame)?.packet;
        ensure!(lab.names.text(&answer)? == "udp node:30053 > stranger:1000 +4", "{}", lab.names.text(&answer)?);
        // Of another conversation, put together and cut anew by the host, which then looks like its maker.
        let piece = lab.names.frame("[first=9] udp far:5353 > stranger:$p +64")?;
        ensure!(lab.bench.run_own(EGRESS, &piece)?.packet == piece, "a piece of another's answer");
    }
    Ok(())
}

#[test]
fn two_services_one_backend_one_client_port_stay_apart() -> Result<()> {
    check(&[
        (INGRESS, "tcp S client:1000 > web:80", Pass, "tcp S client:1000 > pod:8080", "flow_opened forwarded"),
        (INGRESS, "tcp S client:1000 > api:443", Pass, "tcp S client:$p > pod:8080", "flow_opened forwarded"),
        (EGRESS, "tcp SA pod:8080 > client:1000", Pass, "tcp SA web:80 > client:1000", "returned"),
        (EGRESS, "tcp SA pod:8080 > client:$p", Pass, "tcp SA api:443 > client:1000", "returned"),
        (INGRESS, "tcp A client:1000 > api:443", Pass, "tcp A client:$p > pod:8080", "forwarded"),
    ])
}

#[test]
fn a_direct_connection_beside_a_flow_with_the_same_tuple_gets_another_port() -> Result<()> {
    check(&[
        (INGRESS, "tcp S client:1000 > web:80", Pass, "tcp S client:1000 > pod:8080", "flow_opened forwarded"),
        (INGRESS, "tcp S client:1000 > pod:8080", Pass, "tcp S client:$p > pod:8080", "flow_opened forwarded"),
        (EGRESS, "tcp SA pod:8080 > client:$p", Pass, "tcp SA pod:8080 > client:1000", "returned"),
        (EGRESS, "tcp SA pod:8080 > client:1000", Pass, "tcp SA web:80 > client:1000", "returned"),
        (INGRESS, "tcp S client:1001 > pod:8080", Pass, "same", "not_ours"),
    ])
}

#[test]
fn a_closed_flow_gives_its_port_back() -> Result<()> {
    check(&[
        (INGRESS, "tcp S client:1000 > self:80", Pass, "tcp S client:$p > client:8080", "flow_opened forwarded"),
        (INGRESS, "tcp FA client:1000 > self:80", Pass, "tcp FA client:$p > client:8080", "forwarded"),
        // One side may still send.
        (INGRESS, "tcp S client:1000 > self:80", Pass, "tcp S client:$p > client:8080", "forwarded"),
        (INGRESS, "tcp FA client:8080 > node:$p", Pass, "tcp FA client:8080 > client:$p", ""),
        (EGRESS, "tcp FA client:8080 > client:$p", Pass, "tcp FA self:80 > client:1000", "returned"),
        // Both are done: the next SYN opens anew.
        (INGRESS, "tcp S client:1000 > self:80", Pass, "tcp S client:$q > client:8080", "flow_opened forwarded"),
        // What belonged to the old one is gone.
        (EGRESS, "tcp A client:8080 > client:$p", Pass, "same", "not_ours"),
        // A reset frees the port as well.
        (INGRESS, "tcp RA client:8080 > node:$q", Pass, "tcp RA client:8080 > client:$q", ""),
        (EGRESS, "tcp RA client:8080 > client:$q", Pass, "tcp RA self:80 > client:1000", "returned"),
        (INGRESS, "tcp S client:1000 > self:80", Pass, "tcp S client:$r > client:8080", "flow_opened forwarded"),
        // But who goes on talking has not been reset.
        (INGRESS, "tcp RA client:8080 > node:$r", Pass, "tcp RA client:8080 > client:$r", ""),
        (EGRESS, "tcp RA client:8080 > client:$r", Pass, "tcp RA self:80 > client:1000", "returned"),
        (INGRESS, "tcp A client:1000 > self:80 +1", Pass, "tcp A client:$r > client:8080 +1", "forwarded"),
        (INGRESS, "tcp S client:1000 > self:80", Pass, "tcp S client:$r > client:8080", "forwarded"),
    ])
}

#[test]
fn every_reset_of_the_backend_counts() -> Result<()> {
    check(&[
        (INGRESS, "tcp S client:1000 > self:80", Pass, "tcp S client:$p > client:8080", "flow_opened forwarded"),
        (INGRESS, "tcp RA client:8080 > node:$p", Pass, "tcp RA client:8080 > client:$p", ""),
        (EGRESS, "tcp RA client:8080 > client:$p", Pass, "tcp RA self:80 > client:1000", "returned"),
        // Data that was on its way; the backend resets once more.
        (INGRESS, "tcp A client:1000 > self:80 +1", Pass, "tcp A client:$p > client:8080 +1", "forwarded"),
        (INGRESS, "tcp R client:8080 > node:$p", Pass, "tcp R client:8080 > client:$p", ""),
        (EGRESS, "tcp R client:8080 > client:$p", Pass, "tcp R self:80 > client:1000", "returned"),
        (INGRESS, "tcp S client:1000 > self:80", Pass, "tcp S client:$q > client:8080", "flow_opened forwarded"),
        // A reset of the client that the backend does not accept, in the same second.
        (INGRESS, "tcp SA client:8080 > node:$q", Pass, "tcp SA client:8080 > client:$q", ""),
        (EGRESS, "tcp SA client:8080 > client:$q", Pass, "tcp SA self:80 > client:1000", "returned"),
        (INGRESS, "tcp R client:1000 > self:80", Pass, "tcp R client:$q > client:8080", "forwarded"),
        (INGRESS, "tcp A client:8080 > node:$q", Pass, "tcp A client:8080 > client:$q", ""),
        (EGRESS, "tcp A client:8080 > client:$q", Pass, "tcp A self:80 > client:1000", "returned"),
        (INGRESS, "tcp S client:1000 > self:80", Pass, "tcp S client:$q > client:8080", "forwarded"),
    ])
}

#[test]
fn peers_that_dial_each_other_from_the_ports_they_serve() -> Result<()> {
    check(&[
        (INGRESS, "udp client:5353 > web:53", Pass, "udp client:5353 > pod:5353", "flow_opened forwarded"),
        (INGRESS, "udp pod:5353 > self:53", Pass, "udp pod:5353 > client:5353", "flow_opened forwarded"),
        // Replies, not direct dials.
        (INGRESS, "udp pod:5353 > client:5353", Pass, "same", "not_ours"),
        (EGRESS, "udp pod:5353 > client:5353", Pass, "udp web:53 > client:5353", "returned"),
        (INGRESS, "udp client:5353 > pod:5353", Pass, "same", "not_ours"),
        (EGRESS, "udp client:5353 > pod:5353", Pass, "udp self:53 > pod:5353", "returned"),
    ])
}

#[test]
fn a_route_that_is_lost_costs_packets_and_no_connection() -> Result<()> {
    for mut lab in labs("route")? {
        let far = lab.names.addr("far")?;
        lab.check(&[(
            ANCHOR,
            "udp node:1000 > remote:53",
            Redirect,
            "udp uplink:$p > far:5353",
            "flow_opened forwarded",
        )])?;
        lab.netns.ip(&format!("route del {far} dev eth1"))?;
        lab.check(&[(ANCHOR, "udp node:1000 > remote:53", Drop, "-", "route_lost")])?;
        lab.netns.ip(&format!("route add {far} dev eth1"))?;
        lab.check(&[(ANCHOR, "udp node:1000 > remote:53", Redirect, "udp uplink:$p > far:5353", "forwarded")])?;
    }
    Ok(())
}

#[test]
fn the_host_reaches_backends_through_the_anchor() -> Result<()> {
    check(&[
        // Here, through a device without addresses: with the address that the socket has, from a port of ours.
        (ANCHOR, "tcp S node:1000 > web:80", Redirect, "tcp S node:$q > pod:8080", "flow_opened forwarded"),
        (INGRESS, "tcp SA pod:8080 > node:$q", Redirect, "tcp SA web:80 > node:1000", "returned"),
        (ANCHOR, "tcp A node:1000 > web:80 +7", Redirect, "tcp A node:$q > pod:8080 +7", "forwarded"),
        // Beyond an uplink with an address of its own: with that.
        (ANCHOR, "udp node:1000 > remote:53 +1", Redirect, "udp uplink:$p > far:5353 +1", "flow_opened forwarded"),
        (INGRESS, "udp far:5353 > uplink:$p +2", Redirect, "udp remote:53 > node:1000 +2", "returned"),
        (ANCHOR, "udp node:1000 > remote:53 +3", Redirect, "udp uplink:$p > far:5353 +3", "forwarded"),
        // The host itself: through lo, where the reply is met on its way out.
        (ANCHOR, "tcp S node:1000 > own:443", Redirect, "tcp S node:$r > node:6443", "flow_opened forwarded"),
        (LO, "tcp SA node:6443 > node:$r", Redirect, "tcp SA own:443 > node:1000", "returned"),
    ])
}

#[test]
fn a_hairpin_without_a_node_address_drops() -> Result<()> {
    for mut lab in labs("noaddr")? {
        let none = Node::new(Addr4::UNSPECIFIED, Addr6::UNSPECIFIED, 1, [2, 0, 0, 0, 0, 9], 0);
        lab.bench.datapath.node.set_node(none)?;
        lab.check(&[(INGRESS, "tcp S client:1000 > self:80", Drop, "-", "no_node_address")])?;
    }
    Ok(())
}
