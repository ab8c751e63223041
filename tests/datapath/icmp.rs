//! ICMP errors about packets of flows. Every row's checksums are verified: of the error, its IP header, and the quoted one.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aya::maps::{HashMap, Map, MapData, MapInfo};
use nix::time::{ClockId, clock_gettime};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::flow::{Flow, FlowKey};
use proxy_common::names::{ANCHOR, EGRESS, INGRESS};
use testbed::agent::wait_until;
use testbed::test_run::Verdict::{Drop, Pass, Redirect};

use crate::lab::{Lab, check, labs};

#[test]
fn an_error_of_the_backends_side_comes_from_the_service() -> Result<()> {
    check(&[
        (INGRESS, "tcp S client:1000 > web:80", Pass, "tcp S client:1000 > pod:8080", "flow_opened forwarded"),
        (INGRESS, "udp client:1000 > web:53 +1", Pass, "udp client:1000 > pod:5353 +1", "flow_opened forwarded"),
        (
            INGRESS,
            "sctp INIT client:1000 > web:3868",
            Pass,
            "sctp INIT client:1000 > pod:13868",
            "flow_opened forwarded",
        ),
        (EGRESS, "unreachable tcp client:1000 > pod:8080", Pass, "unreachable tcp client:1000 > web:80", "returned"),
        (EGRESS, "unreachable udp client:1000 > pod:5353", Pass, "unreachable udp client:1000 > web:53", "returned"),
        (
            EGRESS,
            "unreachable sctp client:1000 > pod:13868",
            Pass,
            "unreachable sctp client:1000 > web:3868",
            "returned",
        ),
        // A router on the way keeps its address.
        (
            EGRESS,
            "icmp frag-needed=1400 router > client about tcp PA client:1000 > pod:8080 +100",
            Pass,
            "icmp frag-needed=1400 router > client about tcp PA client:1000 > web:80 +100",
            "returned",
        ),
        (
            EGRESS,
            "icmp time-exceeded router > client about udp client:1000 > pod:5353 +1000",
            Pass,
            "icmp time-exceeded router > client about udp client:1000 > web:53 +1000",
            "returned",
        ),
        (
            EGRESS,
            "icmp bad-header pod > client about udp client:1000 > pod:5353",
            Pass,
            "icmp bad-header web > client about udp client:1000 > web:53",
            "returned",
        ),
        (
            EGRESS,
            "icmp host-unreachable router > client about cut tcp client:1000 > pod:8080",
            Pass,
            "icmp host-unreachable router > client about cut tcp client:1000 > web:80",
            "returned",
        ),
        (
            EGRESS,
            "[options=40] icmp prohibited pod > client about [options=24] tcp S client:1000 > pod:8080",
            Pass,
            "[options=40] icmp prohibited web > client about [options=24] tcp S client:1000 > web:80",
            "returned",
        ),
        // Of a fragmented packet, the first piece.
        (
            EGRESS,
            "icmp frag-needed=576 router > client about [first=7] udp client:1000 > pod:5353 +64",
            Pass,
            "icmp frag-needed=576 router > client about [first=7] udp client:1000 > web:53 +64",
            "returned",
        ),
    ])
}

#[test]
fn an_error_of_the_clients_side_reaches_the_backend() -> Result<()> {
    check(&[
        (INGRESS, "tcp S client:1000 > web:80", Pass, "tcp S client:1000 > pod:8080", "flow_opened forwarded"),
        (
            INGRESS,
            "icmp frag-needed=1400 router > web about cut tcp web:80 > client:1000",
            Pass,
            "icmp frag-needed=1400 router > pod about cut tcp pod:8080 > client:1000",
            "forwarded",
        ),
        // Between the hooks it is an error about the backend's own packet, and stays one.
        (EGRESS, "icmp frag-needed=1400 router > pod about cut tcp pod:8080 > client:1000", Pass, "same", "protocol"),
        (INGRESS, "udp client:1000 > web:53", Pass, "udp client:1000 > pod:5353", "flow_opened forwarded"),
        (INGRESS, "unreachable udp web:53 > client:1000", Pass, "unreachable udp pod:5353 > client:1000", "forwarded"),
        (
            INGRESS,
            "[options] icmp time-exceeded router > web about [options=40] udp web:53 > client:1000 +8",
            Pass,
            "[options] icmp time-exceeded router > pod about [options=40] udp pod:5353 > client:1000 +8",
            "forwarded",
        ),
    ])
}

