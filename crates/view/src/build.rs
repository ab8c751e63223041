//! Builds the views from the agent's state. The agent's loop provides shared snapshots, and the
//! views are built outside the loop, so that ten thousand Services do not delay it.

use std::collections::BTreeMap;
use std::net::IpAddr;

use proxy_common::addr::{Addr, Proto, SockAddr};
use proxy_common::connect::Connects;
use proxy_common::frontend::{Backend, Dialled, FrontendKey, FrontendKind, Set};

use crate::{
    BackendView, ConnectView, FrontendView, NameView, PortCounts, PortView, ServiceView,
    UdpOutcomes,
};
use proxy_core::compact::{ServicePort, Shared};
use proxy_core::desired::{ServiceSnapshot, Snapshot};
use proxy_core::health::Path;
use proxy_core::input::ObjectName;
use proxy_core::model::{
    self, Endpoint, FamilyModel, NodeModel, Skipped, Slice, Unreachable, Weights,
};
use proxy_datapath::{Counts, FamilyCounts, FlowCount};

/// The paths to backends in host mode.
const DIRECT: &str = "direct";
const NODE_PORT: &str = "node port";
const TUNNEL: &str = "tunnel";
const UNREACHABLE: &str = "unreachable";

/// Returns the views by namespace and name.
pub fn views(snapshot: &Snapshot, counts: &Counts) -> Vec<ServiceView> {
    let views = Views { snapshot, counts };
    snapshot
        .services
        .iter()
        .map(|service| views.view(service))
        .collect()
}

pub fn view(snapshot: &Snapshot, counts: &Counts, service: &ServiceSnapshot) -> ServiceView {
    Views { snapshot, counts }.view(service)
}

/// Returns the names of all programmed frontends.
pub fn frontend_names(snapshot: &Snapshot) -> Vec<NameView> {
    let names = snapshot.services.iter().flat_map(|service| {
        let v4 = service
            .v4
            .iter()
            .flat_map(|v4| names(service, v4, &snapshot.conflicts4));
        let v6 = service
            .v6
            .iter()
            .flat_map(|v6| names(service, v6, &snapshot.conflicts6));
        v4.chain(v6)
    });
    names.collect()
}

/// The state of the agent, and the flow counts read after it.
struct Views<'a> {
    snapshot: &'a Snapshot,
    counts: &'a Counts,
}

impl Views<'_> {
    fn view(&self, service: &ServiceSnapshot) -> ServiceView {
        let Self {
            snapshot:
                Snapshot {
                    node,
                    conflicts4,
                    conflicts6,
                    ..
                },
            counts,
        } = self;
        let object = &service.object;
        let ObjectName { namespace, name } = &object.name;
        let mut ports: Vec<_> = object.ports.iter().map(port_view).collect();
        let mut connects = vec![Connects::NOTHING; ports.len()];
        let mut addresses = Addresses::default();
        if let Some(v4) = &service.v4 {
            FamilyView {
                service,
                model: v4,
                conflicts: conflicts4,
                counts: &counts.v4,
            }
            .add_to(&mut ports, &mut connects, &mut addresses, node);
        }
        if let Some(v6) = &service.v6 {
            FamilyView {
                service,
                model: v6,
                conflicts: conflicts6,
                counts: &counts.v6,
            }
            .add_to(&mut ports, &mut connects, &mut addresses, node);
        }
        for (port, connects) in ports.iter_mut().zip(&connects) {
            port.connect = connects.into();
        }
        ports.retain(|port| !port.frontends.is_empty());
        let v4 = service
            .v4
            .iter()
            .flat_map(|v4| v4.ports.values().map(|port| port.service));
        let v6 = service
            .v6
            .iter()
            .flat_map(|v6| v6.ports.values().map(|port| port.service));
        let terms = v4.chain(v6).next().unwrap_or_default();
        let or =
            |text: &Option<Shared>, default: &str| text.as_deref().unwrap_or(default).to_owned();
        ServiceView {
            namespace: namespace.to_string(),
            name: name.to_string(),
            r#type: or(&object.type_, "ClusterIP"),
            created: object.created,
            labels: object
                .labels
                .iter()
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .collect(),
            labels_cut: object.labels.is_cut(),
            cluster_ips: addresses.cluster_ips,
            external_ips: addresses.external_ips,
            load_balancer_ips: addresses.load_balancer_ips,
            not_taken: model::not_taken(object, node).collect(),
            internal_traffic_policy: or(&object.internal_traffic_policy, "Cluster"),
            external_traffic_policy: or(&object.external_traffic_policy, "Cluster"),
            affinity_secs: (terms.affinity_secs > 0).then_some(terms.affinity_secs),
            health_check_node_port: service.health_check_node_port,
            algorithm: model::algorithm_name(terms.algorithm).to_owned(),
            ports,
        }
    }
}

