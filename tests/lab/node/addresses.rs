//! Addresses that Linux treats as unicast, unlike other programs: pods and ClusterIPs in
//! 240.0.0.0/4, clients in 169.254.0.0/16 and 0.0.0.0/8.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, ensure};
use testbed::agent::Agent;
use testbed::echo::{Dial, Protocol, Servers};
use testbed::lab::{Dual, Host};
use testbed::netns::NetNs;

/// The node's address, and its second address on the outside machine's link.
const NODE: &str = "192.0.2.1";
const BESIDE: &str = "169.254.7.1";
const NODE_PORT: u16 = 30_055;
const PORT: u16 = 8_080;

/// A node with two pods, and a machine on its link.
struct Machines {
    node: NetNs,
    outside: NetNs,
    client: NetNs,
    server: Host,
    pods: [IpAddr; 2],
}

#[test]
fn pods_and_cluster_ips_in_240_are_reached() -> Result<()> {
    let servers = Servers::start()?;
    for (nth, (pods, services)) in [
        ("240.10", "10.96"),
        ("10.244", "241.96"),
        ("255.255", "254.96"),
    ]
    .iter()
    .enumerate()
    {
        let machines = Machines::make(&format!("class-e{nth}"), pods, &servers)?;
        for socket_lb in ["off", "auto"] {
            let kpx = machines.start(services, &format!("--socket-lb {socket_lb}"))?;
            let cluster_ip = SocketAddr::new(format!("{services}.0.50").parse()?, 80);
            let node_port = SocketAddr::new(NODE.parse()?, NODE_PORT);
            let reported =
                format!("pods in {pods}, ClusterIPs in {services}, --socket-lb {socket_lb}");
            for (what, from, to) in [
                ("a pod", &machines.client, cluster_ip),
                ("the backend itself", &machines.server.ns, cluster_ip),
                ("the node", &machines.node, cluster_ip),
                ("outside", &machines.outside, node_port),
            ] {
                is_answered(from, to, None)
                    .with_context(|| format!("{what} dials {to}; {reported}"))?;
            }
            ensure!(kpx.typed_status()?.skipped.is_empty());
            kpx.stop()?;
        }
    }
    Ok(())
}

#[test]
fn clients_at_link_local_addresses_and_in_net_0_are_answered() -> Result<()> {
    let servers = Servers::start()?;
    let machines = Machines::make("link-local", "10.244", &servers)?;
    machines.node.ip(&format!(
        "addr add {BESIDE}/24 dev eth0\nroute add 0.1.2.3/32 dev eth0"
    ))?;
    machines
        .outside
        .ip("addr add 169.254.7.7/24 dev eth0\naddr add 0.1.2.3/32 dev eth0")?;
    for masquerade in ["default", "compat"] {
        let kpx = machines.start("10.96", &format!("--masquerade {masquerade}"))?;
        for (from, to) in [
            ("169.254.7.7", NODE),
            ("169.254.7.7", BESIDE),
            ("0.1.2.3", NODE),
        ] {
            let to = SocketAddr::new(to.parse()?, NODE_PORT);
            let answered = is_answered(&machines.outside, to, Some(from.parse()?));
            answered.with_context(|| format!("{from} dials {to}, --masquerade {masquerade}"))?;
        }
        kpx.stop()?;
    }
    Ok(())
}

/// Exchanges several messages over each flow, because later packets take other code paths.
fn is_answered(from: &NetNs, to: SocketAddr, source: Option<IpAddr>) -> Result<()> {
    for protocol in Protocol::COMMON {
        let dial = Dial {
            source_ip: source,
            ..Dial::new(protocol, to)
        };
        let mut connection = dial.connect(from).with_context(|| format!("{protocol}"))?;
        for _ in 0..3 {
            let answer = connection
                .exchange(b"hello")
                .with_context(|| format!("{protocol}"))?;
            ensure!(answer.backend == "server", "{answer:?}");
        }
    }
    Ok(())
}

