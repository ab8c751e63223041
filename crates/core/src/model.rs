//! The semantics of kube-proxy, as a pure function of one Service, its slices and this node. The
//! two IP families are independent.

use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};
use std::net::IpAddr;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use proxy_common::addr::{Addr, Addr4, Addr6, Port, Proto};
use proxy_common::frontend::{Frontend, FrontendKey, FrontendKind, Namespace};

use crate::compact::{self, EndpointSlice, Flat, Shared};
use crate::health::ServiceHealth;
use crate::input::ObjectName;
use crate::room::{Rows, add};
use crate::store::Store;

mod cost;
mod endpoints;
mod external;
mod guard;
mod handover;
mod host_mode;
mod node;
mod places;
mod policy;
mod port;
mod ranges;
mod read;
mod redirect;
mod weights;

pub(crate) use cost::rows_at_most;
use cost::{TABLES_OF_SERVICE, report_without_tables};
pub use endpoints::{Endpoint, Slice, join};
use endpoints::{Joined, NodePortFallback, WithinReach};
use external::{External, externals, source_ranges};
pub use external::{Range, not_taken};
pub use guard::concerns as concerns_guard;
pub use guard::{Guard, PodsOfOthers};
pub use handover::{AbleNodes, ExternalForwarding};
pub use host_mode::{
    ClusterRoute, HostMode, HostRoutes, RemoteNode, TunnelledPod, Unreachable, UnreachableReason,
    endpoint_addresses,
};
pub use node::{
    ModelOptions, NodeModel, is_node_eligible, is_node_lost, node_addresses, pod_cidrs,
};
use policy::Policy;
pub use policy::{ALGORITHMS, algorithm_name};
use port::PortPolicy;
pub use port::ServicePort;
pub use ranges::SharedNetworks;
pub(crate) use read::ip_of;
pub use read::{Cause, ObjectRef, Skipped};
use read::{Reader, addr, port_number, protocol};
pub use read::{cidr, ip};
pub use redirect::Redirect;
pub(crate) use redirect::address::{claimant, name_object};
pub(crate) use redirect::{redirected_by, redirected_to, skipped_redirects};
pub use weights::{WEIGHT_MAX, Weights};

/// The frontends and ports of one Service, for each family of its ClusterIPs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceModel {
    pub v4: Option<FamilyModel<Addr4>>,
    pub v6: Option<FamilyModel<Addr6>>,
    pub health_check: Option<HealthCheck>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FamilyModel<A: Addr> {
    pub claim: Claim,
    /// Set if a device of the host has the ClusterIP and the host keeps its packets. The Service's
    /// claims hold, so that no other Service gets the frontends, which are not programmed.
    pub is_kept_by_host: bool,
    /// The claimed frontends. Some may belong to an older Service and are then not programmed.
    pub frontends: Flat<FrontendKey<A>, ClaimedFrontend<A>>,
    /// The ports, keyed by ClusterIP frontend.
    pub ports: Flat<FrontendKey<A>, ServicePort<A>>,
    /// The ports without backends because the ports before them already exceed the maps' capacity.
    pub without_room: BTreeSet<FrontendKey<A>>,
    /// The client ranges allowed to dial the LoadBalancer frontends. Empty allows every client.
    pub source_ranges: BTreeSet<Range<A>>,
    /// The number of ready addresses on this node, over all ports.
    pub local_ready: usize,
    /// The backends omitted in host mode because this host has no route to them.
    pub unreachable: Vec<Unreachable>,
    /// The pods behind the tunnel, for each port that only the tunnel reaches.
    pub tunnelled: BTreeMap<FrontendKey<A>, Vec<TunnelledPod>>,
    /// The local redirect's pods for each port, in slot order of the set `local`.
    pub redirected: BTreeMap<FrontendKey<A>, Vec<ObjectName>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimedFrontend<A: Addr> {
    pub frontend: Frontend<A>,
    /// The Service field that holds the address, for reports.
    pub field: Shared,
}

/// A Service's claim to a frontend. The smallest claim wins, which is the oldest Service's.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Claim {
    /// Set for a redirected address, which yields to every Service.
    pub(crate) yields: bool,
    created: Timestamp,
    pub service: ObjectName,
}

/// The health check that load balancers query at `spec.healthCheckNodePort`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthCheck {
    pub port: u16,
    /// The number of ready endpoint addresses on this node: the larger family's.
    pub local_endpoints: usize,
}

