//! What the objects mean. All of kube-proxy's semantics live here, as a function of one Service, its slices and this
//! node; each IP family stands alone.

use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};
use std::sync::Arc;

use k8s_openapi::api::core::v1::{self as core, LoadBalancerIngress, ServiceSpec};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use k8s_openapi::jiff::Timestamp;
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto};
use proxy_common::frontend::{Frontend, FrontendKey, FrontendKind};

use crate::input::ObjectName;
use crate::store::Store;

mod endpoints;
mod external;
mod maglev;
mod node;
mod outside;
mod policy;
mod port;
mod read;

use endpoints::{Detour, Joined};
pub(crate) use endpoints::{Endpoint, Slice, join};
pub use external::Range;
use external::{External, externals, source_ranges};
pub use node::{ModelOptions, NodeModel, is_node_eligible, node_addresses, pod_cidrs};
pub use outside::{Lead, Obstacle, Outside, Peer, Reach, Unreachable, endpoint_addresses};
use policy::Policy;
pub use policy::{ALGORITHMS, algorithm_name};
pub use port::ServicePort;
pub use read::{ObjectRef, Skipped};
use read::{Reader, addr, cidr, ip, port_number, protocol};

/// Another proxy serves a Service with this label (any value).
const SERVICE_PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// An EndpointSlice with this label (any value) is not for proxies.
const HEADLESS: &str = "service.kubernetes.io/headless";

/// What one Service offers, in each family in which it has a ClusterIP.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceModel {
    pub v4: Option<FamilyModel<Addr4>>,
    pub v6: Option<FamilyModel<Addr6>>,
    pub health_check: Option<HealthCheck>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FamilyModel<A: Addr> {
    pub claim: Claim,
    /// What clients may dial. Other Services may claim the same, so not all of them need to be in force.
    pub frontends: BTreeMap<FrontendKey<A>, Offer<A>>,
    /// By their names, their ClusterIP frontends.
    pub ports: BTreeMap<FrontendKey<A>, ServicePort<A>>,
    /// Who may dial the LoadBalancer frontends; empty if everyone may.
    pub source_ranges: BTreeSet<Range<A>>,
    /// Addresses that are on this node and ready, over all ports.
    pub local_ready: usize,
    /// Backends that are left out because this host, which is no node, does not reach them.
    pub unreachable: Vec<Unreachable>,
}

/// A frontend that a Service would have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer<A: Addr> {
    pub frontend: Frontend<A>,
    /// Where the Service says so, for reports.
    pub field: String,
}

/// Who asks for a frontend. Of several the least, which is the oldest Service, holds it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Claim {
    created: Timestamp,
    pub service: ObjectName,
}

/// What load balancers are told that ask at `spec.healthCheckNodePort`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    pub port: u16,
    /// Addresses of ready endpoints on this node, of both families.
    pub local_endpoints: usize,
}

/// What both families of a Service are made from.
struct Parts<'a> {
    claim: Claim,
    spec: &'a ServiceSpec,
    ingress: &'a [LoadBalancerIngress],
    policy: Policy,
    slices: Vec<&'a EndpointSlice>,
    node: &'a NodeModel,
}

impl ServiceModel {
    pub fn new<'a>(
        name: &ObjectName,
        service: &core::Service,
        slices: impl Iterator<Item = &'a EndpointSlice>,
        node: &NodeModel,
    ) -> (Self, Vec<Skipped>) {
        let mut skipped = Vec::new();
        let Some(spec) = service.spec.as_ref().filter(|spec| is_proxied(service, spec)) else {
            return (Self::default(), skipped);
        };
        let status = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
        let parts = Parts {
            claim: Claim::new(name, service),
            spec,
            ingress: status.and_then(|status| status.ingress.as_deref()).unwrap_or_default(),
            policy: Policy::new(&mut Reader::new("Service", name, &mut skipped), service, spec, node),
            slices: slices.filter(|slice| !is_headless(slice)).collect(),
            node,
        };
        let v4 = FamilyModel::new(&parts, &mut skipped);
        let v6 = FamilyModel::new(&parts, &mut skipped);
        // A pod of both families is one endpoint to a load balancer.
        let local_endpoints =
            v4.as_ref().map_or(0, |v4| v4.local_ready).max(v6.as_ref().map_or(0, |v6| v6.local_ready));
        let health_check =
            parts.policy.health_check_port.filter(|_| (v4.is_some() || v6.is_some()) && node.outside.is_none());
        let health_check = health_check.map(|port| HealthCheck { port, local_endpoints });
        // Both families read the same fields.
        skipped.sort_unstable();
        skipped.dedup();
        (Self { v4, v6, health_check }, skipped)
    }

    /// As the store has it now; nothing if it has no such Service.
    pub fn of(store: &Store, name: &ObjectName, node: &NodeModel) -> (Self, Vec<Skipped>) {
        match store.service(name) {
            Some(service) => Self::new(name, service, store.slices_of(name).map(Arc::as_ref), node),
            None => Default::default(),
        }
    }
}

