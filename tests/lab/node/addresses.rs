//! Addresses that Linux treats as unicast, unlike other programs: pods and ClusterIPs in
//! 240.0.0.0/4, clients in 169.254.0.0/16 and 0.0.0.0/8.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

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

/// A node with pairs of pods, and a machine on its link.
struct Machines {
    node: NetNs,
    outside: NetNs,
    pairs: Vec<Pair>,
}

/// Two pods, and the node port of a Service of the second.
struct Pair {
    client: NetNs,
    server: Host,
    nets: Nets,
    node_port: u16,
}

/// The first halves of the addresses of pods and of ClusterIPs.
#[derive(Clone, Copy)]
struct Nets {
    pods: &'static str,
    services: &'static str,
}

#[test]
fn pods_and_cluster_ips_in_240_are_reached() -> Result<()> {
    let servers = Servers::start()?;
    let nets = [
        ("240.10", "10.96"),
        ("10.244", "241.96"),
        ("255.255", "254.96"),
    ]
    .map(|(pods, services)| Nets { pods, services });
    let machines = Machines::make("class-e", &nets, &servers)?;
    for socket_lb in ["off", "auto"] {
        let kpx = machines.start(&format!("--socket-lb {socket_lb}"))?;
        for pair in &machines.pairs {
            let Nets { pods, services } = pair.nets;
            let cluster_ip = SocketAddr::new(format!("{services}.0.50").parse()?, 80);
            let node_port = SocketAddr::new(NODE.parse()?, pair.node_port);
            let reported =
                format!("pods in {pods}, ClusterIPs in {services}, --socket-lb {socket_lb}");
            for (what, from, to) in [
                ("a pod", &pair.client, cluster_ip),
                ("the backend itself", &pair.server.ns, cluster_ip),
                ("the node", &machines.node, cluster_ip),
                ("outside", &machines.outside, node_port),
            ] {
                is_answered(from, to, None)
                    .with_context(|| format!("{what} dials {to}; {reported}"))?;
            }
        }
        ensure!(kpx.typed_status()?.skipped.is_empty());
        kpx.stop()?;
    }
    Ok(())
}

#[test]
fn clients_at_link_local_addresses_and_in_net_0_are_answered() -> Result<()> {
    let servers = Servers::start()?;
    let nets = Nets {
        pods: "10.244",
        services: "10.96",
    };
    let machines = Machines::make("link-local", &[nets], &servers)?;
    machines.node.ip(&format!(
        "addr add {BESIDE}/24 dev eth0\nroute add 0.1.2.3/32 dev eth0"
    ))?;
    machines
        .outside
        .ip("addr add 169.254.7.7/24 dev eth0\naddr add 0.1.2.3/32 dev eth0")?;
    for masquerade in ["default", "compat"] {
        let kpx = machines.start(&format!("--masquerade {masquerade}"))?;
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
    /// Makes the machines, with two pods for each of `nets`.
    fn make(name: &str, nets: &[Nets], servers: &Servers) -> Result<Self> {
        let ns = |role: &str| NetNs::create(format!("kpx-{}-{name}-{role}", std::process::id()));
        let node = ns("n")?;
        let outside = ns("x")?;
        node.sysctl("ipv4/ip_forward", "1")?;
        node.ip(&format!(
            "link add eth0 type veth peer name eth0 netns {}
             link set eth0 up
             addr add {NODE}/24 dev eth0",
            outside.name()
        ))?;
        outside.ip("link set eth0 up\naddr add 192.0.2.100/24 dev eth0")?;
        node.ip("route add default via 192.0.2.100")?;
        let pairs = (NODE_PORT..)
            .zip(nets)
            .map(|(node_port, nets)| Pair::make(&node, *nets, node_port, servers));
        Ok(Self {
            pairs: pairs.collect::<Result<_>>()?,
            node,
            outside,
        })
    }

    /// Starts kpx with the Services.
    fn start(&self, arguments: &str) -> Result<Agent<'_>> {
        let pods = |pair: &Pair| format!("{}.1.0/24", pair.nets.pods);
        let pods: Vec<String> = self.pairs.iter().map(pods).collect();
        let services: String = self.pairs.iter().map(Pair::objects).collect();
        let objects = NODE_OBJECT.replace("POD_CIDRS", &pods.join(", ")) + &services;
        Agent::start_alone(&self.node, &[("objects", &objects)], arguments)?.healthy()
    }
}

impl Pair {
    fn make(node: &NetNs, nets: Nets, node_port: u16, servers: &Servers) -> Result<Self> {
        let make = |role: &str, last: u8| {
            let pod = NetNs::create(format!("{}-{role}{node_port}", node.name()))?;
            let device = format!("{role}{node_port}");
            let addr: Ipv4Addr = format!("{}.1.{last}", nets.pods).parse()?;
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
            Ok::<_, anyhow::Error>((pod, addr))
        };
        let (client, _) = make("client", 10)?;
        let (ns, v4) = make("server", 11)?;
        let server = Host {
            name: "server",
            ns,
            addrs: Dual {
                v4,
                v6: Ipv6Addr::UNSPECIFIED,
            },
        };
        servers.serve_at(&server, "server", SocketAddr::new(v4.into(), PORT))?;
        Ok(Self {
            client,
            server,
            nets,
            node_port,
        })
    }

    fn objects(&self) -> String {
        SERVICE_OBJECTS
            .replace("BACKEND", &self.server.addrs.v4.to_string())
            .replace("SERVICES", self.nets.services)
            .replace("NODE_PORT", &self.node_port.to_string())
    }
}

const NODE_OBJECT: &str = "
apiVersion: v1
kind: Node
metadata: { name: n1 }
spec: { podCIDRs: [POD_CIDRS] }
status: { addresses: [{ type: InternalIP, address: 192.0.2.1 }] }
";

const SERVICE_OBJECTS: &str = "
---
apiVersion: networking.k8s.io/v1
kind: ServiceCIDR
metadata: { name: for-NODE_PORT }
spec: { cidrs: [SERVICES.0.0/16] }
---
apiVersion: v1
kind: Service
metadata: { name: web-NODE_PORT, namespace: shop }
spec:
  type: NodePort
  clusterIP: SERVICES.0.50
  ports:
  - { name: tcp, port: 80, targetPort: 8080, nodePort: NODE_PORT }
  - { name: udp, port: 80, targetPort: 8080, nodePort: NODE_PORT, protocol: UDP }
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: { name: web-NODE_PORT-1, namespace: shop, labels: { kubernetes.io/service-name: web-NODE_PORT } }
addressType: IPv4
ports: [{ name: tcp, port: 8080 }, { name: udp, port: 8080, protocol: UDP }]
endpoints: [{ addresses: [BACKEND], nodeName: n1 }]
";
