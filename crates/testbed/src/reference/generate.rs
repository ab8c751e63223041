//! Random clusters and packets, without objects that the API server refuses or cases that
//! kube-proxy leaves undefined.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Service;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use serde_json::{Value, json};

use crate::reference::cluster::{Cluster, Detector, Hook, NodeFacts, Packet, Proto, object};
use crate::reference::place::{
    self, BRIDGED, CLUSTER_IPS, Device, FAR, FARTHER, Family, NODES, OUTSIDE, PODS, PUBLIC, STORAGE,
};
use crate::reference::slices;

pub type Dice = SmallRng;

pub fn dice(seed: u64) -> Dice {
    SmallRng::seed_from_u64(seed)
}

const PORTS: [u16; 3] = [53, 80, 443];
const NODE_PORTS: [u16; 4] = [30_053, 30_080, 30_081, 30_443];

pub fn one<T: Copy>(dice: &mut Dice, of: &[T]) -> T {
    *of.choose(dice).expect("something to choose from")
}

pub fn cluster(dice: &mut Dice) -> Cluster {
    let count = dice.random_range(3..12);
    let services: Vec<_> = (0..count).map(|index| service(dice, index)).collect();
    let slices = services
        .iter()
        .flat_map(|service| slices::of(dice, service))
        .collect();
    let declared = dice.random_bool(0.6);
    let service_cidrs = Family::ALL
        .iter()
        .map(|family| CLUSTER_IPS.cidr(*family))
        .filter(|_| declared)
        .collect();
    Cluster {
        services,
        slices,
        service_cidrs,
        node: node(dice),
    }
}

fn node(dice: &mut Dice) -> NodeFacts {
    let own = Family::ALL.iter().flat_map(|family| place::own(*family));
    NodeFacts {
        name: "here",
        zone: one(dice, &[None, Some("east"), Some("west")]),
        node_port_addrs: own
            .map(|(addr, _)| addr)
            .filter(|_| dice.random_bool(0.75))
            .collect(),
        detector: detector(dice),
        compat: dice.random_bool(0.4),
        masquerade_all: dice.random_bool(0.15),
        cluster_ip_external: dice.random_bool(0.6),
    }
}

fn detector(dice: &mut Dice) -> Detector {
    if dice.random_bool(0.25) {
        return Detector::Device(one(dice, &[Device::Pod, Device::Bridge]));
    }
    let mut cidrs: Vec<IpNet> = Vec::new();
    for family in Family::ALL {
        let choices = [
            None,
            Some(place::cluster_cidr(family)),
            Some(PODS.cidr(family)),
            Some(BRIDGED.cidr(family)),
        ];
        cidrs.extend(one(dice, &choices));
    }
    Detector::Cidrs(cidrs)
}

