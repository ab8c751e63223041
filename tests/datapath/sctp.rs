//! SCTP: what opens and ends an association, and the checksum, which every packet that comes out is checked for.

use anyhow::Result;
use proxy_common::names::{ANCHOR, EGRESS, INGRESS, LO};
use testbed::test_run::Verdict::{Drop, Pass, Redirect};

use crate::lab::{check, labs};

#[test]
fn an_association_there_and_back() -> Result<()> {
    check(&[
        (
            INGRESS,
            "sctp INIT client:1000 > web:3868 +16",
            Pass,
            "sctp INIT client:1000 > pod:13868 +16",
            "flow_opened forwarded",
        ),
        (
            EGRESS,
            "sctp INIT-ACK pod:13868 > client:1000 +200",
            Pass,
            "sctp INIT-ACK web:3868 > client:1000 +200",
            "returned",
        ),
        (
            INGRESS,
            "sctp COOKIE-ECHO,DATA client:1000 > web:3868 +33",
            Pass,
            "sctp COOKIE-ECHO,DATA client:1000 > pod:13868 +33",
            "forwarded",
        ),
        (
            EGRESS,
            "sctp COOKIE-ACK,SACK,DATA pod:13868 > client:1000 +1400",
            Pass,
            "sctp COOKIE-ACK,SACK,DATA web:3868 > client:1000 +1400",
            "returned",
        ),
        // With one port on both sides only addresses change, which the checksum does not cover.
        (
            INGRESS,
            "sctp INIT client:1000 > web:5060 +16",
            Pass,
            "sctp INIT client:1000 > pod:5060 +16",
            "flow_opened forwarded",
        ),
        (EGRESS, "sctp INIT-ACK pod:5060 > client:1000", Pass, "sctp INIT-ACK web:5060 > client:1000", "returned"),
    ])
}

#[test]
fn only_a_packet_that_starts_with_init_opens() -> Result<()> {
    check(&[
        (INGRESS, "sctp DATA client:1000 > web:3868 +5", Pass, "same", "no_flow"),
        (INGRESS, "sctp COOKIE-ECHO,INIT client:1000 > web:3868", Pass, "same", "no_flow"),
        (INGRESS, "sctp INIT-ACK client:1000 > web:3868", Pass, "same", "no_flow"),
        (INGRESS, "sctp INIT client:1000 > stranger:3868", Pass, "same", "not_ours"),
        (EGRESS, "sctp INIT client:1000 > web:3868", Pass, "same", "not_ours"),
    ])
}

#[test]
fn an_association_that_ended_gives_its_port_back() -> Result<()> {
    check(&[
        (
            INGRESS,
            "sctp INIT client:1000 > self:3868",
            Pass,
            "sctp INIT client:$p > client:13868",
            "flow_opened forwarded",
        ),
        (EGRESS, "sctp INIT client:$p > client:13868", Pass, "sctp INIT node:$p > client:13868", ""),
        (INGRESS, "sctp INIT-ACK client:13868 > node:$p", Pass, "sctp INIT-ACK client:13868 > client:$p", ""),
        (EGRESS, "sctp INIT-ACK client:13868 > client:$p", Pass, "sctp INIT-ACK self:3868 > client:1000", "returned"),
        // An INIT sent again is the same association.
        (INGRESS, "sctp INIT client:1000 > self:3868", Pass, "sctp INIT client:$p > client:13868", "forwarded"),
        // Shut down by one side only, it goes on.
        (INGRESS, "sctp SHUTDOWN client:1000 > self:3868", Pass, "sctp SHUTDOWN client:$p > client:13868", "forwarded"),
        (INGRESS, "sctp INIT client:1000 > self:3868", Pass, "sctp INIT client:$p > client:13868", "forwarded"),
        (INGRESS, "sctp SHUTDOWN-ACK client:13868 > node:$p", Pass, "sctp SHUTDOWN-ACK client:13868 > client:$p", ""),
        (
            EGRESS,
            "sctp SHUTDOWN-ACK client:13868 > client:$p",
            Pass,
            "sctp SHUTDOWN-ACK self:3868 > client:1000",
            "returned",
        ),
        (
            INGRESS,
            "sctp SHUTDOWN-COMPLETE client:1000 > self:3868",
            Pass,
            "sctp SHUTDOWN-COMPLETE client:$p > client:13868",
            "forwarded",
        ),
        (
            INGRESS,
            "sctp INIT client:1000 > self:3868",
            Pass,
            "sctp INIT client:$q > client:13868",
            "flow_opened forwarded",
        ),
        (INGRESS, "sctp ABORT client:13868 > node:$q", Pass, "sctp ABORT client:13868 > client:$q", ""),
        (EGRESS, "sctp ABORT client:13868 > client:$q", Pass, "sctp ABORT self:3868 > client:1000", "returned"),
        (
            INGRESS,
            "sctp INIT client:1000 > self:3868",
            Pass,
            "sctp INIT client:$r > client:13868",
            "flow_opened forwarded",
        ),
    ])
}

