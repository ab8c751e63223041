//! What the programs do to packets: tables of packets, run through BPF_PROG_TEST_RUN, for both families alike.
//!
//! Every row names the program, the packet that goes in, the verdict, the packet that comes out, and all that is counted.

use std::collections::BTreeMap;
use std::net::IpAddr;

use anyhow::{Context, Result, ensure};
use kpx_tests::bench::{Bench, Verdict};
use kpx_tests::netns::NetNs;
use kpx_tests::text::Names;
use proxy_agent::datapath::{Maps, Options};
use proxy_agent::diff::{Change, FamilyChange};
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto};
use proxy_common::counter::Reason;
use proxy_common::device::{Device, Node};
use proxy_common::frontend::{Backend, Frontend, FrontendKey, FrontendKind, Service, Set, SlotKey};
use proxy_common::names::{ANCHOR, EGRESS, INGRESS};

use Verdict::{Drop, Pass, Redirect};

/// Program, packet in, verdict, packet out ("same", or "-" for a dropped one), what is counted.
type Row = (&'static str, &'static str, Verdict, &'static str, &'static str);

const FAMILIES: [&[(&str, &str)]; 2] = [
    &[
        ("client", "10.244.1.10"),
        ("pod", "10.244.1.11"),
        ("far", "10.244.2.11"),
        ("lost", "10.244.9.9"),
        ("node", "172.18.0.11"),
        ("uplink", "172.18.1.11"),
        ("web", "10.96.0.10"),
        ("api", "10.96.0.11"),
        ("self", "10.96.0.12"),
        ("none", "10.96.0.13"),
        ("local", "10.96.0.14"),
        ("stale", "10.96.0.15"),
        ("own", "10.96.0.16"),
        ("remote", "10.96.0.17"),
        ("nowhere", "10.96.0.18"),
        ("stranger", "192.0.2.1"),
        ("group", "224.0.0.251"),
    ],
    &[
        ("client", "fd00:10:244:1::10"),
        ("pod", "fd00:10:244:1::11"),
        ("far", "fd00:10:244:2::11"),
        ("lost", "fd00:10:244:9::9"),
        ("node", "fd00:172:18::11"),
        ("uplink", "fd00:172:18:1::11"),
        ("web", "fd00:10:96::10"),
        ("api", "fd00:10:96::11"),
        ("self", "fd00:10:96::12"),
        ("none", "fd00:10:96::13"),
        ("local", "fd00:10:96::14"),
        ("stale", "fd00:10:96::15"),
        ("own", "fd00:10:96::16"),
        ("remote", "fd00:10:96::17"),
        ("nowhere", "fd00:10:96::18"),
        ("stranger", "2001:db8::1"),
        ("group", "ff02::fb"),
    ],
];

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
        (EGRESS, "tcp FA client:8080 > client:$p", Pass, "tcp FA self:80 > client:1000", "returned"),
        // Both are done: the next SYN opens anew, with another port of its own.
        (INGRESS, "tcp S client:1000 > self:80", Pass, "tcp S client:$q > client:8080", "flow_opened forwarded"),
        // What belonged to the old one is gone.
        (EGRESS, "tcp A client:8080 > client:$p", Pass, "same", "not_ours"),
        // A reset frees the port as well.
        (EGRESS, "tcp RA client:8080 > client:$q", Pass, "tcp RA self:80 > client:1000", "returned"),
        (INGRESS, "tcp S client:1000 > self:80", Pass, "tcp S client:$r > client:8080", "flow_opened forwarded"),
        // But who goes on talking has not been reset.
        (EGRESS, "tcp RA client:8080 > client:$r", Pass, "tcp RA self:80 > client:1000", "returned"),
        (INGRESS, "tcp A client:1000 > self:80 +1", Pass, "tcp A client:$r > client:8080 +1", "forwarded"),
        (INGRESS, "tcp S client:1000 > self:80", Pass, "tcp S client:$r > client:8080", "forwarded"),
    ])
}

