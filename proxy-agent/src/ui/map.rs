//! `/ui/api/map`: the open flows of a namespace or of one Service, summed up by path: client,
//! Service, backend.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result};
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use proxy_common::flow::State as FlowState;
use serde::{Deserialize, Serialize};
use tokio::task::spawn_blocking;

use super::Page;
use crate::control::answer;
use proxy_core::compact::Address;
use proxy_core::desired::Snapshot;
use proxy_core::model::NodeModel;
use proxy_datapath::{FlowMaps, ListedFlow};
use proxy_view::{Names, frontend_names};

/// The maximum number of flows that are read, for a partial map.
const FLOWS: usize = 500_000;
/// The maximum number of paths that are counted separately.
const WAYS: usize = 8_192;
/// The maximum number of further addresses that get names.
const ALSO: usize = 128;
/// The maximum number of paths in the answer, the busiest first.
const SHOWN: usize = 256;

/// The requested part of the flows.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wanted {
    namespace: String,
    /// The name of a Service; `None` for all Services of the namespace.
    service: Option<String>,
    /// Further addresses that need pods' names, separated by commas: the page has them from events.
    also: Option<String>,
}

/// A path from a client to a backend.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
struct Way {
    /// The address of the client; `None` if it is this node.
    client: Option<IpAddr>,
    service: String,
    backend: SocketAddr,
}

#[derive(Debug, PartialEq, Serialize)]
struct Counted {
    #[serde(flatten)]
    way: Way,
    flows: u64,
    /// The seconds since the last packet of a client, on the flow with the latest packet.
    #[serde(rename = "idleSecs")]
    idle_secs: u32,
    /// The same on the flow that is silent for the longest time.
    #[serde(rename = "longestIdleSecs")]
    longest_idle_secs: u32,
}

#[derive(Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct MapView {
    ways: Vec<Counted>,
    /// The number of open flows whose paths are not in the answer.
    left_out: u64,
    /// True if the tables have more flows than [`FLOWS`].
    partial: bool,
    /// The pods as `namespace/name`, by address, if they are endpoints of a Service. An address of
    /// several pods, as on another node's network, has no name.
    pods: BTreeMap<IpAddr, String>,
    /// The name of this node, by its addresses. Pods on the node's network have no names here.
    nodes: BTreeMap<IpAddr, String>,
}

pub(super) async fn map(State(page): State<Page>, Query(wanted): Query<Wanted>) -> Response {
    let room = match page.rooms.maps.enter() {
        Ok(room) => room,
        Err(full) => return full.into_response(),
    };
    let (snapshot, flows) = match page.sources.agent.flows().await {
        Ok(state) => state,
        Err(error) => return answer::<()>(Err(error)),
    };
    let made = spawn_blocking(move || {
        let _room = room;
        view(snapshot, &flows, &wanted)
    });
    answer(made.await.context("make the map").flatten())
}

fn view(mut snapshot: Snapshot, flows: &FlowMaps, wanted: &Wanted) -> Result<MapView> {
    let all = snapshot.clone();
    snapshot.services.retain(|service| {
        let name = &service.object.name;
        *name.namespace == *wanted.namespace
            && wanted
                .service
                .as_ref()
                .is_none_or(|wanted| *name.name == **wanted)
    });
    let names = Names::new(frontend_names(&snapshot));
    let mut ways = Ways::default();
    let mut reader = flows.reader()?;
    let mut read = 0;
    while let Some(batch) = reader.next_batch()? {
        batch.iter().for_each(|flow| ways.add(flow, &names));
        read += batch.len();
        if read > FLOWS {
            ways.view.partial = true;
            break;
        }
    }
    let also = wanted
        .also
        .iter()
        .flat_map(|also| also.split(','))
        .take(ALSO);
    Ok(ways.view(&all, also.filter_map(|addr| addr.parse().ok())))
}

/// The paths, while they are counted.
#[derive(Default)]
struct Ways {
    /// The number of flows, and the least and most seconds since their last packets.
    counts: BTreeMap<Way, (u64, u32, u32)>,
    view: MapView,
}