fn service(dice: &mut Dice, index: u8) -> Service {
    let type_ = one(
        dice,
        &[
            "ClusterIP",
            "ClusterIP",
            "NodePort",
            "LoadBalancer",
            "LoadBalancer",
        ],
    );
    let families = one(
        dice,
        &[
            &[Family::V4][..],
            &[Family::V6],
            &[Family::V4, Family::V6],
            &[Family::V6, Family::V4],
        ],
    );
    let net = if dice.random_bool(0.8) {
        CLUSTER_IPS
    } else {
        place::UNDECLARED
    };
    let cluster_ips: Vec<_> = families
        .iter()
        .map(|family| net.addr(*family, index + 1))
        .collect();
    let mut spec = json!({
        "type": type_,
        "clusterIP": cluster_ips[0],
        "clusterIPs": cluster_ips,
        "ipFamilies": families.iter().map(|family| family.name()).collect::<Vec<_>>(),
        "ports": ports(dice, type_),
        "internalTrafficPolicy": one(dice, &["Cluster", "Cluster", "Local"]),
        "externalIPs": external_ips(dice, families),
    });
    if dice.random_bool(0.6) {
        spec["externalTrafficPolicy"] = one(dice, &["Cluster", "Local"]).into();
    }
    if dice.random_bool(0.3) {
        spec["sessionAffinity"] = "ClientIP".into();
        spec["sessionAffinityConfig"] =
            json!({ "clientIP": { "timeoutSeconds": dice.random_range(600..20_000) } });
    }
    let mut status = Value::Null;
    if type_ == "LoadBalancer" {
        spec["loadBalancerSourceRanges"] = json!(source_ranges(dice));
        status = json!({ "loadBalancer": { "ingress": ingresses(dice, families) } });
    }
    match dice.random_range(0..40) {
        0 => spec["type"] = "ExternalName".into(),
        1 => (spec["clusterIP"], spec["clusterIPs"]) = ("None".into(), json!(["None"])),
        _ => {}
    }
    let mut metadata = json!({
        "namespace": one(dice, &["default", "prod"]),
        "name": format!("s{index}"),
        "creationTimestamp": format!("2026-01-01T00:00:0{}Z", dice.random_range(0..5)),
    });
    if dice.random_bool(0.04) {
        metadata["labels"] = json!({ "service.kubernetes.io/service-proxy-name": "other" });
    }
    if dice.random_bool(0.4) {
        let algorithm = one(
            dice,
            &["random", "maglev", "round-robin", "least-connections"],
        );
        metadata["annotations"] = json!({ "kpx.dev/lb-algorithm": algorithm });
    }
    if dice.random_bool(0.4) {
        metadata["annotations"]["kpx.dev/backend-health"] = one(dice, &["off", "on", "on"]).into();
    }
    object(
        json!({ "apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec, "status": status }),
    )
}

/// Returns ports with distinct numbers and protocols, as the API server requires; the node ports of
/// a Service are distinct too.
fn ports(dice: &mut Dice, type_: &str) -> Vec<Value> {
    let mut taken = BTreeSet::new();
    let mut ports = Vec::new();
    for index in 0..dice.random_range(1..4) {
        let number = one(dice, &PORTS);
        let proto = one(dice, &Proto::ALL);
        if !taken.insert((number, proto)) {
            continue;
        }
        let mut port =
            json!({ "name": format!("p{index}"), "port": number, "protocol": proto.name() });
        let node_port = one(dice, &NODE_PORTS);
        let wants_node_port =
            type_ == "NodePort" || (type_ == "LoadBalancer" && dice.random_bool(0.7));
        if wants_node_port && taken.insert((node_port, proto)) {
            port["nodePort"] = node_port.into();
        }
        ports.push(port);
    }
    if let [only] = ports.as_mut_slice()
        && dice.random_bool(0.5)
    {
        only["name"] = Value::Null;
    }
    ports
}

/// Returns a family, usually one of the Service's.
fn likely(dice: &mut Dice, families: &[Family]) -> Family {
    if dice.random_bool(0.9) {
        one(dice, families)
    } else {
        one(dice, &Family::ALL)
    }
}

fn external_ips(dice: &mut Dice, families: &[Family]) -> Vec<String> {
    let count = one(dice, &[0, 0, 1, 2]);
    let mut choose = || {
        let family = likely(dice, families);
        let public = [(PUBLIC, 1), (PUBLIC, 2), (PUBLIC, 4), (PUBLIC, 9)];
        let odd = [(NODES, 11), (NODES, 12), (CLUSTER_IPS, 1), (CLUSTER_IPS, 3)];
        let (net, host) = if dice.random_bool(0.7) {
            one(dice, &public)
        } else {
            one(dice, &odd)
        };
        net.addr(family, host).to_string()
    };
    let mut ips: Vec<_> = (0..count).map(|_| choose()).collect();
    ips.dedup();
    ips
}

fn ingresses(dice: &mut Dice, families: &[Family]) -> Vec<Value> {
    let count = dice.random_range(0..4);
    let mut choose = || {
        let family = likely(dice, families);
        match dice.random_range(0..10) {
            0 => json!({ "hostname": "lb.example.com" }),
            1 => json!({ "ip": PUBLIC.addr(family, 5), "ipMode": "Proxy" }),
            2 => json!({ "ip": PUBLIC.addr(family, 6), "ipMode": "VIP" }),
            _ => json!({ "ip": PUBLIC.addr(family, one(dice, &[4, 5, 6, 9])) }),
        }
    };
    (0..count).map(|_| choose()).collect()
}

fn source_ranges(dice: &mut Dice) -> Vec<String> {
    let count = one(dice, &[0, 0, 1, 2]);
    let choose = |_| {
        let family = one(dice, &Family::ALL);
        let range = match dice.random_range(0..6) {
            0 => OUTSIDE.part(family, 7, 0),
            1 => OUTSIDE.part(family, 7, 7),
            2 => NODES.cidr(family),
            3 => PODS.cidr(family),
            4 => place::cluster_cidr(family),
            _ => IpNet::new(OUTSIDE.addr(family, 0), 0)
                .expect("a prefix of nothing")
                .trunc(),
        };
        if dice.random_bool(0.2) {
            format!(" {range} ")
        } else {
            range.to_string()
        }
    };
    (0..count).map(choose).collect()
}

/// Returns a packet that probably dials a Service.
pub fn packet(dice: &mut Dice, cluster: &Cluster) -> Packet {
    let (dst, proto) = match dice.random_range(0..100) {
        0 => {
            let loopback = one(
                dice,
                &[Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()],
            );
            let src = SocketAddr::new(loopback, 40_000);
            let dst = SocketAddr::new(loopback, one(dice, &NODE_PORTS));
            return Packet {
                hook: Hook::Lo,
                proto: one(dice, &Proto::ALL),
                src,
                dst,
            };
        }
        1..10 => {
            let net = one(
                dice,
                &[CLUSTER_IPS, place::UNDECLARED, PODS, FAR, OUTSIDE, PUBLIC],
            );
            let addr = net.addr(one(dice, &Family::ALL), dice.random_range(1..30));
            (
                SocketAddr::new(addr, one(dice, &PORTS)),
                one(dice, &Proto::ALL),
            )
        }
        _ => offered(dice, cluster),
    };
    let is_hosts = dice.random_bool(0.3);
    let hook = match is_hosts {
        true if place::is_own(dst.ip()) => Hook::Lo,
        true => Hook::Anchor,
        false => Hook::Ingress(one(dice, &Device::OUTER)),
    };
    let src = source(dice, hook, dst);
    Packet {
        hook,
        proto,
        src,
        dst,
    }
}

/// Returns an address of a Service or the node, with a port that is probably served.
fn offered(dice: &mut Dice, cluster: &Cluster) -> (SocketAddr, Proto) {
    let service = cluster
        .services
        .choose(dice)
        .expect("a cluster has Services");
    let spec = service.spec.as_ref().expect("a Service has a spec");
    let port = spec
        .ports
        .as_ref()
        .and_then(|ports| ports.choose(dice))
        .expect("a Service has ports");
    let of_port = Proto::ALL
        .into_iter()
        .find(|proto| port.protocol.as_deref() == Some(proto.name()));
    let proto = of_port
        .filter(|_| dice.random_bool(0.9))
        .unwrap_or_else(|| one(dice, &Proto::ALL));
    if let Some(node_port) = port.node_port.filter(|_| dice.random_bool(0.3)) {
        let has_family = |family: &Family| {
            spec.ip_families
                .iter()
                .flatten()
                .any(|name| name == family.name())
        };
        let families = Family::ALL
            .into_iter()
            .filter(|family| has_family(family) || dice.random_bool(0.1));
        let families: Vec<_> = families.collect();
        let own: Vec<_> = families
            .into_iter()
            .flat_map(place::own)
            .map(|(addr, _)| addr)
            .collect();
        return (
            SocketAddr::new(one(dice, &own), port_number(node_port)),
            proto,
        );
    }
    let status = service
        .status
        .as_ref()
        .and_then(|status| status.load_balancer.as_ref());
    let ingresses = status
        .and_then(|status| status.ingress.as_ref())
        .into_iter()
        .flatten();
    let vips: Vec<IpAddr> = ingresses
        .filter_map(|ingress| ingress.ip.as_ref()?.parse().ok())
        .collect();
    let parse = |ips: &Option<Vec<String>>| -> Vec<IpAddr> {
        ips.iter().flatten().flat_map(|ip| ip.parse()).collect()
    };
    let mut kinds = vec![parse(&spec.cluster_ips), parse(&spec.external_ips), vips];
    kinds.retain(|addrs| !addrs.is_empty());
    let addr = match kinds.choose(dice).and_then(|addrs| addrs.choose(dice)) {
        Some(addr) => *addr,
        None => PUBLIC.addr(one(dice, &Family::ALL), one(dice, &[1, 4, 9])),
    };
    let number = if dice.random_bool(0.95) {
        port_number(port.port)
    } else {
        one(dice, &PORTS)
    };
    (SocketAddr::new(addr, number), proto)
}

fn port_number(number: i32) -> u16 {
    u16::try_from(number).expect("a port number")
}

fn source(dice: &mut Dice, hook: Hook, dst: SocketAddr) -> SocketAddr {
    let family = Family::of(dst.ip());
    let own: Vec<_> = place::own(family).map(|(addr, _)| addr).collect();
    let addr = match hook {
        Hook::Lo if dice.random_bool(0.7) => dst.ip(),
        Hook::Lo | Hook::Anchor => one(dice, &own),
        // A spoofed source.
        Hook::Ingress(_) if dice.random_bool(0.03) => {
            one(dice, &[FAR.addr(family, 10), PODS.addr(family, 10)])
        }
        Hook::Ingress(Device::Bridge) => BRIDGED.addr(family, one(dice, &[10, 11])),
        Hook::Ingress(Device::Uplink) => {
            let (net, host) = one(
                dice,
                &[
                    (OUTSIDE, 7),
                    (OUTSIDE, 200),
                    (NODES, 12),
                    (FAR, 10),
                    (FAR, 11),
                ],
            );
            net.addr(family, host)
        }
        Hook::Ingress(Device::SecondUplink) => {
            one(dice, &[STORAGE.addr(family, 12), FARTHER.addr(family, 10)])
        }
        Hook::Ingress(_) => PODS.addr(family, one(dice, &[10, 11])),
    };
    // Below the ports that kpx assigns.
    SocketAddr::new(addr, dice.random_range(1_024..61_000))
}

/// Adds, removes or changes endpoints of about half of the Services; all records of an endpoint
/// change alike.
pub fn change_endpoints(dice: &mut Dice, cluster: &mut Cluster) {
    let owner = |labels: &BTreeMap<String, String>| labels["kubernetes.io/service-name"].clone();
    let owners: BTreeSet<String> = cluster
        .slices
        .iter()
        .filter_map(|slice| slice.metadata.labels.as_ref())
        .map(owner)
        .collect();
    for changed in owners {
        let gone = dice.random_bool(0.2);
        if !gone && dice.random_bool(0.4) {
            continue;
        }
        let slices = cluster
            .slices
            .iter_mut()
            .filter(|slice| slice.metadata.labels.as_ref().map(owner) == Some(changed.clone()));
        let mut fates: BTreeMap<String, u32> = BTreeMap::new();
        for slice in slices {
            let endpoints = slice.endpoints.get_or_insert_default();
            for endpoint in endpoints {
                let fate = *fates
                    .entry(endpoint.addresses[0].clone())
                    .or_insert_with(|| dice.random_range(0..10));
                let (ready, serving, terminating) = match fate {
                    _ if gone => (false, false, true),
                    0 | 1 => (false, true, true),
                    2..=4 => (false, false, false),
                    5..=7 => (true, true, false),
                    _ => continue,
                };
                endpoint.conditions = Some(object(
                    json!({ "ready": ready, "serving": serving, "terminating": terminating }),
                ));
            }
        }
    }
}