/// The addresses of a Service by kind, ordered by family within a kind.
#[derive(Default)]
struct Addresses {
    cluster_ips: Vec<IpAddr>,
    external_ips: Vec<IpAddr>,
    load_balancer_ips: Vec<IpAddr>,
}

impl Addresses {
    fn add(&mut self, kind: FrontendKind, address: IpAddr) {
        let addresses = match kind.known() {
            Some(Dialled::Address | Dialled::ClusterIp) => &mut self.cluster_ips,
            Some(Dialled::ExternalIp) => &mut self.external_ips,
            Some(Dialled::LoadBalancer) => &mut self.load_balancer_ips,
            Some(Dialled::NodePort) | None => return,
        };
        if !addresses.contains(&address) {
            addresses.push(address);
        }
    }
}

/// Returns the port as the Service lists it, without the parts that depend on the address family.
fn port_view(port: &ServicePort) -> PortView {
    PortView {
        name: port.name.as_deref().unwrap_or_default().to_owned(),
        protocol: port.protocol.as_deref().unwrap_or("TCP").to_owned(),
        port: u16::try_from(port.port).unwrap_or_default(),
        node_port: port
            .node_port
            .and_then(|port| u16::try_from(port).ok())
            .filter(|port| *port != 0),
        frontends: Vec::new(),
        backends: Vec::new(),
        counts: PortCounts::default(),
        connect: ConnectView::default(),
        udp: None,
        expects_answers: true,
        redirected: false,
    }
}

struct FamilyView<'a, A: Addr> {
    service: &'a ServiceSnapshot,
    model: &'a FamilyModel<A>,
    conflicts: &'a BTreeMap<FrontendKey<A>, Vec<Skipped>>,
    counts: &'a FamilyCounts<A>,
}