#[test]
fn where_the_source_changes_errors_follow_in_both_directions() -> Result<()> {
    check(&[
        (INGRESS, "tcp S client:1000 > self:80", Pass, "tcp S client:$p > client:8080", "flow_opened forwarded"),
        (INGRESS, "unreachable tcp node:$p > client:8080", Pass, "unreachable tcp client:$p > client:8080", ""),
        (EGRESS, "unreachable tcp client:$p > client:8080", Pass, "unreachable tcp client:1000 > self:80", "returned"),
        (
            INGRESS,
            "icmp frag-needed=1400 router > node about cut tcp node:$p > client:8080",
            Pass,
            "icmp frag-needed=1400 router > client about cut tcp client:$p > client:8080",
            "",
        ),
        (
            EGRESS,
            "icmp frag-needed=1400 router > client about cut tcp client:$p > client:8080",
            Pass,
            "icmp frag-needed=1400 router > client about cut tcp client:1000 > self:80",
            "returned",
        ),
        // About the reply.
        (
            INGRESS,
            "unreachable tcp self:80 > client:1000",
            Pass,
            "unreachable tcp client:8080 > client:$p",
            "forwarded",
        ),
        (EGRESS, "unreachable tcp client:8080 > client:$p", Pass, "unreachable tcp client:8080 > node:$p", ""),
        (
            INGRESS,
            "icmp time-exceeded router > self about cut tcp self:80 > client:1000",
            Pass,
            "icmp time-exceeded router > client about cut tcp client:8080 > client:$p",
            "forwarded",
        ),
        (
            EGRESS,
            "icmp time-exceeded router > client about cut tcp client:8080 > client:$p",
            Pass,
            "icmp time-exceeded node > client about cut tcp client:8080 > node:$p",
            "",
        ),
        // What no hook has noted is about a conversation of the client's own, from a port that happens to be the same.
        (EGRESS, "icmp prohibited router > client about cut tcp client:8080 > client:$p", Pass, "same", "protocol"),
        (EGRESS, "icmp prohibited router > client about cut tcp client:$p > client:8080", Pass, "same", "protocol"),
    ])
}

#[test]
fn a_direct_connection_with_another_port_has_errors_too() -> Result<()> {
    check(&[
        (INGRESS, "tcp S client:1000 > web:80", Pass, "tcp S client:1000 > pod:8080", "flow_opened forwarded"),
        (INGRESS, "tcp S client:1000 > pod:8080", Pass, "tcp S client:$p > pod:8080", "flow_opened forwarded"),
        (EGRESS, "unreachable tcp client:$p > pod:8080", Pass, "unreachable tcp client:1000 > pod:8080", "returned"),
        (EGRESS, "unreachable tcp client:1000 > pod:8080", Pass, "unreachable tcp client:1000 > web:80", "returned"),
        (INGRESS, "unreachable tcp pod:8080 > client:1000", Pass, "unreachable tcp pod:8080 > client:$p", "forwarded"),
    ])
}

