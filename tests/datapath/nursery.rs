//! Half-open flows: what makes a flow more than that, and who makes room for whom.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use aya::maps::{HashMap, MapData};
use proxy_common::addr::{Addr, Addr4, Addr6, Proto};
use proxy_common::flow::{Flow, FlowKey, Kind};
use proxy_common::frontend::FrontendKey;
use proxy_common::names::{ANCHOR, EGRESS, FamilyMaps, INGRESS, IPV4, IPV6};
use proxy_datapath::open;
use testbed::test_run::Verdict::{Drop, Pass, Redirect};

use crate::counts::counted;
use crate::lab::{Lab, Row, labs_with_room};
use crate::policy::{outside_with_room, pods_with_room};

/// Room for 16 flows of four entries, and so for as many half-open ones.
const SMALL: Option<u32> = Some(64);
const HALF_OPEN: u16 = 16;

/// As many openers, from ports of their own, each answered as a backend does that is not asked whom it talks to.
fn flood(lab: &Lab, first_port: u16, count: u16) -> Result<()> {
    for port in (first_port..).take(count.into()) {
        let syn = lab.names.frame(&format!("tcp S burglar:{port} > web:80"))?;
        ensure!(lab.run(INGRESS, &syn)?.verdict == Pass, "a SYN from port {port}: {:?}", lab.counts()?);
        lab.run(EGRESS, &lab.names.frame(&format!("tcp SA pod:8080 > burglar:{port}"))?)?;
    }
    Ok(())
}

/// What each client did before a flood, and what becomes of its packet after it: the nth has port n.
type Case<'a> = (&'a [Row], Row);

/// Is the flow gone, after a flood that is twice what there is room for?
fn after_a_flood(cases: &[Case<'_>]) -> Result<()> {
    for mut lab in labs_with_room("survive", SMALL)? {
        let cases = (1..).zip(cases);
        for (port, (before, _)) in cases.clone() {
            before.iter().try_for_each(|row| lab.check(&[of_client(port, row)]))?;
        }
        flood(&lab, 30_000, 2 * HALF_OPEN)?;
        cases.into_iter().try_for_each(|(port, (_, then))| lab.check(&[of_client(port, then)]))?;
    }
    Ok(())
}

/// With the client's port in place of 1, and another name for the one that it is given.
fn of_client(port: u16, (program, packet, verdict, out, counted): &Row) -> Row {
    let of = |text: &str| -> &'static str {
        let text = format!("{text} ").replace(":1 ", &format!(":{port} ")).replace("$p", &format!("$p{port}"));
        String::leak(text.trim_end().to_owned())
    };
    (program, of(packet), *verdict, of(out), counted)
}

const SYN: Row = (INGRESS, "tcp S client:1 > web:80", Pass, "tcp S client:1 > pod:8080", "flow_opened forwarded");
const SYN_AGAIN: Row = (INGRESS, "tcp S client:1 > web:80", Pass, "tcp S client:1 > pod:8080", "forwarded");
const SYN_ACK: Row = (EGRESS, "tcp SA pod:8080 > client:1", Pass, "tcp SA web:80 > client:1", "returned");
const ACK: Row = (INGRESS, "tcp A client:1 > web:80", Pass, "tcp A client:1 > pod:8080", "forwarded");
const RST: Row = (INGRESS, "tcp R client:1 > web:80", Pass, "tcp R client:1 > pod:8080", "forwarded");
const NOBODYS_ACK: Row = (INGRESS, "tcp A client:1 > web:80", Pass, "same", "no_flow");

#[test]
fn who_answers_the_answer_stays_and_who_is_only_answered_makes_room() -> Result<()> {
    after_a_flood(&[
        (&[SYN, SYN_ACK, ACK], ACK),
        (&[SYN], NOBODYS_ACK),
        (&[SYN, SYN_ACK], NOBODYS_ACK),
        // A SYN sent again is no answer, nor is the RST of somebody in whose name it was sent.
        (&[SYN, SYN_ACK, SYN_AGAIN], NOBODYS_ACK),
        (&[SYN, SYN_ACK, RST], NOBODYS_ACK),
    ])
}

#[test]
fn a_datagram_after_an_answer_or_several_answers_make_a_flow_stay() -> Result<()> {
    let ask = (INGRESS, "udp client:1 > web:53", Pass, "udp client:1 > pod:5353", "flow_opened forwarded");
    let again = (INGRESS, "udp client:1 > web:53", Pass, "udp client:1 > pod:5353", "forwarded");
    let answer = (EGRESS, "udp pod:5353 > client:1", Pass, "udp web:53 > client:1", "returned");
    let gone = (EGRESS, "udp pod:5353 > client:1", Pass, "same", "not_ours");
    after_a_flood(&[
        (&[ask, again], gone),
        (&[ask, answer, answer, answer, answer], gone),
        (&[ask, answer, again], answer),
        (&[ask, answer, answer, answer, answer, answer], answer),
    ])
}

