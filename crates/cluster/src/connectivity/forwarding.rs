//! The packets of external forwarding: from node to node in IPIP, and answers to this process with
//! addresses of other nodes and of Services. The nodes' pods send them, whatever kpx's mode, so the
//! result is known before the mode is switched on.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::future::pending;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use anyhow::Result;
use futures::future::join_all;
use tokio::net::UdpSocket;
use tokio::time::sleep;

use super::ConnectivityArgs;
use super::cases::From;
use super::objects::{Role, TestPod};
use super::report::{Failure, LeftOut};
use super::run::command_in;
use super::stage::Stage;
use crate::probe::Forwarded;

const BETWEEN_NODES: &str = "external forwarding: node to node in IPIP";
const ANSWERS: &str = "external forwarding: answers with other sources";

/// The source port of the answers. No Service of the test has it.
const PORT: u16 = 18_479;
/// The time during which a node sends and receives.
const SENDING: Duration = Duration::from_secs(4);
/// Time after which this process sends to the answers' sources again.
const AGAIN: Duration = Duration::from_secs(1);
/// Maximum size of an answer in bytes.
const ANSWER: usize = 512;

/// A node and the source of a datagram that arrived from it.
type Arrival = (String, IpAddr);

/// A packet that was sent, and the failure if it did not arrive.
pub(super) struct Sent {
    pub(super) case: &'static str,
    pub(super) from: From,
    pub(super) failure: Option<Failure>,
}

/// The packets of external forwarding, and the cases that are skipped.
#[derive(Default)]
pub(super) struct Forwarding {
    pub(super) sent: Vec<Sent>,
    pub(super) left_out: Vec<LeftOut>,
}

/// A node's pod, and what it reported.
struct Node<'a> {
    pod: &'a TestPod,
    forwarded: Result<Forwarded>,
}

impl Forwarding {
    /// Lets all nodes send to each other and to this process for a few seconds, and compares the
    /// arrivals with the packets sent.
    pub(super) async fn run(stage: &Stage<'_>, args: &ConnectivityArgs) -> Self {
        let mut forwarding = Self::default();
        let hosts: Vec<_> = stage
            .pods
            .iter()
            .filter(|pod| pod.role == Role::Host)
            .collect();
        let sources: Vec<_> = (0..hosts.len())
            .map(|place| sources(&hosts, place, args))
            .collect();
        let all: BTreeSet<IpAddr> = sources.iter().flatten().copied().collect();
        let mut clients = Vec::new();
        for is_v4 in [true, false] {
            let mut ips = hosts.iter().flat_map(|pod| &pod.ips);
            let Some(node) = ips.find(|ip| ip.is_ipv4() == is_v4) else {
                continue;
            };
            match Client::open(*node, &all).await {
                Ok(client) => clients.push(client),
                Err(error) => {
                    let why = format!("this machine has no path to {node}: {error}");
                    forwarding.leave_out(ANSWERS, From::Outside, why);
                }
            }
        }
        let arrived = RefCell::default();
        let commands = hosts.iter().zip(&sources).map(|(pod, sources)| {
            let arguments = arguments(stage, &hosts, pod, sources, &clients);
            async move {
                let forwarded = command_in(stage, pod, &arguments).await;
                Node { pod, forwarded }
            }
        });
        let receive = async {
            join_all(clients.iter().map(|client| client.receive(stage, &arrived))).await;
            pending::<Infallible>().await
        };
        let nodes = tokio::select! {
            nodes = join_all(commands) => nodes,
            never = receive => match never {},
        };
        forwarding.between_nodes(&nodes);
        let arrived = arrived.into_inner();
        for (node, sources) in nodes.iter().zip(&sources) {
            for client in &clients {
                forwarding.answers(node, sources, client, &arrived);
            }
        }
        forwarding
    }

    /// Judges a packet from each node to each address of each other node.
    fn between_nodes(&mut self, nodes: &[Node<'_>]) {
        if nodes.len() < 2 {
            let why = "the test runs on a single node".to_owned();
            return self.leave_out(BETWEEN_NODES, From::Node, why);
        }
        for from in nodes {
            for to in nodes.iter().filter(|to| to.pod.node != from.pod.node) {
                for ip in to.pod.ips.iter().filter(|ip| from.has_family_of(**ip)) {
                    let judged = from.hands_over(to, *ip);
                    let failure = judged.err().map(|got| Failure {
                        node: Some(from.pod.node.clone()),
                        protocol: if ip.is_ipv4() { "ipip" } else { "ip6ip6" }.to_owned(),
                        to: ip.to_string(),
                        expected: format!("an arrival at {}", to.pod.node),
                        got,
                        kpx: None,
                    });
                    self.sent.push(Sent {
                        case: BETWEEN_NODES,
                        from: From::Node,
                        failure,
                    });
                }
            }
        }
    }

    /// Judges a node's datagrams to this process.
    fn answers(
        &mut self,
        node: &Node<'_>,
        sources: &[IpAddr],
        client: &Client,
        arrived: &BTreeSet<Arrival>,
    ) {
        let name = &node.pod.node;
        let of_family = sources
            .iter()
            .copied()
            .filter(|ip| client.has_family_of(*ip));
        let (own, other): (Vec<_>, Vec<_>) = of_family.partition(|ip| node.pod.ips.contains(ip));
        let arrives = |source: IpAddr| arrived.contains(&(name.clone(), source));
        let is_reached = own.into_iter().any(arrives);
        if let (Ok(_), false) = (&node.forwarded, is_reached) {
            let why = format!(
                "{} gets no datagram of {name}, not even with the node's own address",
                client.at
            );
            return self.leave_out(ANSWERS, From::Outside, why);
        }
        for source in other {
            let judged = match node.has_sent(source) {
                Ok(()) if arrives(source) => Ok(()),
                Ok(()) => Err(format!("no datagram with the source {source}")),
                Err(error) => Err(error),
            };
            let failure = judged.err().map(|got| Failure {
                node: Some(name.clone()),
                protocol: "udp".to_owned(),
                to: client.at.to_string(),
                expected: "an arrival here".to_owned(),
                got,
                kpx: None,
            });
            self.sent.push(Sent {
                case: ANSWERS,
                from: From::Outside,
                failure,
            });
        }
    }

    fn leave_out(&mut self, case: &'static str, from: From, why: String) {
        self.left_out.push(LeftOut { case, from, why });
    }
}

impl Node<'_> {
    fn has_family_of(&self, ip: IpAddr) -> bool {
        self.pod.ips.iter().any(|own| own.is_ipv4() == ip.is_ipv4())
    }

