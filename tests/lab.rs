//! The lab itself works without kpx: whatever fails elsewhere is kpx's.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kpx_tests::agent::wait_until;
use kpx_tests::capture::{Capture, Checksums};
use kpx_tests::echo::{Dial, Fault, Protocol, Servers, pattern};
use kpx_tests::lab::{Family, Lab, Layout, PodRoute};
use kpx_tests::netns;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const PORT: u16 = 8080;

/// Who dials whom, and the address with which the callee sees the caller.
struct Path {
    from: &'static str,
    to: &'static str,
    seen_as: &'static str,
}

const PATHS: [Path; 9] = [
    Path { from: "p1a", to: "p1b", seen_as: "p1a" },
    Path { from: "p1a", to: "p2a", seen_as: "p1a" },
    Path { from: "p2b", to: "p1c", seen_as: "p2b" },
    Path { from: "p1a", to: "n1", seen_as: "p1a" },
    Path { from: "p1a", to: "n2", seen_as: "n1" },
    Path { from: "p1a", to: "ext", seen_as: "n1" },
    Path { from: "n1", to: "n2", seen_as: "n1" },
    Path { from: "n1", to: "p2a", seen_as: "n1" },
    Path { from: "x", to: "n1", seen_as: "x" },
];

#[test]
fn hosts_reach_each_other_in_both_layouts() {
    for layout in [Layout::Routed, Layout::Bridge] {
        let lab = Lab::start(layout).unwrap();
        let servers = Servers::start().unwrap();
        for host in lab.backends() {
            servers.serve(host, PORT).unwrap();
        }
        for (rp_filter, default_route) in [(0, true), (1, true), (2, true), (1, false)] {
            lab.set_rp_filter(rp_filter).unwrap();
            lab.set_default_route(default_route).unwrap();
            check_paths(&lab, &format!("{layout:?} rp_filter={rp_filter} default_route={default_route}"));
        }
        lab.set_firewall(true).unwrap();
        for (offload, checksums) in [(true, Checksums::MayBePending), (false, Checksums::Complete)] {
            lab.set_offload(offload).unwrap();
            let captures: Vec<Capture> = lab.backends().map(|host| Capture::start(host).unwrap()).collect();
            check_paths(&lab, &format!("{layout:?} firewall offload={offload}"));
            for capture in captures {
                capture.stop(checksums).unwrap_or_else(|error| panic!("{layout:?} offload={offload}: {error:#}"));
            }
        }
        assert_eq!(lab.invalid_packets().unwrap(), [""; 0], "{layout:?}");
    }
}

fn check_paths(lab: &Lab, setting: &str) {
    for path in &PATHS {
        for family in Family::ALL {
            for protocol in Protocol::ALL {
                for size in [1, 1400, 60_000] {
                    let name = format!("{} -> {} {protocol} {family} {size} bytes, {setting}", path.from, path.to);
                    let payload = pattern(size);
                    let to = (lab.host(path.to).addrs.ip(family), PORT).into();
                    let answer = Dial::new(protocol, to).exchange(&lab.host(path.from).ns, &payload);
                    let answer = answer.unwrap_or_else(|fault| panic!("{name}: {fault}"));
                    assert_eq!(answer.backend, path.to, "{name}");
                    assert_eq!(answer.source.ip(), lab.host(path.seen_as).addrs.ip(family), "{name}");
                }
            }
        }
    }
}

#[test]
fn a_refusal_is_not_silence() {
    let lab = Lab::start(Layout::Routed).unwrap();
    let p1b = lab.host("p1b");
    for family in Family::ALL {
        for protocol in Protocol::ALL {
            let dial = Dial::new(protocol, (p1b.addrs.ip(family), PORT).into()).deadline(Duration::from_millis(300));
            let fault = dial.exchange(&lab.host("p1a").ns, b"?").unwrap_err();
            assert!(matches!(fault, Fault::Refused), "{protocol} {family}: {fault}");
        }
    }
    p1b.ns.nft("table inet silence { chain in { type filter hook input priority filter; policy drop; }; }").unwrap();
    for protocol in Protocol::ALL {
        let dial = Dial::new(protocol, (p1b.addrs.v4, PORT).into()).deadline(Duration::from_millis(300));
        let fault = dial.exchange(&lab.host("p1a").ns, b"?").unwrap_err();
        assert!(matches!(fault, Fault::TimedOut(_)), "{protocol}: {fault}");
    }
}

#[test]
fn the_second_link_changes_the_address_of_the_host() {
    let lab = Lab::start(Layout::Routed).unwrap();
    let servers = Servers::start().unwrap();
    servers.serve(lab.host("p2a"), PORT).unwrap();
    lab.set_pod_route(PodRoute::Eth1).unwrap();
    for family in Family::ALL {
        let dial = Dial::new(Protocol::Tcp, (lab.host("p2a").addrs.ip(family), PORT).into());
        let answer = dial.exchange(&lab.n1.host.ns, b"?").unwrap();
        assert_eq!(answer.source.ip(), lab.n1.towards_pods(PodRoute::Eth1).ip(family));
    }
}

#[test]
fn a_lab_leaves_nothing_behind() {
    let lab = Lab::start(Layout::Bridge).unwrap();
    let dir = lab.dir().to_owned();
    let mine = lab.n1.host.ns.name().trim_end_matches("n1").to_owned();
    let exists = || netns::names().unwrap().iter().any(|name| name.starts_with(&mine));
    assert!(exists() && dir.exists());
    let started = Instant::now();
    drop(lab);
    assert!(!exists() && !dir.exists());
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

#[test]
fn no_signal_leaves_anything_behind() {
    for (signal, leaves) in [(Signal::SIGINT, false), (Signal::SIGTERM, false), (Signal::SIGKILL, true)] {
        let mut demo = Command::new(env!("CARGO_BIN_EXE_kpx-demo")).stdout(Stdio::null()).spawn().unwrap();
        let mine = format!("kpx-{}-", demo.id());
        let exists = |host: &str| netns::names().unwrap().iter().any(|name| name.starts_with(&format!("{mine}{host}")));
        wait_until(Duration::from_secs(20), "a part of the lab is there", || Ok(exists("p1a"))).unwrap();
        kill(Pid::from_raw(demo.id().cast_signed()), signal).unwrap();
        demo.wait().unwrap();
        assert_eq!(exists(""), leaves, "{signal}");
        let _next = Lab::start(Layout::Routed).unwrap();
        assert!(!exists(""), "{signal}, and after the next lab started");
    }
}
