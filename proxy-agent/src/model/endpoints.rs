//! Which endpoints a service port may send to: EndpointSlices joined, duplicates settled, sets selected.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use k8s_openapi::api::discovery::v1::{self as discovery, EndpointSlice};
use proxy_common::addr::{Addr, Port, Proto, SockAddr};
use proxy_common::frontend::Backend;

use super::read::{Reader, Skipped, addr, port_number, protocol};
use super::{NodeModel, ObjectName};

/// One EndpointSlice as far as it could be read.
pub(super) struct Slice<'a, A: Addr> {
    ports: Vec<SlicePort<'a>>,
    endpoints: Vec<Endpoint<A>>,
}

struct SlicePort<'a> {
    /// Empty is a name too: it matches the unnamed port of a Service.
    name: &'a str,
    proto: Proto,
    number: Port,
}

#[derive(Clone, Copy)]
struct Endpoint<A: Addr> {
    addr: A,
    ready: bool,
    serving: bool,
    terminating: bool,
    local: bool,
}

/// The endpoints of one service port by where they listen.
pub(super) struct Joined<'a, A: Addr>(BTreeMap<SockAddr<A>, &'a Endpoint<A>>);

/// Which sets a service port's frontends choose from.
#[derive(Clone, Copy)]
pub(super) struct Uses {
    pub(super) cluster: bool,
    pub(super) local: bool,
}

/// The endpoints that take new flows.
pub(super) struct Sets<A: Addr> {
    pub(super) cluster: Vec<Backend<A>>,
    pub(super) local: Vec<Backend<A>>,
    /// There are usable endpoints somewhere, though perhaps in no set that is used.
    pub(super) has_endpoints: bool,
}

impl<'a, A: Addr> Slice<'a, A> {
    /// `None` if the slice is of another family, or of none (`FQDN`).
    pub(super) fn new(slice: &'a EndpointSlice, node: &NodeModel, skipped: &mut Vec<Skipped>) -> Option<Self> {
        if slice.address_type != A::FAMILY {
            return None;
        }
        let name = ObjectName::from(slice);
        let mut reader = Reader::new("EndpointSlice", &name, skipped);
        let ports = slice.ports.iter().flatten().enumerate();
        let ports = ports.filter_map(|(index, port)| SlicePort::new(&mut reader, index, port)).collect();
        let endpoints = slice.endpoints.iter().flatten().enumerate();
        let endpoints =
            endpoints.filter_map(|(index, endpoint)| Endpoint::new(&mut reader, index, endpoint, node)).collect();
        Some(Self { ports, endpoints })
    }
}

impl<'a> SlicePort<'a> {
    fn new(reader: &mut Reader<'_>, index: usize, port: &'a discovery::EndpointPort) -> Option<Self> {
        let missing = || "missing".to_owned();
        let name = reader.take(format_args!("ports[{index}].name"), port.name.as_deref().ok_or_else(missing))?;
        let number = port.port.ok_or_else(missing).and_then(port_number);
        let number = reader.take(format_args!("ports[{index}].port"), number)?;
        let proto = reader.take(format_args!("ports[{index}].protocol"), protocol(port.protocol.as_deref()))?;
        Some(Self { name, proto, number })
    }
}

impl<A: Addr> Endpoint<A> {
    /// Only the first address counts; each condition has its own default.
    fn new(reader: &mut Reader<'_>, index: usize, endpoint: &discovery::Endpoint, node: &NodeModel) -> Option<Self> {
        let text = endpoint.addresses.first().ok_or_else(|| "missing".to_owned());
        let addr = reader.take(format_args!("endpoints[{index}].addresses[0]"), text.and_then(|text| addr(text)))?;
        let conditions = endpoint.conditions.clone().unwrap_or_default();
        Some(Self {
            addr,
            ready: conditions.ready.unwrap_or(true),
            serving: conditions.serving.unwrap_or(true),
            terminating: conditions.terminating.unwrap_or(false),
            local: !node.name.is_empty() && endpoint.node_name.as_ref() == Some(&node.name),
        })
    }

    /// Serving while it terminates: the last resort.
    fn is_fallback(&self) -> bool {
        self.serving && self.terminating && !self.ready
    }

    /// Of two records of one listener the greater is believed: an address that was given to a new pod while the old
    /// one still terminates belongs to the new one. The rest makes the choice independent of the slices' order.
    fn rank(&self) -> (bool, bool, bool, bool) {
        (!self.terminating, self.ready, self.serving, self.local)
    }
}

