//! Nodes with several next hops to other nodes' pods, and with an address that is not on an uplink:
//! the host's packets to Services take the path and the source that the kernel would choose for the
//! same packet to the backend.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, ensure};
use testbed::agent::Agent;
use testbed::echo::{Dial, Protocol, Servers};
use testbed::lab::{Dual, Host};
use testbed::netns::NetNs;

pub(super) const PORT: u16 = 8_080;
const NODE_PORT: u16 = 30_055;
/// Enough connections to use both next hops.
const DIALS: usize = 24;
const BACKENDS: u8 = 8;
/// An outside client beyond the uplinks.
const OUTSIDE: [&str; 2] = ["198.51.100.9", "fd00:198::9"];

/// A node with two uplinks, and the machine at their other ends, with the backends' addresses on
/// lo.
struct Machines {
    node: NetNs,
    far: Host,
    addrs: [&'static str; 2],
}

#[test]
fn host_reaches_services_by_several_next_hops() -> Result<()> {
    const ROUTES: [&str; 2] = [
        "route replace 10.244.2.0/24 nexthop via 10.1.0.2 dev eth1 nexthop via 10.2.0.2 dev eth2
         route replace fd00:244:2::/64 nexthop via fd00:c1::2 dev eth1 nexthop via fd00:c2::2 dev eth2",
        "nexthop replace id 1 via fd00:c1::2 dev eth1
         nexthop replace id 2 via fd00:c2::2 dev eth2
         nexthop replace id 3 group 1/2
         nexthop replace id 4 via 10.1.0.2 dev eth1
         nexthop replace id 5 via 10.2.0.2 dev eth2
         nexthop replace id 6 group 4/5
         route replace 10.244.2.0/24 nhid 6
         route replace fd00:244:2::/64 nhid 3",
    ];
    let servers = Servers::start()?;
    let machines = Machines::make("hops", ["10.1.0.1", "fd00:c1::1"], &servers)?;
    machines.serves_with("--socket-lb off", true, &ROUTES)?;
    machines.serves_with("--mode host", false, &ROUTES)?;
    machines.serves_with("", true, &ROUTES[1..])
}

#[test]
fn host_speaks_with_the_source_that_the_route_names() -> Result<()> {
    const ROUTES: [&str; 2] = [
        "route replace 10.244.2.0/24 via 10.1.0.2 src 192.0.2.1
         route replace fd00:244:2::/64 via fd00:c1::2 src fd00::1",
        "route replace 10.244.2.0/24 src 192.0.2.1 nexthop via 10.1.0.2 dev eth1 nexthop via 10.2.0.2 dev eth2
         route replace fd00:244:2::/64 src fd00::1 nexthop via fd00:c1::2 dev eth1 nexthop via fd00:c2::2 dev eth2",
    ];
    let servers = Servers::start()?;
    let machines = Machines::make("source", ["192.0.2.1", "fd00::1"], &servers)?;
    machines
        .node
        .ip("addr add 192.0.2.1/32 dev lo\naddr add fd00::1/128 dev lo nodad")?;
    machines
        .far
        .ns
        .ip("route add 192.0.2.1 via 10.1.0.1\nroute add fd00::1 via fd00:c1::1")?;
    // The network beyond the next router has no route back to the links between routers.
    machines.far.ns.nft(
        "table inet far { chain input { type filter hook prerouting priority raw
            ip saddr { 10.1.0.1, 10.2.0.1 } drop
            ip6 saddr { fd00:c1::1, fd00:c2::1 } meta l4proto { tcp, udp } drop
        }; }",
    )?;
    machines.serves_with("--socket-lb off", true, &ROUTES)?;
    machines.serves_with("", true, &ROUTES[1..])
}