#[test]
fn an_association_whose_cookie_came_back_stays() -> Result<()> {
    let init =
        (INGRESS, "sctp INIT client:1 > web:3868", Pass, "sctp INIT client:1 > pod:13868", "flow_opened forwarded");
    let init_ack =
        (EGRESS, "sctp INIT-ACK pod:13868 > client:1", Pass, "sctp INIT-ACK web:3868 > client:1", "returned");
    let cookie =
        (INGRESS, "sctp COOKIE-ECHO client:1 > web:3868", Pass, "sctp COOKIE-ECHO client:1 > pod:13868", "forwarded");
    let data = (INGRESS, "sctp DATA client:1 > web:3868", Pass, "sctp DATA client:1 > pod:13868", "forwarded");
    let gone = (INGRESS, "sctp DATA client:1 > web:3868", Pass, "same", "no_flow");
    after_a_flood(&[(&[init, init_ack], gone), (&[init, init_ack, cookie], data)])
}

#[test]
fn the_hosts_own_flows_are_half_open_as_well() -> Result<()> {
    let syn = (ANCHOR, "tcp S node:1 > web:80", Redirect, "tcp S node:$p > pod:8080", "flow_opened forwarded");
    let syn_ack = (INGRESS, "tcp SA pod:8080 > node:$p", Redirect, "tcp SA web:80 > node:1", "returned");
    let ack = (ANCHOR, "tcp A node:1 > web:80", Redirect, "tcp A node:$p > pod:8080", "forwarded");
    let reset = (ANCHOR, "tcp A node:1 > web:80", Redirect, "tcp R web:80 > node:1", "no_flow rejected");
    after_a_flood(&[(&[syn, syn_ack, ack], ack), (&[syn, syn_ack], reset)])
}

#[test]
fn the_oldest_makes_room_first_and_goes_with_all_its_entries() -> Result<()> {
    for mut lab in outside_with_room(SMALL)? {
        // Flows of four entries.
        let opener = |port| format!("udp stranger:{port} > node:30053");
        for port in 1..=HALF_OPEN {
            lab.run(INGRESS, &lab.names.frame(&opener(port))?)?;
        }
        ensure!(openers(&lab)? == (1..=HALF_OPEN).collect(), "{:?}", openers(&lab)?);
        let before = lab.counts()?;
        lab.check(&[(
            INGRESS,
            "udp stranger:100 > node:30053",
            Pass,
            "udp stranger:$p > far:5353",
            "flow_forgotten flow_opened forwarded",
        )])?;
        ensure!(openers(&lab)? == (2..=HALF_OPEN).chain([100]).collect(), "{:?}", openers(&lab)?);
        ensure!(entries(&lab)?.len() == usize::from(HALF_OPEN) * 4, "{:?}", entries(&lab)?);
        ensure!(lab.counts()?["flows_full"] == before["flows_full"], "full");
        // Its packets count for the service all the same.
        let (totals, open) = counted(&lab, "remote", 53, Proto::UDP)?;
        ensure!(totals.sent.packets == u64::from(HALF_OPEN) + 1 && open == u64::from(HALF_OPEN), "{totals:?}, {open}");
    }
    Ok(())
}

#[test]
fn a_flood_fills_no_more_than_its_line() -> Result<()> {
    for mut lab in labs_with_room("flood", Some(4_096))? {
        for port in 1..=100 {
            establish(&lab, port)?;
        }
        flood(&lab, 10_000, 4_000)?;
        // Half of the table is for the flood, in flows of two entries.
        let entries = entries(&lab)?.len();
        ensure!(entries == 2 * 100 + 2 * 1_024, "{entries} entries");
        ensure!(lab.counts()?["flow_forgotten"] == 4_000 - 1_024, "{:?}", lab.counts()?);
        for port in 1..=100 {
            let frame = lab.names.frame(&format!("tcp A client:{port} > web:80"))?;
            let out = lab.names.text(&lab.run(INGRESS, &frame)?.packet)?;
            ensure!(out == format!("tcp A client:{port} > pod:8080"), "{out}");
        }
        // And a handshake in the middle of it, with as many openers between its packets as there is room for.
        let counted = "flow_forgotten flow_opened forwarded";
        lab.check(&[of_client(900, &(SYN.0, SYN.1, SYN.2, SYN.3, counted))])?;
        flood(&lab, 40_000, 1_000)?;
        lab.check(&[of_client(900, &SYN_ACK), of_client(900, &ACK)])?;
    }
    Ok(())
}

