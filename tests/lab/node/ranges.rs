//! Ranges of ClusterIPs that contain other addresses: pods, and networks to which the node has
//! routes.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, ensure};
use testbed::agent::{Agent, DEADLINE, kpx, wait_until};
use testbed::cases::Running;
use testbed::echo::{Dial, Protocol};
use testbed::lab::{Family, Layout};
use testbed::served_lab::ServedLab;

const PORT: u16 = 8_080;
const PROBLEM: &str = "ranges of ClusterIPs";

#[test]
fn ranges_of_cluster_ips_contain_other_addresses() -> Result<()> {
    let fixture = &ServedLab::with_manifests(Layout::Routed)?.serve(&["p1b", "p2a", "x"], PORT)?;
    let node = &fixture.lab.n1.host.ns;
    let agent = Agent::start_alone(node, &[], "--socket-lb off")?.healthy()?;
    let running = Running { fixture, agent };
    testbed::cases!(
        &running;
        a_range_over_pods_and_routes_drops_none_of_their_packets,
        route_into_range_is_reported_and_rest_serves,
    )?;
    running.agent.stop()
}

fn a_range_over_pods_and_routes_drops_none_of_their_packets(
    running: &Running<ServedLab>,
) -> Result<()> {
    let Running { fixture, agent } = running;
    let lab = &fixture.lab;
    let [own, far] = ["p1b", "p2a"].map(|name| lab.host(name).addrs);
    for (ranges, services) in [
        // The range holds the pods of both nodes, and ClusterIPs.
        (
            "10.244.0.0/16, \"fd00:10:244::/48\"",
            ["10.244.200.20", "fd00:10:244:200::20"],
        ),
        ("0.0.0.0/0, \"::/0\"", ["10.96.0.20", "fd00:10:96::20"]),
    ] {
        let [v4, v6] = services;
        let endpoints = |one: IpAddr, other: IpAddr| {
            format!(
                "endpoints: [{{ addresses: [\"{one}\"], nodeName: n1 }}, {{ addresses: [\"{other}\"], nodeName: n2 }}]"
            )
        };
        let objects = OBJECTS
            .replace("RANGES", ranges)
            .replace("SERVICE4", v4)
            .replace("SERVICE6", v6)
            .replace("ENDPOINTS4", &endpoints(own.v4.into(), far.v4.into()))
            .replace("ENDPOINTS6", &endpoints(own.v6.into(), far.v6.into()));
        agent.put("objects", &objects)?;
        wait_until(DEADLINE, "the overlap is a problem", || {
            Ok(agent
                .problem(PROBLEM)?
                .is_some_and(|why| why.contains("10.244.") || why.contains("0.0.0.0/0")))
        })
        .with_context(|| agent.log())?;
        agent.wait(DEADLINE, "both families serve the Service", |status| {
            status.tables.len() == 2 && status.tables.values().all(|table| table.services == 1)
        })?;
        ensure!(
            agent.typed_status()?.skipped.is_empty(),
            "{:?}",
            agent.typed_status()?.skipped
        );
        for (family, service) in Family::ALL.into_iter().zip(services) {
            let direct = ["p1b", "p2a", "x"]
                .map(|name| (name, SocketAddr::new(lab.host(name).addrs.ip(family), PORT)));
            let cluster_ip = ("a Service", SocketAddr::new(service.parse()?, 80));
            for (what, to) in direct.into_iter().chain([cluster_ip]) {
                for protocol in Protocol::COMMON {
                    let answer = Dial::new(protocol, to).exchange(&lab.host("p1a").ns, b"hello");
                    answer
                        .with_context(|| format!("{what} at {to}, {protocol}, ranges {ranges}"))?;
                }
            }
        }
        forget_objects(agent)?;
    }
    Ok(())
}