/// Whether the Service has a ClusterIP that is ours to serve.
fn is_proxied(service: &core::Service, spec: &ServiceSpec) -> bool {
    let cluster_ip = spec.cluster_ip.as_deref().unwrap_or_default();
    !has_label(service, SERVICE_PROXY_NAME)
        && !matches!(cluster_ip, "" | "None")
        && spec.type_.as_deref() != Some("ExternalName")
}

pub(crate) fn is_headless(slice: &EndpointSlice) -> bool {
    has_label(slice, HEADLESS)
}

fn has_label(object: &impl kube::Resource, label: &str) -> bool {
    object.meta().labels.as_ref().is_some_and(|labels| labels.contains_key(label))
}

impl<A: Addr> FamilyModel<A> {
    fn new(parts: &Parts<'_>, skipped: &mut Vec<Skipped>) -> Option<Self> {
        let name = &parts.claim.service;
        let cluster_ip: A = cluster_ip(parts.spec, &mut Reader::new("Service", name, skipped))?;
        let slices: Vec<_> = parts.slices.iter().filter_map(|slice| Slice::new(slice, parts.node, skipped)).collect();

        let mut reader = Reader::new("Service", name, skipped);
        let externals = externals(&mut reader, parts.spec, parts.ingress, cluster_ip);
        let source_ranges = source_ranges(&mut reader, parts.spec, &externals, parts.node);
        let mut frontends = Offers::at(cluster_ip);
        let mut ports = BTreeMap::new();
        let (mut local_ready, mut unreachable) = (BTreeSet::new(), Vec::new());
        for (index, port) in parts.spec.ports.iter().flatten().enumerate() {
            let Some((number, proto)) = read_port(&mut reader, index, port) else { continue };
            let key = FrontendKey::new(cluster_ip, number, proto);
            if ports.contains_key(&key) {
                reader.skip(format_args!("spec.ports[{index}]"), format!("{key:?} is listed before"));
                continue;
            }
            let node_port = parts.policy.node_port(&mut reader, index, port);
            let own_node_port = node_port.filter(|_| parts.node.outside.is_none());
            let is_external = own_node_port.is_some() || !externals.is_empty();
            frontends.add_port(&mut reader, index, key, own_node_port, &externals);
            let endpoints = join(&slices, port.name.as_deref().unwrap_or_default(), proto);
            let (endpoints, left_out) = parts.within_reach(key, node_port, is_external, endpoints);
            unreachable.extend(left_out);
            local_ready.extend(endpoints.local_ready());
            let terms = parts.policy.terms(proto, is_external, !source_ranges.is_empty());
            ports.insert(key, ServicePort::new(&mut reader, index, terms, &endpoints));
        }
        let Offers(frontends) = frontends;
        let (claim, local_ready) = (parts.claim.clone(), local_ready.len());
        Some(Self { claim, frontends, ports, source_ranges, local_ready, unreachable })
    }
}

impl Parts<'_> {
    /// The endpoints of a port as this host reaches them, and those that it does not reach.
    fn within_reach<'a, A: Addr>(
        &self,
        key: FrontendKey<A>,
        node_port: Option<Port>,
        is_external: bool,
        endpoints: Joined<'a, A>,
    ) -> (Joined<'a, A>, Vec<Unreachable>) {
        let Some(outside) = &self.node.outside else { return (endpoints, Vec::new()) };
        if self.policy.internal_local && !is_external {
            return (Joined::none(), Vec::new()); // None is ever local, so there is nothing to wait for.
        }
        let external_local = self.policy.external_local;
        let (endpoints, left_out) = endpoints.around(Detour { outside, node_port, external_local });
        let unreachable = left_out.into_iter().map(|(at, obstacle)| Unreachable {
            port: key.port.get(),
            proto: key.proto,
            backend: (at.addr.ip(), at.port.get()).into(),
            obstacle,
            has_node_port: node_port.is_some(),
        });
        (endpoints, unreachable.collect())
    }
}

