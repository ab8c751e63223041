//! The Services of every kind that rows name.

use std::net::IpAddr;

use anyhow::{Context, Result};
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto, SockAddr};
use proxy_common::frontend::{
    Algorithm, Backend, Endpoint, EndpointKey, Frontend, FrontendKey, FrontendKind, Service, Set,
    SlotKey,
};
use proxy_core::diff::{Change, FamilyChange};
use proxy_core::tables::RangeKey;
use proxy_datapath::Maps;

use crate::fixture::Fixture;

/// A frontend besides a ClusterIP: address, port, protocol, kind; the ClusterIP and port of its
/// Service.
type External = (&'static str, u16, Proto, FrontendKind, (&'static str, u16));

const EXTERNALS: [External; 14] = [
    (
        "any",
        30080,
        Proto::TCP,
        FrontendKind::NODE_PORT,
        ("web", 80),
    ),
    (
        "any",
        30053,
        Proto::UDP,
        FrontendKind::NODE_PORT,
        ("remote", 53),
    ),
    (
        "any",
        30443,
        Proto::TCP,
        FrontendKind::NODE_PORT,
        ("own", 443),
    ),
    (
        "any",
        30082,
        Proto::TCP,
        FrontendKind::NODE_PORT,
        ("none", 80),
    ),
    (
        "any",
        30083,
        Proto::TCP,
        FrontendKind::NODE_PORT,
        ("twins", 80),
    ),
    (
        "any",
        30090,
        Proto::TCP,
        FrontendKind::NODE_PORT,
        ("fenced-ip", 80),
    ),
    (
        "vip",
        80,
        Proto::TCP,
        FrontendKind::LOAD_BALANCER,
        ("web", 80),
    ),
    (
        "uplink",
        80,
        Proto::TCP,
        FrontendKind::LOAD_BALANCER,
        ("web", 80),
    ),
    (
        "outer",
        80,
        Proto::TCP,
        FrontendKind::EXTERNAL_IP,
        ("web", 80),
    ),
    (
        "near",
        80,
        Proto::TCP,
        FrontendKind::LOAD_BALANCER,
        ("near-ip", 80),
    ),
    (
        "distant",
        80,
        Proto::TCP,
        FrontendKind::LOAD_BALANCER,
        ("distant-ip", 80),
    ),
    (
        "empty",
        80,
        Proto::TCP,
        FrontendKind::LOAD_BALANCER,
        ("empty-ip", 80),
    ),
    (
        "fenced",
        80,
        Proto::TCP,
        FrontendKind::LOAD_BALANCER,
        ("fenced-ip", 80),
    ),
    (
        "fenced",
        81,
        Proto::TCP,
        FrontendKind::LOAD_BALANCER,
        ("fenced-ip", 81),
    ),
];

/// A service port with its backends in the cluster-wide and in the local set, as a name and true
/// for a local backend.
struct ServicePort {
    name: &'static str,
    port: u16,
    proto: Proto,
    service: Service,
    cluster: &'static [(&'static str, bool)],
    local: &'static [(&'static str, bool)],
}

fn service_ports() -> Vec<ServicePort> {
    const HERE: (&str, bool) = ("pod", true);
    const THERE: (&str, bool) = ("far", false);
    let tcp = |name, service, cluster, local| ServicePort {
        name,
        port: 80,
        proto: Proto::TCP,
        service,
        cluster,
        local,
    };
    let all = Service::HAS_ENDPOINTS;
    let local = all | Service::EXTERNAL_LOCAL;
    let fenced = Service::SOURCE_RANGES;
    let two = Service::new(2, 0, all);
    let redirected = all | Service::REDIRECTED | Service::SPARES_PODS;
    let spares_node = redirected | Service::SPARES_NODE;
    let of_address = redirected | Service::ELSE_PASSES;
    let fails_over = all | Service::FAILS_OVER;
    vec![
        tcp(
            "near-ip",
            Service::new(2, 1, local),
            &[THERE, THERE],
            &[HERE],
        ),
        ServicePort {
            port: 81,
            ..tcp("near-ip", Service::new(1, 1, redirected), &[THERE], &[HERE])
        },
        ServicePort {
            port: 82,
            ..tcp(
                "near-ip",
                Service::new(1, 1, spares_node),
                &[THERE],
                &[HERE],
            )
        },
        tcp("outpost", Service::new(0, 1, of_address), &[], &[HERE]),
        ServicePort {
            port: 81,
            ..tcp(
                "outpost",
                Service::new(0, 0, all | Service::ELSE_PASSES),
                &[],
                &[],
            )
        },
        tcp("metadata", Service::new(0, 1, of_address), &[], &[HERE]),
        ServicePort {
            port: 83,
            ..tcp("uplink", Service::new(0, 1, of_address), &[], &[HERE])
        },
        tcp("distant-ip", Service::new(1, 0, local), &[THERE], &[]),
        tcp(
            "empty-ip",
            Service::new(0, 0, Service::EXTERNAL_LOCAL),
            &[],
            &[],
        ),
        tcp("fenced-ip", Service::new(1, 0, all | fenced), &[HERE], &[]),
        ServicePort {
            port: 81,
            ..tcp("fenced-ip", Service::new(0, 0, fenced), &[], &[])
        },
        tcp("sticky", two.with_affinity(60), &[HERE, THERE], &[]),
        tcp(
            "turns",
            two.with_algorithm(Algorithm::ROUND_ROBIN),
            &[HERE, THERE],
            &[],
        ),
        tcp(
            "least",
            two.with_algorithm(Algorithm::LEAST_CONNECTIONS),
            &[HERE, THERE],
            &[],
        ),
        tcp(
            "twins",
            Service::new(2, 0, fails_over).with_algorithm(Algorithm::ROUND_ROBIN),
            &[HERE, THERE],
            &[],
        ),
        tcp(
            "sticky-twins",
            Service::new(2, 0, fails_over).with_affinity(60),
            &[HERE, THERE],
            &[],
        ),
        ServicePort {
            port: 53,
            proto: Proto::UDP,
            ..tcp("pair", Service::new(1, 0, all), &[HERE], &[])
        },
        tcp("web", Service::new(1, 0, all), &[HERE], &[]),
        tcp("none", Service::new(0, 0, 0), &[], &[]),
    ]
}

