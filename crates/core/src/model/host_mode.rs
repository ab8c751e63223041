//! Models a host in host mode: which backends it reaches, and how. The host's routes are an input.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use proxy_common::addr::{Addr, Port, Proto, SockAddr};

use super::node::{node_addresses, pod_cidrs};
use crate::compact::{Endpoint, EndpointSlice, Shared};
use crate::store::Store;

/// The host's routes to the addresses that the agent asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostRoutes {
    /// Set by the operator if the default route leads to pods.
    pub default_leads_to_pods: bool,
    /// The sockets of this host from which the agent leads connections to pods by another way, at
    /// most one a family.
    pub tunnel: Vec<SocketAddr>,
    pub routes: BTreeMap<IpAddr, ClusterRoute>,
}

impl HostRoutes {
    /// Returns the state before any route is known.
    pub fn unknown(default_leads_to_pods: bool) -> Self {
        Self {
            default_leads_to_pods,
            tunnel: Vec::new(),
            routes: BTreeMap::new(),
        }
    }
}

/// The class of the host's route to one address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterRoute {
    /// The address is the host's own.
    Own,
    /// The address is a neighbour of the host, through this device (interface index).
    OnLink(u32),
    /// The network of the address has a route.
    Routed,
    /// The default route is the only one.
    Default,
    /// No route, with the kernel's words.
    Nowhere(String),
}

/// The way to reach an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reachability<A> {
    Direct,
    /// A port of its node, if the Service has one: the node's address, if the node takes node
    /// ports.
    ViaNodePort(Option<A>, UnreachableReason),
}

/// The reason why an endpoint's own address cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UnreachableReason {
    NoRoute,
    OnlyDefault,
}

/// A backend that takes no packets from this host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unreachable {
    /// The number of the service port; `proto` is its protocol.
    pub port: u16,
    pub proto: Proto,
    pub backend: SocketAddr,
    pub reason: UnreachableReason,
    pub has_node_port: bool,
}

impl fmt::Display for Unreachable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.reason {
            UnreachableReason::NoRoute => "no route",
            UnreachableReason::OnlyDefault => "only the default route",
        })?;
        f.write_str(if self.has_node_port {
            ", and no ready node is reached that takes the node port for it"
        } else {
            ", and the Service has no node port"
        })
    }
}

/// A pod that connections reach through the tunnel, and the port at which it listens.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TunnelledPod {
    pub namespace: Shared,
    pub name: Box<str>,
    /// The address and port of the endpoint. No packet of this host goes there.
    pub at: SocketAddr,
}

/// The host's view of the cluster beside its Services.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostMode {
    host_routes: Arc<HostRoutes>,
    nodes: BTreeMap<String, RemoteNode>,
}

/// A node of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteNode {
    /// The addresses, those inside the cluster first.
    pub addresses: Vec<IpAddr>,
    pub pod_cidrs: Vec<IpNet>,
    pub ready: bool,
}

impl HostMode {
    pub(super) fn of(store: &Store, host_routes: Arc<HostRoutes>) -> Self {
        Self {
            host_routes,
            nodes: remote_nodes(store),
        }
    }

    /// Returns all nodes of the cluster, by name.
    pub fn nodes(&self) -> &BTreeMap<String, RemoteNode> {
        &self.nodes
    }