/// Joins by port name and protocol. Each slice may give the name another number: pods can disagree on a named port.
pub(super) fn join<'a, A: Addr>(slices: &'a [Slice<'_, A>], name: &str, proto: Proto) -> Joined<'a, A> {
    let mut joined = BTreeMap::new();
    for slice in slices {
        for port in slice.ports.iter().filter(|port| port.name == name && port.proto == proto) {
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
    /// Each set falls back to terminating endpoints on its own. Topology hints will narrow the ready endpoints of the
    /// cluster-wide set, never its fallback and never the local set.
    pub(super) fn select(&self, uses: Uses) -> Sets<A> {
        let everywhere = |_: &Endpoint<A>| true;
        let here = |endpoint: &Endpoint<A>| endpoint.local;
        let cluster = if uses.cluster { self.usable(everywhere) } else { Vec::new() };
        let local = if uses.local { self.usable(here) } else { Vec::new() };
        let has_endpoints = !cluster.is_empty()
            || uses.local && self.0.values().any(|endpoint| endpoint.ready || endpoint.is_fallback());
        Sets { cluster, local, has_endpoints }
    }

    /// The ready ones among those that are `wanted`, or if none is, those that still serve while they terminate.
    fn usable(&self, wanted: impl Fn(&Endpoint<A>) -> bool) -> Vec<Backend<A>> {
        let ready = self.backends(|endpoint| wanted(endpoint) && endpoint.ready);
        if ready.is_empty() { self.backends(|endpoint| wanted(endpoint) && endpoint.is_fallback()) } else { ready }
    }

    fn backends(&self, chosen: impl Fn(&Endpoint<A>) -> bool) -> Vec<Backend<A>> {
        let chosen = self.0.iter().filter(|(_, endpoint)| chosen(endpoint));
        let flags = |endpoint: &Endpoint<A>| if endpoint.local { Backend::<A>::LOCAL } else { 0 };
        chosen.map(|(at, endpoint)| Backend::new(at.addr, at.port, flags(endpoint))).collect()
    }
}

#[cfg(test)]
mod tests {
    use proxy_common::addr::Addr4;

    use super::*;
    use crate::builders::slice;

    /// As a Service with external frontends under `externalTrafficPolicy: Local` needs it.
    #[test]
    fn both_sets_may_be_used_and_fall_back_separately() {
        let remote_ready = slice("web-1", "web").tcp(80).ready("10.244.1.1").on("there");
        let local_terminating = remote_ready.clone().terminating("10.244.0.1").on("here");
        let terminating_only =
            slice("web-1", "web").tcp(80).terminating("10.244.1.1").terminating("10.244.0.1").on("here");
        let cases = [
            (remote_ready, &["10.244.1.1"][..], &[][..]),
            (local_terminating, &["10.244.1.1"], &["10.244.0.1"]),
            (terminating_only, &["10.244.0.1", "10.244.1.1"], &["10.244.0.1"]),
        ];
        let node = NodeModel { name: "here".to_owned(), zone: None };
        for (slice, cluster, local) in cases {
            let object = slice.object();
            let slices = [Slice::<Addr4>::new(&object, &node, &mut Vec::new()).unwrap()];
            let sets = join(&slices, "", Proto::TCP).select(Uses { cluster: true, local: true });
            let ips = |set: &[Backend<Addr4>]| set.iter().map(|backend| backend.addr.ip().to_string()).collect();
            let selected: [Vec<String>; 2] = [ips(&sets.cluster), ips(&sets.local)];
            assert_eq!(selected, [cluster, local]);
            assert!(sets.has_endpoints);
        }
    }

    #[test]
    fn of_two_records_the_same_counts_in_either_order() {
        let node = NodeModel { name: "here".to_owned(), zone: None };
        let records = (0..16_u8).map(|bits| {
            let has = |bit: u8| bits & 1 << bit != 0;
            let record = slice("web-1", "web").tcp(80).conditions("10.244.0.1", has(0), has(1), has(2));
            record.on(if has(3) { "here" } else { "there" }).object()
        });
        let records: Vec<_> = records.collect();
        let chosen = |first: &EndpointSlice, second: &EndpointSlice| {
            let slices = [first, second].map(|object| Slice::<Addr4>::new(object, &node, &mut Vec::new()).unwrap());
            let joined = join(&slices, "", Proto::TCP);
            let endpoint = joined.0.into_values().next().unwrap();
            (endpoint.ready, endpoint.serving, endpoint.terminating, endpoint.local)
        };
        for first in &records {
            for second in &records {
                assert_eq!(chosen(first, second), chosen(second, first), "{first:?}\n{second:?}");
            }
        }
    }
}