fn route_into_range_is_reported_and_rest_serves(running: &Running<ServedLab>) -> Result<()> {
    let Running { fixture, agent } = running;
    let lab = &fixture.lab;
    // A foreign network within the range, like Docker's default network in some clusters.
    let n1 = &lab.n1.host;
    let n2 = &lab.n2.host;
    let beyond: SocketAddr = "10.96.7.2:8080".parse()?;
    n2.ns.ip("addr add 10.96.7.2/32 dev lo")?;
    fixture.servers.serve_at(n2, "beyond", beyond)?;
    n1.ns
        .ip(&format!("route add 10.96.7.0/24 via {}", n2.addrs.v4))?;
    let objects = OBJECTS
        .replace("RANGES", "10.96.0.0/16")
        .replace("SERVICE4", "10.96.0.20")
        .replace("SERVICE6", "fd00:10:96::20")
        .replace("ENDPOINTS4", "endpoints: []")
        .replace("ENDPOINTS6", "endpoints: []");
    agent.put("objects", &objects)?;
    wait_until(DEADLINE, "the overlap is a problem", || {
        let why = agent.problem(PROBLEM)?;
        Ok(why.is_some_and(|why| {
            why.starts_with(
                "the ClusterIP range 10.96.0.0/16 contains a route of this node's to 10.96.7.0/24:",
            )
        }))
    })
    .with_context(|| agent.log())?;
    agent.wait(DEADLINE, "the pod's device has its programs", |status| {
        status.devices.iter().any(|device| device.name == "p1a")
    })?;
    let p1a = &lab.host("p1a").ns;
    Dial::new(Protocol::Tcp, beyond)
        .exchange(p1a, b"hello")
        .context("the network within the range")?;

    let dropped = || {
        Ok::<_, anyhow::Error>(
            agent.status()?["reasons"]["unallocated"]
                .as_u64()
                .unwrap_or_default(),
        )
    };
    let before = dropped()?;
    ensure!(
        Dial::new(Protocol::Udp, "10.96.9.9:80".parse()?)
            .connect(p1a)?
            .exchange(b"hello")
            .is_err()
    );
    ensure!(
        dropped()? > before,
        "no Service has this address, and no route leads there"
    );

    let reported = kpx(&n1.ns, "check --service-cidr 10.96.0.0/16")?;
    let reported = String::from_utf8(reported.stdout)?;
    ensure!(
        reported.contains("10.96.0.0/16 have in them routes of this node's to 10.96.7.0/24"),
        "{reported}"
    );
    n1.ns.ip("route del 10.96.7.0/24")?;
    n2.ns.ip("addr del 10.96.7.2/32 dev lo")?;
    forget_objects(agent)
}

/// Deletes the objects, and waits until their ranges are no problem.
fn forget_objects(agent: &Agent) -> Result<()> {
    agent.delete("objects")?;
    agent.wait(DEADLINE, "the ranges are forgotten", |status| {
        status.healthy && status.tables.values().all(|table| table.services == 0)
    })
}

const OBJECTS: &str = "
apiVersion: v1
kind: Node
metadata: { name: n1 }
spec: { podCIDRs: [10.244.1.0/24, \"fd00:10:244:1::/64\"] }
status: { addresses: [{ type: InternalIP, address: 172.18.0.11 }] }
---
apiVersion: networking.k8s.io/v1
kind: ServiceCIDR
metadata: { name: kubernetes }
spec: { cidrs: [RANGES] }
---
apiVersion: v1
kind: Service
metadata: { name: web, namespace: shop }
spec:
  ipFamilies: [IPv4, IPv6]
  clusterIP: SERVICE4
  clusterIPs: [SERVICE4, \"SERVICE6\"]
  ports:
  - { name: tcp, port: 80, targetPort: 8080 }
  - { name: udp, port: 80, targetPort: 8080, protocol: UDP }
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: { name: web-4, namespace: shop, labels: { kubernetes.io/service-name: web } }
addressType: IPv4
ports: [{ name: tcp, port: 8080 }, { name: udp, port: 8080, protocol: UDP }]
ENDPOINTS4
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: { name: web-6, namespace: shop, labels: { kubernetes.io/service-name: web } }
addressType: IPv6
ports: [{ name: tcp, port: 8080 }, { name: udp, port: 8080, protocol: UDP }]
ENDPOINTS6
";