/// The ClusterIP of one family. `clusterIPs` is in the order of `ipFamilies`, and `clusterIP` is its first.
fn cluster_ip<A: Addr>(spec: &ServiceSpec, reader: &mut Reader<'_>) -> Option<A> {
    let primary = spec.cluster_ip.as_deref()?;
    let families = spec.ip_families.as_deref().unwrap_or_default();
    if families.is_empty() {
        let other_family = ip(primary).is_ok_and(|ip| A::from_ip(ip).is_none());
        return if other_family { None } else { reader.take(format_args!("spec.clusterIP"), addr(primary)) };
    }
    let index = families.iter().position(|family| family == A::FAMILY)?;
    let cluster_ips = spec.cluster_ips.as_deref().unwrap_or_default();
    // Only a manifest that never saw an API server leaves `clusterIPs` out.
    let text = cluster_ips.get(index).map(String::as_str).or((index == 0).then_some(primary))?;
    reader.take(format_args!("spec.clusterIPs[{index}]"), addr(text))
}

fn read_port(reader: &mut Reader<'_>, index: usize, port: &core::ServicePort) -> Option<(Port, Proto)> {
    let number = reader.take(format_args!("spec.ports[{index}].port"), port_number(port.port))?;
    let proto = reader.take(format_args!("spec.ports[{index}].protocol"), protocol(port.protocol.as_deref()))?;
    Some((number, proto))
}

struct Offers<A: Addr>(BTreeMap<FrontendKey<A>, Offer<A>>);

impl<A: Addr> Offers<A> {
    fn at(cluster_ip: A) -> Self {
        let key = FrontendKey::address(cluster_ip);
        let frontend = Frontend::new(key, FrontendKind::ADDRESS);
        Self([(key, Offer { frontend, field: "spec.clusterIP".to_owned() })].into())
    }

    /// All frontends of one port. Of an address that is listed twice the first listing counts.
    fn add_port(
        &mut self,
        reader: &mut Reader<'_>,
        index: usize,
        service: FrontendKey<A>,
        node_port: Option<Port>,
        externals: &[External<A>],
    ) {
        let FrontendKey { port, proto, .. } = service;
        self.add(service, Frontend::new(service, FrontendKind::CLUSTER_IP), format!("spec.ports[{index}]"));
        if let Some(node_port) = node_port {
            let key = FrontendKey::node_port(node_port, proto);
            let field = format!("spec.ports[{index}].nodePort");
            if !self.add(key, Frontend::new(service, FrontendKind::NODE_PORT), field) {
                reader.skip(format_args!("spec.ports[{index}].nodePort"), format!("{key:?} is listed before"));
            }
        }
        for External { addr, kind, field } in externals {
            self.add(FrontendKey::new(*addr, port, proto), Frontend::new(service, *kind), field.clone());
        }
    }

    /// Whether it is new.
    fn add(&mut self, key: FrontendKey<A>, frontend: Frontend<A>, field: String) -> bool {
        match self.0.entry(key) {
            Entry::Vacant(entry) => {
                entry.insert(Offer { frontend, field });
                true
            }
            Entry::Occupied(_) => false,
        }
    }
}

impl Claim {
    /// What has no age, because no API server ever saw it, is as young as can be.
    fn new(name: &ObjectName, service: &core::Service) -> Self {
        let created = service.metadata.creation_timestamp.as_ref().map_or(Timestamp::MAX, |time| time.0);
        Self { created, service: name.clone() }
    }
}

/// The ranges from which ClusterIPs are taken, sorted.
pub fn service_cidrs<'a>(objects: impl Iterator<Item = &'a ServiceCIDR>) -> (Vec<ipnet::IpNet>, Vec<Skipped>) {
    let (mut cidrs, mut skipped) = (Vec::new(), Vec::new());
    for object in objects {
        let name = ObjectName::from(object);
        let mut reader = Reader::new("ServiceCIDR", &name, &mut skipped);
        let texts = object.spec.iter().flat_map(|spec| spec.cidrs.iter().flatten());
        for (index, text) in texts.enumerate() {
            cidrs.extend(reader.take(format_args!("spec.cidrs[{index}]"), cidr(text)));
        }
    }
    cidrs.sort_unstable();
    cidrs.dedup();
    (cidrs, skipped)
}

#[cfg(test)]
mod tests;
