//! Computes the outcome of a packet on a node from the objects alone, without tables, sets or
//! memory. Slow and simple, because it is the standard for all other code.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use proxy_common::counter::Reason;

use crate::reference::cluster::{Cluster, Detector, Hook, Packet, Proto};
use crate::reference::endpoints::{self, Endpoint};
use crate::reference::place::{self, Device, Family};

/// The outcome of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Pass(Reason),
    Reject(Reason),
    Drop(Reason),
    Forward(Forward),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Forward {
    /// The service port, independent of the dialled address: the key of a client's affinity.
    pub entry: Entry,
    pub kind: Kind,
    pub has_affinity: bool,
    /// The possible backends, each with the client address that it must see.
    pub backends: BTreeMap<SocketAddr, IpAddr>,
}

/// A Service's namespace, name and port, protocol and family.
pub type Entry = (String, String, String, Proto, Family);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    ClusterIp,
    LoadBalancer,
    ExternalIp,
    NodePort,
}

/// A service port with the dialled frontend.
struct Dialled<'a> {
    service: &'a Service,
    spec: &'a ServiceSpec,
    port: &'a ServicePort,
    kind: Kind,
}

/// The client of a packet.
#[derive(Clone, Copy)]
struct Client {
    /// True for a process of this node: the source is an address of the node.
    is_node: bool,
    /// True for a pod by the operator's detector.
    is_detected: bool,
    /// True behind a pod's device, or a device of the detector.
    is_here: bool,
    /// True behind a pod's device, which kube-proxy does not check.
    is_pod: bool,
}

impl Client {
    fn is_outside(self) -> bool {
        !self.is_node && !self.is_detected && !self.is_pod
    }

    /// Returns true for a pod of this node or the node itself; the address alone is no proof.
    fn is_local(self) -> bool {
        self.is_node || self.is_pod || (self.is_detected && self.is_here)
    }
}

pub fn answer(cluster: &Cluster, packet: &Packet) -> Answer {
    if packet.src.ip().is_loopback() || packet.dst.ip().is_loopback() {
        return pass(packet, Reason::NotUnicast);
    }
    let client = client(cluster, packet);
    let is_shut_out =
        client.is_outside() && !cluster.node.compat && !cluster.node.cluster_ip_external;
    let dialled = dialled(cluster, packet);
    let nothing = dialled
        .is_none()
        .then(|| nothing_dialled(cluster, packet, is_shut_out));
    // Departure: kube-proxy leaves spoofed packets to rp_filter.
    if matches!(packet.hook, Hook::Ingress(_))
        && nothing != Some(Answer::Pass(Reason::NotOurs))
        && is_spoofed(packet)
    {
        return Answer::Drop(Reason::Spoofed);
    }
    if let Some(answer) = nothing {
        return answer;
    }
    let dialled = dialled.expect("nothing else is dialled");
    if dialled.kind == Kind::ClusterIp && is_shut_out {
        return Answer::Drop(Reason::Outside);
    }
    if dialled.kind == Kind::LoadBalancer
        && !is_in_source_ranges(dialled.service, dialled.spec, packet.src.ip())
    {
        return Answer::Drop(Reason::SourceRange);
    }
    let endpoints = endpoints::of(cluster, dialled.service, dialled.port, packet.family());
    let list = if uses_local_list(&dialled, client) {
        &endpoints.local
    } else {
        &endpoints.cluster
    };
    if list.is_empty() {
        return if endpoints.serving.is_empty() {
            Answer::Reject(Reason::NoEndpoints)
        } else {
            Answer::Drop(Reason::NoLocalEndpoints)
        };
    }
    let source = |endpoint: &Endpoint| source_seen(cluster, packet, &dialled, client, endpoint);
    Answer::Forward(Forward {
        entry: entry(&dialled, packet),
        kind: dialled.kind,
        has_affinity: dialled.spec.session_affinity.as_deref() == Some("ClientIP"),
        backends: list
            .iter()
            .map(|endpoint| (endpoint.at, source(endpoint)))
            .collect(),
    })
}

/// Returns all serving backends of the dialled service port, even out of reach, which open flows
/// may keep; `None` if the packet dials no Service.
pub fn serving(cluster: &Cluster, packet: &Packet) -> Option<Vec<SocketAddr>> {
    let Dialled { service, port, .. } = dialled(cluster, packet)?;
    let endpoints = endpoints::of(cluster, service, port, packet.family());
    Some(endpoints.kept.iter().map(|endpoint| endpoint.at).collect())
}

/// Returns the dialled service port, as its ClusterIP and port.
pub fn service_port(cluster: &Cluster, packet: &Packet) -> Option<SocketAddr> {
    let Dialled { service, port, .. } = dialled(cluster, packet)?;
    Some(SocketAddr::new(
        cluster_ip(service, packet.family())?,
        u16::try_from(port.port).ok()?,
    ))
}

