//! The server's completion of a Service: defaults, cluster IPs, node ports.

use std::collections::HashSet;
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::{
    ClientIPConfig, Service, ServicePort, ServiceSpec, SessionAffinityConfig,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use serde_json::{Value, json};

use super::admit::text;
use super::failure::{Cause, Failure, Outcome};

const NODE_PORTS: std::ops::RangeInclusive<i32> = 30_000..=32_767;
/// In seconds.
const AFFINITY_TIMEOUT: i32 = 10_800;

/// The address ranges, and the allocated addresses and node ports.
#[derive(Debug)]
pub(crate) struct Addresses {
    /// The first range sets the default family of Services.
    cidrs: Vec<IpNet>,
    taken: HashSet<IpAddr>,
    taken_ports: HashSet<(i32, String)>,
    /// The next candidate in each range.
    next: Vec<usize>,
}

impl Addresses {
    pub(crate) fn new(cidrs: Vec<IpNet>) -> Self {
        // The first address belongs to the Service default/kubernetes.
        let next = vec![1; cidrs.len()];
        Self {
            cidrs,
            taken: HashSet::new(),
            taken_ports: HashSet::new(),
            next,
        }
    }

    pub(crate) fn claim(&mut self, service: &Service) {
        self.taken.extend(cluster_ips(service));
        self.taken_ports.extend(node_ports(service));
    }

    pub(crate) fn release(&mut self, service: &Service) {
        for ip in cluster_ips(service) {
            self.taken.remove(&ip);
        }
        for port in node_ports(service) {
            self.taken_ports.remove(&port);
        }
    }

    fn families(&self) -> impl Iterator<Item = &'static str> {
        self.cidrs.iter().map(|c| family(c.addr()))
    }

    fn free_address(&mut self, name: &str, of: &str) -> Outcome<IpAddr> {
        let unknown = || {
            invalid(
                name,
                "spec.ipFamilies",
                &format!("\"{of}\": not configured on this cluster"),
            )
        };
        let at = self.families().position(|f| f == of).ok_or_else(unknown)?;
        // Two passes: released addresses lie before the last allocated.
        for start in [self.next[at], 1] {
            if let Some((n, ip)) = self.cidrs[at]
                .hosts()
                .enumerate()
                .skip(start)
                .find(|(_, ip)| !self.taken.contains(ip))
            {
                self.next[at] = n + 1;
                return Ok(ip);
            }
        }
        Err(Failure::new(
            500,
            "Internal error occurred: failed to allocate a serviceIP: range is full",
        ))
    }

    fn free_port(&self, protocol: &str, beside: &[ServicePort]) -> Outcome<i32> {
        let is_free = |port: &i32| {
            !self.taken_ports.contains(&(*port, protocol.to_owned()))
                && !beside
                    .iter()
                    .any(|p| p.node_port == Some(*port) && p.protocol.as_deref() == Some(protocol))
        };
        NODE_PORTS.into_iter().find(is_free).ok_or_else(|| {
            Failure::new(
                500,
                "Internal error occurred: failed to allocate a nodePort: range is full",
            )
        })
    }
}

/// Fills in the fields that a Service's writer left to the server.
pub(crate) fn complete(
    service: &mut Service,
    old: Option<&Service>,
    addresses: &mut Addresses,
) -> Outcome<()> {
    let name = service.metadata.name.as_deref().unwrap_or_default();
    let spec = service.spec.get_or_insert_default();
    set_defaults(spec);
    if let Some(was) = old.and_then(|o| o.spec.as_ref()) {
        drop_leftovers(spec, was);
    }
    give_cluster_ips(name, spec, old.and_then(|o| o.spec.as_ref()), addresses)?;
    give_node_ports(spec, old.and_then(|o| o.spec.as_ref()), addresses)?;
    service
        .status
        .get_or_insert_default()
        .load_balancer
        .get_or_insert_default();
    Ok(())
}

/// Completes a status by the Service's type, even if the type is not written.
pub(crate) fn default_status(service: &mut Value) {
    if service["spec"]["type"] != "LoadBalancer" {
        return;
    }
    let ingress = service
        .pointer_mut("/status/loadBalancer/ingress")
        .and_then(Value::as_array_mut);
    for ingress in ingress
        .into_iter()
        .flatten()
        .filter(|i| !text(i, "/ip").is_empty() && i["ipMode"].is_null())
    {
        ingress["ipMode"] = json!("VIP");
    }
}

