//! What may stand between an IP header and a transport: IPv4 options, IPv6 extension headers.

use anyhow::{Context, Result};
use proxy_common::names::{ANCHOR, EGRESS, INGRESS};
use testbed::test_run::Verdict::{Drop, Pass, Redirect};

use crate::lab::{Row, check, labs};

/// Runs rows that speak of extension headers.
fn check6(rows: &[Row]) -> Result<()> {
    labs("rows")?.pop().context("IPv6 comes last")?.check(rows)
}

#[test]
fn options_shift_the_transport_and_stay() -> Result<()> {
    check(&[
        (
            INGRESS,
            "[options] tcp S client:1000 > web:80",
            Pass,
            "[options] tcp S client:1000 > pod:8080",
            "flow_opened forwarded",
        ),
        (
            EGRESS,
            "[options=40] tcp SA pod:8080 > client:1000",
            Pass,
            "[options=40] tcp SA web:80 > client:1000",
            "returned",
        ),
        // With and without is the same flow.
        (INGRESS, "tcp A client:1000 > web:80 +5", Pass, "tcp A client:1000 > pod:8080 +5", "forwarded"),
        (
            INGRESS,
            "[options=16] udp client:1000 > web:53 +7",
            Pass,
            "[options=16] udp client:1000 > pod:5353 +7",
            "flow_opened forwarded",
        ),
        (EGRESS, "[options] udp pod:5353 > client:1000", Pass, "[options] udp web:53 > client:1000", "returned"),
        (
            INGRESS,
            "[options] sctp INIT client:1000 > web:3868 +16",
            Pass,
            "[options] sctp INIT client:1000 > pod:13868 +16",
            "flow_opened forwarded",
        ),
        (
            EGRESS,
            "[options=40] sctp INIT-ACK pod:13868 > client:1000 +99",
            Pass,
            "[options=40] sctp INIT-ACK web:3868 > client:1000 +99",
            "returned",
        ),
        (
            ANCHOR,
            "[options] udp node:1000 > remote:53 +1",
            Redirect,
            "[options] udp uplink:$p > far:5353 +1",
            "flow_opened forwarded",
        ),
        (
            INGRESS,
            "[options=24] udp far:5353 > uplink:$p +2",
            Redirect,
            "[options=24] udp remote:53 > node:1000 +2",
            "returned",
        ),
    ])
}

#[test]
fn options_and_a_source_that_changes() -> Result<()> {
    check(&[
        (
            INGRESS,
            "[options] tcp S client:1000 > self:80",
            Pass,
            "[options] tcp S client:$p > client:8080",
            "flow_opened forwarded",
        ),
        (EGRESS, "[options] tcp S client:$p > client:8080", Pass, "[options] tcp S node:$p > client:8080", ""),
        (INGRESS, "[options] tcp SA client:8080 > node:$p", Pass, "[options] tcp SA client:8080 > client:$p", ""),
        (
            EGRESS,
            "[options] tcp SA client:8080 > client:$p",
            Pass,
            "[options] tcp SA self:80 > client:1000",
            "returned",
        ),
    ])
}

#[test]
fn answers_have_no_options_and_quote_none() -> Result<()> {
    check(&[
        (
            INGRESS,
            "[options] tcp S client:1000 > none:80",
            Redirect,
            "tcp RA none:80 > client:1000",
            "no_endpoints rejected",
        ),
        (
            INGRESS,
            "[options=40] udp client:1000 > none:80 +1400",
            Redirect,
            "unreachable udp client:1000 > none:80",
            "no_endpoints rejected",
        ),
        (
            INGRESS,
            "[options=40] udp client:1000 > none:80",
            Redirect,
            "unreachable udp client:1000 > none:80",
            "no_endpoints rejected",
        ),
        (
            INGRESS,
            "[options] sctp INIT client:1000 > none:3868 +16",
            Redirect,
            "unreachable sctp INIT client:1000 > none:3868",
            "no_endpoints rejected",
        ),
        (
            ANCHOR,
            "[options=16] udp node:1000 > web:54 +9",
            Redirect,
            "unreachable udp node:1000 > web:54",
            "unknown_port rejected",
        ),
        (ANCHOR, "[options=8] tcp A node:1000 > web:80 +9", Redirect, "tcp R web:80 > node:1000", "no_flow rejected"),
    ])
}

#[test]
fn extension_headers_are_walked() -> Result<()> {
    check6(&[
        (
            INGRESS,
            "[hop,options,routing] tcp S client:1000 > web:80",
            Pass,
            "[hop,options,routing] tcp S client:1000 > pod:8080",
            "flow_opened forwarded",
        ),
        (
            EGRESS,
            "[hop,options=248,routing,options,options,options] tcp SA pod:8080 > client:1000",
            Pass,
            "[hop,options=248,routing,options,options,options] tcp SA web:80 > client:1000",
            "returned",
        ),
        // A fragment that is all of its packet (RFC 6946).
        (
            INGRESS,
            "[atomic] udp client:1000 > web:53 +9",
            Pass,
            "[atomic] udp client:1000 > pod:5353 +9",
            "flow_opened forwarded",
        ),
        (EGRESS, "[hop,atomic] udp pod:5353 > client:1000", Pass, "[hop,atomic] udp web:53 > client:1000", "returned"),
        (
            INGRESS,
            "[hop,atomic,options] tcp S client:1000 > none:80",
            Redirect,
            "tcp RA none:80 > client:1000",
            "no_endpoints rejected",
        ),
        (
            INGRESS,
            "[hop,routing,options=248] udp client:1000 > none:80 +5",
            Redirect,
            "unreachable udp client:1000 > none:80",
            "no_endpoints rejected",
        ),
    ])
}

#[test]
fn what_cannot_be_translated_is_left_alone() -> Result<()> {
    check6(&[
        // More than six.
        (INGRESS, "[hop,hop,hop,hop,hop,hop,hop] tcp S client:1000 > web:80", Pass, "same", "protocol"),
        (INGRESS, "[hop,hop,hop,hop,hop,hop,later=7] udp client > web +64", Pass, "same", "protocol"),
        // The address is that of the next router, not of the one whom the packet is for.
        (INGRESS, "[visits] tcp S client:1000 > web:80", Pass, "same", "protocol"),
        // Authenticates the addresses.
        (INGRESS, "[auth] tcp S client:1000 > web:80", Pass, "same", "protocol"),
        (INGRESS, "[esp] tcp S client:1000 > web:80", Pass, "same", "protocol"),
        (INGRESS, "[none] tcp S client:1000 > web:80", Pass, "same", "protocol"),
        (INGRESS, "[atomic,atomic] tcp S client:1000 > web:80", Pass, "same", "protocol"),
        (EGRESS, "[hop,auth] tcp SA pod:8080 > client:1000", Pass, "same", "protocol"),
        (ANCHOR, "[visits] udp node:1000 > remote:53", Drop, "-", "protocol"),
    ])
}