#[test]
fn every_reset_of_the_backend_counts() -> Result<()> {
    check(&[
        (INGRESS, "tcp S client:1000 > self:80", Pass, "tcp S client:$p > client:8080", "flow_opened forwarded"),
        (EGRESS, "tcp RA client:8080 > client:$p", Pass, "tcp RA self:80 > client:1000", "returned"),
        // Data that was on its way; the backend resets once more.
        (INGRESS, "tcp A client:1000 > self:80 +1", Pass, "tcp A client:$p > client:8080 +1", "forwarded"),
        (EGRESS, "tcp R client:8080 > client:$p", Pass, "tcp R self:80 > client:1000", "returned"),
        (INGRESS, "tcp S client:1000 > self:80", Pass, "tcp S client:$q > client:8080", "flow_opened forwarded"),
        // A reset of the client that the backend does not accept, in the same second.
        (EGRESS, "tcp SA client:8080 > client:$q", Pass, "tcp SA self:80 > client:1000", "returned"),
        (INGRESS, "tcp R client:1000 > self:80", Pass, "tcp R client:$q > client:8080", "forwarded"),
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
fn where_all_ports_are_taken_a_flow_that_is_over_makes_room() -> Result<()> {
    for lab in labs("evict")? {
        // Twice as many connections as there are ports, one after the other.
        for port in 1_000..10_000_u16 {
            for (program, packet) in [(INGRESS, "tcp S client"), (INGRESS, "tcp R client")] {
                let frame = lab.names.frame(&format!("{packet}:{port} > self:80"))?;
                let verdict = lab.bench.run(program, &frame)?.verdict;
                ensure!(verdict == Pass, "{packet}:{port}: {verdict:?} {:?}", lab.counts()?);
            }
        }
        ensure!(lab.counts()?.get("flow_opened") == Some(&9_000), "{:?}", lab.counts()?);
    }
    Ok(())
}

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
        (ANCHOR, "tcp S node:1000 > own:443", Redirect, "tcp S node:1000 > node:6443", "flow_opened forwarded"),
        (EGRESS, "tcp SA node:6443 > node:1000", Redirect, "tcp SA own:443 > node:1000", "returned"),
    ])
}

#[test]
fn a_hairpin_without_a_node_address_drops() -> Result<()> {
    for mut lab in labs("noaddr")? {
        let none = Node::new(Addr4::UNSPECIFIED, Addr6::UNSPECIFIED, 1, [2, 0, 0, 0, 0, 9]);
        lab.bench.datapath.node.set_node(none)?;
        lab.check(&[(INGRESS, "tcp S client:1000 > self:80", Drop, "-", "no_node_address")])?;
    }
    Ok(())
}

#[test]
fn frames_that_are_no_whole_tcp_or_udp_packets() -> Result<()> {
    for lab in labs("odd")? {
        let v4 = lab.names.addr("web")?.is_ipv4();
        let syn = lab.names.frame("tcp S client:1000 > web:80")?;
        let ip_len = if v4 { 20 } else { 40 };
        let edited = |edit: &dyn Fn(&mut Vec<u8>)| {
            let mut frame = syn.clone();
            edit(&mut frame);
            frame
        };
        let set = |at: usize, bytes: &[u8]| edited(&|frame| frame[at..at + bytes.len()].copy_from_slice(bytes));
        let cut = |l4_len: u8| {
            edited(&|frame| {
                frame.truncate(14 + ip_len + usize::from(l4_len));
                let at = if v4 { 17 } else { 19 };
                frame[at] = if v4 { 20 + l4_len } else { l4_len };
            })
        };
        let mut cases = vec![
            ("ARP", set(12, &[0x08, 0x06]), Pass, "not_ip"),
            ("LLDP", set(12, &[0x88, 0xcc]), Pass, "not_ip"),
            ("a TCP header cut short", cut(12), Pass, "malformed"),
            // Cut before its checksum, it cannot be rewritten.
            ("a TCP header cut before its checksum", cut(16), Drop, "flow_opened forwarded rewrite"),
        ];
        if v4 {
            cases.extend([
                ("IP version 5", set(14, &[0x55]), Pass, "malformed"),
                ("a header of 16 bytes", set(14, &[0x44]), Pass, "malformed"),
                ("a total length beyond the packet", set(16, &[5, 0xdc]), Pass, "malformed"),
                ("a total length within the header", set(16, &[0, 24]), Pass, "malformed"),
                ("a first fragment", set(20, &[0x20, 0]), Pass, "fragment"),
                ("a later fragment", set(20, &[0, 1]), Pass, "fragment"),
                ("ICMP", set(23, &[1]), Pass, "protocol"),
                ("GRE", set(23, &[47]), Pass, "protocol"),
                ("to loopback", set(30, &[127, 0, 0, 1]), Pass, "not_unicast"),
                ("to everybody", set(30, &[255; 4]), Pass, "not_unicast"),
                ("from link-local", set(26, &[169, 254, 1, 1]), Pass, "not_unicast"),
            ]);
        } else {
            let link_local = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
            let loopback = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
            cases.extend([
                ("IP version 4", set(14, &[0x45]), Pass, "malformed"),
                ("a payload length beyond the packet", set(18, &[5, 0xdc]), Pass, "malformed"),
                ("a fragment", set(20, &[44]), Pass, "fragment"),
                ("ICMPv6", set(20, &[58]), Pass, "protocol"),
                ("no next header", set(20, &[59]), Pass, "protocol"),
                ("to loopback", set(38, &loopback), Pass, "not_unicast"),
                ("from link-local", set(22, &link_local), Pass, "not_unicast"),
            ]);
        }
        for (name, frame, verdict, counted) in cases {
            let before = lab.counts()?;
            let outcome = lab.bench.run(INGRESS, &frame).with_context(|| name.to_owned())?;
            ensure!(outcome.verdict == verdict, "{name}: {:?}, not {verdict:?}", outcome.verdict);
            ensure!(verdict == Drop || outcome.packet == frame, "{name}: changed");
            ensure!(
                counted_since(&before, &lab.counts()?) == words(counted),
                "{name}: {:?}",
                counted_since(&before, &lab.counts()?)
            );
        }
    }
    Ok(())
}