    pub fn node_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.nodes
            .values()
            .flat_map(|node| node.addresses.iter().copied())
    }

    /// Returns true if the agent leads connections to pods that this host does not reach.
    pub(crate) fn has_tunnel(&self) -> bool {
        !self.host_routes.tunnel.is_empty()
    }

    /// Returns the socket at which the tunnel of a family begins.
    pub(super) fn tunnel<A: Addr>(&self) -> Option<SockAddr<A>> {
        let starts = self.host_routes.tunnel.iter();
        starts
            .filter_map(|at| Some(SockAddr::new(A::from_ip(at.ip())?, Port::new(at.port()))))
            .next()
    }

    /// Returns the class of the route to an address, if it is known.
    pub fn route(&self, addr: &IpAddr) -> Option<&ClusterRoute> {
        self.host_routes.routes.get(addr)
    }

    /// Takes in classes of routes, which extend the known ones, or replace them if `all` is set.
    /// Returns the addresses with a change. With `all`, addresses that were unknown count as
    /// changed: their query may have failed before a sync.
    pub fn update(
        &mut self,
        host_routes: &mut Arc<HostRoutes>,
        routes: BTreeMap<IpAddr, ClusterRoute>,
        all: bool,
    ) -> BTreeSet<IpAddr> {
        // Without this reference the other one is unique, and its value need not be copied.
        self.host_routes = Arc::default();
        let known = &mut Arc::make_mut(host_routes).routes;
        let before = if all {
            std::mem::take(known)
        } else {
            BTreeMap::new()
        };
        let mut changed: BTreeSet<IpAddr> = before
            .iter()
            .filter(|(ip, route)| routes.get(ip) != Some(route))
            .map(|(ip, _)| *ip)
            .collect();
        if all {
            changed.extend(routes.keys().filter(|ip| !before.contains_key(ip)));
        }
        known.extend(routes);
        self.host_routes = Arc::clone(host_routes);
        changed
    }

    /// Returns the node addresses at which a node port may be dialled: one of each ready node.
    pub(super) fn ready_nodes<A: Addr>(&self) -> impl Iterator<Item = A> {
        self.nodes
            .values()
            .filter_map(|node| self.node_port_address(node))
    }

    pub(super) fn reachability<A: Addr>(&self, addr: A, endpoint: &Endpoint) -> Reachability<A> {
        let reason = match self.host_routes.routes.get(&addr.ip()) {
            Some(ClusterRoute::Own | ClusterRoute::OnLink(_) | ClusterRoute::Routed) => {
                return Reachability::Direct;
            }
            Some(ClusterRoute::Default)
                if self.host_routes.default_leads_to_pods || !self.is_pod(addr.ip(), endpoint) =>
            {
                return Reachability::Direct;
            }
            Some(ClusterRoute::Default) => UnreachableReason::OnlyDefault,
            Some(ClusterRoute::Nowhere(_)) | None => UnreachableReason::NoRoute,
        };
        let node = endpoint
            .node_name
            .as_ref()
            .and_then(|name| self.nodes.get(&**name));
        Reachability::ViaNodePort(node.and_then(|node| self.node_port_address(node)), reason)
    }

    /// Returns true for the address of a pod, which routers outside the cluster do not know. Such
    /// routers know nodes, and every address that is no pod's.
    fn is_pod(&self, ip: IpAddr, endpoint: &Endpoint) -> bool {
        let mut nodes = self.nodes.values();
        (endpoint.pod.is_some()
            || endpoint.node_name.is_some()
            || nodes.any(|node| node.pod_cidrs.iter().any(|net| net.contains(&ip))))
            && !self.nodes.values().any(|node| node.addresses.contains(&ip))
    }

    /// Returns the address at which a node takes node ports: its first address with a route.
    fn node_port_address<A: Addr>(&self, node: &RemoteNode) -> Option<A> {
        let has_route = |ip: &IpAddr| {
            !matches!(
                self.host_routes.routes.get(ip),
                None | Some(ClusterRoute::Nowhere(_))
            )
        };
        let addrs = node
            .addresses
            .iter()
            .filter(|ip| node.ready && has_route(ip));
        addrs.copied().filter_map(A::from_ip).next()
    }
}

fn remote_nodes(store: &Store) -> BTreeMap<String, RemoteNode> {
    let node = |node: &Node| {
        let name = node.metadata.name.clone().unwrap_or_default();
        (
            name,
            RemoteNode {
                addresses: node_addresses(node),
                pod_cidrs: pod_cidrs(node),
                ready: is_ready(node),
            },
        )
    };
    store.nodes().map(node).collect()
}

/// Returns true for a ready node. A node without a condition (one in a manifest) counts as ready.
fn is_ready(node: &Node) -> bool {
    let conditions = node
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    let mut ready = conditions.filter(|condition| condition.type_ == "Ready");
    node.metadata.deletion_timestamp.is_none()
        && ready
            .next()
            .is_none_or(|condition| condition.status == "True")
}

/// Returns the addresses of a slice's endpoints, as far as they count.
pub fn endpoint_addresses(slice: &EndpointSlice) -> BTreeSet<IpAddr> {
    slice
        .endpoints
        .iter()
        .filter_map(|endpoint| super::read::ip_of(&endpoint.address).ok())
        .collect()
}
