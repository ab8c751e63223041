//! Fills in defaults and refuses values as an API server does, as far as kpx depends on it.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::{ClientIPConfig, Service, ServicePort, ServiceSpec};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::ServiceCIDR;

use super::object::{Object, Refused};
use proxy_core::input::ObjectName;
use proxy_core::model;

type Verdict = Result<(), Refused>;

const PROTOCOLS: &[&str] = &["TCP", "UDP", "SCTP"];
const POLICIES: &[&str] = &["Cluster", "Local"];
/// The default timeout of ClientIP affinity, in seconds.
const DEFAULT_AFFINITY_TIMEOUT: i32 = 10_800;

pub(super) fn name(name: &ObjectName) -> Verdict {
    for (field, text) in [
        ("metadata.name", &name.name),
        ("metadata.namespace", &name.namespace),
    ] {
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
        require(
            text.chars().all(fits),
            field,
            format_args!("{text:?} has characters outside a-z, 0-9, '-' and '.'"),
        )?;
    }
    Ok(())
}

pub(super) fn object(object: &mut Object) -> Verdict {
    match object {
        Object::ServiceCidr(cidr) => service_cidr(cidr),
        Object::Node(_) => Ok(()),
        Object::EndpointSlice(slice) => {
            default_slice(slice);
            endpoint_slice(slice)
        }
        Object::Service(object) => {
            let spec = object.spec.get_or_insert_default();
            default_service(spec);
            service(spec)?;
            load_balancer(object)
        }
    }
}

fn default_service(spec: &mut ServiceSpec) {
    for port in spec.ports.iter_mut().flatten() {
        port.protocol.get_or_insert_with(|| "TCP".to_owned());
    }
    if spec.session_affinity.as_deref() == Some("ClientIP") {
        let client_ip = spec
            .session_affinity_config
            .get_or_insert_default()
            .client_ip
            .get_or_insert_default();
        let ClientIPConfig { timeout_seconds } = client_ip;
        timeout_seconds.get_or_insert(DEFAULT_AFFINITY_TIMEOUT);
    }
    let Some(cluster_ip) = spec.cluster_ip.as_ref().filter(|ip| !ip.is_empty()) else {
        return;
    };
    let cluster_ips = spec
        .cluster_ips
        .get_or_insert_with(|| vec![cluster_ip.clone()]);
    let families: Option<Vec<_>> = cluster_ips
        .iter()
        .map(|ip| model::ip(ip).ok().map(family))
        .collect();
    if let (None, Some(families)) = (&spec.ip_families, families) {
        spec.ip_families = Some(families);
    }
}

fn service(spec: &ServiceSpec) -> Verdict {
    one_of(
        "spec.type",
        &spec.type_,
        &["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"],
    )?;
    one_of(
        "spec.sessionAffinity",
        &spec.session_affinity,
        &["None", "ClientIP"],
    )?;
    one_of(
        "spec.internalTrafficPolicy",
        &spec.internal_traffic_policy,
        POLICIES,
    )?;
    one_of(
        "spec.externalTrafficPolicy",
        &spec.external_traffic_policy,
        POLICIES,
    )?;
    let timeout = spec
        .session_affinity_config
        .as_ref()
        .and_then(|config| config.client_ip.as_ref()?.timeout_seconds);
    if let Some(timeout) = timeout {
        let field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds";
        require(
            (1..=86_400).contains(&timeout),
            field,
            format_args!("{timeout} is not within 1 to 86400"),
        )?;
    }
    cluster_ips(spec)?;
    for (i, ip) in spec.external_ips.iter().flatten().enumerate() {
        address(format_args!("spec.externalIPs[{i}]"), ip)?;
    }
    for (i, range) in spec
        .load_balancer_source_ranges
        .iter()
        .flatten()
        .enumerate()
    {
        // An API server accepts white space around the range.
        let field = format_args!("spec.loadBalancerSourceRanges[{i}]");
        model::cidr(range.trim()).map_err(|_| not_a_network(field, range.trim()))?;
    }
    if let Some(port) = spec.health_check_node_port.filter(|port| *port != 0) {
        port_number("spec.healthCheckNodePort", port)?;
    }
    service_ports(spec.ports.as_deref().unwrap_or_default())
}

fn cluster_ips(spec: &ServiceSpec) -> Verdict {
    let cluster_ip = spec.cluster_ip.as_deref().unwrap_or_default();
    if !matches!(cluster_ip, "" | "None") {
        address("spec.clusterIP", cluster_ip)?;
    }
    for (i, ip) in spec.cluster_ips.iter().flatten().enumerate() {
        let field = format!("spec.clusterIPs[{i}]");
        require(
            i > 0 || ip == cluster_ip,
            &field,
            format_args!("{ip:?} is not the clusterIP, {cluster_ip:?}"),
        )?;
        if cluster_ip == "None" {
            continue;
        }
        let ip = address(&field, ip)?;
        let said = spec
            .ip_families
            .as_ref()
            .and_then(|families| families.get(i));
        let fits = said.is_none_or(|said| *said == family(ip));
        require(
            fits,
            format_args!("spec.ipFamilies[{i}]"),
            format_args!("is not that of clusterIPs[{i}], {ip}"),
        )?;
    }
    for (i, family) in spec.ip_families.iter().flatten().enumerate() {
        one_of(
            format_args!("spec.ipFamilies[{i}]"),
            &Some(family.clone()),
            &["IPv4", "IPv6"],
        )?;
    }
    Ok(())
}