/// The inputs shared by both families.
struct Parts<'a> {
    claim: Claim,
    service: &'a compact::Service,
    policy: Policy,
    weights: Weights,
    slices: Vec<&'a EndpointSlice>,
    redirect: Option<Redirect<'a>>,
    around: &'a Surroundings,
    node: &'a NodeModel,
}

/// The state outside a Service that affects its model.
#[derive(Clone, Debug, Default)]
pub struct Surroundings {
    pub namespace: Namespace,
    pub pods_of_others: PodsOfOthers,
}

impl ServiceModel {
    pub fn new<'a>(
        name: &ObjectName,
        service: &compact::Service,
        slices: impl Iterator<Item = &'a EndpointSlice>,
        redirect: Option<Redirect<'a>>,
        around: &Surroundings,
        node: &NodeModel,
    ) -> (Self, Vec<Skipped>) {
        let mut skipped = Vec::new();
        let parts = Parts {
            claim: Claim::new(name, service),
            service,
            policy: Policy::new(
                &mut Reader::new("Service", name, &mut skipped),
                service,
                node,
            ),
            weights: Weights::of(service, &mut skipped),
            slices: slices.filter(|slice| !slice.is_headless).collect(),
            redirect,
            around,
            node,
        };
        let v4 = FamilyModel::new(&parts, &mut skipped);
        let v6 = FamilyModel::new(&parts, &mut skipped);
        // Load balancers count a dual-stack pod once.
        let local_endpoints = v4
            .as_ref()
            .map_or(0, |v4| v4.local_ready)
            .max(v6.as_ref().map_or(0, |v6| v6.local_ready));
        let health_check = parts
            .policy
            .health_check_port
            .filter(|_| (v4.is_some() || v6.is_some()) && node.host_mode.is_none());
        let health_check = health_check.map(|port| HealthCheck {
            port,
            local_endpoints,
        });
        // Both families report the same fields.
        skipped.sort_unstable();
        skipped.dedup();
        (
            Self {
                v4,
                v6,
                health_check,
            },
            skipped,
        )
    }

    /// Models a Service from the store. Returns an empty model if kpx does not serve the Service.
    pub fn of(store: &Store, name: &ObjectName, node: &NodeModel) -> (Self, Vec<Skipped>) {
        let is_served =
            |service: &&Arc<_>| is_proxied(service) && redirect::is_served(store, name, service);
        let Some(service) = store.service(name).filter(is_served) else {
            return Default::default();
        };
        let mut of_redirect = Vec::new();
        let redirect = Redirect::of(store, name, service, node.has_redirects, &mut of_redirect);
        let slices = store.slices_of(name).map(Arc::as_ref);
        // A redirected address belongs to no namespace.
        let namespace = match service.is_redirected_address {
            true => Namespace::NONE,
            false => store.namespace_number(&name.namespace),
        };
        let around = Surroundings {
            namespace,
            pods_of_others: PodsOfOthers::of(store, name, service),
        };
        let (model, mut skipped) = Self::new(name, service, slices, redirect, &around, node);
        skipped.extend(of_redirect);
        skipped.iter_mut().for_each(name_object);
        (model, skipped)
    }
}

/// Returns true if the Service has a ClusterIP that kpx must serve.
fn is_proxied(service: &compact::Service) -> bool {
    let cluster_ip = service.cluster_ip.as_deref().unwrap_or_default();
    !service.is_of_other_proxy
        && !matches!(cluster_ip, "" | "None")
        && service.type_.as_deref() != Some("ExternalName")
}

impl<A: Addr> FamilyModel<A> {
    fn new(parts: &Parts<'_>, skipped: &mut Vec<Skipped>) -> Option<Self> {
        let name = &parts.claim.service;
        let cluster_ip: A = cluster_ip(parts.service, &mut Reader::new("Service", name, skipped))?;
        let slice = |slice| Slice::new(slice, parts.node, &parts.weights, skipped);
        let slices: Vec<_> = parts.slices.iter().copied().filter_map(slice).collect();

        let mut reader = Reader::new("Service", name, skipped);
        if !parts
            .node
            .guard
            .leaves_address(&mut reader, parts.service, cluster_ip.ip())
        {
            return None;
        }
        let is_kept_by_host = parts.node.keeps(&mut reader, cluster_ip.ip());
        let externals = externals(&mut reader, parts.service, cluster_ip, &parts.node.guard);
        let source_ranges = source_ranges(&mut reader, parts.service, &externals, parts.node);
        let frontends = ClaimedFrontends::of(parts.service, cluster_ip, parts.around.namespace);
        let mut family = Family {
            parts,
            cluster_ip,
            slices: &slices,
            externals: &externals,
            has_source_ranges: !source_ranges.is_empty(),
            frontends,
            ports: BTreeMap::new(),
            used: Rows::default(),
            without_room: BTreeSet::new(),
            without_tables: 0,
            local_ready: BTreeSet::new(),
            unreachable: Vec::new(),
            tunnelled: BTreeMap::new(),
            redirected: BTreeMap::new(),
            skipped_redirects: Vec::new(),
        };
        for (index, port) in parts.service.ports.iter().enumerate() {
            if let Some((key, node_port)) = family.claim_port(&mut reader, index, port) {
                family.fill_port(&mut reader, index, port, key, node_port);
            }
        }
        report_without_tables(&mut reader, family.without_tables);
        skipped.extend(family.skipped_redirects);
        Some(Self {
            claim: parts.claim.clone(),
            is_kept_by_host,
            frontends: family.frontends.frontends.into(),
            ports: family.ports.into(),
            without_room: family.without_room,
            source_ranges,
            local_ready: family.local_ready.len(),
            unreachable: family.unreachable,
            tunnelled: family.tunnelled,
            redirected: family.redirected,
        })
    }