/// Returns the affinity of a Service with failover of TCP flows; `None` for other Services. A set
/// in use must not have a single backend.
pub fn fails_over(cluster: &Cluster, packet: &Packet) -> Option<bool> {
    let Dialled {
        service,
        spec,
        port,
        ..
    } = dialled(cluster, packet)?;
    let annotation = service
        .metadata
        .annotations
        .as_ref()?
        .get("kpx.dev/backend-health")?;
    let is_local = spec.internal_traffic_policy.as_deref() == Some("Local");
    let has_address = |kind| {
        Family::ALL.iter().any(|family| {
            *family == packet.family() && !addresses(service, spec, kind, *family).is_empty()
        })
    };
    let is_external = port.node_port.is_some()
        || has_address(Kind::LoadBalancer)
        || has_address(Kind::ExternalIp);
    let endpoints = endpoints::of(cluster, service, port, packet.family());
    let of = |is_used: bool, set: &[Endpoint]| if is_used { set.len() } else { 0 };
    let cluster_set = of(!is_local || is_external, &endpoints.cluster);
    let local_set = of(
        is_local || is_external && is_external_local(spec),
        &endpoints.local,
    );
    let is_on = annotation == "on" && packet.proto == Proto::Tcp;
    let fails_over = is_on && cluster_set != 1 && local_set != 1 && cluster_set + local_set > 1;
    fails_over.then(|| spec.session_affinity.as_deref() == Some("ClientIP"))
}

/// Returns the outcome of a packet that dials no Service.
fn nothing_dialled(cluster: &Cluster, packet: &Packet, is_shut_out: bool) -> Answer {
    if place::is_own(packet.dst.ip()) {
        return pass(packet, Reason::NotOurs);
    }
    if is_cluster_ip(cluster, packet.dst.ip()) {
        // A client that ClusterIPs do not serve must not detect existing ClusterIPs.
        return if is_shut_out {
            Answer::Drop(Reason::Outside)
        } else {
            Answer::Reject(Reason::UnknownPort)
        };
    }
    let is_another_proxys = is_of_other_proxy(cluster, packet.dst.ip());
    if !is_another_proxys
        && cluster
            .service_cidrs
            .iter()
            .any(|cidr| cidr.contains(&packet.dst.ip()))
    {
        return Answer::Drop(Reason::Unallocated);
    }
    pass(packet, Reason::NotOurs)
}

/// Replaces a pass at the anchor, where only packets to Services are routed, by a reject.
fn pass(packet: &Packet, reason: Reason) -> Answer {
    match (packet.hook, reason) {
        (Hook::Anchor, Reason::NotOurs) => Answer::Reject(reason),
        (Hook::Anchor, _) => Answer::Drop(reason),
        _ => Answer::Pass(reason),
    }
}

/// Returns true if the packet's source cannot be behind its incoming device.
pub fn is_spoofed(packet: &Packet) -> bool {
    let Hook::Ingress(device) = packet.hook else {
        return false;
    };
    let back = place::route(packet.src.ip());
    place::is_own(packet.src.ip())
        || back != Some(device)
            && (device.leads_to_pods() || back.is_some_and(Device::leads_to_pods))
}

/// Returns the dialled frontend: Service addresses precede node ports, and the oldest Service owns
/// a shared address. External addresses never equal another Service's ClusterIP (undefined in
/// kube-proxy).
fn dialled<'a>(cluster: &'a Cluster, packet: &Packet) -> Option<Dialled<'a>> {
    let mut services: Vec<_> = cluster.services.iter().collect();
    services.sort_by_key(|service| {
        let meta = &service.metadata;
        (
            meta.creation_timestamp.clone(),
            meta.namespace.clone(),
            meta.name.clone(),
        )
    });
    let ports = services.into_iter().flat_map(|service| {
        let spec = service.spec.as_ref().expect("every Service has a spec");
        let offers = cluster_ip(service, packet.family()).is_some();
        spec.ports
            .iter()
            .flatten()
            .filter(move |_| offers)
            .map(move |port| (service, spec, port))
    });
    let ports = ports
        .filter(|(_, _, port)| port.protocol.as_deref().unwrap_or("TCP") == packet.proto.name());
    let ports: Vec<_> = ports.collect();
    let dialled_port = i32::from(packet.dst.port());
    let by_address = ports
        .iter()
        .filter(|(_, _, port)| port.port == dialled_port)
        .find_map(|(service, spec, port)| {
            let kind = [Kind::ClusterIp, Kind::LoadBalancer, Kind::ExternalIp]
                .into_iter()
                .filter(|kind| *kind == Kind::ClusterIp || !is_cluster_ip(cluster, packet.dst.ip()))
                .filter(|_| !is_of_other_proxy(cluster, packet.dst.ip()))
                .find(|kind| {
                    addresses(service, spec, *kind, packet.family()).contains(&packet.dst.ip())
                })?;
            Some(Dialled {
                service,
                spec,
                port,
                kind,
            })
        });
    let takes_node_ports = cluster.node.node_port_addrs.contains(&packet.dst.ip());
    let by_node_port = || {
        let (service, spec, port) = ports
            .iter()
            .find(|(_, _, port)| port.node_port == Some(dialled_port))?;
        Some(Dialled {
            service,
            spec,
            port,
            kind: Kind::NodePort,
        })
    };
    by_address.or_else(|| takes_node_ports.then(by_node_port).flatten())
}

