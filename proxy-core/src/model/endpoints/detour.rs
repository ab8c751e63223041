//! Replaces endpoints that a host outside the cluster cannot reach by their nodes' node ports.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use proxy_common::addr::{Addr, Port, SockAddr};

use super::{Endpoint, Joined};
use crate::model::outside::{Obstacle, Outside, Way};

/// The way to reach a service port around its endpoints.
#[derive(Clone, Copy)]
pub(in crate::model) struct Detour<'a> {
    pub(in crate::model) outside: &'a Outside,
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
    pub(in crate::model) fn around(self, detour: Detour<'_>) -> (Self, Vec<(SockAddr<A>, Obstacle)>) {
        let Detour { outside, node_port, external_local } = detour;
        let mut joined = Self::none();
        let mut stranded = Vec::new();
        for (at, endpoint) in self.0 {
            match (endpoint.way, node_port) {
                (Way::Direct, _) => joined.put(at, endpoint),
                (Way::Around(Some(node), _), Some(port)) => joined.put(SockAddr::new(node, port), endpoint),
                (Way::Around(_, obstacle), _) => stranded.push((at, endpoint, obstacle)),
            }
        }
        let any_node: Vec<A> = if external_local { Vec::new() } else { outside.ready_nodes().collect() };
        if let Some(port) = node_port.filter(|_| !any_node.is_empty()) {
            for (_, endpoint, _) in stranded.drain(..) {
                any_node.iter().for_each(|node| joined.put(SockAddr::new(*node, port), endpoint));
            }
        }
        let serving = stranded.into_iter().filter(|(_, endpoint, _)| endpoint.ready || endpoint.is_fallback());
        (joined, serving.map(|(at, _, obstacle)| (at, obstacle)).collect())
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