/// Refuses a status that kube-apiserver would refuse.
pub(crate) fn validate_status(service: &Value) -> Outcome<()> {
    let name = text(service, "/metadata/name");
    let refuse = |field: &str, cause: Cause, message: &str| {
        let path = format!("status.loadBalancer.ingress{field}");
        Err(Failure::invalid("Service", "", name, &path, cause, message))
    };
    let all = service
        .pointer("/status/loadBalancer/ingress")
        .and_then(Value::as_array);
    let all = all.map(Vec::as_slice).unwrap_or_default();
    if service["spec"]["type"] != "LoadBalancer" && !all.is_empty() {
        return refuse(
            "",
            Cause::Forbidden,
            "may only be used when `spec.type` is 'LoadBalancer'",
        );
    }
    for (i, ingress) in all.iter().enumerate() {
        let ip = text(ingress, "/ip");
        let mode = ingress["ipMode"].as_str();
        if !ip.is_empty() && ip.parse::<IpAddr>().is_err() {
            return refuse(
                &format!("[{i}].ip"),
                Cause::Invalid,
                &format!("\"{ip}\": must be a valid IP address"),
            );
        }
        let field = format!("[{i}].ipMode");
        match mode {
            None if ip.is_empty() => {}
            None => {
                return refuse(
                    &field,
                    Cause::Required,
                    "must be specified when `ip` is set",
                );
            }
            Some(_) if ip.is_empty() => {
                return refuse(
                    &field,
                    Cause::Forbidden,
                    "may not be specified when `ip` is not set",
                );
            }
            Some("VIP" | "Proxy") => {}
            Some(mode) => {
                let message = format!("\"{mode}\": supported values: \"Proxy\", \"VIP\"");
                return refuse(&field, Cause::NotSupported, &message);
            }
        }
    }
    Ok(())
}

/// Refuses a Service that kube-apiserver would refuse, as far as a proxy relies on it.
pub(crate) fn validate(
    service: &Service,
    old: Option<&Service>,
    addresses: &Addresses,
) -> Outcome<()> {
    let name = service.metadata.name.as_deref().unwrap_or_default();
    let Some(spec) = &service.spec else {
        return Ok(());
    };
    let ports = spec.ports.as_deref().unwrap_or_default();
    let is_headless = spec.cluster_ip.as_deref() == Some("None");
    if ports.is_empty() && !is_headless && !is_external_name(spec) {
        return Err(Failure::invalid(
            "Service",
            "",
            name,
            "spec.ports",
            Cause::Required,
            "",
        ));
    }
    for (i, port) in ports.iter().enumerate() {
        if !(1..=65_535).contains(&port.port) {
            let message = format!("{}: must be between 1 and 65535", port.port);
            return Err(invalid(name, &format!("spec.ports[{i}].port"), &message));
        }
        let protocol = port.protocol.as_deref().unwrap_or_default();
        if !["TCP", "UDP", "SCTP"].contains(&protocol) {
            let message = format!("\"{protocol}\": supported values: \"SCTP\", \"TCP\", \"UDP\"");
            let path = format!("spec.ports[{i}].protocol");
            return Err(Failure::invalid(
                "Service",
                "",
                name,
                &path,
                Cause::NotSupported,
                &message,
            ));
        }
        if ports.len() > 1 && port.name.as_deref().unwrap_or_default().is_empty() {
            return Err(Failure::invalid(
                "Service",
                "",
                name,
                &format!("spec.ports[{i}].name"),
                Cause::Required,
                "",
            ));
        }
    }
    let was = old
        .and_then(|o| o.spec.as_ref())
        .filter(|o| !is_external_name(o) && !is_external_name(spec));
    if let Some(was) = was
        && was.cluster_ip.as_deref().is_some_and(|ip| !ip.is_empty())
        && was.cluster_ip != spec.cluster_ip
    {
        let ip = spec.cluster_ip.as_deref().unwrap_or_default();
        return Err(invalid(
            name,
            "spec.clusterIPs[0]",
            &format!("\"{ip}\": may not change once set"),
        ));
    }
    let ips = spec.cluster_ips.iter().flatten().filter(|ip| *ip != "None");
    if let Some((i, ip)) = ips
        .enumerate()
        .find(|(_, ip)| ip.parse::<IpAddr>().is_err())
    {
        return Err(invalid(
            name,
            &format!("spec.clusterIPs[{i}]"),
            &format!("\"{ip}\": must be an IP address"),
        ));
    }
    for (i, ip) in cluster_ips(service).enumerate() {
        let path = format!("spec.clusterIPs[{i}]");
        if !addresses.cidrs.iter().any(|c| c.contains(&ip)) {
            let cidrs: Vec<_> = addresses.cidrs.iter().map(ToString::to_string).collect();
            let message = format!(
                "\"{ip}\": the provided IP is not in the valid range {}",
                cidrs.join(",")
            );
            return Err(invalid(name, &path, &message));
        }
        if addresses.taken.contains(&ip)
            && !old.is_some_and(|o| cluster_ips(o).any(|was| was == ip))
        {
            let message =
                format!("\"{ip}\": failed to allocate IP {ip}: provided IP is already allocated");
            return Err(invalid(name, &path, &message));
        }
    }
    Ok(())
}

