//! Limits on the state of one client, and the state that unproven clients may evict.

use std::net::IpAddr;

use anyhow::{Result, bail, ensure};
use aya::maps::{Array, HashMap, MapData};
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto};
use proxy_common::balance::{Affinity, AffinityKey};
use proxy_common::device::Node;
use proxy_common::fragment::{FragmentKey, Ports};
use proxy_common::frontend::{Frontend, FrontendKey, FrontendKind, Namespace};
use proxy_common::names::{EGRESS, FamilyMaps, INGRESS, IPV4, IPV6};
use proxy_common::share;
use proxy_core::diff::{Change, FamilyChange};
use proxy_datapath::{FamilyNames, Maps};
use testbed::test_run::Verdict::Pass;

use crate::fixture::{Fixture, fixtures_with_room};
use crate::half_open::{establish, flood};
use crate::policy::external_with_room;
use crate::sweep::later;

/// Flow entries of the tests' tables: 64 flows of two, and a half-open ring of the same size.
const ROOM: u32 = 256;
/// The flows with which a client holds half of the table.
const HALF: u16 = 64;

fn names(fixture: &Fixture) -> Result<FamilyMaps> {
    Ok(if fixture.names.addr("web")?.is_ipv4() {
        IPV4
    } else {
        IPV6
    })
}

#[test]
fn client_opens_no_flow_beyond_its_share_and_others_do() -> Result<()> {
    for mut fixture in fixtures_with_room("share", Some(ROOM))? {
        for port in 1..=HALF {
            ensure!(
                establish(&fixture, "client", port)?,
                "port {port}: {:?}",
                fixture.counts()?
            );
        }
        fixture.rows("shares::client_opens_no_flow_beyond_its_share_and_others_do")?;
        // Another client gets half of the rest. One of the first client's flows has ended, and the
        // next is half-open.
        let mut others = 0;
        while establish(&fixture, "neighbour", 1 + others)? {
            others += 1;
        }
        ensure!(
            others == HALF / 2 + 1,
            "{others} flows of another client: {:?}",
            fixture.counts()?
        );
    }
    Ok(())
}

/// A pod that is a backend completes handshakes even with invented clients.
#[test]
fn namespace_holds_no_more_than_its_share_and_others_open() -> Result<()> {
    const CLIENTS: [&str; 6] = ["client", "neighbour", "stranger", "burglar", "far", "lost"];
    for mut fixture in fixtures_with_room("namespaces", Some(ROOM))? {
        let of = |name, port, namespace| (name, Port::new(port), Namespace::new(namespace));
        put_in_namespaces(&mut fixture, &[of("web", 80, 7), of("api", 443, 8)])?;
        let mut opened = 0_u16;
        for client in CLIENTS {
            for port in 1.. {
                if !establish(&fixture, client, port)? {
                    break;
                }
                opened += 1;
            }
        }
        let most = u16::try_from(ROOM * share::NAMESPACE / (share::NAMESPACE + 1) / 2)?;
        ensure!(
            opened.abs_diff(most) <= 1,
            "{opened} flows of one namespace, not {most}: {:?}",
            fixture.counts()?
        );
        fixture.rows("shares::namespace_holds_no_more_than_its_share_and_others_open/full")?;
        // The sweep arrives at the same counts.
        fixture.bench.datapath.flows.sweep()?;
        fixture.rows("shares::namespace_holds_no_more_than_its_share_and_others_open/swept")?;
        // A tenant that deletes its Service still holds the Service's flows.
        let before = counts(&fixture)?;
        delete(&mut fixture, "web", Port::new(80))?;
        fixture.bench.datapath.flows.sweep()?;
        ensure!(
            counts(&fixture)? == before,
            "{:?}, not {before:?}",
            counts(&fixture)?
        );
        put_in_namespaces(&mut fixture, &[of("web", 80, 7)])?;
        fixture.bench.datapath.flows.sweep_at(later()?)?;
        ensure!(counts(&fixture)? == (0, vec![]), "{:?}", counts(&fixture)?);
        ensure!(
            establish(&fixture, "client", 1_000)?,
            "the namespace's flows have gone"
        );
    }
    Ok(())
}