#[test]
fn the_host_hears_of_its_own_packets() -> Result<()> {
    check(&[
        (ANCHOR, "udp node:1000 > remote:53", Redirect, "udp uplink:$p > far:5353", "flow_opened forwarded"),
        // Up to the host, from the device through which the route to the backend leads.
        (
            INGRESS,
            "icmp frag-needed=1400 router > uplink about udp uplink:$p > far:5353 +1400",
            Pass,
            "icmp frag-needed=1400 router > node about udp node:1000 > remote:53 +1400",
            "returned",
        ),
        (
            INGRESS,
            "unreachable udp uplink:$p > far:5353",
            Pass,
            "icmp port-unreachable far > node about udp node:1000 > remote:53",
            "returned",
        ),
        // The host does not take a reply.
        (
            ANCHOR,
            "unreachable udp remote:53 > node:1000",
            Redirect,
            "unreachable udp far:5353 > uplink:$p",
            "forwarded",
        ),
        // The backend is the host itself.
        (ANCHOR, "tcp S node:1000 > own:443", Redirect, "tcp S node:$s > node:6443", "flow_opened forwarded"),
        (EGRESS, "unreachable tcp node:$s > node:6443", Redirect, "unreachable tcp node:1000 > own:443", "returned"),
        (ANCHOR, "unreachable tcp own:443 > node:1000", Redirect, "unreachable tcp node:6443 > node:$s", "forwarded"),
    ])
}

#[test]
fn messages_about_no_flow_are_left_alone_and_never_answered() -> Result<()> {
    check(&[
        (INGRESS, "tcp S client:1000 > web:80", Pass, "tcp S client:1000 > pod:8080", "flow_opened forwarded"),
        (INGRESS, "unreachable tcp web:80 > client:1001", Pass, "same", "protocol"),
        (INGRESS, "unreachable tcp client:1000 > stranger:80", Pass, "same", "protocol"),
        (EGRESS, "unreachable udp client:1000 > pod:8080", Pass, "same", "protocol"),
        // About what the client sent: no answer to that comes in where the client is.
        (INGRESS, "unreachable tcp client:1000 > web:80", Pass, "same", "protocol"),
        // An error goes to whom it is about.
        (
            INGRESS,
            "icmp frag-needed=1400 router > stranger about cut tcp web:80 > client:1000",
            Pass,
            "same",
            "protocol",
        ),
        // A later fragment has no ports.
        (INGRESS, "icmp time-exceeded router > web about [later=7] tcp web > client +8", Pass, "same", "protocol"),
        // To those who hold the route.
        (EGRESS, "icmp redirect router > client about cut tcp client:1000 > pod:8080", Pass, "same", "protocol"),
        (INGRESS, "icmp echo client > web +56", Pass, "same", "protocol"),
        (INGRESS, "icmp echo client > none +56", Pass, "same", "protocol"),
        (ANCHOR, "icmp echo node > web +56", Drop, "-", "protocol"),
        (ANCHOR, "unreachable tcp stranger:80 > node:1000", Drop, "-", "protocol"),
        (ANCHOR, "unreachable tcp none:80 > node:1000", Drop, "-", "protocol"),
    ])
}

#[test]
fn an_error_for_which_there_is_no_route_is_dropped() -> Result<()> {
    for mut lab in labs("icmproute")? {
        let far = lab.names.addr("far")?;
        lab.check(&[(
            ANCHOR,
            "udp node:1000 > remote:53",
            Redirect,
            "udp uplink:$p > far:5353",
            "flow_opened forwarded",
        )])?;
        lab.netns.ip(&format!("route del {far} dev eth1"))?;
        lab.check(&[(ANCHOR, "unreachable udp remote:53 > node:1000", Drop, "-", "route_lost")])?;
    }
    Ok(())
}