/// Returns the changes that add these Services and frontends.
pub(crate) fn frontends<A: Addr>(fixture: &Fixture) -> Result<Vec<FamilyChange<A>>> {
    let addr =
        |name: &str| -> Result<A> { A::from_ip(fixture.names.addr(name)?).context("family") };
    let mut changes = Vec::new();
    for ServicePort {
        name,
        port,
        proto,
        service,
        cluster,
        local,
    } in service_ports()
    {
        let key = FrontendKey::new(addr(name)?, Port::new(port), proto);
        let target = Port::new(if proto == Proto::UDP { 5353 } else { 8080 });
        for (set, backends) in [(Set::CLUSTER, cluster), (Set::LOCAL, local)] {
            for (index, (backend, here)) in (0..).zip(backends) {
                let backend = addr(backend)?;
                let flags = if *here { Backend::<A>::LOCAL } else { 0 };
                let slot = SlotKey::new(key, set, index);
                changes.push(FamilyChange::PutSlot(
                    slot,
                    Backend::new(backend, target, flags),
                ));
                let endpoint = Endpoint::new(
                    Endpoint::IN_CLUSTER_SET | if *here { Endpoint::LOCAL } else { 0 },
                );
                let at = EndpointKey::new(key, SockAddr::new(backend, target));
                changes.push(FamilyChange::PutEndpoint(at, endpoint));
            }
        }
        changes.push(FamilyChange::PutService(key, service));
        changes.push(FamilyChange::PutFrontend(
            key,
            Frontend::new(key, FrontendKind::CLUSTER_IP),
        ));
    }
    for (name, port, proto, kind, (service, service_port)) in EXTERNALS {
        let port = Port::new(port);
        let key = match kind {
            FrontendKind::NODE_PORT => FrontendKey::node_port(port, proto),
            _ => FrontendKey::new(addr(name)?, port, proto),
        };
        let service = FrontendKey::new(addr(service)?, Port::new(service_port), proto);
        changes.push(FamilyChange::PutFrontend(key, Frontend::new(service, kind)));
    }
    for (name, port) in [
        ("near-ip", 81),
        ("near-ip", 82),
        ("outpost", 80),
        ("metadata", 80),
    ] {
        let service = FrontendKey::new(addr(name)?, Port::new(port), Proto::TCP);
        let spared = EndpointKey::spared(service, addr("pod")?);
        changes.push(FamilyChange::PutEndpoint(
            spared,
            Endpoint::new(Endpoint::LOCAL),
        ));
    }
    for port in [80, 81] {
        let service = FrontendKey::new(addr("fenced-ip")?, Port::new(port), Proto::TCP);
        let bits = u8::try_from(size_of::<A>() * 8)?;
        changes.push(FamilyChange::PutSourceRange(RangeKey::new(
            service,
            addr("stranger")?,
            bits,
        )));
    }
    Ok(changes)
}

impl Fixture {
    /// Replaces a backend of a Service by another.
    pub(crate) fn leave(&mut self, service: &str, port: u16, old: &str, new: &str) -> Result<()> {
        let service = self.names.addr(service)?;
        let old = self.names.addr(old)?;
        let new = self.names.addr(new)?;
        let changes: Vec<Change> = if service.is_ipv4() {
            replace::<Addr4>(service, port, old, new)?
                .into_iter()
                .map(Change::V4)
                .collect()
        } else {
            replace::<Addr6>(service, port, old, new)?
                .into_iter()
                .map(Change::V6)
                .collect()
        };
        changes
            .iter()
            .try_for_each(|change| self.bench.datapath.tables.apply(change))
    }
}

fn replace<A: Addr>(
    service: IpAddr,
    port: u16,
    old: IpAddr,
    new: IpAddr,
) -> Result<Vec<FamilyChange<A>>> {
    let addr = |ip| A::from_ip(ip).context("family");
    let key = FrontendKey::new(addr(service)?, Port::new(port), Proto::UDP);
    let at = |ip| Ok::<_, anyhow::Error>(SockAddr::new(addr(ip)?, Port::new(5353)));
    let new = at(new)?;
    Ok(vec![
        FamilyChange::PutEndpoint(
            EndpointKey::new(key, new),
            Endpoint::new(Endpoint::IN_CLUSTER_SET),
        ),
        FamilyChange::PutSlot(
            SlotKey::new(key, Set::CLUSTER, 0),
            Backend::new(new.addr, new.port, 0),
        ),
        FamilyChange::DelEndpoint(EndpointKey::new(key, at(old)?)),
    ])
}