#[test]
fn a_udp_checksum_of_zero_stays_zero() -> Result<()> {
    for lab in labs("zero")? {
        if !lab.names.addr("web")?.is_ipv4() {
            continue; // Illegal over IPv6 (RFC 8200 §8.1).
        }
        let mut frame = lab.names.frame("udp client:1000 > web:53 +4")?;
        frame[40..42].fill(0);
        let outcome = lab.bench.run(INGRESS, &frame)?;
        ensure!(outcome.packet[40..42] == [0, 0], "the checksum became {:?}", &outcome.packet[40..42]);
        assert_eq!(lab.names.text(&outcome.packet)?, "udp client:1000 > pod:5353 +4");
    }
    Ok(())
}

#[test]
fn a_full_table_refuses_new_flows_and_keeps_the_old() -> Result<()> {
    let options = Options { flow_entries: Some(64), ..Options::default() };
    for mut lab in labs_with("full", options)? {
        lab.check(&[(INGRESS, "tcp S client:1 > web:80", Pass, "tcp S client:1 > pod:8080", "flow_opened forwarded")])?;
        let full = (2..200).find_map(|port| {
            let frame = lab.names.frame(&format!("tcp S client:{port} > web:80")).ok()?;
            (lab.bench.run(INGRESS, &frame).ok()?.verdict == Drop).then_some(port)
        });
        ensure!(full.is_some_and(|port| port > 20), "refused at {full:?}");
        ensure!(lab.counts()?.get("flows_full") == Some(&1), "{:?}", lab.counts()?);
        lab.check(&[
            (EGRESS, "tcp SA pod:8080 > client:1", Pass, "tcp SA web:80 > client:1", "returned"),
            (INGRESS, "tcp A client:1 > web:80", Pass, "tcp A client:1 > pod:8080", "forwarded"),
        ])?;
    }
    Ok(())
}

#[test]
fn source_ports_are_never_given_twice_and_can_run_out() -> Result<()> {
    for lab in labs("ports")? {
        let mut given = BTreeMap::new();
        let mut refused = 0;
        for port in 1..=8_000_u16 {
            let frame = lab.names.frame(&format!("udp client:{port} > self:53"))?;
            let outcome = lab.bench.run(INGRESS, &frame)?;
            if outcome.verdict == Drop {
                refused += 1;
                continue;
            }
            let text = lab.names.text(&outcome.packet)?;
            let other = given.insert(text.clone(), port);
            ensure!(other.is_none(), "{text} for ports {other:?} and {port}");
        }
        let range = usize::from(u16::MAX - 61_000) + 1;
        ensure!(given.len() > range * 9 / 10 && given.len() <= range, "{} ports given", given.len());
        ensure!(refused > 0 && lab.counts()?.get("no_source_port") == Some(&refused), "{refused} refused");
    }
    Ok(())
}

