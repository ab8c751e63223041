//! Replaces endpoints that a host outside the cluster cannot reach, by node ports or by the tunnel.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use proxy_common::addr::{Addr, Port, Proto, SockAddr};

use super::{Endpoint, Joined};
use crate::compact::Shared;
use crate::model::host_mode::{HostMode, Reachability, TunnelledPod, UnreachableReason};

/// The alternative paths to a service port.
#[derive(Clone, Copy)]
pub(in crate::model) struct NodePortFallback<'a> {
    pub(in crate::model) host_mode: &'a HostMode,
    pub(in crate::model) node_port: Option<Port>,
    /// Set if a node forwards only to its own endpoints.
    pub(in crate::model) external_local: bool,
    pub(in crate::model) proto: Proto,
    pub(in crate::model) namespace: &'a Shared,
}

/// The endpoints of a service port that the host reaches.
pub(in crate::model) struct WithinReach<'a, A: Addr> {
    pub(in crate::model) joined: Joined<'a, A>,
    /// The pods behind the tunnel, if only the tunnel reaches the port.
    pub(in crate::model) tunnelled: Vec<TunnelledPod>,
    /// The unreachable serving endpoints.
    pub(in crate::model) stranded: Vec<(SockAddr<A>, UnreachableReason)>,
}

impl<'a, A: Addr> Joined<'a, A> {
    pub(in crate::model) fn none() -> Self {
        Self(BTreeMap::new())
    }

    /// Replaces each unreachable endpoint by its node's node port. Where that is impossible, the node
    /// ports of all ready nodes replace it, unless externalTrafficPolicy is Local. If no endpoint is
    /// left then, the tunnel serves the stranded pods.
    pub(in crate::model) fn with_node_ports(
        self,
        fallback: NodePortFallback<'_>,
    ) -> WithinReach<'a, A> {
        let NodePortFallback {
            host_mode,
            node_port,
            external_local,
            ..
        } = fallback;
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
        let any_node: Vec<A> = if external_local {
            Vec::new()
        } else {
            host_mode.ready_nodes().collect()
        };
        if let Some(port) = node_port.filter(|_| !any_node.is_empty()) {
            for (_, endpoint, _) in stranded.drain(..) {
                any_node
                    .iter()
                    .for_each(|node| joined.put(SockAddr::new(*node, port), endpoint));
            }
        }
        stranded.retain(|(_, endpoint, _)| endpoint.serves() && endpoint.weight > 0);
        let tunnelled = joined.tunnel(&mut stranded, fallback);
        let stranded = stranded
            .into_iter()
            .map(|(at, _, reason)| (at, reason))
            .collect();
        WithinReach {
            joined,
            tunnelled,
            stranded,
        }
    }

    /// Replaces the pods in `stranded` by the tunnel if nothing else serves. Returns the pods that
    /// take connections: ready pods, else terminating pods.
    fn tunnel(
        &mut self,
        stranded: &mut Vec<(SockAddr<A>, &'a Endpoint<'a, A>, UnreachableReason)>,
        fallback: NodePortFallback<'_>,
    ) -> Vec<TunnelledPod> {
        let is_served = self
            .0
            .values()
            .any(|endpoint| endpoint.serves() && endpoint.weight > 0);
        let start = fallback
            .host_mode
            .tunnel()
            .filter(|_| fallback.proto == Proto::TCP && !is_served);
        let Some(start) = start else {
            return Vec::new();
        };
        let mut pods = Vec::new();
        stranded.retain(|(at, endpoint, _)| {
            let pod = endpoint
                .object
                .pod
                .as_ref()
                .and_then(|pod| Some((pod.namespace.as_ref(), pod.name.as_ref()?)));
            let Some((namespace, name)) = pod else {
                return true;
            };
            // The API server does not validate `targetRef`, so a slice could name a pod of another
            // namespace.
            if namespace.is_some_and(|namespace| namespace != fallback.namespace) {
                return true;
            }
            let namespace = fallback.namespace.clone();
            let at = (at.addr.ip(), at.port.get()).into();
            pods.push((
                endpoint.ready,
                TunnelledPod {
                    namespace,
                    name: name.clone(),
                    at,
                },
            ));
            self.put(start, endpoint);
            false
        });
        let any_ready = pods.iter().any(|(ready, _)| *ready);
        pods.into_iter()
            .filter(|(ready, _)| *ready || !any_ready)
            .map(|(_, pod)| pod)
            .collect()
    }

    /// Adds a node in place of an endpoint. A node has the rank of the best endpoint that it
    /// replaces.
    fn put(&mut self, at: SockAddr<A>, endpoint: &'a Endpoint<A>) {
        match self.0.entry(at) {
            Entry::Vacant(entry) => drop(entry.insert(endpoint)),
            Entry::Occupied(mut entry) if entry.get().rank() < endpoint.rank() => {
                entry.insert(endpoint);
            }
            Entry::Occupied(_) => {}
        }
    }
}
