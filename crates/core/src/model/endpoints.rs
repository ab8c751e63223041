//! The endpoints of a service port: joins EndpointSlices, resolves duplicates, selects the sets.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use proxy_common::addr::{Addr, Port, Proto, SockAddr};
use proxy_common::frontend::Backend;

use super::NodeModel;
use super::handover::AbleNodes;
use super::host_mode::Reachability;
use super::port::Direct;
use super::read::{Reader, Skipped, addr_of, port_number, protocol};
use super::weights::{self, Weights};
use crate::compact::{self, EndpointSlice, Shared};
use crate::loss::{Placed, Standing};

mod fallback;

pub(super) use fallback::{NodePortFallback, WithinReach};

/// The readable part of one EndpointSlice.
pub struct Slice<'a, A: Addr> {
    /// Sorted by name and protocol. Duplicates keep the slice's order.
    ports: Vec<SlicePort<'a>>,
    endpoints: Vec<Endpoint<'a, A>>,
}

struct SlicePort<'a> {
    /// An empty name matches a Service's unnamed port.
    name: &'a str,
    proto: Proto,
    number: Port,
}

#[derive(Clone, Copy)]
pub struct Endpoint<'a, A: Addr> {
    pub object: &'a compact::Endpoint,
    addr: A,
    pub ready: bool,
    pub serving: bool,
    pub terminating: bool,
    /// The relative share of new flows. An endpoint of weight 0 gets none.
    pub weight: u16,
    pub local: bool,
    for_node: Hint,
    for_zone: Hint,
    reachability: Reachability<A>,
}

/// A topology hint of an endpoint, for nodes or for zones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Hint {
    None,
    Elsewhere,
    Here,
}

/// The endpoints of one service port, by address and port.
pub struct Joined<'a, A: Addr>(BTreeMap<SockAddr<A>, &'a Endpoint<'a, A>>);

/// The sets that a service port's frontends use.
#[derive(Clone, Copy)]
pub(super) struct UsedSets {
    pub(super) cluster: bool,
    pub(super) local: bool,
}

/// The endpoints that take new flows.
pub(super) struct Sets<A: Addr> {
    pub(super) cluster: Vec<Backend<A>>,
    pub(super) local: Vec<Backend<A>>,
    /// Set if a usable endpoint exists, even outside the used sets.
    pub(super) has_endpoints: bool,
}

impl<'a, A: Addr> Slice<'a, A> {
    /// Reads a slice. Returns `None` for the other family and for `FQDN` slices.
    pub fn new(
        slice: &'a EndpointSlice,
        node: &NodeModel,
        weights: &Weights,
        skipped: &mut Vec<Skipped>,
    ) -> Option<Self> {
        if *slice.address_type != *A::FAMILY {
            return None;
        }
        let mut reader = Reader::new("EndpointSlice", &slice.name, skipped);
        let ports = slice.ports.iter().enumerate();
        let mut ports: Vec<_> = ports
            .filter_map(|(index, port)| SlicePort::new(&mut reader, index, port))
            .collect();
        ports.sort_by_key(SlicePort::key);
        let of_slice = weights::of_slice(&mut reader, slice);
        let endpoints = slice
            .endpoints
            .iter()
            .enumerate()
            .filter_map(|(index, endpoint)| {
                let read: Endpoint<'_, A> = Endpoint::new(&mut reader, index, endpoint, node)?;
                Some(Endpoint {
                    weight: weights.of_endpoint(read.addr.ip(), endpoint, of_slice),
                    ..read
                })
            });
        Some(Self {
            ports,
            endpoints: endpoints.collect(),
        })
    }
}

impl<'a> SlicePort<'a> {
    fn key(&self) -> (&'a str, Proto) {
        (self.name, self.proto)
    }

    fn new(reader: &mut Reader<'_>, index: usize, port: &'a compact::EndpointPort) -> Option<Self> {
        let missing = || "missing".to_owned();
        let name = reader.take(
            format_args!("ports[{index}].name"),
            port.name.as_deref().ok_or_else(missing),
        )?;
        let number = port.port.ok_or_else(missing).and_then(port_number);
        let number = reader.take(format_args!("ports[{index}].port"), number)?;
        let proto = reader.take(
            format_args!("ports[{index}].protocol"),
            protocol(port.protocol.as_deref()),
        )?;
        Some(Self {
            name,
            proto,
            number,
        })
    }
}

impl<'a, A: Addr> Endpoint<'a, A> {
    fn new(
        reader: &mut Reader<'_>,
        index: usize,
        endpoint: &'a compact::Endpoint,
        node: &NodeModel,
    ) -> Option<Self> {
        let field = format_args!("endpoints[{index}].addresses[0]");
        let addr: A = reader.take(field, addr_of(&endpoint.address))?;
        if !reader.admit(field, node.guard.admit_endpoint(addr.ip())) {
            return None;
        }
        let nodes = endpoint.hints.iter().flat_map(|hints| &hints.nodes);
        let zones = endpoint.hints.iter().flat_map(|hints| &hints.zones);
        Some(Self {
            object: endpoint,
            addr,
            ready: endpoint.ready,
            serving: endpoint.serving,
            terminating: endpoint.terminating,
            weight: 1,
            local: !node.name.is_empty() && endpoint.node_name.as_deref() == Some(&*node.name),
            for_node: Hint::of(nodes, Some(&node.name)),
            for_zone: Hint::of(zones, node.zone.as_deref()),
            reachability: node
                .host_mode
                .as_ref()
                .map_or(Reachability::Direct, |host_mode| {
                    host_mode.reachability(addr, endpoint)
                }),
        })
    }