    /// Returns true if the host keeps the packets to this frontend.
    pub(crate) fn is_kept(&self, frontend: &Frontend<A>) -> bool {
        self.is_kept_by_host && !frontend.kind.is_external()
    }
}

/// The builder of one family's model, port by port.
struct Family<'a, A: Addr> {
    parts: &'a Parts<'a>,
    cluster_ip: A,
    slices: &'a [Slice<'a, A>],
    externals: &'a [External<A>],
    has_source_ranges: bool,
    frontends: ClaimedFrontends<A>,
    ports: BTreeMap<FrontendKey<A>, ServicePort<A>>,
    /// The rows used so far. Ports beyond the maps' capacity get no backends.
    used: Rows,
    without_room: BTreeSet<FrontendKey<A>>,
    /// The number of ports without a look-up table, because the maps have no space for it.
    without_tables: usize,
    local_ready: BTreeSet<A>,
    unreachable: Vec<Unreachable>,
    tunnelled: BTreeMap<FrontendKey<A>, Vec<TunnelledPod>>,
    redirected: BTreeMap<FrontendKey<A>, Vec<ObjectName>>,
    skipped_redirects: Vec<Skipped>,
}

/// The node port in the Service's spec, and the node port that this node serves.
#[derive(Clone, Copy)]
struct NodePorts {
    named: Option<Port>,
    served: Option<Port>,
}

impl<A: Addr> Family<'_, A> {
    /// Claims the frontends of a port. Returns `None` if the port is not served.
    fn claim_port(
        &mut self,
        reader: &mut Reader<'_>,
        index: usize,
        port: &compact::ServicePort,
    ) -> Option<(FrontendKey<A>, NodePorts)> {
        let parts = self.parts;
        let guard = &parts.node.guard;
        let (number, proto) = read_port(reader, index, port)?;
        let key = FrontendKey::new(self.cluster_ip, number, proto);
        if self.ports.contains_key(&key) {
            let why = format!("{key:?} is listed before");
            reader.skip(format_args!("spec.ports[{index}]"), why);
            return None;
        }
        if !guard.leaves_port(reader, parts.service, index, key) {
            return None;
        }
        let named = parts.policy.node_port(reader, index, port);
        let served = named.filter(|_| parts.node.host_mode.is_none());
        let served = served.filter(|node_port| {
            let admitted = guard.admit_node_port(*node_port, proto);
            reader.admit(format_args!("spec.ports[{index}].nodePort"), admitted)
        });
        self.frontends.add_port(reader, index, key, served);
        for external in self.externals {
            let admitted = parts.admit_external_port(external, number, proto);
            if reader.admit(format_args!("{}", external.field), admitted) {
                self.frontends.add_external(key, external);
            }
        }
        Some((key, NodePorts { named, served }))
    }

    /// Adds a port, with backends while the maps have space.
    fn fill_port(
        &mut self,
        reader: &mut Reader<'_>,
        index: usize,
        port: &compact::ServicePort,
        key: FrontendKey<A>,
        node_ports: NodePorts,
    ) {
        let parts = self.parts;
        let room = &parts.node.room;
        let is_external = node_ports.served.is_some() || !self.externals.is_empty();
        let has_room = room.holds(&self.used);
        let endpoints = if has_room {
            let name = port.name.as_deref().unwrap_or_default();
            join(self.slices, name, key.proto)
        } else {
            self.without_room.insert(key);
            Joined::none()
        };
        let (endpoints, pods, unreachable) =
            parts.within_reach(key, node_ports.named, is_external, endpoints);
        self.unreachable.extend(unreachable);
        if !pods.is_empty() {
            self.tunnelled.insert(key, pods);
        }
        self.local_ready.extend(endpoints.local_ready());
        let policy = PortPolicy {
            hands_over: parts.hands_over(is_external, key.proto),
            has_tables: room.holds_tables(&self.used, TABLES_OF_SERVICE),
            ..parts
                .policy
                .port_policy(key.proto, is_external, self.has_source_ranges)
        };
        let redirect = parts.redirect.as_ref().filter(|_| has_room);
        let admit = |ip| parts.node.guard.admit_endpoint(ip);
        let redirected = redirect.and_then(|to| {
            to.port(
                port,
                key.port,
                key.proto,
                admit,
                &mut self.skipped_redirects,
            )
        });
        let health = ServiceHealth::new(parts.policy.backend_health, key, &parts.node.silent);
        let served = ServicePort::new(
            reader,
            index,
            policy,
            &endpoints,
            redirected.as_ref(),
            health,
            &parts.node.able,
        );
        add(&mut self.used, &served.rows());
        self.without_tables += usize::from(served.lacks_tables);
        self.ports.insert(key, served);
        if let Some(redirected) = redirected {
            self.redirected.insert(key, redirected.pods);
        }
    }
}