fn addresses(service: &Service, spec: &ServiceSpec, kind: Kind, family: Family) -> Vec<IpAddr> {
    let of_family = |text: &String| {
        text.parse()
            .ok()
            .filter(|addr: &IpAddr| Family::of(*addr) == family)
    };
    match kind {
        Kind::ClusterIp => cluster_ip(service, family).into_iter().collect(),
        Kind::ExternalIp => spec
            .external_ips
            .iter()
            .flatten()
            .filter_map(of_family)
            .collect(),
        Kind::LoadBalancer => {
            let status = service
                .status
                .as_ref()
                .and_then(|status| status.load_balancer.as_ref());
            let ingresses = status
                .and_then(|status| status.ingress.as_ref())
                .into_iter()
                .flatten();
            let vips =
                ingresses.filter(|ingress| ingress.ip_mode.as_deref().unwrap_or("VIP") == "VIP");
            vips.filter_map(|ingress| ingress.ip.as_ref())
                .filter_map(of_family)
                .collect()
        }
        Kind::NodePort => Vec::new(),
    }
}

/// Returns the Service's ClusterIP of a family, if this proxy serves it.
fn cluster_ip(service: &Service, family: Family) -> Option<IpAddr> {
    let labels = service.metadata.labels.clone().unwrap_or_default();
    let spec = service.spec.as_ref()?;
    if labels.contains_key("service.kubernetes.io/service-proxy-name")
        || spec.type_.as_deref() == Some("ExternalName")
    {
        return None;
    }
    let place = spec
        .ip_families
        .iter()
        .flatten()
        .position(|name| name == family.name())?;
    spec.cluster_ips.as_ref()?.get(place)?.parse().ok()
}

/// Returns true if another proxy serves that ClusterIP, which kpx then ignores.
fn is_of_other_proxy(cluster: &Cluster, addr: IpAddr) -> bool {
    let is_other = |service: &&Service| {
        let labels = service.metadata.labels.as_ref();
        labels.is_some_and(|labels| labels.contains_key("service.kubernetes.io/service-proxy-name"))
    };
    let specs = cluster
        .services
        .iter()
        .filter(is_other)
        .filter_map(|service| service.spec.as_ref());
    let mut specs = specs.filter(|spec| spec.type_.as_deref() != Some("ExternalName"));
    specs.any(|spec| {
        spec.cluster_ips
            .iter()
            .flatten()
            .any(|ip| ip.parse() == Ok(addr))
    })
}

fn is_cluster_ip(cluster: &Cluster, addr: IpAddr) -> bool {
    cluster
        .services
        .iter()
        .any(|service| cluster_ip(service, Family::of(addr)) == Some(addr))
}

fn entry(dialled: &Dialled<'_>, packet: &Packet) -> Entry {
    let meta = &dialled.service.metadata;
    let name = |name: &Option<String>| name.clone().unwrap_or_default();
    (
        name(&meta.namespace),
        name(&meta.name),
        name(&dialled.port.name),
        packet.proto,
        packet.family(),
    )
}

fn client(cluster: &Cluster, packet: &Packet) -> Client {
    let (is_node, device) = match packet.hook {
        Hook::Ingress(device) => (false, Some(device)),
        Hook::Anchor | Hook::Lo if place::is_own(packet.src.ip()) => (true, None),
        // Forwarded: it came in through the device on its reverse route.
        Hook::Anchor | Hook::Lo => (false, place::route(packet.src.ip())),
    };
    // An unknown origin does not count as outside.
    let is_unknown = !is_node && device.is_none();
    let is_detected = match &cluster.node.detector {
        Detector::Cidrs(cidrs) => cidrs.iter().any(|cidr| cidr.contains(&packet.src.ip())),
        Detector::Device(pods) => device == Some(*pods),
    };
    Client {
        is_node,
        is_detected: is_detected || is_unknown,
        is_here: is_unknown
            || device.is_some_and(Device::leads_to_pods)
            || matches!(&cluster.node.detector, Detector::Device(pods) if device == Some(*pods)),
        // kube-proxy uses only the detector.
        is_pod: !cluster.node.compat && device.is_some_and(Device::leads_to_pods),
    }
}