impl<A: Addr> FamilyView<'_, A> {
    fn add_to(
        &self,
        ports: &mut [PortView],
        connects: &mut [Connects],
        addresses: &mut Addresses,
        node: &NodeModel,
    ) {
        let slices = self
            .service
            .slices
            .iter()
            .filter(|slice| !slice.is_headless);
        let weights = Weights::of(&self.service.object, &mut Vec::new());
        let slices: Vec<_> = slices
            .filter_map(|slice| Slice::<A>::new(slice, node, &weights, &mut Vec::new()))
            .collect();
        for (key, claimed) in self.model.frontends.iter() {
            addresses.add(claimed.frontend.kind, key.addr.ip());
        }
        for (key, port) in self.model.ports.iter() {
            // A Service may list a port twice; the first entry counts.
            let is_of_key = |view: &PortView| {
                view.port == key.port.get() && view.protocol == protocol(key.proto)
            };
            let Some((view, connects)) = ports
                .iter_mut()
                .zip(connects.iter_mut())
                .find(|(view, _)| is_of_key(view))
            else {
                continue;
            };
            let claimed_frontends = self
                .model
                .frontends
                .iter()
                .filter(|(_, claimed)| claimed.frontend.service == *key);
            let mut frontends: Vec<_> = claimed_frontends
                .filter_map(|(key, claimed)| self.frontend(key, claimed.frontend.kind))
                .collect();
            frontends.sort_by_key(|(kind, _)| *kind);
            for (_, frontend) in frontends {
                // Both families have the same node port.
                if !view.frontends.contains(&frontend) {
                    view.frontends.push(frontend);
                }
            }
            count(self.counts, key, &mut view.counts);
            if key.proto == Proto::UDP {
                let udp = view.udp.unwrap_or_default();
                let udp = udp.plus(self.counts.datagrams_of(key));
                view.expects_answers = udp.expect_answers(view.port);
                view.udp = Some(udp);
            }
            *connects += self.counts.connects_of(key);
            let joined = model::join(&slices, &view.name, key.proto);
            let first = view.backends.len();
            view.backends.extend(joined.listed().map(|(at, endpoint)| {
                let flows = self.flows(key, &at);
                let way = node
                    .host_mode
                    .as_ref()
                    .and_then(|_| self.way(key, at, endpoint));
                let ejected = port.ejected.binary_search(&at).is_ok();
                BackendView {
                    // Behind a node port or the tunnel, the cluster set holds that port's address
                    // instead of the backend's.
                    in_cluster_set: holds(port.backends(Set::CLUSTER), at)
                        || matches!(way, Some(NODE_PORT | TUNNEL)),
                    in_local_set: holds(port.backends(Set::LOCAL), at),
                    flows: flows.all,
                    open_flows: flows.open,
                    connect: self
                        .counts
                        .connects
                        .get(key)
                        .and_then(|rows| rows.get(&at))
                        .map(Into::into)
                        .unwrap_or_default(),
                    udp: self.udp(key, &at),
                    way: way.map(str::to_owned),
                    silent: key.proto == Proto::TCP && node.silent.contains(&Path::new(key, &at)),
                    ejected,
                    set_aside: ejected,
                    ..self.backend(at, endpoint)
                }
            }));
            if let Some(pods) = self.model.redirected.get(key) {
                view.redirected = true;
                let backends = port.backends(Set::LOCAL).iter().zip(pods);
                for (at, pod) in
                    backends.map(|(backend, pod)| (SockAddr::new(backend.addr, backend.port), pod))
                {
                    self.add_redirected(&mut view.backends, first, key, at, pod, node);
                }
            }
        }
    }

    /// Adds a pod that serves a local redirect, or marks the pod among the Service's endpoints.
    fn add_redirected(
        &self,
        backends: &mut Vec<BackendView>,
        first: usize,
        key: &FrontendKey<A>,
        at: SockAddr<A>,
        pod: &ObjectName,
        node: &NodeModel,
    ) {
        let address = at.socket_addr();
        if let Some(listed) = backends[first..]
            .iter_mut()
            .find(|backend| backend.address == address)
        {
            (listed.in_local_set, listed.in_redirect_set) = (false, true);
            return;
        }
        let connect = self
            .counts
            .connects
            .get(key)
            .and_then(|rows| rows.get(&at))
            .map(Into::into);
        let flows = self.flows(key, &at);
        backends.push(BackendView {
            address,
            pod: Some(pod.to_string()),
            node: Some(node.name.clone()),
            zone: node.zone.clone(),
            ready: true,
            serving: true,
            terminating: false,
            local: true,
            in_cluster_set: false,
            in_local_set: false,
            in_redirect_set: true,
            silent: key.proto == Proto::TCP && node.silent.contains(&Path::new(key, &at)),
            ejected: false,
            set_aside: false,
            weight: 1,
            flows: flows.all,
            open_flows: flows.open,
            connect: connect.unwrap_or_default(),
            udp: self.udp(key, &at),
            way: None,
        });
    }

    /// Returns the path of a host in host mode to an endpoint; `None` if the endpoint takes no
    /// connections.
    fn way(
        &self,
        key: &FrontendKey<A>,
        at: SockAddr<A>,
        endpoint: &Endpoint<'_, A>,
    ) -> Option<&'static str> {
        let at = at.socket_addr();
        let is_it = |one: &&Unreachable| {
            (one.port, one.proto, one.backend) == (key.port.get(), key.proto, at)
        };
        let takes_traffic =
            endpoint.weight > 0 && (endpoint.ready || endpoint.serving && endpoint.terminating);
        if !takes_traffic {
            None
        } else if endpoint.is_direct() {
            Some(DIRECT)
        } else if self.model.unreachable.iter().any(|one| is_it(&one)) {
            Some(UNREACHABLE)
        } else {
            match self.model.tunnelled.get(key) {
                // A terminating pod is used only while no pod is ready.
                Some(pods) => pods.iter().any(|pod| pod.at == at).then_some(TUNNEL),
                None => Some(NODE_PORT),
            }
        }
    }

    fn flows(&self, key: &FrontendKey<A>, at: &SockAddr<A>) -> FlowCount {
        let backends = self.counts.flows.get(key);
        backends
            .and_then(|flows| flows.get(at))
            .copied()
            .unwrap_or_default()
    }

    /// Returns the outcomes of a backend's flows; `None` for other protocols than UDP.
    fn udp(&self, key: &FrontendKey<A>, at: &SockAddr<A>) -> Option<UdpOutcomes> {
        let backends = self.counts.datagrams.get(key);
        let counts = backends.and_then(|backends| backends.get(at)).copied();
        (key.proto == Proto::UDP).then(|| counts.unwrap_or_default())
    }

    /// Returns the view of a backend without its sets and its flows.
    fn backend(&self, at: SockAddr<A>, endpoint: &Endpoint<'_, A>) -> BackendView {
        let namespace = &self.model.claim.service.namespace;
        let pod = endpoint.object.pod.as_ref();
        let pod = pod.and_then(|pod| {
            Some((
                pod.namespace.as_ref().unwrap_or(namespace),
                pod.name.as_ref()?,
            ))
        });
        BackendView {
            address: at.socket_addr(),
            pod: pod.map(|(namespace, name)| format!("{namespace}/{name}")),
            node: endpoint.object.node_name.as_ref().map(Shared::to_string),
            zone: endpoint.object.zone.as_ref().map(Shared::to_string),
            ready: endpoint.ready,
            serving: endpoint.serving,
            terminating: endpoint.terminating,
            local: endpoint.local,
            weight: endpoint.weight,
            in_cluster_set: false,
            in_local_set: false,
            in_redirect_set: false,
            silent: false,
            ejected: false,
            set_aside: false,
            flows: 0,
            open_flows: 0,
            connect: ConnectView::default(),
            udp: None,
            way: None,
        }
    }

    /// Returns the view of a frontend; `None` for the row of a whole address.
    fn frontend(
        &self,
        key: &FrontendKey<A>,
        kind: FrontendKind,
    ) -> Option<(FrontendKind, FrontendView)> {
        let view = FrontendView {
            kind: kind_name(kind)?.to_owned(),
            address: (kind != FrontendKind::NODE_PORT).then(|| key.addr.ip()),
            port: key.port.get(),
            conflict: conflict(self.conflicts, key, &self.model.claim.service)
                .map(|skipped| skipped.why.clone()),
        };
        Some((kind, view))
    }
}