#[test]
fn in_a_table_full_of_others_half_open_flows_make_room_and_nobody_else() -> Result<()> {
    for mut lab in labs_with_room("room", SMALL)? {
        // Half-open ones, not as many as would make each other room.
        flood(&lab, 30_000, 8)?;
        let refused = |lab: &Lab| Ok::<_, anyhow::Error>(lab.counts()?["flows_full"] != 0);
        let mut established = 0;
        for port in 1..100 {
            if !establish(&lab, port)? {
                break;
            }
            established = port;
        }
        ensure!(refused(&lab)? && established > 20, "{established} established");
        let counts = lab.counts()?;
        ensure!(counts["flow_forgotten"] == 8, "{counts:?}");
        for port in 1..=established {
            let packet = format!("tcp A client:{port} > web:80");
            let out = lab.names.text(&lab.run(INGRESS, &lab.names.frame(&packet)?)?.packet)?;
            ensure!(out == format!("tcp A client:{port} > pod:8080"), "{out}");
        }
        lab.check(&[(INGRESS, "tcp S client:999 > web:80", Drop, "-", "flows_full")])?;
    }
    Ok(())
}

#[test]
fn forgotten_flows_no_longer_count_for_their_backend() -> Result<()> {
    for lab in pods_with_room(SMALL)? {
        // Ten times as many as there is room for.
        for port in 1..=10 * HALF_OPEN {
            lab.run(INGRESS, &lab.names.frame(&format!("tcp S client:{port} > least:80"))?)?;
        }
        let v4 = lab.names.addr("web")?.is_ipv4();
        let of_backends = if v4 { connections::<Addr4>(&lab, IPV4)? } else { connections::<Addr6>(&lab, IPV6)? };
        ensure!(of_backends == u32::from(HALF_OPEN), "{of_backends} connections");
        let (_, open) = counted(&lab, "least", 80, Proto::TCP)?;
        ensure!(open == u64::from(HALF_OPEN), "{open} open");
    }
    Ok(())
}

#[test]
fn where_all_ports_are_taken_a_half_open_flow_makes_room() -> Result<()> {
    for lab in outside_with_room(Some(32_768))? {
        // More flows than ports, fewer than the line has places.
        for port in 1..=6_000_u16 {
            let frame = lab.names.frame(&format!("udp stranger:{port} > node:30053"))?;
            ensure!(lab.run(INGRESS, &frame)?.verdict == Pass, "{port}: {:?}", lab.counts()?);
        }
        let counts = lab.counts()?;
        ensure!(counts["no_source_port"] == 0 && counts["flow_forgotten"] > 6_000 - 4_536 - 1, "{counts:?}");
        ensure!(entries(&lab)?.len() % 4 == 0, "a flow has two or four entries");
    }
    Ok(())
}

#[test]
fn two_cpus_forget_and_open_at_once_and_leave_no_half_of_a_flow() -> Result<()> {
    for lab in labs_with_room("race", Some(256))? {
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| lab.netns.run(|| (0..5).try_for_each(|_| flood(&lab, 20_000, 400)))))
                .collect();
            threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| anyhow::anyhow!("panicked"))?)
        })?;
        // Taken off its CPU between its place in line and its entries, a flow is out of line before it is there.
        let entries = entries(&lab)?;
        let openers = entries.iter().filter(|(kind, _)| *kind == Kind::DNAT).count();
        ensure!(openers <= 64 + 16, "{openers} half-open flows");
        let orphans = entries.len() - 2 * openers;
        ensure!(orphans <= 4, "{orphans} entries without a flow");
    }
    Ok(())
}

/// Those that least connections counts, of all backends.
fn connections<A: Addr>(lab: &Lab, names: FamilyMaps) -> Result<u32> {
    let map: HashMap<MapData, FrontendKey<A>, u32> = open(&lab.bench.datapath.loaded.maps, names.connections)?;
    map.iter().map(|entry| Ok(entry?.1)).sum()
}

/// False if there is no room.
fn establish(lab: &Lab, port: u16) -> Result<bool> {
    let packets = [
        (INGRESS, format!("tcp S client:{port} > web:80")),
        (EGRESS, format!("tcp SA pod:8080 > client:{port}")),
        (INGRESS, format!("tcp A client:{port} > web:80")),
    ];
    for (program, packet) in packets {
        if lab.run(program, &lab.names.frame(&packet)?)?.verdict == Drop {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The client ports of all openers' entries.
fn openers(lab: &Lab) -> Result<BTreeSet<u16>> {
    Ok(entries(lab)?.into_iter().filter(|(kind, _)| *kind == Kind::DNAT).map(|(_, port)| port).collect())
}

/// Of each entry of the flow table: what it is, and its client's port.
fn entries(lab: &Lab) -> Result<Vec<(Kind, u16)>> {
    if lab.names.addr("web")?.is_ipv4() {
        entries_of::<Addr4>(lab, IPV4.flows)
    } else {
        entries_of::<Addr6>(lab, IPV6.flows)
    }
}

fn entries_of<A: Addr>(lab: &Lab, name: &str) -> Result<Vec<(Kind, u16)>> {
    let map: HashMap<MapData, FlowKey<A>, Flow<A>> = open(&lab.bench.datapath.loaded.maps, name)?;
    map.iter()
        .map(|entry| entry.map(|(_, flow)| (flow.kind, flow.client.port.get())))
        .collect::<Result<_, _>>()
        .context("read")
}