/// A client completes all of its handshakes at once.
#[test]
fn flow_beyond_share_stays_half_open() -> Result<()> {
    for fixture in fixtures_with_room("burst", Some(ROOM))? {
        for port in 1..HALF {
            ensure!(
                establish(&fixture, "client", port)?,
                "port {port}: {:?}",
                fixture.counts()?
            );
        }
        let burst = 1_000..1_032;
        for (program, flags, from) in [
            (INGRESS, "S", true),
            (EGRESS, "SA", false),
            (INGRESS, "A", true),
        ] {
            for port in burst.clone() {
                let packet = match from {
                    true => format!("tcp {flags} client:{port} > web:80"),
                    false => format!("tcp {flags} pod:8080 > client:{port}"),
                };
                let verdict = fixture
                    .run(program, &fixture.names.frame(&packet)?)?
                    .verdict;
                ensure!(verdict == Pass, "{packet}: {verdict:?}");
            }
        }
        let held = counts(&fixture)?;
        ensure!(
            held == (u32::from(HALF) * 2, vec![u32::from(HALF) * 2]),
            "{held:?}"
        );
        // All but one flow of the burst make room, as half-open flows do; the established ones
        // stay.
        flood(&fixture, 40_000, HALF)?;
        for (port, lives) in [
            (1, true),
            (HALF - 1, true),
            (1_000, true),
            (1_001, false),
            (1_031, false),
        ] {
            let frame = fixture
                .names
                .frame(&format!("tcp A client:{port} > web:80"))?;
            let is_translated = fixture.run(INGRESS, &frame)?.packet != frame;
            ensure!(is_translated == lives, "port {port}");
        }
    }
    Ok(())
}

#[test]
fn sweep_corrects_what_clients_hold() -> Result<()> {
    for fixture in fixtures_with_room("swept", Some(ROOM))? {
        for port in 1..=40 {
            ensure!(
                establish(&fixture, "client", port)?,
                "port {port}: {:?}",
                fixture.counts()?
            );
        }
        set_counts(&fixture, 1_000)?;
        fixture.bench.datapath.flows.sweep()?;
        ensure!(
            counts(&fixture)? == (80, vec![80]),
            "{:?}",
            counts(&fixture)?
        );
        fixture.bench.datapath.flows.sweep_at(later()?)?;
        ensure!(counts(&fixture)? == (0, vec![]), "{:?}", counts(&fixture)?);
    }
    Ok(())
}

/// Two spoofed datagrams are enough to look like a client.
#[test]
fn remote_udp_flows_evict_only_idle_ones() -> Result<()> {
    for fixture in external_with_room(Some(ROOM))? {
        let opener = |port: u16| format!("udp stranger:{port} > node:30053");
        let pair = |port: u16| -> Result<String> {
            let reply = answer(&fixture, &opener(port), "udp")?;
            fixture.run(INGRESS, &fixture.names.frame(&opener(port))?)?;
            Ok(reply)
        };
        let replies = [pair(1)?, pair(2)?];
        let goes_on = || {
            fixture
                .run(INGRESS, &fixture.names.frame(&opener(1))?)
                .map(drop)
        };
        (0..16).try_for_each(|_| goes_on())?;
        let lives = || -> Result<Vec<bool>> {
            let frames = replies
                .iter()
                .map(|reply| fixture.names.frame(reply))
                .collect::<Result<Vec<_>>>()?;
            frames
                .iter()
                .map(|frame| Ok(fixture.run(INGRESS, frame)?.packet != *frame))
                .collect()
        };
        // Unanswered openers, more than there are places, evict neither.
        for port in 2_000..2_000 + u16::try_from(ROOM)? {
            fixture.run(INGRESS, &fixture.names.frame(&opener(port))?)?;
            goes_on()?;
        }
        ensure!(
            fixture.counts()?["flow_forgotten"] > 0 && lives()? == [true, true],
            "{:?}",
            lives()?
        );
        for port in 1_000..1_000 + u16::try_from(ROOM)? {
            pair(port)?;
            goes_on()?;
        }
        ensure!(lives()? == [true, false], "{:?}", lives()?);
        ensure!(
            counts(&fixture)? == (0, vec![]),
            "such flows count for no client: {:?}",
            counts(&fixture)?
        );
    }
    Ok(())
}