/// Runs the rows one after the other, in both families.
fn check(rows: &[Row]) -> Result<()> {
    for mut lab in labs("rows")? {
        lab.check(rows)?;
    }
    Ok(())
}

struct Lab {
    bench: Bench,
    names: Names,
    netns: NetNs,
}

fn labs(name: &str) -> Result<Vec<Lab>> {
    labs_with(name, Options::default())
}

/// One lab per family: programs that are attached to nothing, in a namespace with routes for them to look up.
fn labs_with(name: &str, options: Options) -> Result<Vec<Lab>> {
    let make = |addrs: &&[(&'static str, &str)]| {
        let addrs: Vec<(&'static str, IpAddr)> =
            addrs.iter().map(|(name, addr)| Ok((*name, addr.parse()?))).collect::<Result<_>>()?;
        let names = Names::new(addrs);
        let family = if names.addr("web")?.is_ipv4() { 4 } else { 6 };
        let thread = std::thread::current();
        let test: String =
            thread.name().unwrap_or("main").chars().rev().take(8).filter(char::is_ascii_alphanumeric).collect();
        let netns = NetNs::create(format!("kpx-{}-{name}-{test}-{family}", std::process::id()))?;
        let mut bench = Bench::load(options)?;
        prepare(&mut bench, &names, &netns)?;
        Ok(Lab { bench, names, netns })
    };
    FAMILIES.iter().map(make).collect()
}

impl Lab {
    fn check(&mut self, rows: &[Row]) -> Result<()> {
        for row in rows {
            self.check_row(row)
                .with_context(|| format!("{row:?} with {}", self.names.addr("web").expect("it is there")))?;
        }
        Ok(())
    }

    fn check_row(&mut self, (program, packet, verdict, out, counted): &Row) -> Result<()> {
        let frame = self.names.frame(packet)?;
        let before = self.counts()?;
        let outcome = self.netns.run(|| self.bench.run(program, &frame))?;
        ensure!(outcome.verdict == *verdict, "{:?}; {:?}", outcome.verdict, counted_since(&before, &self.counts()?));
        match *out {
            "-" => {}
            "same" => ensure!(outcome.packet == frame, "became {}", self.names.text(&outcome.packet)?),
            out => {
                let found = self.names.learn(&outcome.packet, out)?;
                ensure!(found == out, "became {found}");
            }
        }
        let now = counted_since(&before, &self.counts()?);
        ensure!(now == words(counted), "counted {now:?}");
        Ok(())
    }

    fn counts(&self) -> Result<BTreeMap<&'static str, u64>> {
        let counters = &self.bench.datapath.counters;
        let mut counts: BTreeMap<_, _> = counters.events()?.into_iter().map(|(event, n)| (event.name(), n)).collect();
        counts.extend(counters.reasons()?.into_iter().map(|(reason, n): (Reason, u64)| (reason.name(), n)));
        Ok(counts)
    }
}

/// Names of the counters that grew, each by one, in alphabetical order.
fn counted_since(before: &BTreeMap<&'static str, u64>, now: &BTreeMap<&'static str, u64>) -> Vec<String> {
    let grown = |(name, n): (&&str, &u64)| vec![(*name).to_owned(); usize::try_from(n - before[*name]).expect("few")];
    now.iter().flat_map(grown).collect()
}

fn words(text: &str) -> Vec<String> {
    let mut words: Vec<_> = text.split_whitespace().map(str::to_owned).collect();
    words.sort();
    words
}

/// Services, devices and routes that the rows speak of.
fn prepare(bench: &mut Bench, names: &Names, netns: &NetNs) -> Result<()> {
    let v4 = names.addr("web")?.is_ipv4();
    let host_len = if v4 { 32 } else { 128 };
    let (node, uplink) = (names.addr("node")?, names.addr("uplink")?);
    let uplink_len = if v4 { 24 } else { 64 };
    netns.ip(&format!(
        "link add pod0 type veth peer name pod1
         link set pod0 up
         link set pod1 up
         link add eth1 type veth peer name wire
         link set eth1 up
         link set wire up
         addr add {node}/{host_len} dev lo
         addr add {uplink}/{uplink_len} dev eth1
         route add {} dev pod0
         route add {} dev eth1",
        names.addr("pod")?,
        names.addr("far")?,
    ))?;
    // BPF_PROG_TEST_RUN takes lo for the packet's device.
    netns.sysctl("ipv4/conf/lo/forwarding", "1")?;
    netns.sysctl("ipv6/conf/lo/forwarding", "1")?;
    let ifindex = |name: &str| -> Result<u32> {
        let index = netns.run(|| nix::net::if_::if_nametoindex(name));
        index.with_context(|| format!("index of {name}"))
    };
    let maps = &mut bench.datapath.node;
    let addr4 = |ip: IpAddr| Addr4::from_ip(ip).unwrap_or(Addr4::UNSPECIFIED);
    let addr6 = |ip: IpAddr| Addr6::from_ip(ip).unwrap_or(Addr6::UNSPECIFIED);
    maps.set_node(Node::new(addr4(node), addr6(node), 1, [2, 0, 0, 0, 0, 9]))?;
    let none = (Addr4::UNSPECIFIED, Addr6::UNSPECIFIED);
    maps.set_devices(&BTreeMap::from([
        (1, Device::new(Device::POD, none.0, none.1)),
        (ifindex("pod0")?, Device::new(Device::POD, none.0, none.1)),
        (ifindex("eth1")?, Device::new(0, addr4(uplink), addr6(uplink))),
    ]))?;
    maps.set_addrs(&BTreeMap::from([(node, 1), (uplink, ifindex("eth1")?)]))?;
    for change in if v4 {
        tables::<Addr4>(names)?.into_iter().map(Change::V4).collect::<Vec<_>>()
    } else {
        tables::<Addr6>(names)?.into_iter().map(Change::V6).collect()
    } {
        bench.datapath.tables.apply(&change)?;
    }
    Ok(())
}

fn tables<A: Addr>(names: &Names) -> Result<Vec<FamilyChange<A>>> {
    let addr = |name| -> Result<A> { A::from_ip(names.addr(name)?).context("family") };
    // Service, port, protocol, its backend, slots in the cluster set, flags.
    let all = Service::HAS_ENDPOINTS;
    let ports = [
        ("web", 80, Proto::TCP, Some(("pod", 8080, true)), 1, all),
        ("web", 53, Proto::UDP, Some(("pod", 5353, true)), 1, all),
        ("api", 443, Proto::TCP, Some(("pod", 8080, true)), 1, all),
        ("self", 80, Proto::TCP, Some(("client", 8080, true)), 1, all),
        ("self", 53, Proto::UDP, Some(("client", 5353, true)), 1, all),
        ("own", 443, Proto::TCP, Some(("node", 6443, true)), 1, all),
        ("remote", 53, Proto::UDP, Some(("far", 5353, false)), 1, all),
        ("nowhere", 80, Proto::TCP, Some(("lost", 80, false)), 1, all),
        ("none", 80, Proto::TCP, None, 0, 0),
        ("none", 80, Proto::UDP, None, 0, 0),
        ("local", 80, Proto::TCP, None, 0, all | Service::INTERNAL_LOCAL),
        ("local", 80, Proto::UDP, None, 0, all | Service::INTERNAL_LOCAL),
        ("stale", 80, Proto::TCP, None, 2, all),
    ];
    let mut changes = Vec::new();
    for (service, port, proto, backend, count, flags) in ports {
        let key = FrontendKey::new(addr(service)?, Port::new(port), proto);
        if let Some((backend, port, local)) = backend {
            let flags = if local { Backend::<A>::LOCAL } else { 0 };
            let backend = Backend::new(addr(backend)?, Port::new(port), flags);
            changes.push(FamilyChange::PutSlot(SlotKey::new(key, Set::CLUSTER, 0), backend));
        }
        let address = FrontendKey::address(addr(service)?);
        changes.push(FamilyChange::PutService(key, Service::new(count, 0, flags)));
        changes.push(FamilyChange::PutFrontend(key, Frontend::new(key, FrontendKind::CLUSTER_IP)));
        changes.push(FamilyChange::PutFrontend(address, Frontend::new(address, FrontendKind::ADDRESS)));
    }
    Ok(changes)
}
