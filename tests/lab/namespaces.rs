//! The lab works without kpx, so failures of other tests are kpx's.

use std::time::{Duration, Instant};

use testbed::capture::{Capture, Checksums};
use testbed::echo::{Dial, Fault, Protocol, Servers, pattern};
use testbed::lab::{Dual, EXTERNAL, Family, Lab, Layout, PodRoute};
use testbed::netns;

const PORT: u16 = 8080;

/// A client, a server, and the client's address as the server sees it.
struct Path {
    from: &'static str,
    to: &'static str,
    seen_as: &'static str,
}

const PATHS: [Path; 11] = [
    Path {
        from: "p1a",
        to: "p1b",
        seen_as: "p1a",
    },
    Path {
        from: "p1a",
        to: "p2a",
        seen_as: "p1a",
    },
    Path {
        from: "p2b",
        to: "p1c",
        seen_as: "p2b",
    },
    Path {
        from: "p1a",
        to: "n1",
        seen_as: "p1a",
    },
    Path {
        from: "p1a",
        to: "n2",
        seen_as: "n1",
    },
    Path {
        from: "p1a",
        to: "ext",
        seen_as: "n1",
    },
    Path {
        from: "n1",
        to: "n2",
        seen_as: "n1",
    },
    Path {
        from: "n1",
        to: "p2a",
        seen_as: "n1",
    },
    Path {
        from: "x",
        to: "n1",
        seen_as: "x",
    },
    Path {
        from: "x",
        to: "ext",
        seen_as: "x",
    },
    Path {
        from: "xl",
        to: "n2",
        seen_as: "xl",
    },
];

#[test]
fn hosts_reach_each_other_in_every_layout() {
    for layout in Layout::ALL {
        let lab = Lab::start(layout).unwrap();
        let servers = Servers::start().unwrap();
        for host in lab.backends() {
            servers.serve(host, PORT).unwrap();
        }
        for (rp_filter, default_route) in [(0, true), (1, true), (2, true), (1, false)] {
            lab.set_rp_filter(rp_filter).unwrap();
            lab.set_default_route(default_route).unwrap();
            // Routes and their validation are the same for all sizes.
            check_paths(
                &lab,
                &[1],
                &format!("{layout:?} rp_filter={rp_filter} default_route={default_route}"),
            );
        }
        lab.set_firewall(true).unwrap();
        for (offload, checksums) in [
            (true, Checksums::MayBePending),
            (false, Checksums::Complete),
        ] {
            lab.set_offload(offload).unwrap();
            // The kernel leaves checksums pending between macvlan devices.
            let checksums = if layout == Layout::Macvlan {
                Checksums::MayBePending
            } else {
                checksums
            };
            let captures: Vec<Capture> = lab
                .backends()
                .map(|host| Capture::start(host).unwrap())
                .collect();
            check_paths(
                &lab,
                &[1, 1400, 60_000],
                &format!("{layout:?} firewall offload={offload}"),
            );
            for capture in captures {
                capture
                    .stop(checksums)
                    .unwrap_or_else(|error| panic!("{layout:?} offload={offload}: {error:#}"));
            }
        }
        assert_eq!(lab.invalid_packets().unwrap(), [""; 0], "{layout:?}");
    }
}

fn check_paths(lab: &Lab, sizes: &[usize], setting: &str) {
    for path in &PATHS {
        for family in Family::ALL {
            for protocol in Protocol::ALL {
                for &size in sizes {
                    let name = format!(
                        "{} -> {} {protocol} {family} {size} bytes, {setting}",
                        path.from, path.to
                    );
                    let payload = pattern(size);
                    let to = (lab.host(path.to).addrs.ip(family), PORT).into();
                    for dial in [Dial::new(protocol, to), Dial::new(protocol, to).fragments()] {
                        let ns = &lab.host(path.from).ns;
                        let answer = dial
                            .learning(lab.layout, |dial| dial.connect(ns)?.exchange_last(&payload));
                        let answer = answer.unwrap_or_else(|fault| panic!("{name}: {fault}"));
                        assert_eq!(answer.backend, path.to, "{name}");
                        assert_eq!(answer.source.ip(), seen_as(lab, path).ip(family), "{name}");
                    }
                }
            }
        }
    }
}

fn seen_as(lab: &Lab, path: &Path) -> Dual {
    let from = lab.host(path.from);
    let to = lab.host(path.to);
    let to_pod = lab
        .node_of(to)
        .is_some_and(|node| node.host.name != to.name);
    match lab
        .nodes()
        .into_iter()
        .find(|node| node.host.name == from.name)
    {
        Some(node) if to_pod => node.towards_pods(lab.layout, PodRoute::Eth0),
        _ => lab.host(path.seen_as).addrs,
    }
}

#[test]
fn a_refusal_is_not_silence() {
    let lab = Lab::start(Layout::Routed).unwrap();
    let p1b = lab.host("p1b");
    for family in Family::ALL {
        for protocol in Protocol::COMMON {
            let dial = Dial::new(protocol, (p1b.addrs.ip(family), PORT).into())
                .deadline(Duration::from_millis(300));
            let fault = dial.exchange(&lab.host("p1a").ns, b"?").unwrap_err();
            assert!(
                matches!(fault, Fault::Refused),
                "{protocol} {family}: {fault}"
            );
        }
    }
    p1b.ns.nft("table inet silence { chain in { type filter hook input priority filter; policy drop; }; }").unwrap();
    for protocol in Protocol::ALL {
        let dial =
            Dial::new(protocol, (p1b.addrs.v4, PORT).into()).deadline(Duration::from_millis(300));
        let fault = dial.exchange(&lab.host("p1a").ns, b"?").unwrap_err();
        assert!(matches!(fault, Fault::TimedOut(_)), "{protocol}: {fault}");
    }
}

