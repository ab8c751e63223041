//! Weights of endpoints: from annotations, and random.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{ObjectReference, Service};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use rand::RngExt;

use crate::reference::cluster::Cluster;
use crate::reference::generate::{Dice, one};

const OF_SERVICE: &str = "kpx.dev/weights";
const OF_SLICE: &str = "kpx.dev/weight";

/// Some are invalid and affect only themselves.
const WEIGHTS: [&str; 8] = ["0", "0", "0", "1", "3", "1000", "1001", "-1"];

/// Returns the weight of a slice's endpoint: from the Service's list by address or pod name, else
/// the slice's common weight.
pub fn of(service: &Service, slice: &EndpointSlice, endpoint: &Endpoint) -> u16 {
    let said = |annotations: &Option<BTreeMap<String, String>>, name| {
        annotations.as_ref()?.get(name).cloned()
    };
    let list = said(&service.metadata.annotations, OF_SERVICE).unwrap_or_default();
    let named = |is_it: &dyn Fn(&str) -> bool| {
        let pairs = list
            .split([',', ' '])
            .filter_map(|element| element.split_once('='));
        pairs
            .filter(|(name, _)| is_it(name))
            .find_map(|(_, text)| weight(text))
    };
    let addr: Option<IpAddr> = endpoint
        .addresses
        .first()
        .and_then(|text| text.parse().ok());
    let pod = endpoint
        .target_ref
        .as_ref()
        .and_then(|pod| pod.name.as_deref());
    named(&|name| addr.is_some() && name.parse().ok() == addr)
        .or_else(|| named(&|name| Some(name) == pod))
        .or_else(|| {
            said(&slice.metadata.annotations, OF_SLICE).and_then(|text| weight(text.trim()))
        })
        .unwrap_or(1)
}

fn weight(text: &str) -> Option<u16> {
    text.parse().ok().filter(|weight| *weight <= 1_000)
}

/// Sets weights on endpoints of some Services, and removes the others.
pub fn give(dice: &mut Dice, cluster: &mut Cluster) {
    for slice in &mut cluster.slices {
        let annotations = slice.metadata.annotations.get_or_insert_default();
        annotations.remove(OF_SLICE);
        if dice.random_bool(0.2) {
            annotations.insert(OF_SLICE.to_owned(), format!(" {} ", one(dice, &WEIGHTS)));
        }
        for endpoint in slice.endpoints.iter_mut().flatten() {
            let name = format!("pod-{}", endpoint.addresses[0].replace([':', '.'], "-"));
            let kind = Some("Pod".to_owned());
            let name = Some(name);
            endpoint.target_ref = Some(ObjectReference {
                kind,
                name,
                ..ObjectReference::default()
            });
        }
    }
    for service in &mut cluster.services {
        let is_own = |slice: &&EndpointSlice| {
            let owner = slice
                .metadata
                .labels
                .as_ref()
                .and_then(|labels| labels.get("kubernetes.io/service-name"));
            owner == service.metadata.name.as_ref()
                && slice.metadata.namespace == service.metadata.namespace
        };
        let own = cluster
            .slices
            .iter()
            .filter(is_own)
            .flat_map(|slice| slice.endpoints.iter().flatten());
        let own: BTreeSet<_> = own.map(|endpoint| endpoint.addresses[0].clone()).collect();
        let annotations = service.metadata.annotations.get_or_insert_default();
        annotations.remove(OF_SERVICE);
        if dice.random_bool(0.5) {
            let all = if dice.random_bool(0.2) { 1.0 } else { 0.6 };
            let mut element = |addr: String| {
                let by_name = dice.random_bool(0.3);
                let name = if by_name {
                    format!("pod-{}", addr.replace([':', '.'], "-"))
                } else {
                    addr
                };
                dice.random_bool(all)
                    .then(|| format!("{name}={}", one(dice, &WEIGHTS)))
            };
            let list: Vec<_> = own.into_iter().filter_map(&mut element).collect();
            annotations.insert(
                OF_SERVICE.to_owned(),
                list.join(if dice.random_bool(0.5) { "," } else { ", " }),
            );
        }
    }
}
