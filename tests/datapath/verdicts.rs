//! What is rejected, dropped, or left alone.

use anyhow::Result;
use proxy_common::device::Node;
use proxy_common::names::{ANCHOR, EGRESS, INGRESS, LO};
use testbed::test_run::Verdict::{Drop, Pass, Redirect};

use crate::lab::{check, labs};

#[test]
fn nobody_to_serve_is_told_at_once() -> Result<()> {
    check(&[
        (INGRESS, "tcp S client:1000 > none:80", Redirect, "tcp RA none:80 > client:1000", "no_endpoints rejected"),
        (
            INGRESS,
            "udp client:1000 > none:80 +1",
            Redirect,
            "unreachable udp client:1000 > none:80",
            "no_endpoints rejected",
        ),
        (
            INGRESS,
            "udp client:1000 > none:80 +1400",
            Redirect,
            "unreachable udp client:1000 > none:80",
            "no_endpoints rejected",
        ),
        (INGRESS, "tcp S client:1000 > web:81", Redirect, "tcp RA web:81 > client:1000", "unknown_port rejected"),
        (
            INGRESS,
            "udp client:1000 > web:80",
            Redirect,
            "unreachable udp client:1000 > web:80",
            "unknown_port rejected",
        ),
        (ANCHOR, "tcp S node:1000 > none:80", Redirect, "tcp RA none:80 > node:1000", "no_endpoints rejected"),
        (
            ANCHOR,
            "udp node:1000 > none:80 +9",
            Redirect,
            "unreachable udp node:1000 > none:80",
            "no_endpoints rejected",
        ),
        (ANCHOR, "tcp S node:1000 > web:81", Redirect, "tcp RA web:81 > node:1000", "unknown_port rejected"),
        // Nothing may pass the anchor: behind it the kernel would route the packet in again.
        (ANCHOR, "tcp S node:1000 > stranger:80", Redirect, "tcp RA stranger:80 > node:1000", "not_ours rejected"),
        (ANCHOR, "tcp A node:1000 > web:80", Redirect, "tcp R web:80 > node:1000", "no_flow rejected"),
        (ANCHOR, "tcp S node:1000 > nowhere:80", Redirect, "tcp RA nowhere:80 > node:1000", "no_route rejected"),
        // A reset is never answered.
        (ANCHOR, "tcp R node:1000 > web:80", Drop, "-", "no_flow"),
    ])
}

#[test]
fn a_policy_without_a_local_backend_drops() -> Result<()> {
    check(&[
        (INGRESS, "tcp S client:1000 > local:80", Drop, "-", "no_local_endpoints"),
        (ANCHOR, "udp node:1000 > local:80", Drop, "-", "no_local_endpoints"),
        (INGRESS, "tcp S client:1000 > stale:80", Drop, "-", "stale_slot"),
    ])
}

#[test]
fn what_is_not_ours_passes_untouched() -> Result<()> {
    check(&[
        (INGRESS, "tcp S client:1000 > stranger:80", Pass, "same", "not_ours"),
        (INGRESS, "udp client:1000 > stranger:53 +40", Pass, "same", "not_ours"),
        (INGRESS, "udp client:5353 > group:5353 +40", Pass, "same", "not_unicast"),
        // From the middle of a connection that somebody else translates.
        (INGRESS, "tcp A client:1000 > web:80 +1", Pass, "same", "no_flow"),
        (INGRESS, "tcp SA client:1000 > web:80", Pass, "same", "no_flow"),
        (EGRESS, "tcp SA pod:8080 > client:1000", Pass, "same", "not_ours"),
        (EGRESS, "udp pod:5353 > client:1000", Pass, "same", "not_ours"),
        // A service is not looked up on the way out.
        (EGRESS, "tcp S client:1000 > web:80", Pass, "same", "not_ours"),
    ])
}

#[test]
fn a_node_that_drains_leaves_openers_to_others_and_follows_its_flows() -> Result<()> {
    for mut lab in labs("draining")? {
        lab.check(&[
            (INGRESS, "tcp S client:1000 > web:80", Pass, "tcp S client:1000 > pod:8080", "flow_opened forwarded"),
            (EGRESS, "tcp SA pod:8080 > client:1000", Pass, "tcp SA web:80 > client:1000", "returned"),
        ])?;
        lab.set_flags(Node::DRAINING)?;
        lab.check(&[
            (INGRESS, "tcp A client:1000 > web:80 +9", Pass, "tcp A client:1000 > pod:8080 +9", "forwarded"),
            (EGRESS, "tcp A pod:8080 > client:1000 +5", Pass, "tcp A web:80 > client:1000 +5", "returned"),
            (INGRESS, "tcp S client:1001 > web:80", Pass, "same", "draining"),
            (INGRESS, "udp client:1001 > web:80", Pass, "same", "draining"),
            (ANCHOR, "tcp S node:1001 > web:80", Pass, "same", "draining"),
        ])?;
        lab.set_flags(0)?;
    }
    Ok(())
}

/// Somebody has taken the program off the device where they came in: soon it is put back, and they are sent again.
#[test]
fn packets_of_flows_that_nothing_met_where_they_came_in_are_not_refused() -> Result<()> {
    for mut lab in labs("unhooked")? {
        lab.came_in = true;
        lab.check(&[
            (INGRESS, "tcp S client:1000 > web:80", Pass, "tcp S client:1000 > pod:8080", "flow_opened forwarded"),
            (ANCHOR, "tcp A client:1000 > web:80 +9", Drop, "-", "unhooked"),
            (ANCHOR, "tcp A client:1001 > web:80 +9", Redirect, "tcp R web:80 > client:1001", "no_flow rejected"),
        ])?;
    }
    Ok(())
}

/// Behind the anchor no policy of the node would see the connection.
#[test]
fn a_packet_that_came_in_opens_nothing_at_the_anchor() -> Result<()> {
    for mut lab in labs("behind")? {
        lab.came_in = true;
        lab.check(&[
            (ANCHOR, "tcp S client:1000 > web:80", Drop, "-", "unhooked"),
            (ANCHOR, "udp client:1000 > web:53", Drop, "-", "unhooked"),
            (ANCHOR, "tcp S client:1000 > none:80", Drop, "-", "unhooked"),
            (LO, "tcp S client:1000 > web:80", Drop, "-", "unhooked"),
            (ANCHOR, "tcp S client:1000 > spare:80", Redirect, "tcp RA spare:80 > client:1000", "not_ours rejected"),
        ])?;
        // A flow of the host's own is not touched in the host's name.
        lab.came_in = false;
        lab.check(&[(
            ANCHOR,
            "tcp S node:1000 > web:80",
            Redirect,
            "tcp S node:$p > pod:8080",
            "flow_opened forwarded",
        )])?;
        lab.came_in = true;
        lab.check(&[(ANCHOR, "tcp R node:1000 > web:80", Drop, "-", "forged")])?;
    }
    Ok(())
}
