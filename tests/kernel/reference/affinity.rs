//! The affinity timeout.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use anyhow::{Result, bail, ensure};
use serde_json::json;

use crate::reference::fixture::{Fixture, Observed};
use testbed::reference::cluster::{Cluster, Detector, Hook, NodeFacts, Packet, Proto, object};
use testbed::reference::node;
use testbed::reference::place::{self, CLUSTER_IPS, Device, Family, OUTSIDE, PODS};

const TIMEOUT_SECS: u32 = 20;
const PORT: u16 = 80;
const NODE_PORT: u16 = 30_080;
/// So many that a client with a random backend each time would not get the same one by chance.
const TIMES: u16 = 60;

#[test]
fn a_client_has_its_backend_until_it_stays_away() -> Result<()> {
    let netns = node::namespace("affinity")?;
    netns.run(|| {
        let mut fixture = Fixture::new("here")?;
        for family in Family::ALL {
            check(&mut fixture, family)?;
        }
        Ok(())
    })
}

fn check(fixture: &mut Fixture, family: Family) -> Result<()> {
    let service = SocketAddr::new(CLUSTER_IPS.addr(family, 1), PORT);
    let node_port = SocketAddr::new(place::primary(family), NODE_PORT);
    let cluster = cluster(family, &[10, 11, 12, 13]);
    fixture.enter(&cluster)?;
    let client = |port| Packet {
        hook: Hook::Ingress(Device::Uplink),
        proto: Proto::Tcp,
        src: SocketAddr::new(OUTSIDE.addr(family, 7), port),
        dst: service,
    };

    let first = backend(fixture, &client(1_000))?;
    for port in 1_001..1_000 + TIMES {
        ensure!(
            backend(fixture, &client(port))? == first,
            "port {port} goes elsewhere"
        );
        let by_node_port = Packet {
            dst: node_port,
            ..client(port)
        };
        ensure!(
            backend(fixture, &by_node_port)? == first,
            "the node port leads elsewhere"
        );
    }
    // Every new flow restarts the timeout.
    for port in 2_000..2_000 + TIMES {
        fixture.age_affinity(&client(port), service, TIMEOUT_SECS - 5)?;
        ensure!(
            backend(fixture, &client(port))? == first,
            "port {port} goes elsewhere before the time is over"
        );
    }
    let mut backends = BTreeSet::new();
    for port in 3_000..3_000 + TIMES {
        fixture.age_affinity(&client(port), service, TIMEOUT_SECS + 5)?;
        backends.insert(backend(fixture, &client(port))?);
    }
    ensure!(
        backends.len() == 4,
        "when the time is over clients still come to {backends:?} only"
    );

    // A client that loses its backend gets another one and keeps it; other clients keep theirs.
    let clients = (1..=TIMES).map(|host| {
        let host = u8::try_from(host).expect("few clients");
        Packet {
            src: SocketAddr::new(OUTSIDE.addr(family, host), 4_000),
            ..client(4_000)
        }
    });
    let before = clients
        .map(|client| Ok((client.src, (client, backend(fixture, &client)?))))
        .collect::<Result<BTreeMap<_, _>>>()?;
    fixture.enter(&self::cluster(family, &[11, 12, 13]))?;
    let gone = PODS.addr(family, 10);
    for (client, had) in before.values() {
        let has = backend(fixture, client)?;
        ensure!(
            if had.ip() == gone {
                has.ip() != gone
            } else {
                has == *had
            },
            "{client:?} had {had} and has {has}"
        );
        ensure!(
            backend(fixture, client)? == has,
            "{client:?} does not stay with {has}"
        );
    }
    ensure!(
        before.values().any(|(_, had)| had.ip() == gone),
        "no client had the backend that left"
    );
    Ok(())
}

fn backend(fixture: &mut Fixture, packet: &Packet) -> Result<SocketAddr> {
    match fixture.send(packet)? {
        Observed::Forward(forwarded) => Ok(forwarded.backend),
        other => bail!("{packet:?}: {other:?}"),
    }
}

/// Returns a cluster with these pods and one Service with a node port.
fn cluster(family: Family, pods: &[u8]) -> Cluster {
    let cluster_ip = CLUSTER_IPS.addr(family, 1);
    let metadata = json!({ "namespace": "default", "name": "web" });
    let service = object(json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "type": "NodePort",
            "clusterIP": cluster_ip,
            "clusterIPs": [cluster_ip],
            "ipFamilies": [family.name()],
            "ports": [{ "port": PORT, "nodePort": NODE_PORT }],
            "sessionAffinity": "ClientIP",
            "sessionAffinityConfig": { "clientIP": { "timeoutSeconds": TIMEOUT_SECS } },
        },
    }));
    let endpoints = pods
        .iter()
        .map(|host| json!({ "addresses": [PODS.addr(family, *host)], "nodeName": "here" }));
    let slice = object(json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "namespace": "default",
            "name": "web-1",
            "labels": { "kubernetes.io/service-name": "web" },
        },
        "addressType": family.name(),
        "ports": [{ "name": "", "port": 8_080 }],
        "endpoints": endpoints.collect::<Vec<_>>(),
    }));
    Cluster {
        services: vec![service],
        slices: vec![slice],
        service_cidrs: Vec::new(),
        node: NodeFacts {
            name: "here",
            zone: None,
            node_port_addrs: place::own(family).map(|(addr, _)| addr).collect(),
            detector: Detector::Cidrs(Vec::new()),
            compat: false,
            masquerade_all: false,
            cluster_ip_external: true,
        },
    }
}
