//! Models a host in host mode: which backends it reaches, and how. The host's routes are an input.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use proxy_common::addr::{Addr, Proto};

use super::node::{node_addresses, pod_cidrs};
use crate::compact::{Endpoint, EndpointSlice};
use crate::store::Store;

/// The host's routes to the addresses that the agent asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// Set by the operator if the default route leads to pods.
    pub default_leads_to_pods: bool,
    pub leads: BTreeMap<IpAddr, Lead>,
}

impl Reach {
    /// Returns the state before any route is known.
    pub fn unknown(default_leads_to_pods: bool) -> Self {
        Self { default_leads_to_pods, leads: BTreeMap::new() }
    }
}

/// The class of the host's route to one address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lead {
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
pub(super) enum Way<A> {
    Direct,
    /// A port of its node, if the Service has one: the node's address, if the node takes node ports.
    Around(Option<A>, Obstacle),
}

/// The reason why an endpoint's own address cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Obstacle {
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
    pub obstacle: Obstacle,
    pub has_node_port: bool,
}

impl fmt::Display for Unreachable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.obstacle {
            Obstacle::NoRoute => "no route leads to it",
            Obstacle::OnlyDefault => "only the default route leads to it",
        })?;
        f.write_str(if self.has_node_port {
            ", and no ready node is reached that takes the node port for it"
        } else {
            ", and the Service has no node port"
        })
    }
}

/// The host's view of the cluster beside its Services.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outside {
    reach: Arc<Reach>,
    nodes: BTreeMap<String, Peer>,
}

/// A node of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peer {
    /// The addresses, those inside the cluster first.
    pub addresses: Vec<IpAddr>,
    pub pod_cidrs: Vec<IpNet>,
    pub ready: bool,
}

impl Outside {
    pub(super) fn of(store: &Store, reach: Arc<Reach>) -> Self {
        Self { reach, nodes: peers(store) }
    }

    /// Returns all nodes of the cluster, by name.
    pub fn nodes(&self) -> &BTreeMap<String, Peer> {
        &self.nodes
    }

    pub fn node_addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.nodes.values().flat_map(|peer| peer.addresses.iter().copied())
    }

    /// Returns the class of the route to an address, if it is known.
    pub fn lead(&self, addr: &IpAddr) -> Option<&Lead> {
        self.reach.leads.get(addr)
    }

    /// Takes in classes of routes, which extend the known ones, or replace them if `all` is set. Returns the addresses
    /// with a change. With `all`, addresses that were unknown count as changed: their query may have failed before a
    /// sync.
    pub fn learn(&mut self, reach: &mut Arc<Reach>, leads: BTreeMap<IpAddr, Lead>, all: bool) -> BTreeSet<IpAddr> {
        // Without this reference the other one is unique, and its value need not be copied.
        self.reach = Arc::default();
        let known = &mut Arc::make_mut(reach).leads;
        let before = if all { std::mem::take(known) } else { BTreeMap::new() };
        let mut changed: BTreeSet<IpAddr> =
            before.iter().filter(|(ip, lead)| leads.get(ip) != Some(lead)).map(|(ip, _)| *ip).collect();
        if all {
            changed.extend(leads.keys().filter(|ip| !before.contains_key(ip)));
        }
        known.extend(leads);
        self.reach = Arc::clone(reach);
        changed
    }

    /// Returns the node addresses at which a node port may be dialled: one of each ready node.
    pub(super) fn ready_nodes<A: Addr>(&self) -> impl Iterator<Item = A> {
        self.nodes.values().filter_map(|peer| self.entrance(peer))
    }

    pub(super) fn way<A: Addr>(&self, addr: A, endpoint: &Endpoint) -> Way<A> {
        let obstacle = match self.reach.leads.get(&addr.ip()) {
            Some(Lead::Own | Lead::OnLink(_) | Lead::Routed) => return Way::Direct,
            Some(Lead::Default) if self.reach.default_leads_to_pods || !self.is_pod(addr.ip(), endpoint) => {
                return Way::Direct;
            }
            Some(Lead::Default) => Obstacle::OnlyDefault,
            Some(Lead::Nowhere(_)) | None => Obstacle::NoRoute,
        };
        let node = endpoint.node_name.as_ref().and_then(|name| self.nodes.get(&**name));
        Way::Around(node.and_then(|peer| self.entrance(peer)), obstacle)
    }

    /// Returns true for the address of a pod, which routers outside the cluster do not know. Such routers know nodes,
    /// and every address that is no pod's.
    fn is_pod(&self, ip: IpAddr, endpoint: &Endpoint) -> bool {
        let mut peers = self.nodes.values();
        (endpoint.pod.is_some()
            || endpoint.node_name.is_some()
            || peers.any(|peer| peer.pod_cidrs.iter().any(|net| net.contains(&ip))))
            && !self.nodes.values().any(|peer| peer.addresses.contains(&ip))
    }

    /// Returns the address at which a node takes node ports: its first address with a route.
    fn entrance<A: Addr>(&self, peer: &Peer) -> Option<A> {
        let leads_there = |ip: &IpAddr| !matches!(self.reach.leads.get(ip), None | Some(Lead::Nowhere(_)));
        let addrs = peer.addresses.iter().filter(|ip| peer.ready && leads_there(ip));
        addrs.copied().filter_map(A::from_ip).next()
    }
}

fn peers(store: &Store) -> BTreeMap<String, Peer> {
    let peer = |node: &Node| {
        let name = node.metadata.name.clone().unwrap_or_default();
        (name, Peer { addresses: node_addresses(node), pod_cidrs: pod_cidrs(node), ready: is_ready(node) })
    };
    store.nodes().map(peer).collect()
}

/// Returns true for a ready node. A node without a condition (one in a manifest) counts as ready.
fn is_ready(node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let mut ready = conditions.filter(|condition| condition.type_ == "Ready");
    node.metadata.deletion_timestamp.is_none() && ready.next().is_none_or(|condition| condition.status == "True")
}

/// Returns the addresses of a slice's endpoints, as far as they count.
pub fn endpoint_addresses(slice: &EndpointSlice) -> BTreeSet<IpAddr> {
    slice.endpoints.iter().filter_map(|endpoint| super::read::ip_of(&endpoint.address).ok()).collect()
}