/// Adds the traffic of a service port to `counts`.
pub(crate) fn count<A: Addr>(
    family: &FamilyCounts<A>,
    key: &FrontendKey<A>,
    counts: &mut PortCounts,
) {
    let totals = family.ports.get(key).copied().unwrap_or_default();
    counts.flows_opened += totals.opened;
    for flows in family.flows.get(key).into_iter().flat_map(BTreeMap::values) {
        counts.flows += flows.all;
        counts.open_flows += flows.open;
    }
    counts.packets += totals.sent.packets;
    counts.bytes += totals.sent.bytes;
    counts.packets_returned += totals.returned.packets;
    counts.bytes_returned += totals.returned.bytes;
    counts.dropped += totals.dropped;
    counts.rejected += totals.rejected;
    counts.refused = counts.unserved();
}

/// Searches a set by binary search: the model sorts sets by address and port.
fn holds<A: Addr>(set: &[Backend<A>], at: SockAddr<A>) -> bool {
    set.binary_search_by_key(&at, |backend| SockAddr::new(backend.addr, backend.port))
        .is_ok()
}

fn names<A: Addr>(
    service: &ServiceSnapshot,
    model: &FamilyModel<A>,
    conflicts: &BTreeMap<FrontendKey<A>, Vec<Skipped>>,
) -> impl Iterator<Item = NameView> {
    let ObjectName { namespace, name } = &model.claim.service;
    let ports = || service.object.ports.iter().map(port_view);
    let claimed_frontends = model.frontends.iter().filter(|(key, claimed)| {
        claimed.frontend.kind != FrontendKind::ADDRESS
            && conflict(conflicts, key, &model.claim.service).is_none()
    });
    let named = claimed_frontends.map(move |(key, claimed)| {
        let port = claimed.frontend.service;
        let mut named = ports()
            .filter(|view| view.port == port.port.get() && view.protocol == protocol(port.proto));
        NameView {
            address: key.addr.ip(),
            port: key.port.get(),
            protocol: protocol(key.proto),
            namespace: namespace.to_string(),
            name: name.to_string(),
            port_name: named.next().map(|port| port.name).unwrap_or_default(),
        }
    });
    named.collect::<Vec<_>>().into_iter()
}

/// Returns the reason why a frontend that the Service claims is not programmed.
fn conflict<'a, A: Addr>(
    conflicts: &'a BTreeMap<FrontendKey<A>, Vec<Skipped>>,
    key: &FrontendKey<A>,
    service: &ObjectName,
) -> Option<&'a Skipped> {
    let lost = conflicts.get(key)?;
    lost.iter().find(|skipped| skipped.object.name == *service)
}

fn kind_name(kind: FrontendKind) -> Option<&'static str> {
    match kind.known() {
        Some(Dialled::ClusterIp) => Some("ClusterIP"),
        Some(Dialled::NodePort) => Some("NodePort"),
        Some(Dialled::ExternalIp) => Some("ExternalIP"),
        Some(Dialled::LoadBalancer) => Some("LoadBalancer"),
        Some(Dialled::Address) | None => None,
    }
}

fn protocol(proto: Proto) -> String {
    proto.to_string().to_uppercase()
}

#[cfg(test)]
mod tests;