    /// Returns the error of the command, or of the kernel for packets with this address.
    fn has_sent(&self, ip: IpAddr) -> Result<(), String> {
        let forwarded = self
            .forwarded
            .as_ref()
            .map_err(|error| format!("{error:#}"))?;
        let refused = forwarded.refused.iter().find(|(address, _)| *address == ip);
        refused.map_or(Ok(()), |(_, error)| Err(error.clone()))
    }

    /// Judges the packets to a node's address. The sender may use any of its addresses of the family.
    fn hands_over(&self, to: &Self, ip: IpAddr) -> Result<(), String> {
        self.has_sent(ip)?;
        let there = to
            .forwarded
            .as_ref()
            .map_err(|error| format!("{}: {error:#}", to.pod.node))?;
        let mut own = self
            .pod
            .ips
            .iter()
            .filter(|own| own.is_ipv4() == ip.is_ipv4());
        match own.any(|own| there.arrived_from.contains(own)) {
            true => Ok(()),
            false => Err("nothing arrived".to_owned()),
        }
    }
}

/// Returns the sources of a node's answers: its own addresses, the next node's, and the given
/// addresses of Services. With the mode, an answer has an address of the client's entry node or of
/// the Service.
fn sources(hosts: &[&TestPod], place: usize, args: &ConnectivityArgs) -> Vec<IpAddr> {
    let next = hosts[(place + 1) % hosts.len()];
    let given = args.load_balancer_ip.iter().chain(&args.external_ip);
    let all: BTreeSet<_> = hosts[place]
        .ips
        .iter()
        .chain(&next.ips)
        .chain(given)
        .collect();
    all.into_iter().copied().collect()
}

/// Returns the arguments of the command in a node's pod.
fn arguments(
    stage: &Stage<'_>,
    hosts: &[&TestPod],
    pod: &TestPod,
    sources: &[IpAddr],
    clients: &[Client],
) -> Vec<String> {
    let others = hosts.iter().filter(|other| other.node != pod.node);
    let nodes = others.flat_map(|other| &other.ips);
    let sources = sources.iter().map(|ip| SocketAddr::new(*ip, PORT));
    ["probe".to_owned(), "forward".to_owned()]
        .into_iter()
        .chain([
            format!("--word={}", stage.run),
            format!("--name={}", pod.node),
            format!("--millis={}", SENDING.as_millis()),
        ])
        .chain(nodes.map(|ip| format!("--node={ip}")))
        .chain(sources.map(|source| format!("--source={source}")))
        .chain(
            clients
                .iter()
                .map(|client| format!("--client={}", client.at)),
        )
        .collect()
}

/// The socket of this process that gets the answers of one family.
struct Client {
    at: SocketAddr,
    socket: UdpSocket,
    /// The addresses and ports that the answers come from.
    sources: Vec<SocketAddr>,
}

impl Client {
    /// Opens a socket at the address from which this machine reaches the node.
    async fn open(node: IpAddr, sources: &BTreeSet<IpAddr>) -> io::Result<Self> {
        let any = SocketAddr::new(
            match node {
                IpAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
                IpAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
            },
            0,
        );
        let path = UdpSocket::bind(any).await?;
        path.connect((node, PORT)).await?;
        let socket = UdpSocket::bind((path.local_addr()?.ip(), 0)).await?;
        let of_family = sources.iter().filter(|ip| ip.is_ipv4() == node.is_ipv4());
        Ok(Self {
            at: socket.local_addr()?,
            socket,
            sources: of_family.map(|ip| SocketAddr::new(*ip, PORT)).collect(),
        })
    }

    fn has_family_of(&self, ip: IpAddr) -> bool {
        self.at.is_ipv4() == ip.is_ipv4()
    }

    /// Receives answers, and sends to their sources like a client that waits: a firewall before this
    /// machine accepts only answers.
    async fn receive(&self, stage: &Stage<'_>, arrived: &RefCell<BTreeSet<Arrival>>) {
        let dial = async {
            loop {
                for source in &self.sources {
                    // A source without a route, or a port without a socket, is no failure here.
                    let _sent = self.socket.send_to(b"", source).await;
                }
                sleep(AGAIN).await;
            }
        };
        let receive = async {
            let mut answer = [0; ANSWER];
            loop {
                // An ICMP error about a datagram is no answer.
                let Ok((bytes, from)) = self.socket.recv_from(&mut answer).await else {
                    continue;
                };
                let text = String::from_utf8_lossy(&answer[..bytes]);
                let Some((word, node)) = text.split_once(' ') else {
                    continue;
                };
                if word == stage.run && stage.nodes.contains_key(node) {
                    arrived.borrow_mut().insert((node.to_owned(), from.ip()));
                }
            }
        };
        tokio::join!(dial, receive);
    }
}