/// Returns true if the Service's source ranges admit this client to its load balancer addresses.
fn is_in_source_ranges(service: &Service, spec: &ServiceSpec, client: IpAddr) -> bool {
    let family = Family::of(client);
    let parse = |text: &String| text.trim().parse::<IpNet>().ok();
    let ranges = spec
        .load_balancer_source_ranges
        .iter()
        .flatten()
        .filter_map(parse);
    let ranges: Vec<_> = ranges
        .filter(|range| Family::of(range.addr()) == family)
        .collect();
    let holds = |addr: IpAddr| ranges.iter().any(|range| range.contains(&addr));
    // When the node dials a load balancer address on one of its devices, the kernel chooses that
    // address as source. The ranges admit it by the node's primary address.
    let is_own_vip = || addresses(service, spec, Kind::LoadBalancer, family).contains(&client);
    ranges.is_empty() || holds(client) || (is_own_vip() && holds(place::primary(family)))
}

/// Returns true if the frontend's policy is `Local`. Under an external policy `Local`, clients on
/// this node use all endpoints.
fn uses_local_list(dialled: &Dialled<'_>, client: Client) -> bool {
    if dialled.kind == Kind::ClusterIp {
        return dialled.spec.internal_traffic_policy.as_deref() == Some("Local");
    }
    is_external_local(dialled.spec) && !client.is_local()
}

fn is_external_local(spec: &ServiceSpec) -> bool {
    let has_external_ips = spec.external_ips.iter().flatten().next().is_some();
    let is_external = match spec.type_.as_deref().unwrap_or("ClusterIP") {
        "LoadBalancer" | "NodePort" => true,
        _ => has_external_ips,
    };
    is_external && spec.external_traffic_policy.as_deref() == Some("Local")
}

/// Returns the client's address as the backend sees it.
fn source_seen(
    cluster: &Cluster,
    packet: &Packet,
    dialled: &Dialled<'_>,
    client: Client,
    backend: &Endpoint,
) -> IpAddr {
    let chosen = packet.src.ip();
    let primary = place::primary(packet.family());
    // A packet to the node itself leaves through no device.
    if place::is_own(backend.at.ip()) {
        return chosen;
    }
    let route = place::route(backend.at.ip()).expect("backends are in one of the networks");
    let on_device = route.addr(packet.family());
    let arrives = matches!(packet.hook, Hook::Ingress(_));
    let masqueraded = if backend.at.ip() == chosen && arrives {
        true
    } else if cluster.node.compat {
        kube_proxy_masquerades(cluster, packet, dialled, client)
    } else {
        let is_external = detects(cluster, packet) && client.is_outside();
        (dialled.kind == Kind::ClusterIp && (cluster.node.masquerade_all || is_external))
            || (!client.is_node && !client.is_pod && !backend.local)
    };
    if arrives {
        return if masqueraded {
            on_device.unwrap_or(primary)
        } else {
            chosen
        };
    }
    // Forwarded from a device without hooks, through the anchor's routes.
    if !place::is_own(chosen) {
        return if masqueraded {
            on_device.unwrap_or(chosen)
        } else {
            chosen
        };
    }
    // The route to the frontend chose an address of the node before the backend was known. A
    // frontend's own address does not serve other frontends. Behind a device with an address, only
    // replies to that address are sure to return through the device.
    let chosen = if chosen == packet.dst.ip() {
        primary
    } else {
        chosen
    };
    if masqueraded || !backend.local {
        on_device.unwrap_or(chosen)
    } else {
        chosen
    }
}

/// Section 4.4 of kube-proxy's semantics, except for clients that are their own backends.
fn kube_proxy_masquerades(
    cluster: &Cluster,
    packet: &Packet,
    dialled: &Dialled<'_>,
    client: Client,
) -> bool {
    match dialled.kind {
        Kind::ClusterIp => {
            cluster.node.masquerade_all || (detects(cluster, packet) && !client.is_detected)
        }
        _ if is_external_local(dialled.spec) => client.is_node && !client.is_detected,
        _ => true,
    }
}

/// Returns true if the operator configured pod detection for the packet's family.
fn detects(cluster: &Cluster, packet: &Packet) -> bool {
    match &cluster.node.detector {
        Detector::Cidrs(cidrs) => cidrs
            .iter()
            .any(|cidr| Family::of(cidr.addr()) == packet.family()),
        Detector::Device(_) => true,
    }
}
