//! The cluster's Services. A Service whose backends any client may reach has the name of its only
//! backend.

use std::net::SocketAddr;

use testbed::agent::Service;
use testbed::lab::{Dual, EXTERNAL, Family, Lab};

use super::case::spare;

/// The port of all servers of the lab.
pub(crate) const PORT: u16 = 8080;
/// A port that no Service has.
pub(crate) const SECOND_PORT: u16 = 81;
const FIRST: u8 = 11;

/// Service names, in the order of their addresses.
const NAMES: [&str; 27] = [
    "p1a",
    "p1b",
    "p2a",
    "n1",
    "n2",
    "ext",
    "p1b-too",
    "everywhere",
    "local",
    "elsewhere",
    "nowhere",
    "p1b-local",
    "p2a-local",
    "both-local",
    "nowhere-local",
    "for-x",
    "not-for-x",
    "for-all",
    "not-for-x-nowhere",
    "for-n1",
    "proxied",
    "named",
    "no-node-ports",
    "here",
    "here-local",
    "away-local",
    "listened",
];

/// Returns all Services that stay unchanged while the tests run.
pub(crate) fn services(lab: &Lab) -> Vec<Service> {
    NAMES.map(|name| service(lab, name)).to_vec()
}

fn service(lab: &Lab, name: &'static str) -> Service {
    let nth = index(name);
    let with = |backends: &[&'static str]| Service::new(name, nth, backends, PORT);
    let balanced = |backends: &[&'static str]| {
        with(backends)
            .node_port(node_port(nth))
            .load_balancer(vip(nth), "VIP")
    };
    let everything = |backends: &[&'static str]| balanced(backends).external_ips(external_ip(nth));
    let only = |dual: Dual| [format!("{}/32", dual.v4), format!("{}/128", dual.v6)];
    match name {
        "p1b" | "p2a" => everything(&[name]),
        "p1a" | "n1" | "n2" | "ext" => balanced(&[name]),
        "p1b-too" => with(&["p1b"]),
        "everywhere" => balanced(&["p1b", "p2a"]),
        "local" => with(&["p1b", "p2a"]).local(),
        "elsewhere" => with(&["p2a"]).local(),
        "nowhere" => everything(&[]),
        "p1b-local" => everything(&["p1b"])
            .external_local()
            .health_check_node_port(health_check_port(nth)),
        "p2a-local" => everything(&["p2a"])
            .external_local()
            .health_check_node_port(health_check_port(nth)),
        "both-local" => everything(&["p1b", "p2a"]).external_local(),
        "nowhere-local" => balanced(&[])
            .external_local()
            .health_check_node_port(health_check_port(nth)),
        "for-x" => balanced(&["p1b"]).source_ranges(&only(lab.x.addrs)),
        "not-for-x" => everything(&["p1b"]).source_ranges(&only(lab.ext.addrs)),
        "for-all" => balanced(&["p1b"]).source_ranges(&["0.0.0.0/0".to_owned(), "::/0".to_owned()]),
        "not-for-x-nowhere" => balanced(&[]).source_ranges(&only(lab.ext.addrs)),
        "for-n1" => balanced(&["p1b"]).source_ranges(&only(lab.n1.host.addrs)),
        "proxied" => with(&["p1b"])
            .node_port(node_port(nth))
            .load_balancer(vip(nth), "Proxy"),
        "named" => with(&["p1b"]).load_balancer_at("lb.example.com"),
        "no-node-ports" => with(&["p1b"])
            .load_balancer(vip(nth), "VIP")
            .without_node_ports(),
        "here" => everything(&["p1b"]),
        "here-local" => everything(&["p1b"]).external_local(),
        "away-local" => everything(&["p2a"]).external_local(),
        "listened" => balanced(&["p1b"]),
        other => panic!("there is no service {other}"),
    }
}

/// The Services whose addresses are on an interface of n1, as with MetalLB and kube-vip.
pub(crate) const HERE: [&str; 4] = ["here", "here-local", "away-local", "for-n1"];

/// Returns the only backend of a Service with one backend.
pub(crate) fn backend(name: &str) -> &str {
    match name {
        "p1a" | "p1b" | "p2a" | "n1" | "n2" | "ext" => name,
        "p2a-local" | "away-local" => "p2a",
        _ => "p1b",
    }
}

/// Returns the index of a Service's addresses in their networks.
pub(crate) fn index(name: &str) -> u8 {
    let at = NAMES.iter().position(|known| *known == name);
    let at = at.unwrap_or_else(|| panic!("the cluster has no service {name}"));
    FIRST + u8::try_from(at).expect("there are few services")
}

pub(crate) fn frontend(name: &str, family: Family) -> SocketAddr {
    Service::new("any", index(name), &[], PORT).frontend(family)
}

pub(crate) fn node_port(index: u8) -> u16 {
    30_100 + u16::from(index)
}

pub(crate) fn health_check_port(index: u8) -> u16 {
    30_400 + u16::from(index)
}

/// Returns the address of a Service's load balancer.
pub(crate) fn vip(index: u8) -> Dual {
    EXTERNAL.host(index)
}

pub(crate) fn external_ip(index: u8) -> Dual {
    EXTERNAL.host(100 + index)
}

/// Returns the address of n1 that `--nodeport-addresses` leaves out.
pub(crate) fn left_out() -> Dual {
    spare(0)
}
