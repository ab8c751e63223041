//! Replaces endpoints that a host outside the cluster cannot reach by their nodes' node ports.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use proxy_common::addr::{Addr, Port, SockAddr};

use super::{Endpoint, Joined};
use crate::model::host_mode::{HostMode, Reachability, UnreachableReason};

/// The way to reach a service port around its endpoints.
#[derive(Clone, Copy)]
pub(in crate::model) struct NodePortFallback<'a> {
    pub(in crate::model) host_mode: &'a HostMode,
    pub(in crate::model) node_port: Option<Port>,
    /// Set if a node forwards only to its own endpoints.
    pub(in crate::model) external_local: bool,
}

impl<'a, A: Addr> Joined<'a, A> {
    pub(in crate::model) fn none() -> Self {
        Self(BTreeMap::new())
    }

    /// Replaces every unreachable endpoint by its node's port. Where that is impossible, any ready node stands in,
    /// provided that nodes forward to all endpoints. Also returns the serving endpoints without a replacement.
    pub(in crate::model) fn with_node_ports(
        self,
        fallback: NodePortFallback<'_>,
    ) -> (Self, Vec<(SockAddr<A>, UnreachableReason)>) {
        let NodePortFallback { host_mode, node_port, external_local } = fallback;
        let mut joined = Self::none();
        let mut stranded = Vec::new();
        for (at, endpoint) in self.0 {
            match (endpoint.reachability, node_port) {
                (Reachability::Direct, _) => joined.put(at, endpoint),
                (Reachability::ViaNodePort(Some(node), _), Some(port)) => {
                    joined.put(SockAddr::new(node, port), endpoint)
                }
                (Reachability::ViaNodePort(_, reason), _) => stranded.push((at, endpoint, reason)),
            }
        }
        let any_node: Vec<A> = if external_local { Vec::new() } else { host_mode.ready_nodes().collect() };
        if let Some(port) = node_port.filter(|_| !any_node.is_empty()) {
            for (_, endpoint, _) in stranded.drain(..) {
                any_node.iter().for_each(|node| joined.put(SockAddr::new(*node, port), endpoint));
            }
        }
        let serving = stranded.into_iter().filter(|(_, endpoint, _)| endpoint.ready || endpoint.is_fallback());
        (joined, serving.map(|(at, _, reason)| (at, reason)).collect())
    }

    /// Adds a node in place of an endpoint. A node ranks like the best endpoint that it stands for.
    fn put(&mut self, at: SockAddr<A>, endpoint: &'a Endpoint<A>) {
        match self.0.entry(at) {
            Entry::Vacant(entry) => drop(entry.insert(endpoint)),
            Entry::Occupied(mut entry) if entry.get().rank() < endpoint.rank() => drop(entry.insert(endpoint)),
            Entry::Occupied(_) => {}
        }
    }
}