fn set_defaults(spec: &mut ServiceSpec) {
    let or = |field: &mut Option<String>, default: &str| {
        if field.as_deref().unwrap_or_default().is_empty() {
            *field = Some(default.to_owned());
        }
    };
    or(&mut spec.type_, "ClusterIP");
    or(&mut spec.session_affinity, "None");
    if spec.session_affinity.as_deref() == Some("ClientIP") {
        let config = spec
            .session_affinity_config
            .get_or_insert_with(SessionAffinityConfig::default);
        config
            .client_ip
            .get_or_insert_with(ClientIPConfig::default)
            .timeout_seconds
            .get_or_insert(AFFINITY_TIMEOUT);
    }
    for port in spec.ports.iter_mut().flatten() {
        or(&mut port.protocol, "TCP");
        port.target_port.get_or_insert(IntOrString::Int(port.port));
    }
    let has_external_ips = spec
        .external_ips
        .as_ref()
        .is_some_and(|ips| !ips.is_empty());
    if has_node_ports(spec) || has_external_ips {
        or(&mut spec.external_traffic_policy, "Cluster");
    }
    if !is_external_name(spec) {
        or(&mut spec.internal_traffic_policy, "Cluster");
    }
    if spec.type_.as_deref() == Some("LoadBalancer") {
        spec.allocate_load_balancer_node_ports.get_or_insert(true);
    }
}

/// Removes the fields of the previous type that a patch of the type leaves.
fn drop_leftovers(spec: &mut ServiceSpec, was: &ServiceSpec) {
    if !has_node_ports(spec) && has_node_ports(was) {
        for port in spec.ports.iter_mut().flatten() {
            let is_left =
                |old: &ServicePort| old.port == port.port && old.node_port == port.node_port;
            if was.ports.iter().flatten().any(is_left) {
                port.node_port = None;
            }
        }
        if spec.external_ips.as_ref().is_none_or(Vec::is_empty) {
            spec.external_traffic_policy = None;
        }
    }
    if spec.type_.as_deref() != Some("LoadBalancer") && was.type_.as_deref() == Some("LoadBalancer")
    {
        (
            spec.allocate_load_balancer_node_ports,
            spec.health_check_node_port,
        ) = (None, None);
    }
    if is_external_name(spec) && !is_external_name(was) {
        spec.internal_traffic_policy = None;
    }
}

