//! The endpoints that a service port may use: sections 2 and 3 of kube-proxy's semantics, step by
//! step.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::core::v1::{Service, ServicePort};
use k8s_openapi::api::discovery::v1::{Endpoint as ApiEndpoint, EndpointPort, EndpointSlice};

use crate::reference::cluster::{Cluster, NodeFacts};
use crate::reference::place::Family;
use crate::reference::weights;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    pub at: SocketAddr,
    pub local: bool,
    ready: bool,
    serving: bool,
    terminating: bool,
    /// The weight for new flows; 0 excludes the endpoint from new flows.
    weight: u16,
    for_nodes: BTreeSet<String>,
    for_zones: BTreeSet<String>,
}

/// The endpoints of a service port in one family, by use.
#[derive(Clone, Debug)]
pub struct Endpoints {
    /// The endpoints for a policy `Cluster`.
    pub cluster: Vec<Endpoint>,
    /// The endpoints for a policy `Local`.
    pub local: Vec<Endpoint>,
    /// All serving endpoints, even out of reach; empty if new flows may use none of them.
    pub serving: Vec<Endpoint>,
    /// All serving endpoints, including weight 0: existing flows may keep them.
    pub kept: Vec<Endpoint>,
}

pub fn of(cluster: &Cluster, service: &Service, port: &ServicePort, family: Family) -> Endpoints {
    let all = listed(cluster, service, port, family);
    let those = |which: fn(&Endpoint) -> bool| {
        all.iter()
            .filter(|endpoint| which(endpoint))
            .cloned()
            .collect::<Vec<_>>()
    };
    let serves = |endpoint: &Endpoint| endpoint.ready || endpoint.serving && endpoint.terminating;
    let ready = those(|endpoint| endpoint.ready && endpoint.weight > 0);
    // The fallback.
    let terminating = those(|endpoint| {
        !endpoint.ready && endpoint.serving && endpoint.terminating && endpoint.weight > 0
    });
    let takes_any = !ready.is_empty() || !terminating.is_empty();
    let here = |endpoints: &[Endpoint]| {
        endpoints
            .iter()
            .filter(|endpoint| endpoint.local)
            .cloned()
            .collect::<Vec<_>>()
    };
    Endpoints {
        cluster: if ready.is_empty() {
            terminating.clone()
        } else {
            near(&ready, &cluster.node)
        },
        local: if here(&ready).is_empty() {
            here(&terminating)
        } else {
            here(&ready)
        },
        serving: all
            .iter()
            .filter(|endpoint| takes_any && serves(endpoint))
            .cloned()
            .collect(),
        kept: all
            .iter()
            .filter(|endpoint| serves(endpoint))
            .cloned()
            .collect(),
    }
}

/// Returns the ready endpoints that hints select: those for this node, else for its zone, else all.
fn near(ready: &[Endpoint], node: &NodeFacts) -> Vec<Endpoint> {
    let hinted = |hints: fn(&Endpoint) -> &BTreeSet<String>, to: &str| -> Option<Vec<Endpoint>> {
        let all_have_hints = ready.iter().all(|endpoint| !hints(endpoint).is_empty());
        let chosen: Vec<_> = ready
            .iter()
            .filter(|endpoint| hints(endpoint).contains(to))
            .cloned()
            .collect();
        (all_have_hints && !chosen.is_empty()).then_some(chosen)
    };
    hinted(|endpoint| &endpoint.for_nodes, node.name)
        .or_else(|| {
            node.zone
                .and_then(|zone| hinted(|endpoint| &endpoint.for_zones, zone))
        })
        .unwrap_or_else(|| ready.to_vec())
}

/// Returns all endpoints in the slices, each once.
fn listed(
    cluster: &Cluster,
    service: &Service,
    port: &ServicePort,
    family: Family,
) -> Vec<Endpoint> {
    let mut endpoints: Vec<Endpoint> = Vec::new();
    for slice in cluster
        .slices
        .iter()
        .filter(|slice| belongs(slice, service) && slice.address_type == family.name())
    {
        for slice_port in slice
            .ports
            .iter()
            .flatten()
            .filter(|slice_port| is_same_port(slice_port, port))
        {
            let Some(number) = slice_port
                .port
                .and_then(|number| u16::try_from(number).ok())
            else {
                continue;
            };
            for listed in slice.endpoints.iter().flatten() {
                let Some(mut endpoint) = read(listed, number, &cluster.node) else {
                    continue;
                };
                endpoint.weight = weights::of(service, slice, listed);
                match endpoints.iter_mut().find(|known| known.at == endpoint.at) {
                    None => endpoints.push(endpoint),
                    Some(known) if known.terminating == endpoint.terminating => {
                        known.weight = known.weight.max(endpoint.weight);
                    }
                    // If a new pod has the address of a terminating pod, the new pod counts.
                    Some(known) if !endpoint.terminating => *known = endpoint,
                    Some(_) => {}
                }
            }
        }
    }
    endpoints
}

fn belongs(slice: &EndpointSlice, service: &Service) -> bool {
    let labels = slice.metadata.labels.clone().unwrap_or_default();
    slice.metadata.namespace == service.metadata.namespace
        && labels.get("kubernetes.io/service-name") == service.metadata.name.as_ref()
        && !labels.contains_key("service.kubernetes.io/headless")
}

/// Matches by name and protocol; an unnamed Service port has an empty name.
fn is_same_port(slice_port: &EndpointPort, port: &ServicePort) -> bool {
    let protocol = |protocol: &Option<String>| protocol.clone().unwrap_or_else(|| "TCP".to_owned());
    slice_port.name.as_deref() == Some(port.name.as_deref().unwrap_or_default())
        && protocol(&slice_port.protocol) == protocol(&port.protocol)
}

fn read(endpoint: &ApiEndpoint, port: u16, node: &NodeFacts) -> Option<Endpoint> {
    let addr: IpAddr = endpoint.addresses.first()?.parse().ok()?;
    let conditions = endpoint.conditions.clone().unwrap_or_default();
    let hints = endpoint.hints.clone().unwrap_or_default();
    Some(Endpoint {
        at: SocketAddr::new(addr, port),
        local: endpoint.node_name.as_deref() == Some(node.name),
        ready: conditions.ready.unwrap_or(true),
        serving: conditions.serving.unwrap_or(true),
        terminating: conditions.terminating.unwrap_or(false),
        weight: 1,
        for_nodes: hints
            .for_nodes
            .into_iter()
            .flatten()
            .map(|node| node.name)
            .collect(),
        for_zones: hints
            .for_zones
            .into_iter()
            .flatten()
            .map(|zone| zone.name)
            .collect(),
    })
}