    /// Returns true if the endpoint is ready and its weight is not 0.
    fn takes_flows(&self) -> bool {
        self.ready && self.weight > 0
    }

    /// Returns true for a serving, terminating endpoint: the fallback if no endpoint is ready.
    fn is_fallback(&self) -> bool {
        self.serving && self.terminating && !self.ready
    }

    /// Returns true if the host reaches the endpoint at its own address, as nodes always do.
    pub fn is_direct(&self) -> bool {
        matches!(self.reachability, Reachability::Direct)
    }

    /// Returns true if the endpoint may take new connections or keep its open connections.
    fn serves(&self) -> bool {
        self.ready || self.is_fallback()
    }

    /// Ranks duplicates of one address and port; the greatest rank wins. A reused address belongs
    /// to the new pod while the old pod still terminates. The further criteria make the result
    /// independent of the slices' order.
    fn rank(&self) -> impl Ord + use<'a, A> {
        (
            !self.terminating,
            self.ready,
            self.serving,
            self.weight,
            self.local,
            self.for_node,
            self.for_zone,
        )
    }
}

impl Hint {
    /// Returns the hint that lists these names. `own` is this node or zone; if it is unknown, every
    /// hint is for elsewhere.
    fn of<'a>(names: impl Iterator<Item = &'a Shared>, own: Option<&str>) -> Self {
        let own = own.filter(|own| !own.is_empty());
        names
            .map(|name| {
                if Some(&**name) == own {
                    Self::Here
                } else {
                    Self::Elsewhere
                }
            })
            .max()
            .unwrap_or(Self::None)
    }
}