fn give_cluster_ips(
    name: &str,
    spec: &mut ServiceSpec,
    old: Option<&ServiceSpec>,
    addresses: &mut Addresses,
) -> Outcome<()> {
    if is_external_name(spec) {
        (
            spec.cluster_ip,
            spec.cluster_ips,
            spec.ip_families,
            spec.ip_family_policy,
        ) = (None, None, None, None);
        return Ok(());
    }
    let mut ips = spec.cluster_ips.take().unwrap_or_default();
    if ips.is_empty() {
        ips.extend(spec.cluster_ip.take().filter(|ip| !ip.is_empty()));
    }
    if ips.is_empty() {
        ips = old.and_then(|o| o.cluster_ips.clone()).unwrap_or_default();
    }
    let is_headless = ips.first().is_some_and(|ip| ip == "None");
    let mut families = spec.ip_families.take().unwrap_or_default();
    let given = ips
        .iter()
        .filter_map(|ip| ip.parse().ok())
        .map(|ip| family(ip).to_owned());
    families.extend(given.skip(families.len()).collect::<Vec<_>>());
    if families.is_empty() {
        families = old.and_then(|o| o.ip_families.clone()).unwrap_or_default();
    }
    if families.is_empty() {
        families.extend(addresses.families().next().map(str::to_owned));
    }
    let policy = spec.ip_family_policy.get_or_insert_with(|| {
        if families.len() > 1 {
            "RequireDualStack"
        } else {
            "SingleStack"
        }
        .to_owned()
    });
    if policy == "SingleStack" {
        families.truncate(1);
        ips.truncate(1);
    } else if families.len() == 1 {
        families.extend(
            addresses
                .families()
                .find(|f| *f != families[0])
                .map(str::to_owned),
        );
        if families.len() == 1 && policy == "RequireDualStack" {
            let message =
                "\"RequireDualStack\": this cluster is not configured for dual-stack services";
            return Err(invalid(name, "spec.ipFamilyPolicy", message));
        }
    }
    if !is_headless {
        for family in families.iter().skip(ips.len()) {
            ips.push(addresses.free_address(name, family)?.to_string());
        }
    }
    spec.cluster_ip = ips.first().cloned();
    (spec.cluster_ips, spec.ip_families) = (Some(ips), Some(families));
    Ok(())
}

fn give_node_ports(
    spec: &mut ServiceSpec,
    old: Option<&ServiceSpec>,
    addresses: &Addresses,
) -> Outcome<()> {
    let wanted = has_node_ports(spec) && spec.allocate_load_balancer_node_ports != Some(false);
    let mut ports = spec.ports.take().unwrap_or_default();
    for i in 0..ports.len() {
        if !wanted || ports[i].node_port.is_some_and(|p| p != 0) {
            continue;
        }
        let of = |p: &&ServicePort| p.port == ports[i].port && p.protocol == ports[i].protocol;
        let kept = old
            .and_then(|o| o.ports.iter().flatten().find(of))
            .and_then(|p| p.node_port)
            .filter(|p| *p != 0);
        let protocol = ports[i].protocol.clone().unwrap_or_default();
        ports[i].node_port = Some(kept.map_or_else(|| addresses.free_port(&protocol, &ports), Ok)?);
    }
    spec.ports = Some(ports).filter(|p| !p.is_empty());
    let is_local = spec.external_traffic_policy.as_deref() == Some("Local");
    if spec.type_.as_deref() == Some("LoadBalancer")
        && is_local
        && spec.health_check_node_port.unwrap_or(0) == 0
    {
        let kept = old
            .and_then(|o| o.health_check_node_port)
            .filter(|p| *p != 0);
        let beside = spec.ports.as_deref().unwrap_or_default();
        spec.health_check_node_port =
            Some(kept.map_or_else(|| addresses.free_port("TCP", beside), Ok)?);
    }
    Ok(())
}

fn cluster_ips(service: &Service) -> impl Iterator<Item = IpAddr> {
    let ips = service
        .spec
        .iter()
        .flat_map(|s| s.cluster_ips.iter().flatten());
    ips.filter_map(|ip| ip.parse().ok())
}

fn node_ports(service: &Service) -> impl Iterator<Item = (i32, String)> {
    let of = |p: &ServicePort| {
        Some((
            p.node_port.filter(|n| *n != 0)?,
            p.protocol.clone().unwrap_or_default(),
        ))
    };
    let health = service
        .spec
        .iter()
        .filter_map(|s| Some((s.health_check_node_port?, "TCP".to_owned())));
    service
        .spec
        .iter()
        .flat_map(|s| s.ports.iter().flatten())
        .filter_map(of)
        .chain(health)
}

fn has_node_ports(spec: &ServiceSpec) -> bool {
    matches!(spec.type_.as_deref(), Some("NodePort" | "LoadBalancer"))
}

fn is_external_name(spec: &ServiceSpec) -> bool {
    spec.type_.as_deref() == Some("ExternalName")
}

fn family(ip: IpAddr) -> &'static str {
    if ip.is_ipv4() { "IPv4" } else { "IPv6" }
}

fn invalid(name: &str, path: &str, message: &str) -> Failure {
    Failure::invalid("Service", "", name, path, Cause::Invalid, message)
}
