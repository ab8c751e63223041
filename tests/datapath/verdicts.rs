//! What is rejected, dropped, or left alone.

use anyhow::Result;
use kpx_tests::bench::Verdict::{Drop, Pass, Redirect};
use proxy_common::names::{ANCHOR, EGRESS, INGRESS};

use crate::lab::check;

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