#[test]
fn sctp_is_refused_by_its_own_ports_error_alone() {
    let lab = Lab::start(Layout::Routed).unwrap();
    let servers = Servers::start().unwrap();
    let p1a = lab.host("p1a");
    let p1b = lab.host("p1b");
    servers.serve(p1b, PORT).unwrap();
    p1b.ns
        .nft("table inet no { chain in { type filter hook input priority filter; sctp dport 81 reject; }; }")
        .unwrap();
    for family in Family::ALL {
        let ip = p1b.addrs.ip(family);
        let mut open = Dial::new(Protocol::Sctp, (ip, PORT).into())
            .connect(&p1a.ns)
            .unwrap();
        // An ICMP error, like a proxy's refusal, and an ABORT, like a host's.
        for port in [81, 82] {
            let fault = Dial::new(Protocol::Sctp, (ip, port).into())
                .exchange(&p1a.ns, b"?")
                .unwrap_err();
            assert!(
                matches!(fault, Fault::Refused),
                "port {port}, {family}: {fault}"
            );
        }
        assert_eq!(open.exchange(b"!").unwrap().backend, "p1b", "{family}");
    }
}

#[test]
fn narrow_hop_is_found_only_by_icmp() {
    let lab = Lab::start(Layout::Routed).unwrap();
    let servers = Servers::start().unwrap();
    servers.serve(&lab.n1.host, PORT).unwrap();
    lab.set_narrow(true).unwrap();
    for family in Family::ALL {
        let dial = Dial::new(Protocol::Tcp, (lab.n1.host.addrs.ip(family), PORT).into());
        dial.exchange(&lab.x.ns, &pattern(1 << 20)).unwrap();
    }
    lab.set_narrow(true).unwrap();
    lab.n1
        .host
        .ns
        .nft(
            "table inet deaf { chain in { type filter hook input priority filter
            icmp type destination-unreachable drop
            icmpv6 type packet-too-big drop
        }; }",
        )
        .unwrap();
    for family in Family::ALL {
        let dial = Dial::new(Protocol::Tcp, (lab.n1.host.addrs.ip(family), PORT).into());
        let fault = dial.exchange(&lab.x.ns, &pattern(1 << 20)).unwrap_err();
        assert!(matches!(fault, Fault::TimedOut(_)), "{family}: {fault}");
    }
}

#[test]
fn external_addresses_come_to_the_configured_node() {
    let lab = Lab::start(Layout::Bridge).unwrap();
    let servers = Servers::start().unwrap();
    let addrs = EXTERNAL.host(200);
    for node in lab.nodes() {
        node.host.add_addrs("eth0", addrs).unwrap();
        for family in Family::ALL {
            servers
                .serve_at(&node.host, node.host.name, (addrs.ip(family), PORT).into())
                .unwrap();
        }
    }
    for node in lab.nodes() {
        lab.set_external_route(node).unwrap();
        for (family, protocol) in Family::ALL
            .into_iter()
            .flat_map(|family| Protocol::ALL.map(|protocol| (family, protocol)))
        {
            let dial = Dial::new(protocol, (addrs.ip(family), PORT).into());
            assert_eq!(
                dial.exchange(&lab.x.ns, b"?").unwrap().backend,
                node.host.name,
                "{protocol} {family}"
            );
        }
        node.host.del_addrs("eth0", addrs).unwrap();
        let dial =
            Dial::new(Protocol::Tcp, (addrs.v4, PORT).into()).deadline(Duration::from_millis(300));
        dial.exchange(&lab.x.ns, b"?").unwrap_err();
    }
}

#[test]
fn the_second_link_changes_the_address_of_the_host() {
    let lab = Lab::start(Layout::Routed).unwrap();
    let servers = Servers::start().unwrap();
    servers.serve(lab.host("p2a"), PORT).unwrap();
    lab.set_pod_route(PodRoute::Eth1).unwrap();
    for family in Family::ALL {
        let dial = Dial::new(
            Protocol::Tcp,
            (lab.host("p2a").addrs.ip(family), PORT).into(),
        );
        let answer = dial.exchange(&lab.n1.host.ns, b"?").unwrap();
        assert_eq!(
            answer.source.ip(),
            lab.n1.towards_pods(lab.layout, PodRoute::Eth1).ip(family)
        );
    }
}

#[test]
fn a_lab_leaves_nothing_behind() {
    let lab = Lab::start(Layout::Bridge).unwrap();
    let dir = lab.dir().to_owned();
    let mine = lab.n1.host.ns.name().trim_end_matches("n1").to_owned();
    let exists = || {
        netns::names()
            .unwrap()
            .iter()
            .any(|name| name.starts_with(&mine))
    };
    assert!(exists() && dir.exists());
    let started = Instant::now();
    drop(lab);
    assert!(!exists() && !dir.exists());
    assert!(
        started.elapsed() < Duration::from_secs(5),
        "{:?}",
        started.elapsed()
    );
}