impl Machines {
    /// Makes the machines; `addrs` are the node's addresses.
    fn make(name: &str, addrs: [&'static str; 2], servers: &Servers) -> Result<Self> {
        let ns = |role: &str| NetNs::create(format!("kpx-{}-{name}-{role}", std::process::id()));
        let node = ns("n")?;
        let far = ns("r")?;
        for ns in [&node, &far] {
            for (key, value) in [
                ("ipv4/ip_forward", "1"),
                ("ipv6/conf/all/forwarding", "1"),
                ("ipv4/conf/default/rp_filter", "0"),
            ] {
                ns.sysctl(key, value)?;
            }
        }
        for link in [1, 2] {
            node.ip(&format!(
                "link add eth{link} type veth peer name eth{link} netns {}
                 link set eth{link} up
                 addr add 10.{link}.0.1/24 dev eth{link}
                 addr add fd00:c{link}::1/64 dev eth{link} nodad",
                far.name()
            ))?;
            far.ip(&format!(
                "link set eth{link} up
                 addr add 10.{link}.0.2/24 dev eth{link}
                 addr add fd00:c{link}::2/64 dev eth{link} nodad"
            ))?;
        }
        let [v4, v6] = OUTSIDE;
        far.ip(&format!(
            "addr add {v4}/32 dev lo\naddr add {v6}/128 dev lo nodad"
        ))?;
        node.ip(&format!(
            "route add {v4} via 10.1.0.2\nroute add {v6} via fd00:c1::2"
        ))?;
        let unspecified = Dual {
            v4: [0; 4].into(),
            v6: [0; 16].into(),
        };
        let far = Host {
            name: "far",
            ns: far,
            addrs: unspecified,
        };
        let addrs_of_backends = backends().concat().into_iter().map(|backend| {
            let bits = if backend.is_ipv4() { 32 } else { 128 };
            format!("addr add {backend}/{bits} dev lo\n")
        });
        far.ns.ip(&addrs_of_backends.collect::<String>())?;
        far.ns.settle()?;
        node.settle()?;
        for backend in backends().into_iter().flatten() {
            servers.serve_at(&far, "far", SocketAddr::new(backend, PORT))?;
        }
        Ok(Self { node, far, addrs })
    }

    /// Checks with one kpx that the host reaches the Service by each of these sets of routes. The
    /// first set exists before kpx starts.
    fn serves_with(&self, arguments: &str, is_node: bool, routes: &[&str]) -> Result<()> {
        let (first, later) = routes.split_first().context("some routes")?;
        self.node.ip(first)?;
        let [v4, v6] = self.addrs;
        let slices: String = backends()
            .iter()
            .zip(["IPv4", "IPv6"])
            .map(|(addrs, family)| slice(addrs, family))
            .collect();
        let objects = OBJECTS.replace("NODE4", v4).replace("NODE6", v6) + &slices;
        let kpx = Agent::start_alone(&self.node, &[("objects", &objects)], arguments)?.healthy()?;
        self.serves(arguments, is_node)?;
        for routes in later {
            self.node.ip(routes)?;
            self.serves(arguments, is_node)
                .with_context(|| (*routes).to_owned())?;
        }
        kpx.stop().context("stop")
    }

    /// Dials the ClusterIP often enough to use both next hops. A node dials its own node port too,
    /// as does a client outside.
    fn serves(&self, arguments: &str, is_node: bool) -> Result<()> {
        for (family, service) in ["10.96.0.50", "fd00:96::50"].into_iter().enumerate() {
            let cluster_ip = SocketAddr::new(service.parse()?, 80);
            let node_port = SocketAddr::new(self.addrs[family].parse()?, NODE_PORT);
            let outside: IpAddr = OUTSIDE[family].parse()?;
            for protocol in Protocol::COMMON {
                let failed = |ns: &NetNs, dial: Dial| {
                    let faults = (0..DIALS).filter_map(|_| dial.exchange(ns, b"hello").err());
                    faults.map(|fault| fault.to_string()).collect::<Vec<_>>()
                };
                let reported = |to: SocketAddr| format!("{protocol} to {to}, {arguments}");
                let faults = failed(&self.node, Dial::new(protocol, cluster_ip));
                ensure!(
                    faults.is_empty(),
                    "{} of {DIALS}: {faults:?}, {}",
                    faults.len(),
                    reported(cluster_ip)
                );
                if is_node {
                    let faults = failed(&self.node, Dial::new(protocol, node_port));
                    ensure!(
                        faults.is_empty(),
                        "{} of {DIALS}: {faults:?}, {}",
                        faults.len(),
                        reported(node_port)
                    );
                    let dial = Dial::new(protocol, node_port).source_ip(outside);
                    let faults = failed(&self.far.ns, dial);
                    ensure!(
                        faults.is_empty(),
                        "from outside, {} of {DIALS}: {faults:?}, {}",
                        faults.len(),
                        reported(node_port)
                    );
                }
            }
        }
        Ok(())
    }
}

pub(super) fn backends() -> [Vec<IpAddr>; 2] {
    let nth = 10..10 + BACKENDS;
    let v6 = |n: u8| IpAddr::from([0xfd00, 0x244, 2, 0, 0, 0, 0, u16::from(n)]);
    [
        nth.clone().map(|n| IpAddr::from([10, 244, 2, n])).collect(),
        nth.map(v6).collect(),
    ]
}

pub(super) fn slice(addrs: &[IpAddr], family: &str) -> String {
    let endpoints: Vec<_> = addrs
        .iter()
        .map(|addr| format!("{{ addresses: [\"{addr}\"], nodeName: n2 }}"))
        .collect();
    format!(
        "
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {{ name: web-{}, namespace: shop, labels: {{ kubernetes.io/service-name: web }} }}
addressType: {family}
ports: [{{ name: tcp, port: {PORT} }}, {{ name: udp, port: {PORT}, protocol: UDP }}]
endpoints: [{}]
",
        family.to_lowercase(),
        endpoints.join(", ")
    )
}

pub(super) const OBJECTS: &str = "
apiVersion: v1
kind: Node
metadata: { name: n1 }
spec: { podCIDRs: [10.244.1.0/24, \"fd00:244:1::/64\"] }
status: { addresses: [{ type: InternalIP, address: NODE4 }, { type: InternalIP, address: \"NODE6\" }] }
---
apiVersion: networking.k8s.io/v1
kind: ServiceCIDR
metadata: { name: kubernetes }
spec: { cidrs: [10.96.0.0/16, \"fd00:96::/112\"] }
---
apiVersion: v1
kind: Service
metadata: { name: web, namespace: shop }
spec:
  type: NodePort
  ipFamilies: [IPv4, IPv6]
  clusterIP: 10.96.0.50
  clusterIPs: [10.96.0.50, \"fd00:96::50\"]
  ports:
  - { name: tcp, port: 80, targetPort: 8080, nodePort: 30055 }
  - { name: udp, port: 80, targetPort: 8080, nodePort: 30055, protocol: UDP }
";
