//! The objects of a namespace that takes all resources.

use std::net::{Ipv4Addr, Ipv6Addr};

use serde_json::{Value, json};

use super::Greed;
use testbed::agent::{Cluster, Object};
use testbed::lab::{EXTERNAL, Family};

use anyhow::Result;

/// The API server's limit on endpoints per EndpointSlice.
const OF_A_SLICE: u32 = 1_000;
/// The ports of the only Service with ExternalIPs: more than the host has rules.
const EXTERNAL_PORTS: u32 = 300;
const FIRST_PORT: u32 = 1_000;
const CLUSTER_IPS: (Ipv4Addr, Ipv6Addr) = (
    Ipv4Addr::new(10, 96, 9, 0),
    Ipv6Addr::new(0xfd00, 0x10, 0x96, 0, 0, 0, 0, 0x900),
);
/// The endpoints' addresses, which belong to no host.
const ENDPOINTS: (Ipv4Addr, Ipv6Addr) = (
    Ipv4Addr::new(10, 128, 0, 0),
    Ipv6Addr::new(0xfd00, 0x10, 0x128, 0, 0, 0, 0, 0),
);

/// The objects, and the changes that the namespace makes.
pub(super) struct Greedy {
    greed: Greed,
    changes: u32,
}

impl Greedy {
    pub(super) fn create(greed: Greed, cluster: &Cluster) -> Result<Self> {
        cluster.put(&external())?;
        for nth in 0..greed.services {
            cluster.put(&greed.service(nth, 0))?;
            for family in Family::ALL {
                for slice in 0..greed.slices() {
                    cluster.put(&greed.slice(nth, family, slice, 0))?;
                }
            }
        }
        Ok(Self { greed, changes: 0 })
    }

    /// Changes one object of each Service in turn: its ports, or the first endpoint of a slice.
    pub(super) fn change(&mut self, cluster: &Cluster) -> Result<()> {
        let greed = self.greed;
        let change = self.changes;
        self.changes += 1;
        let nth = change % greed.services;
        let turn = change / greed.services;
        let again = 1 + turn / 4;
        let object = match turn % 4 {
            0 => greed.slice(nth, Family::V4, 0, again),
            1 => greed.slice(nth, Family::V6, 0, again),
            2 => greed.slice(nth, Family::V4, greed.slices() - 1, again),
            _ => greed.service(nth, again),
        };
        cluster.put(&object)
    }

    pub(super) fn changes(&self) -> u32 {
        self.changes
    }
}

impl Greed {
    /// Returns the number of slices of a Service in each family.
    fn slices(self) -> u32 {
        self.endpoints_of_a_service().div_ceil(OF_A_SLICE)
    }

    /// Returns the number of endpoints of a Service in each family.
    fn endpoints_of_a_service(self) -> u32 {
        self.endpoints / self.services / 2
    }

    fn ports_of_a_service(self) -> u32 {
        (self.ports - EXTERNAL_PORTS) / self.services
    }

    /// Returns a Service; each change replaces its last port.
    fn service(self, nth: u32, change: u32) -> Object {
        let last = self.ports_of_a_service() - 1;
        let number = |port| FIRST_PORT + port + if port == last { change % 2 } else { 0 };
        let ports = (0..=last)
            .map(|port| json!({ "name": name(port), "protocol": "TCP", "port": number(port) }));
        Object(service(&format!("wide-{nth}"), nth + 1, ports.collect()))
    }

    /// Returns a slice of all ports. Every second change replaces the address of its first
    /// endpoint.
    fn slice(self, service: u32, family: Family, nth: u32, change: u32) -> Object {
        let of_a_service = self.endpoints_of_a_service();
        let of_this = of_a_service
            .saturating_sub(nth * OF_A_SLICE)
            .min(OF_A_SLICE);
        let first = service * of_a_service + nth * OF_A_SLICE;
        // Behind all others, so that all others move in their set.
        let moved = if change.is_multiple_of(2) {
            first
        } else {
            self.endpoints + change
        };
        let endpoints = [moved]
            .into_iter()
            .chain(first + 1..first + of_this)
            .map(|nth| {
                json!({
                    "addresses": [endpoint(family, nth)],
                    "conditions": { "ready": true, "serving": true, "terminating": false },
                })
            });
        let ports = (0..self.ports_of_a_service())
            .map(|port| json!({ "name": name(port), "protocol": "TCP", "port": 8_080 }));
        Object(json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": format!("wide-{service}-{}-{nth}", family.to_string().to_lowercase()),
                "namespace": "greedy",
                "labels": { "kubernetes.io/service-name": format!("wide-{service}") },
            },
            "addressType": family.to_string(),
            "endpoints": endpoints.collect::<Vec<_>>(),
            "ports": ports.collect::<Vec<_>>(),
        }))
    }
}

/// Returns the Service with ExternalIPs. Its address precedes all others of the network.
fn external() -> Object {
    let ports = (0..EXTERNAL_PORTS)
        .map(|port| json!({ "name": name(port), "protocol": "TCP", "port": 1 + port }));
    let mut object = service("external", 0, ports.collect());
    object["spec"]["externalIPs"] = json!(Family::ALL.map(|family| EXTERNAL.host(1).ip(family)));
    Object(object)
}

fn service(name: &str, nth: u32, ports: Vec<Value>) -> Value {
    let (v4, v6) = CLUSTER_IPS;
    let ips = [plus4(v4, nth).to_string(), plus6(v6, nth).to_string()];
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "name": name, "namespace": "greedy" },
        "spec": {
            "type": "ClusterIP",
            "clusterIP": ips[0],
            "clusterIPs": ips,
            "ipFamilies": Family::ALL.map(|family| family.to_string()),
            "ipFamilyPolicy": "RequireDualStack",
            "ports": ports,
        },
    })
}

fn name(port: u32) -> String {
    format!("p{port}")
}

fn endpoint(family: Family, nth: u32) -> String {
    let (v4, v6) = ENDPOINTS;
    match family {
        Family::V4 => plus4(v4, nth + 1).to_string(),
        Family::V6 => plus6(v6, nth + 1).to_string(),
    }
}

fn plus4(addr: Ipv4Addr, nth: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(addr.to_bits() + nth)
}

fn plus6(addr: Ipv6Addr, nth: u32) -> Ipv6Addr {
    Ipv6Addr::from_bits(addr.to_bits() + u128::from(nth))
}