/// Joins endpoints by port name and protocol. Slices may map the name to different numbers, because
/// pods can disagree on a named port.
pub fn join<'a, A: Addr>(slices: &'a [Slice<'a, A>], name: &str, proto: Proto) -> Joined<'a, A> {
    let mut joined = BTreeMap::new();
    for slice in slices {
        let first = slice
            .ports
            .partition_point(|port| port.key() < (name, proto));
        for port in slice.ports[first..]
            .iter()
            .take_while(|port| port.key() == (name, proto))
        {
            for endpoint in &slice.endpoints {
                match joined.entry(SockAddr::new(endpoint.addr, port.number)) {
                    Entry::Vacant(entry) => {
                        entry.insert(endpoint);
                    }
                    Entry::Occupied(mut entry) if entry.get().rank() < endpoint.rank() => {
                        entry.insert(endpoint);
                    }
                    Entry::Occupied(_) => {}
                }
            }
        }
    }
    Joined(joined)
}

impl<A: Addr> Joined<'_, A> {
    /// Selects the sets. Each set falls back to terminating endpoints independently.
    pub(super) fn select(&self, used_sets: UsedSets) -> Sets<A> {
        let cluster = if used_sets.cluster {
            self.usable(self.topology())
        } else {
            Vec::new()
        };
        let local = if used_sets.local {
            self.usable(|endpoint| endpoint.local)
        } else {
            Vec::new()
        };
        let takes_any = || {
            self.0
                .values()
                .any(|endpoint| endpoint.serves() && endpoint.weight > 0)
        };
        let has_endpoints = !cluster.is_empty() || used_sets.local && takes_any();
        Sets {
            cluster,
            local,
            has_endpoints,
        }
    }

    /// Returns the topology filter. Hints apply only if every ready endpoint has a hint and at
    /// least one hint is for this node or zone. Node hints take precedence over zone hints. If no
    /// endpoint is ready, every endpoint passes.
    fn topology(&self) -> fn(&Endpoint<'_, A>) -> bool {
        let ready = || self.0.values().filter(|endpoint| endpoint.takes_flows());
        let is_hinted = |hint: fn(&Endpoint<'_, A>) -> Hint| {
            ready().all(|endpoint| hint(endpoint) != Hint::None)
                && ready().any(|endpoint| hint(endpoint) == Hint::Here)
        };
        if is_hinted(|endpoint| endpoint.for_node) {
            |endpoint| endpoint.for_node == Hint::Here
        } else if is_hinted(|endpoint| endpoint.for_zone) {
            |endpoint| endpoint.for_zone == Hint::Here
        } else {
            |_| true
        }
    }

    /// Returns the ready `wanted` endpoints. If there are none, returns the `wanted` endpoints that
    /// serve while terminating.
    fn usable(&self, wanted: impl Fn(&Endpoint<'_, A>) -> bool) -> Vec<Backend<A>> {
        let ready = self.backends(|endpoint| wanted(endpoint) && endpoint.takes_flows());
        let is_last = |endpoint: &Endpoint<'_, A>| endpoint.is_fallback() && endpoint.weight > 0;
        if ready.is_empty() {
            self.backends(|endpoint| wanted(endpoint) && is_last(endpoint))
        } else {
            ready
        }
    }

    /// Returns the ready endpoints of the cluster, as every node knows them, and the addresses to
    /// which their clients are handed over.
    pub(super) fn direct(&self, able: &AbleNodes) -> Direct<A> {
        let ready = self.0.iter().filter(|(_, endpoint)| endpoint.takes_flows());
        let slots = ready.map(|(at, endpoint)| {
            let node = endpoint.object.node_name.as_deref().unwrap_or_default();
            let to = able.address::<A>(node).filter(|_| !endpoint.local);
            let flags = match to {
                _ if endpoint.local => Backend::<A>::LOCAL,
                Some(_) => Backend::<A>::TUNNELLED,
                None => 0,
            };
            (
                Backend::new(at.addr, at.port, flags).with_weight(endpoint.weight),
                Backend::new(to.unwrap_or(A::UNSPECIFIED), Port::ANY, 0),
            )
        });
        let (backends, nodes): (Vec<_>, Vec<_>) = slots.unzip();
        Direct {
            backends: backends.into(),
            nodes: nodes.into(),
        }
    }

    /// Returns all endpoints that may serve, in a set or not, and whether each is local.
    pub(super) fn serving(&self) -> impl Iterator<Item = (SockAddr<A>, bool)> {
        let serving = self.0.iter().filter(|(_, endpoint)| endpoint.serves());
        serving.map(|(at, endpoint)| (*at, endpoint.local))
    }

    /// Returns the endpoints on other, known nodes.
    pub(super) fn placed(&self) -> impl Iterator<Item = (SockAddr<A>, Placed)> {
        self.0
            .iter()
            .filter(|(_, endpoint)| !endpoint.local)
            .filter_map(|(at, endpoint)| {
                let node = endpoint
                    .object
                    .node_name
                    .clone()
                    .filter(|name| !name.is_empty())?;
                let standing = match endpoint {
                    Endpoint {
                        terminating: true, ..
                    } => Standing::Terminates,
                    Endpoint {
                        ready: false,
                        serving: false,
                        ..
                    } => Standing::Fails,
                    _ => Standing::Serves,
                };
                Some((*at, Placed { node, standing }))
            })
    }

    /// Returns all listed endpoints, including endpoints that may not serve.
    pub fn listed(&self) -> impl Iterator<Item = (SockAddr<A>, &Endpoint<'_, A>)> {
        self.0.iter().map(|(at, endpoint)| (*at, *endpoint))
    }

    /// Returns the addresses of ready local endpoints. Load balancers count the ports of one pod
    /// once.
    pub(super) fn local_ready(&self) -> impl Iterator<Item = A> {
        self.0
            .values()
            .filter(|endpoint| endpoint.local && endpoint.takes_flows())
            .map(|endpoint| endpoint.addr)
    }

    fn backends(&self, chosen: impl Fn(&Endpoint<'_, A>) -> bool) -> Vec<Backend<A>> {
        let chosen = self.0.iter().filter(|(_, endpoint)| chosen(endpoint));
        let flags = |endpoint: &Endpoint<'_, A>| {
            if endpoint.local {
                Backend::<A>::LOCAL
            } else {
                0
            }
        };
        chosen
            .map(|(at, endpoint)| {
                Backend::new(at.addr, at.port, flags(endpoint)).with_weight(endpoint.weight)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use proxy_common::addr::Addr4;

    use super::*;
    use crate::builders::slice;

    #[test]
    fn the_order_of_two_records_does_not_matter() {
        let node = NodeModel {
            name: "here".to_owned(),
            ..Default::default()
        };
        let records = (0..16_u8).map(|bits| {
            let has = |bit: u8| bits & 1 << bit != 0;
            let record =
                slice("web-1", "web")
                    .tcp(80)
                    .conditions("10.244.0.1", has(0), has(1), has(2));
            record.on(if has(3) { "here" } else { "there" }).object()
        });
        let records: Vec<_> = records.collect();
        let chosen = |first: &EndpointSlice, second: &EndpointSlice| {
            let slices = [first, second].map(|object| {
                Slice::<Addr4>::new(object, &node, &Weights::default(), &mut Vec::new()).unwrap()
            });
            let joined = join(&slices, "", Proto::TCP);
            let endpoint = joined.0.into_values().next().unwrap();
            (
                endpoint.ready,
                endpoint.serving,
                endpoint.terminating,
                endpoint.local,
            )
        };
        for first in &records {
            for second in &records {
                assert_eq!(
                    chosen(first, second),
                    chosen(second, first),
                    "{first:?}\n{second:?}"
                );
            }
        }
    }
}