fn service_ports(ports: &[ServicePort]) -> Verdict {
    let mut names = BTreeSet::new();
    let mut numbers = BTreeSet::new();
    for (i, port) in ports.iter().enumerate() {
        let field = |name: &str| format!("spec.ports[{i}].{name}");
        port_number(field("port"), port.port)?;
        one_of(field("protocol"), &port.protocol, PROTOCOLS)?;
        if let Some(node_port) = port.node_port.filter(|port| *port != 0) {
            port_number(field("nodePort"), node_port)?;
        }
        let name = port.name.as_deref().unwrap_or_default();
        require(
            ports.len() == 1 || !name.is_empty(),
            field("name"),
            "is missing, and there are several ports",
        )?;
        require(
            names.insert(name),
            field("name"),
            format_args!("{name:?} is the name of another port"),
        )?;
        let taken = format_args!(
            "{}/{} is another port's",
            port.port,
            port.protocol.as_deref().unwrap_or_default()
        );
        require(
            numbers.insert((port.port, &port.protocol)),
            field("port"),
            taken,
        )?;
    }
    Ok(())
}

fn load_balancer(service: &Service) -> Verdict {
    let ingress = service
        .status
        .as_ref()
        .and_then(|status| status.load_balancer.as_ref()?.ingress.as_ref());
    for (i, ingress) in ingress.into_iter().flatten().enumerate() {
        if let Some(ip) = ingress.ip.as_ref().filter(|ip| !ip.is_empty()) {
            address(format_args!("status.loadBalancer.ingress[{i}].ip"), ip)?;
        }
    }
    Ok(())
}

fn default_slice(slice: &mut EndpointSlice) {
    for port in slice.ports.iter_mut().flatten() {
        port.name.get_or_insert_default();
        port.protocol.get_or_insert_with(|| "TCP".to_owned());
    }
}

fn endpoint_slice(slice: &EndpointSlice) -> Verdict {
    one_of(
        "addressType",
        &Some(slice.address_type.clone()),
        &["IPv4", "IPv6", "FQDN"],
    )?;
    for (i, endpoint) in slice.endpoints.iter().flatten().enumerate() {
        require(
            !endpoint.addresses.is_empty(),
            format_args!("endpoints[{i}].addresses"),
            "is empty",
        )?;
        for (j, text) in endpoint
            .addresses
            .iter()
            .enumerate()
            .filter(|_| slice.address_type != "FQDN")
        {
            let field = format!("endpoints[{i}].addresses[{j}]");
            let ip = address(&field, text)?;
            require(
                family(ip) == slice.address_type,
                &field,
                format_args!("{ip} is not {}", slice.address_type),
            )?;
            require(
                is_endpoint(ip),
                &field,
                format_args!("{ip} is not the address of an endpoint"),
            )?;
        }
    }
    let mut names = BTreeSet::new();
    for (i, port) in slice.ports.iter().flatten().enumerate() {
        let field = |name: &str| format!("ports[{i}].{name}");
        one_of(field("protocol"), &port.protocol, PROTOCOLS)?;
        if let Some(port) = port.port {
            port_number(field("port"), port)?;
        }
        let name = port.name.as_deref().unwrap_or_default();
        require(
            names.insert(name),
            field("name"),
            format_args!("{name:?} is the name of another port"),
        )?;
    }
    Ok(())
}

fn service_cidr(cidr: &ServiceCIDR) -> Verdict {
    for (i, text) in cidr
        .spec
        .iter()
        .flat_map(|spec| &spec.cidrs)
        .flatten()
        .enumerate()
    {
        let field = format!("spec.cidrs[{i}]");
        let cidr = network(&field, text)?;
        require(
            cidr == cidr.trunc(),
            &field,
            format_args!("{cidr} has bits beyond its prefix, {}", cidr.trunc()),
        )?;
    }
    Ok(())
}

/// Returns true for a valid endpoint address: not unspecified, loopback or link-local. An API
/// server refuses only link-local multicast addresses, and accepts the rest.
fn is_endpoint(ip: IpAddr) -> bool {
    if ip.is_unspecified() || ip.is_loopback() {
        return false;
    }
    match ip {
        IpAddr::V4(ip) => !ip.is_link_local() && !matches!(ip.octets(), [224, 0, 0, _]),
        // RFC 4291 section 2.7: the lower half of the second octet is the scope.
        IpAddr::V6(ip) => {
            let is_link_local =
                ip.is_unicast_link_local() || ip.is_multicast() && ip.octets()[1] & 0xf == 2;
            !is_link_local
        }
    }
}

fn family(ip: IpAddr) -> String {
    if ip.is_ipv4() {
        "IPv4".to_owned()
    } else {
        "IPv6".to_owned()
    }
}

/// Parses an address as leniently as an API server does in stored objects.
fn address(field: impl Display, text: &str) -> Result<IpAddr, Refused> {
    model::ip(text).map_err(|_| Refused::new(field, format!("{text:?} is not an IP address")))
}

fn network(field: impl Display, text: &str) -> Result<IpNet, Refused> {
    text.parse().map_err(|_| not_a_network(field, text))
}

fn not_a_network(field: impl Display, text: &str) -> Refused {
    Refused::new(field, format!("{text:?} is not a network (address/length)"))
}

fn port_number(field: impl Display, port: i32) -> Verdict {
    require(
        (1..=65_535).contains(&port),
        field,
        format_args!("{port} is not a port (1 to 65535)"),
    )
}

fn one_of(field: impl Display, value: &Option<String>, values: &[&str]) -> Verdict {
    let Some(value) = value else { return Ok(()) };
    require(
        values.contains(&value.as_str()),
        field,
        format_args!("{value:?} is not one of {}", values.join(", ")),
    )
}

fn require(holds: bool, field: impl Display, why: impl Display) -> Verdict {
    if holds {
        Ok(())
    } else {
        Err(Refused::new(field, why))
    }
}