impl Parts<'_> {
    /// Returns true if external clients of a port are handed over to the backend's node. SCTP is
    /// left out: the addresses in its packets stay those of the frontend.
    fn hands_over(&self, is_external: bool, proto: Proto) -> bool {
        is_external
            && !self.policy.external_local
            && self.policy.external_forwarding == ExternalForwarding::Dsr
            && self.node.able.is_able()
            && self.node.host_mode.is_none()
            && proto != Proto::SCTP
    }

    /// Checks that a port of an external address may be served.
    fn admit_external_port<A: Addr>(
        &self,
        external: &External<A>,
        port: Port,
        proto: Proto,
    ) -> Result<(), String> {
        self.node.guard.admit_port(external.addr, port, proto)?;
        match external.kind == FrontendKind::EXTERNAL_IP {
            // Host-network pods share the node's addresses, so these are not checked against pods.
            true if self.node.guard.is_own(external.addr.ip()) => Ok(()),
            true => self
                .around
                .pods_of_others
                .admit(external.addr.ip(), port, proto),
            false => Ok(()),
        }
    }

    /// Returns the endpoints that this host reaches, the pods behind the tunnel, and the
    /// unreachable endpoints.
    fn within_reach<'a, A: Addr>(
        &self,
        key: FrontendKey<A>,
        node_port: Option<Port>,
        is_external: bool,
        endpoints: Joined<'a, A>,
    ) -> (Joined<'a, A>, Vec<TunnelledPod>, Vec<Unreachable>) {
        let Some(host_mode) = &self.node.host_mode else {
            return (endpoints, Vec::new(), Vec::new());
        };
        if self.policy.internal_local && !is_external {
            return (Joined::none(), Vec::new(), Vec::new()); // Host mode has no local endpoints.
        }
        let external_local = self.policy.external_local;
        let proto = key.proto;
        let namespace = &self.claim.service.namespace;
        let WithinReach {
            joined,
            tunnelled,
            stranded,
        } = endpoints.with_node_ports(NodePortFallback {
            host_mode,
            node_port,
            external_local,
            proto,
            namespace,
        });
        let unreachable = stranded.into_iter().map(|(at, reason)| Unreachable {
            port: key.port.get(),
            proto: key.proto,
            backend: (at.addr.ip(), at.port.get()).into(),
            reason,
            has_node_port: node_port.is_some(),
        });
        (joined, tunnelled, unreachable.collect())
    }
}

/// Returns all readable ClusterIPs of a Service.
pub(crate) fn cluster_ips(service: &compact::Service) -> impl Iterator<Item = IpAddr> {
    let texts = service.cluster_ip.iter().chain(&service.cluster_ips);
    texts
        .filter_map(|text| ip(text).ok())
        .filter(|ip| !ip.is_unspecified())
}