impl Ways {
    /// Counts a flow if it is open and its Service is selected.
    fn add(&mut self, flow: &ListedFlow, names: &Names) {
        if matches!(flow.state, FlowState::Closed | FlowState::Reset) {
            return;
        }
        let Some(service) = names.find(flow.frontend, &flow.proto.to_string()) else {
            return;
        };
        let way = Way {
            client: (!flow.from_node).then(|| flow.client.ip()),
            service: format!("{}/{}", service.namespace, service.name),
            backend: flow.backend,
        };
        let is_full = self.counts.len() >= WAYS;
        match self.counts.get_mut(&way) {
            Some((count, least, most)) => {
                *count += 1;
                *least = flow.idle_secs.min(*least);
                *most = flow.idle_secs.max(*most);
            }
            None if is_full => self.view.left_out += 1,
            None => drop(self.counts.insert(way, (1, flow.idle_secs, flow.idle_secs))),
        }
    }

    /// Returns the busiest paths, with the names of pods in them and at `also`.
    fn view(self, snapshot: &Snapshot, also: impl Iterator<Item = IpAddr>) -> MapView {
        let Self { counts, mut view } = self;
        let mut ways: Vec<_> = counts
            .into_iter()
            .map(|(way, (flows, idle_secs, longest_idle_secs))| Counted {
                way,
                flows,
                idle_secs,
                longest_idle_secs,
            })
            .collect();
        ways.sort_by_key(|counted| std::cmp::Reverse(counted.flows));
        let rest = ways.split_off(ways.len().min(SHOWN));
        view.left_out += rest.iter().map(|counted| counted.flows).sum::<u64>();
        let ends = ways
            .iter()
            .flat_map(|Counted { way, .. }| way.client.into_iter().chain([way.backend.ip()]));
        view.nodes = nodes(&snapshot.node);
        view.pods = pods(snapshot, &ends.chain(also).collect());
        view.pods.retain(|addr, _| !view.nodes.contains_key(addr));
        view.ways = ways;
        view
    }
}

fn nodes(node: &NodeModel) -> BTreeMap<IpAddr, String> {
    node.primary
        .iter()
        .map(|addr| (*addr, node.name.clone()))
        .collect()
}

/// Returns the pods that have these addresses.
fn pods(snapshot: &Snapshot, addrs: &BTreeSet<IpAddr>) -> BTreeMap<IpAddr, String> {
    let slices = snapshot.services.iter().flat_map(|service| &service.slices);
    let endpoints = slices.flat_map(|slice| {
        slice
            .endpoints
            .iter()
            .map(move |endpoint| (slice, endpoint))
    });
    let named = endpoints.filter_map(|(slice, endpoint)| {
        let Address::Ip(addr) = endpoint.address else {
            return None;
        };
        let pod = endpoint.pod.as_ref().filter(|_| addrs.contains(&addr))?;
        let namespace = pod.namespace.as_ref().unwrap_or(&slice.name.namespace);
        Some((addr, format!("{namespace}/{}", pod.name.as_ref()?)))
    });
    unambiguous(named)
}

/// Returns the addresses with exactly one name.
fn unambiguous(named: impl Iterator<Item = (IpAddr, String)>) -> BTreeMap<IpAddr, String> {
    let mut names = BTreeMap::<IpAddr, BTreeSet<String>>::new();
    for (addr, name) in named {
        names.entry(addr).or_default().insert(name);
    }
    names
        .into_iter()
        .filter(|(_, names)| names.len() == 1)
        .filter_map(|(addr, names)| Some((addr, names.into_iter().next()?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_of_several_pods_has_no_name() {
        let named = [
            ("192.0.2.1", "kube-system/etcd-n1"),
            ("192.0.2.1", "kube-system/kube-apiserver-n1"),
            ("10.244.0.2", "default/web-0"),
            // The pod is an endpoint of two Services.
            ("10.244.0.2", "default/web-0"),
        ];
        let named = named.map(|(addr, name)| (addr.parse().unwrap(), name.to_owned()));
        let names: Vec<_> = unambiguous(named.into_iter()).into_values().collect();
        assert_eq!(names, ["default/web-0"]);
    }
}
