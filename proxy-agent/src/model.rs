//! What the objects mean. All of kube-proxy's semantics live here, as a function of one Service, its slices and this
//! node; each IP family stands alone.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{self as core, Node, ServiceSpec};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use k8s_openapi::jiff::Timestamp;
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto};
use proxy_common::frontend::{Backend, Frontend, FrontendKey, FrontendKind, Service};

use crate::input::ObjectName;
use crate::store::Store;

mod endpoints;
mod read;

use endpoints::{Slice, Uses};
pub use read::Skipped;
use read::{Reader, addr, cidr, ip, port_number, protocol};

/// Another proxy serves a Service with this label (any value).
const SERVICE_PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// An EndpointSlice with this label (any value) is not for proxies.
const HEADLESS: &str = "service.kubernetes.io/headless";
const ZONE: &str = "topology.kubernetes.io/zone";

/// As many slots as a `Service` can count.
const SLOTS_MAX: usize = u16::MAX as usize;

/// What one Service offers, in each family in which it has a ClusterIP.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceModel {
    pub v4: Option<FamilyModel<Addr4>>,
    pub v6: Option<FamilyModel<Addr6>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FamilyModel<A: Addr> {
    pub claim: Claim,
    /// What clients may dial. Other Services may claim the same, so not all of them need to be in force.
    pub frontends: BTreeMap<FrontendKey<A>, Frontend<A>>,
    /// By their names, their ClusterIP frontends.
    pub ports: BTreeMap<FrontendKey<A>, ServicePort<A>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePort<A: Addr> {
    /// Its place in `spec.ports`, for reports.
    pub index: usize,
    /// The backends of each set, by address and port, at most 65,535; empty if no frontend chooses from the set.
    pub cluster: Vec<Backend<A>>,
    pub local: Vec<Backend<A>>,
    /// See [`Service`].
    pub flags: u32,
}

/// Who asks for a frontend. Of several the least, which is the oldest Service, holds it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Claim {
    created: Timestamp,
    pub service: ObjectName,
}

/// What of this node matters to Services.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeModel {
    pub name: String,
    pub zone: Option<String>,
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
        let claim = Claim::new(name, service);
        let slices: Vec<_> = slices.filter(|slice| !has_label(*slice, HEADLESS)).collect();
        let v4 = FamilyModel::new(&claim, spec, &slices, node, &mut skipped);
        let v6 = FamilyModel::new(&claim, spec, &slices, node, &mut skipped);
        // Both families read the same ports.
        skipped.sort_unstable();
        skipped.dedup();
        (Self { v4, v6 }, skipped)
    }

    /// As the store has it now; nothing if it has no such Service.
    pub fn of(store: &Store, name: &ObjectName, node: &NodeModel) -> (Self, Vec<Skipped>) {
        match store.service(name) {
            Some(service) => Self::new(name, service, store.slices_of(name), node),
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

fn has_label(object: &impl kube::Resource, label: &str) -> bool {
    object.meta().labels.as_ref().is_some_and(|labels| labels.contains_key(label))
}

impl<A: Addr> FamilyModel<A> {
    fn new(
        claim: &Claim,
        spec: &ServiceSpec,
        slices: &[&EndpointSlice],
        node: &NodeModel,
        skipped: &mut Vec<Skipped>,
    ) -> Option<Self> {
        let cluster_ip: A = cluster_ip(spec, &mut Reader::new("Service", &claim.service, skipped))?;
        let slices: Vec<_> = slices.iter().filter_map(|slice| Slice::new(slice, node, skipped)).collect();

        let mut reader = Reader::new("Service", &claim.service, skipped);
        let address = FrontendKey::address(cluster_ip);
        let mut frontends = BTreeMap::from([(address, Frontend::new(address, FrontendKind::ADDRESS))]);
        let mut ports = BTreeMap::new();
        for (index, port) in spec.ports.iter().flatten().enumerate() {
            let Some((number, proto)) = read_port(&mut reader, index, port) else { continue };
            let key = FrontendKey::new(cluster_ip, number, proto);
            if ports.contains_key(&key) {
                reader.skip(format_args!("spec.ports[{index}]"), format!("{key:?} is listed before"));
                continue;
            }
            let name = port.name.as_deref().unwrap_or_default();
            frontends.insert(key, Frontend::new(key, FrontendKind::CLUSTER_IP));
            ports.insert(key, ServicePort::new(&mut reader, index, spec, endpoints::join(&slices, name, proto)));
        }
        Some(Self { claim: claim.clone(), frontends, ports })
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

impl<A: Addr> ServicePort<A> {
    fn new(reader: &mut Reader<'_>, index: usize, spec: &ServiceSpec, endpoints: endpoints::Joined<'_, A>) -> Self {
        let internal_local = spec.internal_traffic_policy.as_deref() == Some("Local");
        // The ClusterIP is the only frontend yet. External ones will use the cluster-wide set always, and the local
        // one too under `externalTrafficPolicy: Local`.
        let uses = Uses { cluster: !internal_local, local: internal_local };
        let mut sets = endpoints.select(uses);
        for (name, set) in [("cluster", &mut sets.cluster), ("local", &mut sets.local)] {
            if set.len() > SLOTS_MAX {
                let why = format!("of {} backends in the {name} set only the first {SLOTS_MAX} serve", set.len());
                reader.skip(format_args!("spec.ports[{index}]"), why);
                set.truncate(SLOTS_MAX);
            }
        }
        let mut flags = 0;
        if internal_local {
            flags |= Service::INTERNAL_LOCAL;
        }
        if sets.has_endpoints {
            flags |= Service::HAS_ENDPOINTS;
        }
        Self { index, cluster: sets.cluster, local: sets.local, flags }
    }
}

impl Claim {
    /// What has no age, because no API server ever saw it, is as young as can be.
    fn new(name: &ObjectName, service: &core::Service) -> Self {
        let created = service.metadata.creation_timestamp.as_ref().map_or(Timestamp::MAX, |time| time.0);
        Self { created, service: name.clone() }
    }
}

impl NodeModel {
    pub fn of(store: &Store) -> Self {
        let labels = store.node().and_then(|node| node.metadata.labels.as_ref());
        Self { name: store.node_name().to_owned(), zone: labels.and_then(|labels| labels.get(ZONE)).cloned() }
    }
}

/// The node's addresses: those inside the cluster first, and each kind in the node's order.
pub fn node_addresses(node: &Node) -> Vec<std::net::IpAddr> {
    let addresses = || node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let of_type = |type_| addresses().filter(move |address| address.type_ == type_);
    of_type("InternalIP").chain(of_type("ExternalIP")).filter_map(|address| ip(&address.address).ok()).collect()
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