#[test]
fn an_error_is_no_sign_of_life() -> Result<()> {
    for mut lab in labs("icmplife")? {
        lab.check(&[(
            INGRESS,
            "udp client:1000 > web:53",
            Pass,
            "udp client:1000 > pod:5353",
            "flow_opened forwarded",
        )])?;
        let before = flows(&lab)?;
        ensure!(before.len() == 2, "{before:?}");
        let opened = clock_gettime(ClockId::CLOCK_BOOTTIME)?.tv_sec();
        wait_until(Duration::from_secs(5), "the programs' clock ticks", || {
            Ok(clock_gettime(ClockId::CLOCK_BOOTTIME)?.tv_sec() > opened)
        })?;
        lab.check(&[
            (
                EGRESS,
                "unreachable udp client:1000 > pod:5353",
                Pass,
                "unreachable udp client:1000 > web:53",
                "returned",
            ),
            (
                INGRESS,
                "unreachable udp web:53 > client:1000",
                Pass,
                "unreachable udp pod:5353 > client:1000",
                "forwarded",
            ),
        ])?;
        ensure!(flows(&lab)? == before, "{:?}, not {before:?}", flows(&lab)?);
        // What is one.
        lab.check(&[(EGRESS, "udp pod:5353 > client:1000", Pass, "udp web:53 > client:1000", "returned")])?;
        ensure!(flows(&lab)? != before, "a reply changed nothing");
    }
    Ok(())
}

/// All entries of the flow table, as text.
fn flows(lab: &Lab) -> Result<Vec<String>> {
    if lab.names.addr("web")?.is_ipv4() { entries::<Addr4>(lab, "FLOWS4") } else { entries::<Addr6>(lab, "FLOWS6") }
}

fn entries<A: Addr>(lab: &Lab, name: &str) -> Result<Vec<String>> {
    let ids = lab.bench.datapath.attachments.program(INGRESS)?.info()?.map_ids()?.context("no ids of maps")?;
    for id in ids {
        if MapInfo::from_id(id)?.name_as_str() == Some(name) {
            let map: HashMap<MapData, FlowKey<A>, Flow<A>> = Map::HashMap(MapData::from_id(id)?).try_into()?;
            let mut entries = map.iter().map(|entry| Ok(format!("{:?}", entry?))).collect::<Result<Vec<_>>>()?;
            entries.sort();
            return Ok(entries);
        }
    }
    anyhow::bail!("the program has no map {name}")
}

#[test]
fn a_quote_that_is_cut_or_lies_is_left_alone() -> Result<()> {
    for mut lab in labs("quote")? {
        lab.check(&[(
            INGRESS,
            "tcp S client:1000 > web:80",
            Pass,
            "tcp S client:1000 > pod:8080",
            "flow_opened forwarded",
        )])?;
        let v4 = lab.names.addr("web")?.is_ipv4();
        let whole = lab.names.frame("unreachable tcp client:1000 > pod:8080")?;
        let quote = if v4 { 14 + 20 + 8 } else { 14 + 40 + 8 };
        // By the IP header's length, whatever lies behind.
        let ending = |at: usize| {
            let mut frame = whole.clone();
            let len = if v4 { at - 14 } else { at - 14 - 40 };
            let field = if v4 { 16 } else { 18 };
            frame[field..field + 2].copy_from_slice(&(len as u16).to_be_bytes());
            frame
        };
        let set = |at: usize, byte: u8| {
            let mut frame = whole.clone();
            frame[at] = byte;
            frame
        };
        let mut frames: Vec<_> = (quote - 8..whole.len()).map(|end| (format!("ends at {end}"), ending(end))).collect();
        frames.push(("another version".to_owned(), set(quote, if v4 { 0x65 } else { 0x40 })));
        if v4 {
            frames.push(("a header of 16 bytes".to_owned(), set(quote, 0x44)));
            frames.push(("a header beyond the end".to_owned(), set(quote, 0x4f)));
        } else {
            frames.push(("an extension beyond the end".to_owned(), set(quote + 6, 60)));
        }
        frames.extend((whole.len() - 20..whole.len()).map(|end| (format!("cut at {end}"), whole[..end].to_vec())));
        for (name, frame) in frames {
            let outcome = lab.bench.run(EGRESS, &frame).with_context(|| name.clone())?;
            ensure!(outcome.verdict == Pass && outcome.packet == frame, "{name}: {:?}", outcome.verdict);
        }
    }
    Ok(())
}
