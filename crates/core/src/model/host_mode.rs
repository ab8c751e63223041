//! Host mode: the backends that the host reaches, and how. The host's routes are an input.

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

/// The host's routes to the queried addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostRoutes {
    /// Set by the operator if the default route reaches pods.
    pub default_leads_to_pods: bool,
    /// The host's sockets at which the agent accepts connections for the tunnel, at most one for
    /// each family.
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

/// The class of the host's route to an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterRoute {
    /// An address of the host.
    Own,
    /// A neighbour on this device (interface index).
    OnLink(u32),
    /// A route other than the default route.
    Routed,
    /// Only the default route.
    Default,
    /// No route, with the kernel's error.
    Nowhere(String),
}

/// How the host reaches an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reachability<A> {
    Direct,
    /// Through its node's node port, if the Service has one. Holds the node's address if the node
    /// is ready and has a route.
    ViaNodePort(Option<A>, UnreachableReason),
}

/// The reason why the host cannot use an endpoint's own address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum UnreachableReason {
    NoRoute,
    OnlyDefault,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unreachable {
    /// The number of the service port.
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

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TunnelledPod {
    pub namespace: Shared,
    pub name: Box<str>,
    /// The endpoint's address and port. This host's own packets never go there.
    pub at: SocketAddr,
}

/// The cluster's nodes and the host's routes to them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostMode {
    host_routes: Arc<HostRoutes>,
    nodes: BTreeMap<String, RemoteNode>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteNode {
    /// Internal addresses come first.
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

    pub fn nodes(&self) -> &BTreeMap<String, RemoteNode> {
        &self.nodes
    }

    pub fn node_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.nodes
            .values()
            .flat_map(|node| node.addresses.iter().copied())
    }

    /// Returns true if the tunnel serves pods that this host cannot reach.
    pub(crate) fn has_tunnel(&self) -> bool {
        !self.host_routes.tunnel.is_empty()
    }

    /// Returns the host's socket for the tunnel of a family.
    pub(super) fn tunnel<A: Addr>(&self) -> Option<SockAddr<A>> {
        let starts = self.host_routes.tunnel.iter();
        starts
            .filter_map(|at| Some(SockAddr::new(A::from_ip(at.ip())?, Port::new(at.port()))))
            .next()
    }

    /// Returns the class of the route to an address, if known.
    pub fn route(&self, addr: &IpAddr) -> Option<&ClusterRoute> {
        self.host_routes.routes.get(addr)
    }

    /// Adds route classes, or replaces all of them if `all` is set. Returns the changed addresses.
    /// With `all` these include new addresses, whose earlier query may have failed before a sync.
    pub fn update(
        &mut self,
        host_routes: &mut Arc<HostRoutes>,
        routes: BTreeMap<IpAddr, ClusterRoute>,
        all: bool,
    ) -> BTreeSet<IpAddr> {
        // Drops the second reference, so that `make_mut` does not copy.
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

    /// Returns a node port address for each ready node.
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

    /// Returns true for a pod's address. Routers outside the cluster have routes to nodes and to
    /// all other addresses, but not to pods.
    fn is_pod(&self, ip: IpAddr, endpoint: &Endpoint) -> bool {
        let mut nodes = self.nodes.values();
        (endpoint.pod.is_some()
            || endpoint.node_name.is_some()
            || nodes.any(|node| node.pod_cidrs.iter().any(|net| net.contains(&ip))))
            && !self.nodes.values().any(|node| node.addresses.contains(&ip))
    }

    /// Returns the first address of a ready node to which the host has a route.
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

/// Returns true for a ready node. A node without the condition (from a manifest) counts as ready.
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

/// Returns the readable endpoint addresses of a slice.
pub fn endpoint_addresses(slice: &EndpointSlice) -> BTreeSet<IpAddr> {
    slice
        .endpoints
        .iter()
        .filter_map(|endpoint| super::read::ip_of(&endpoint.address).ok())
        .collect()
}