/// Two kinds of spoofed packets leave room in the table: a handshake in the middle of either flood
/// succeeds.
#[test]
fn flood_of_masqueraded_datagrams_leaves_handshakes_alone() -> Result<()> {
    for mut fixture in external_with_room(Some(ROOM))? {
        fixture.set_flags(Node::CLUSTER_IP_EXTERNAL)?;
        let flood = |first: u16| -> Result<()> {
            (first..first + 20).try_for_each(|port| {
                fixture
                    .run(
                        INGRESS,
                        &fixture
                            .names
                            .frame(&format!("udp stranger:{port} > node:30053"))?,
                    )
                    .map(drop)
            })
        };
        // More flows of four entries than the table holds.
        (0..10).try_for_each(|nth| flood(10_000 + nth * 20))?;
        let answered = answer(&fixture, "tcp S stranger:1 > remote:80", "tcp SA")?;
        flood(20_000)?;
        let frame = fixture.names.frame("tcp A stranger:1 > remote:80")?;
        let is_known = fixture.run(INGRESS, &frame)?.packet != frame;
        ensure!(
            is_known && fixture.counts()?["flows_full"] == 0,
            "{answered}: {:?}",
            fixture.counts()?
        );
    }
    Ok(())
}

/// Sends an external client's packet to the backend, and the backend's answer back. Returns the
/// answer as it came in.
fn answer(fixture: &Fixture, packet: &str, kind: &str) -> Result<String> {
    let ingress = fixture.run(INGRESS, &fixture.names.frame(packet)?)?;
    ensure!(ingress.verdict == Pass, "{packet}: {:?}", fixture.counts()?);
    let leaves = fixture
        .names
        .text(&fixture.run(EGRESS, &ingress.packet)?.packet)?;
    let peers: Vec<_> = leaves
        .split(' ')
        .filter(|word| word.contains(':'))
        .collect();
    let [source, backend] = peers[..] else {
        bail!("{leaves}")
    };
    let reply = format!("{kind} {backend} > {source}");
    let comes_in = fixture.run(INGRESS, &fixture.names.frame(&reply)?)?;
    fixture.run(EGRESS, &comes_in.packet)?;
    Ok(reply)
}

#[test]
fn affinity_of_remote_client_lasts_once_it_has_answered() -> Result<()> {
    for mut fixture in external_with_room(None)? {
        fixture.set_flags(Node::CLUSTER_IP_EXTERNAL)?;
        let rows = |name: &str| rows_of_affinity(&fixture, name);
        let maps = names(&fixture)?;
        let reply = answer(&fixture, "tcp S stranger:1 > sticky:80", "tcp SA")?;
        ensure!(
            (rows(maps.affinity)?, rows(maps.new_affinity)?) == (0, 1),
            "after the SYN"
        );
        // Another SYN of an unproven client goes to the same backend.
        let second = answer(&fixture, "tcp S stranger:2 > sticky:80", "tcp SA")?;
        let backend = |reply: &str| reply.split(' ').nth(2).map(str::to_owned);
        ensure!(
            backend(&reply) == backend(&second),
            "{reply}, then {second}"
        );
        fixture.run(
            INGRESS,
            &fixture.names.frame("tcp A stranger:1 > sticky:80")?,
        )?;
        ensure!(
            (rows(maps.affinity)?, rows(maps.new_affinity)?) == (1, 1),
            "after the handshake"
        );
    }
    Ok(())
}

#[test]
fn fragments_of_remote_clients_displace_no_others() -> Result<()> {
    for fixture in external_with_room(None)? {
        let maps = names(&fixture)?;
        run_fragment(&fixture, "udp stranger:1 > node:30053")?;
        ensure!(
            (
                fragments(&fixture, maps.fragments)?,
                fragments(&fixture, maps.far_fragments)?
            ) == (0, 1)
        );
    }
    for fixture in fixtures_with_room("near", None)? {
        let maps = names(&fixture)?;
        run_fragment(&fixture, "udp client:1 > web:53")?;
        ensure!(
            (
                fragments(&fixture, maps.fragments)?,
                fragments(&fixture, maps.far_fragments)?
            ) == (1, 0)
        );
    }
    Ok(())
}

fn run_fragment(fixture: &Fixture, packet: &str) -> Result<()> {
    let frame = fixture.names.frame(&format!("[first=7] {packet} +64"))?;
    let verdict = fixture.run(INGRESS, &frame)?.verdict;
    ensure!(verdict == Pass, "{packet}: {verdict:?}");
    Ok(())
}