impl Machines {
    /// Makes the machines. `net` is the first half of the pods' addresses.
    fn make(name: &str, net: &str, servers: &Servers) -> Result<Self> {
        let ns = |role: &str| NetNs::create(format!("kpx-{}-{name}-{role}", std::process::id()));
        let node = ns("n")?;
        let outside = ns("x")?;
        let client = ns("a")?;
        let server = ns("b")?;
        let pods = [
            format!("{net}.1.10").parse()?,
            format!("{net}.1.11").parse()?,
        ];
        node.sysctl("ipv4/ip_forward", "1")?;
        node.ip(&format!(
            "link add eth0 type veth peer name eth0 netns {}
             link set eth0 up
             addr add {NODE}/24 dev eth0",
            outside.name()
        ))?;
        outside.ip("link set eth0 up\naddr add 192.0.2.100/24 dev eth0")?;
        node.ip("route add default via 192.0.2.100")?;
        for (device, pod, addr) in [("pod0", &client, pods[0]), ("pod1", &server, pods[1])] {
            node.ip(&format!(
                "link add {device} address 02:00:00:00:00:01 type veth peer name eth0 netns {}
                 link set {device} up
                 route add {addr}/32 dev {device}",
                pod.name()
            ))?;
            node.sysctl(&format!("ipv4/conf/{device}/proxy_arp"), "1")?;
            node.sysctl(&format!("ipv4/neigh/{device}/proxy_delay"), "0")?;
            pod.ip(&format!(
                "link set eth0 up
                 addr add {addr}/32 dev eth0
                 neigh add 169.254.1.1 lladdr 02:00:00:00:00:01 dev eth0 nud permanent
                 route add 169.254.1.1 dev eth0 scope link
                 route add default via 169.254.1.1"
            ))?;
        }
        let [_, at] = pods;
        let IpAddr::V4(v4) = at else {
            anyhow::bail!("{at} is of IPv6")
        };
        let server = Host {
            name: "server",
            ns: server,
            addrs: Dual {
                v4,
                v6: std::net::Ipv6Addr::UNSPECIFIED,
            },
        };
        servers.serve_at(&server, "server", SocketAddr::new(at, PORT))?;
        Ok(Self {
            node,
            outside,
            client,
            server,
            pods,
        })
    }

    /// Starts kpx with a Service of the second pod. `net` is the first half of the ClusterIPs.
    fn start(&self, net: &str, arguments: &str) -> Result<Agent<'_>> {
        let objects = OBJECTS
            .replace("BACKEND", &self.pods[1].to_string())
            .replace("SERVICES", net);
        let [pod, _] = self.pods.map(|pod| pod.to_string());
        let objects = objects.replace("POD_CIDR", &format!("{}0/24", pod.trim_end_matches("10")));
        Agent::start_alone(&self.node, &[("objects", &objects)], arguments)?.healthy()
    }
}

const OBJECTS: &str = "
apiVersion: v1
kind: Node
metadata: { name: n1 }
spec: { podCIDRs: [POD_CIDR] }
status: { addresses: [{ type: InternalIP, address: 192.0.2.1 }] }
---
apiVersion: networking.k8s.io/v1
kind: ServiceCIDR
metadata: { name: kubernetes }
spec: { cidrs: [SERVICES.0.0/16] }
---
apiVersion: v1
kind: Service
metadata: { name: web, namespace: shop }
spec:
  type: NodePort
  clusterIP: SERVICES.0.50
  ports:
  - { name: tcp, port: 80, targetPort: 8080, nodePort: 30055 }
  - { name: udp, port: 80, targetPort: 8080, nodePort: 30055, protocol: UDP }
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: { name: web-1, namespace: shop, labels: { kubernetes.io/service-name: web } }
addressType: IPv4
ports: [{ name: tcp, port: 8080 }, { name: udp, port: 8080, protocol: UDP }]
endpoints: [{ addresses: [BACKEND], nodeName: n1 }]
";