/// Returns the ClusterIP of one family. `clusterIPs` has the order of `ipFamilies`; its first
/// element equals `clusterIP`.
fn cluster_ip<A: Addr>(service: &compact::Service, reader: &mut Reader<'_>) -> Option<A> {
    let primary = service.cluster_ip.as_deref()?;
    let families = &service.ip_families;
    if families.is_empty() {
        let other_family = ip(primary).is_ok_and(|ip| A::from_ip(ip).is_none());
        return if other_family {
            None
        } else {
            reader.take(format_args!("spec.clusterIP"), addr(primary))
        };
    }
    let index = families.iter().position(|family| **family == *A::FAMILY)?;
    // The API server always fills `clusterIPs`; a manifest from a folder may omit them.
    let text = service
        .cluster_ips
        .get(index)
        .map(AsRef::as_ref)
        .or((index == 0).then_some(primary))?;
    reader.take(format_args!("spec.clusterIPs[{index}]"), addr(text))
}

fn read_port(
    reader: &mut Reader<'_>,
    index: usize,
    port: &compact::ServicePort,
) -> Option<(Port, Proto)> {
    let number = reader.take(
        format_args!("spec.ports[{index}].port"),
        port_number(port.port),
    )?;
    let proto = reader.take(
        format_args!("spec.ports[{index}].protocol"),
        protocol(port.protocol.as_deref()),
    )?;
    Some((number, proto))
}

/// The frontends that one Service claims. Packets to other ports of an address pass unless the row
/// for the whole address exists.
struct ClaimedFrontends<A: Addr> {
    frontends: BTreeMap<FrontendKey<A>, ClaimedFrontend<A>>,
    namespace: Namespace,
}

impl<A: Addr> ClaimedFrontends<A> {
    fn of(service: &compact::Service, cluster_ip: A, namespace: Namespace) -> Self {
        let mut frontends = Self {
            frontends: BTreeMap::new(),
            namespace,
        };
        let key = FrontendKey::address(cluster_ip);
        if !service.is_redirected_address {
            frontends.add(
                key,
                Frontend::new(key, FrontendKind::ADDRESS),
                "spec.clusterIP".to_owned(),
            );
        }
        frontends
    }

    /// Adds a port's frontends at the ClusterIP and the node's addresses.
    fn add_port(
        &mut self,
        reader: &mut Reader<'_>,
        index: usize,
        service: FrontendKey<A>,
        node_port: Option<Port>,
    ) {
        self.add(
            service,
            Frontend::new(service, FrontendKind::CLUSTER_IP),
            format!("spec.ports[{index}]"),
        );
        if let Some(node_port) = node_port {
            let key = FrontendKey::node_port(node_port, service.proto);
            let field = format!("spec.ports[{index}].nodePort");
            if !self.add(key, Frontend::new(service, FrontendKind::NODE_PORT), field) {
                reader.skip(
                    format_args!("spec.ports[{index}].nodePort"),
                    format!("{key:?} is listed before"),
                );
            }
        }
    }

    /// Adds a port's frontend at an external address. The first field that lists an address wins.
    fn add_external(&mut self, service: FrontendKey<A>, external: &External<A>) {
        let key = FrontendKey::new(external.addr, service.port, service.proto);
        self.add(
            key,
            Frontend::new(service, external.kind),
            external.field.clone(),
        );
    }

    /// Adds a frontend. Returns true if it is new.
    fn add(&mut self, key: FrontendKey<A>, frontend: Frontend<A>, field: String) -> bool {
        let frontend = frontend.in_namespace(self.namespace);
        match self.frontends.entry(key) {
            Entry::Vacant(entry) => {
                entry.insert(ClaimedFrontend {
                    frontend,
                    field: field.into(),
                });
                true
            }
            Entry::Occupied(_) => false,
        }
    }
}

impl Claim {
    /// Returns the Service's claim. A Service without creation time (from a manifest) counts as the
    /// youngest.
    fn new(name: &ObjectName, service: &compact::Service) -> Self {
        Self {
            yields: service.is_redirected_address,
            created: service.created.unwrap_or(Timestamp::MAX),
            service: name.clone(),
        }
    }
}

/// Returns the ServiceCIDRs, sorted.
pub fn service_cidrs<'a>(
    objects: impl Iterator<Item = &'a ServiceCIDR>,
) -> (Vec<ipnet::IpNet>, Vec<Skipped>) {
    let mut cidrs = Vec::new();
    let mut skipped = Vec::new();
    for object in objects {
        let name = ObjectName::from(&object.metadata);
        let mut reader = Reader::new("ServiceCIDR", &name, &mut skipped);
        let texts = object
            .spec
            .iter()
            .flat_map(|spec| spec.cidrs.iter().flatten());
        for (index, text) in texts.enumerate() {
            cidrs.extend(reader.take(format_args!("spec.cidrs[{index}]"), cidr(text)));
        }
    }
    cidrs.sort_unstable();
    cidrs.dedup();
    (cidrs, skipped)
}

#[cfg(test)]
pub(crate) mod tests;