/// Returns the programs' counts of entries beyond half-open: of all clients, and of each client
/// with entries.
fn counts(fixture: &Fixture) -> Result<(u32, Vec<u32>)> {
    if names(fixture)?.clients == IPV4.clients {
        counts_of::<Addr4>(fixture)
    } else {
        counts_of::<Addr6>(fixture)
    }
}

fn counts_of<A: FamilyNames>(fixture: &Fixture) -> Result<(u32, Vec<u32>)> {
    let bench = &fixture.bench;
    let lasting: Array<MapData, u32> = bench.map(A::MAPS.lasting)?;
    let clients: HashMap<MapData, A, u32> = bench.map(A::MAPS.clients)?;
    let held = clients
        .iter()
        .map(|row| Ok(row?.1))
        .collect::<Result<_>>()?;
    Ok((lasting.get(&0, 0)?, held))
}

/// Puts TCP service ports into namespaces.
fn put_in_namespaces(fixture: &mut Fixture, ports: &[(&str, Port, Namespace)]) -> Result<()> {
    fn change<A: Addr>(addr: A, port: Port, namespace: Namespace) -> FamilyChange<A> {
        let key = FrontendKey::new(addr, port, Proto::TCP);
        FamilyChange::PutFrontend(
            key,
            Frontend::new(key, FrontendKind::CLUSTER_IP).in_namespace(namespace),
        )
    }
    for (name, port, namespace) in ports {
        let change = match fixture.names.addr(name)? {
            IpAddr::V4(ip) => Change::V4(change(Addr4::from(ip), *port, *namespace)),
            IpAddr::V6(ip) => Change::V6(change(Addr6::from(ip), *port, *namespace)),
        };
        fixture.bench.datapath.tables.apply(&change)?;
    }
    Ok(())
}

/// Deletes the frontend of a TCP service port.
fn delete(fixture: &mut Fixture, name: &str, port: Port) -> Result<()> {
    fn change<A: Addr>(addr: A, port: Port) -> FamilyChange<A> {
        let key = FrontendKey::new(addr, port, Proto::TCP);
        FamilyChange::DelFrontend(key, key)
    }
    let change = match fixture.names.addr(name)? {
        IpAddr::V4(ip) => Change::V4(change(Addr4::from(ip), port)),
        IpAddr::V6(ip) => Change::V6(change(Addr6::from(ip), port)),
    };
    fixture.bench.datapath.tables.apply(&change)
}

/// Sets wrong counts of the programs.
fn set_counts(fixture: &Fixture, count: u32) -> Result<()> {
    if names(fixture)?.clients == IPV4.clients {
        set_counts_of::<Addr4>(fixture, count)
    } else {
        set_counts_of::<Addr6>(fixture, count)
    }
}

fn set_counts_of<A: FamilyNames>(fixture: &Fixture, count: u32) -> Result<()> {
    let bench = &fixture.bench;
    let mut lasting: Array<MapData, u32> = bench.map(A::MAPS.lasting)?;
    let mut clients: HashMap<MapData, A, u32> = bench.map(A::MAPS.clients)?;
    lasting.set(0, count, 0)?;
    for client in clients.keys().collect::<Result<Vec<_>, _>>()? {
        clients.insert(client, count, 0)?;
    }
    Ok(())
}

fn rows_of_affinity(fixture: &Fixture, name: &str) -> Result<usize> {
    fn count<A: Addr>(fixture: &Fixture, name: &str) -> Result<usize> {
        let map: HashMap<MapData, AffinityKey<A>, Affinity<A>> = fixture.bench.map(name)?;
        Ok(map.iter().collect::<Result<Vec<_>, _>>()?.len())
    }
    if name.ends_with('4') {
        count::<Addr4>(fixture, name)
    } else {
        count::<Addr6>(fixture, name)
    }
}

fn fragments(fixture: &Fixture, name: &str) -> Result<usize> {
    fn count<A: Addr>(fixture: &Fixture, name: &str) -> Result<usize> {
        let map: HashMap<MapData, FragmentKey<A>, Ports> = fixture.bench.map(name)?;
        Ok(map.iter().collect::<Result<Vec<_>, _>>()?.len())
    }
    if name.ends_with('4') {
        count::<Addr4>(fixture, name)
    } else {
        count::<Addr6>(fixture, name)
    }
}