#[test]
fn the_host_has_associations_too() -> Result<()> {
    check(&[
        (
            ANCHOR,
            "sctp INIT node:1000 > web:3868 +16",
            Redirect,
            "sctp INIT node:$p > pod:13868 +16",
            "flow_opened forwarded",
        ),
        (
            INGRESS,
            "sctp INIT-ACK pod:13868 > node:$p +99",
            Redirect,
            "sctp INIT-ACK web:3868 > node:1000 +99",
            "returned",
        ),
        (ANCHOR, "sctp INIT node:1000 > own:3868", Redirect, "sctp INIT node:$q > node:13868", "flow_opened forwarded"),
        (LO, "sctp INIT-ACK node:13868 > node:$q", Redirect, "sctp INIT-ACK own:3868 > node:1000", "returned"),
    ])
}

#[test]
fn nobody_to_serve_is_an_icmp_error() -> Result<()> {
    check(&[
        (
            INGRESS,
            "sctp INIT client:1000 > none:3868 +16",
            Redirect,
            "unreachable sctp INIT client:1000 > none:3868",
            "no_endpoints rejected",
        ),
        (
            INGRESS,
            "sctp INIT client:1000 > web:80",
            Redirect,
            "unreachable sctp client:1000 > web:80",
            "unknown_port rejected",
        ),
        (
            ANCHOR,
            "sctp DATA node:1000 > web:3868 +1000",
            Redirect,
            "unreachable sctp DATA node:1000 > web:3868",
            "no_flow rejected",
        ),
        // Its checksum covers what is in other fragments as well.
        (INGRESS, "[first=7] sctp INIT client:1000 > web:3868 +64", Drop, "-", "flow_opened rewrite"),
        (INGRESS, "[later=7] sctp client > web +64", Pass, "same", "fragment"),
    ])
}

#[test]
fn the_checksum_is_right_at_every_length() -> Result<()> {
    for mut lab in labs("crc")? {
        lab.check(&[(
            INGRESS,
            "sctp INIT client:1000 > web:3868",
            Pass,
            "sctp INIT client:1000 > pod:13868",
            "flow_opened forwarded",
        )])?;
        for len in (1..64).chain([255, 256, 257, 1_000, 1_400, 3_400]) {
            let (there, out) = (
                format!("sctp DATA client:1000 > web:3868 +{len}"),
                format!("sctp DATA client:1000 > pod:13868 +{len}"),
            );
            let outcome = lab.run(INGRESS, &lab.names.frame(&there)?)?;
            assert_eq!(lab.names.text(&outcome.packet)?, out);
        }
    }
    Ok(())
}

/// Zero is what the kernel's SCTP leaves to the device that sends the packet, or to who takes that device's place.
#[test]
fn a_checksum_yet_to_be_computed_stays_so() -> Result<()> {
    for mut lab in labs("later")? {
        let mut frame = lab.names.frame("sctp INIT client:1000 > web:3868 +16")?;
        let checksum = 14 + if lab.names.addr("web")?.is_ipv4() { 20 } else { 40 } + 8;
        frame[checksum..][..4].fill(0);
        let outcome = lab.run(INGRESS, &frame)?;
        assert_eq!(outcome.packet[checksum..][..4], [0; 4]);
        assert_eq!(outcome.packet[checksum - 6..][..2], 13_868_u16.to_be_bytes(), "it is translated");
        lab.check(&[(
            INGRESS,
            "sctp DATA client:1000 > web:3868 +5",
            Pass,
            "sctp DATA client:1000 > pod:13868 +5",
            "forwarded",
        )])?;
    }
    Ok(())
}
