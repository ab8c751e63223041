//! The packets of external forwarding: from node to node in IPIP, and answers to this process with
//! addresses of other nodes and of Services. The nodes' pods send them, whatever kpx's mode, so the
//! result is known before the mode is switched on.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::future::pending;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use anyhow::Result;
use futures::future::join_all;
use tokio::net::UdpSocket;
use tokio::time::sleep;

use super::ConnectivityArgs;
use super::cases::From;
use super::objects::Role;
use super::report::{Failure, LeftOut};
use super::run::command_in;
use super::stage::Stage;
use crate::probe::Forwarded;

const BETWEEN_NODES: &str = "external forwarding: node to node in IPIP";
const ANSWERS: &str = "external forwarding: answers with other sources";

/// The source port of the answers. No Service of the test has it.
const PORT: u16 = 18_479;
/// The time during which a node sends and receives.
const SENDING: Duration = Duration::from_secs(6);
/// Time limit for the command in a node's pod.
const COMMAND: Duration = Duration::from_secs(30);
/// Time after which this process sends to the answers' sources again.
const AGAIN: Duration = Duration::from_secs(1);
/// Maximum size of an answer in bytes.
const ANSWER: usize = 512;
/// The maximum number of nodes that a node sends to: a command's arguments must fit into a URL.
const TARGETS: usize = 20;

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

/// A node, and what its pod reported.
struct Node {
    name: String,
    /// The addresses of the pod in the node's network, to which the other nodes send.
    ips: Vec<IpAddr>,
    /// All addresses of the node: it may send with any of them.
    own: BTreeSet<IpAddr>,
    forwarded: Result<Forwarded>,
}

/// A datagram that this process has received.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Arrival {
    node: String,
    /// The source that the node gave it.
    sent: IpAddr,
    /// The source with which it arrived.
    seen: IpAddr,
}

impl Forwarding {
    /// Lets the nodes send to each other and to this process for a few seconds, and compares the
    /// arrivals with the packets sent.
    pub(super) async fn run(stage: &Stage<'_>, args: &ConnectivityArgs) -> Self {
        let mut forwarding = Self::default();
        let pods = stage.pods.iter().filter(|pod| pod.role == Role::Host);
        let pods: Vec<_> = pods.collect();
        let ips: Vec<_> = pods.iter().map(|pod| pod.ips.clone()).collect();
        let given: Vec<_> = args
            .load_balancer_ip
            .iter()
            .chain(&args.external_ip)
            .copied()
            .collect();
        let sources: Vec<_> = (0..pods.len())
            .map(|place| sources(&ips, place, &given))
            .collect();
        let nodes: BTreeSet<IpAddr> = stage
            .nodes
            .values()
            .chain(&ips)
            .flatten()
            .copied()
            .collect();
        let clients = forwarding.clients(&nodes, &sources).await;
        let arrived = RefCell::default();
        let commands = pods.iter().enumerate().map(|(place, pod)| {
            let targets = targets(pods.len(), place).flat_map(|place| &ips[place]);
            let arguments = arguments(stage, &pod.node, targets, &sources[place], &clients);
            async move {
                let forwarded = command_in(stage, pod, &arguments, COMMAND).await;
                let known = stage.nodes.get(&pod.node).into_iter().flatten();
                Node {
                    name: pod.node.clone(),
                    ips: pod.ips.clone(),
                    own: known.chain(&pod.ips).copied().collect(),
                    forwarded,
                }
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
                forwarding.answers(node, sources, client.at, &arrived);
            }
        }
        forwarding
    }

    /// Opens the sockets that get the answers, one per family.
    async fn clients(&mut self, nodes: &BTreeSet<IpAddr>, sources: &[Vec<IpAddr>]) -> Vec<Client> {
        let mut clients = Vec::new();
        for is_v4 in [true, false] {
            let Some(node) = nodes.iter().find(|ip| ip.is_ipv4() == is_v4) else {
                continue;
            };
            let why = match Client::open(*node, sources).await {
                Ok(client) if !nodes.contains(&client.at.ip()) => {
                    clients.push(client);
                    continue;
                }
                Ok(client) => format!("this machine has the address {} of a node", client.at.ip()),
                Err(error) => format!("this machine has no path to {node}: {error}"),
            };
            self.leave_out(ANSWERS, From::Outside, why);
        }
        clients
    }

    /// Judges a packet from each node to each address of its targets.
    fn between_nodes(&mut self, nodes: &[Node]) {
        if let [first, second] = nodes {
            let why = format!(
                "from {} to {}: a stateful firewall takes such a packet for an answer; test three nodes",
                second.name, first.name
            );
            self.leave_out(BETWEEN_NODES, From::Node, why);
        }
        if nodes.len() < 2 {
            let why = "the test runs on a single node".to_owned();
            self.leave_out(BETWEEN_NODES, From::Node, why);
        }
        for (place, from) in nodes.iter().enumerate() {
            for to in targets(nodes.len(), place).map(|place| &nodes[place]) {
                for ip in to.ips.iter().filter(|ip| from.has_family_of(**ip)) {
                    let failure = from.hands_over(to, *ip).err().map(|got| Failure {
                        node: Some(from.name.clone()),
                        protocol: "ipip".to_owned(),
                        to: ip.to_string(),
                        expected: format!("an arrival at {}", to.name),
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

    /// Judges a node's datagrams to this process at an address.
    fn answers(
        &mut self,
        node: &Node,
        sources: &[IpAddr],
        at: SocketAddr,
        arrived: &BTreeSet<Arrival>,
    ) {
        let of_family = sources.iter().copied();
        let of_family = of_family.filter(|ip| ip.is_ipv4() == at.is_ipv4());
        let (own, other): (Vec<_>, Vec<_>) = of_family.partition(|ip| node.own.contains(ip));
        let arrives = |source: IpAddr| {
            let seen = arrived
                .iter()
                .find(|arrival| arrival.node == node.name && arrival.sent == source)?;
            Some(seen.seen)
        };
        let is_reached = own
            .iter()
            .chain(&other)
            .any(|source| arrives(*source).is_some());
        let why = if other.is_empty() {
            format!("{} has no other source than its own", node.name)
        } else if node.forwarded.is_ok()
            && !is_reached
            && own.iter().all(|source| node.has_answered(*source).is_ok())
        {
            format!(
                "{at} receives no datagram from {}, not even with the node's own address",
                node.name
            )
        } else {
            String::new()
        };
        if !why.is_empty() {
            return self.leave_out(ANSWERS, From::Outside, why);
        }
        for source in other {
            let judged = match arrives(source) {
                Some(seen) if seen == source => Ok(()),
                Some(seen) => Err(format!("{source} arrived as {seen}")),
                None => node
                    .has_answered(source)
                    .and(Err(format!("no datagram with the source {source}"))),
            };
            let failure = judged.err().map(|got| Failure {
                node: Some(node.name.clone()),
                protocol: "udp".to_owned(),
                to: at.to_string(),
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

impl Node {
    fn has_family_of(&self, ip: IpAddr) -> bool {
        self.ips.iter().any(|own| own.is_ipv4() == ip.is_ipv4())
    }

    /// Judges the packets to an address of a node.
    fn hands_over(&self, to: &Self, ip: IpAddr) -> Result<(), String> {
        let sent = self.report()?;
        let arrived = to.report()?.arrived.iter();
        let mut arrived =
            arrived.filter(|(name, source)| *name == self.name && source.is_ipv4() == ip.is_ipv4());
        match arrived.next() {
            Some((_, source)) if self.own.contains(source) => Ok(()),
            Some((_, source)) => Err(format!(
                "arrived from {source}, which is no address of the Node object"
            )),
            None => refusal(&sent.refused_nodes, ip).and(Err("nothing arrived".to_owned())),
        }
    }

    /// Returns the error of the datagrams with this source.
    fn has_answered(&self, source: IpAddr) -> Result<(), String> {
        refusal(&self.report()?.refused_sources, source)
    }

    fn report(&self) -> Result<&Forwarded, String> {
        let report = self.forwarded.as_ref();
        report.map_err(|error| format!("{}: {error:#}", self.name))
    }
}

/// Returns the kernel's error for packets with this address.
fn refusal(refused: &[(IpAddr, String)], ip: IpAddr) -> Result<(), String> {
    let refused = refused.iter().find(|(address, _)| *address == ip);
    refused.map_or(Ok(()), |(_, error)| Err(error.clone()))
}

/// Returns the places of the nodes that a node sends to: the next ones in a ring, so that no two
/// nodes send to each other. A stateful firewall takes a packet in IPIP for an answer to those of
/// the opposite direction.
fn targets(nodes: usize, place: usize) -> impl Iterator<Item = usize> {
    let most = match nodes {
        2 => 1 - place,
        _ => nodes.saturating_sub(1) / 2,
    };
    (1..=most.min(TARGETS)).map(move |step| (place + step) % nodes)
}

/// Returns the sources of a node's answers: its own addresses, the next node's, and the given
/// addresses of Services. With the mode, an answer has an address of the client's entry node or of
/// the Service.
fn sources(nodes: &[Vec<IpAddr>], place: usize, given: &[IpAddr]) -> Vec<IpAddr> {
    let next = &nodes[(place + 1) % nodes.len()];
    let all: BTreeSet<_> = nodes[place].iter().chain(next).chain(given).collect();
    all.into_iter().copied().collect()
}

/// Returns the arguments of the command in a node's pod.
fn arguments<'a>(
    stage: &Stage<'_>,
    name: &str,
    targets: impl Iterator<Item = &'a IpAddr>,
    sources: &[IpAddr],
    clients: &[Client],
) -> Vec<String> {
    let sources = sources.iter().map(|ip| SocketAddr::new(*ip, PORT));
    ["probe".to_owned(), "forward".to_owned()]
        .into_iter()
        .chain([
            format!("--word={}", stage.run),
            format!("--name={name}"),
            format!("--millis={}", SENDING.as_millis()),
        ])
        .chain(targets.map(|ip| format!("--node={ip}")))
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
    sources: BTreeSet<SocketAddr>,
}

impl Client {
    /// Opens a socket at the address from which this machine reaches the node.
    async fn open(node: IpAddr, sources: &[Vec<IpAddr>]) -> io::Result<Self> {
        let any: IpAddr = match node {
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        let path = UdpSocket::bind((any, 0)).await?;
        path.connect((node, PORT)).await?;
        let socket = UdpSocket::bind((path.local_addr()?.ip(), 0)).await?;
        let sources = sources.iter().flatten();
        let of_family = sources.filter(|ip| ip.is_ipv4() == node.is_ipv4());
        Ok(Self {
            at: socket.local_addr()?,
            socket,
            sources: of_family.map(|ip| SocketAddr::new(*ip, PORT)).collect(),
        })
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
                let Ok((bytes, from)) = self.socket.recv_from(&mut answer).await else {
                    continue;
                };
                let text = String::from_utf8_lossy(&answer[..bytes]);
                let words: Vec<_> = text.split(' ').collect();
                if let [word, node, sent] = words[..]
                    && word == stage.run
                    && stage.nodes.contains_key(node)
                    && let Ok(sent) = sent.parse()
                {
                    arrived.borrow_mut().insert(Arrival {
                        node: node.to_owned(),
                        sent,
                        seen: from.ip(),
                    });
                }
            }
        };
        tokio::join!(dial, receive);
    }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    /// Returns node n with the addresses 10.0.0.n and fd00::n.
    fn node(number: u8, forwarded: Result<Forwarded>) -> Node {
        let ips = vec![
            ip(&format!("10.0.0.{number}")),
            ip(&format!("fd00::{number}")),
        ];
        Node {
            name: format!("n{number}"),
            own: ips.iter().copied().collect(),
            ips,
            forwarded,
        }
    }

    fn got(arrived: &[(&str, &str)]) -> Result<Forwarded> {
        let arrived = arrived.iter();
        Ok(Forwarded {
            arrived: arrived
                .map(|(name, from)| ((*name).to_owned(), ip(from)))
                .collect(),
            ..Forwarded::default()
        })
    }

    fn failures(forwarding: &Forwarding) -> Vec<String> {
        let failures = forwarding
            .sent
            .iter()
            .filter_map(|sent| sent.failure.as_ref());
        failures.map(ToString::to_string).collect()
    }

    #[test]
    fn no_two_nodes_send_to_each_other() {
        for nodes in 1..50 {
            let pairs: BTreeSet<_> = (0..nodes)
                .flat_map(|from| targets(nodes, from).map(move |to| (from, to)))
                .collect();
            let reached: BTreeSet<_> = pairs.iter().map(|(_, to)| to).collect();
            assert!(
                pairs
                    .iter()
                    .all(|(from, to)| from != to && !pairs.contains(&(*to, *from)))
            );
            // Only of two nodes one gets nothing.
            assert!(nodes == 1 || reached.len() == if nodes == 2 { 1 } else { nodes });
        }
    }

    #[test]
    fn packets_between_nodes_are_judged_by_family_and_source() {
        let mut forwarding = Forwarding::default();
        let refused = Ok(Forwarded {
            refused_nodes: vec![(ip("fd00::1"), "no route".to_owned())],
            ..Forwarded::default()
        });
        forwarding.between_nodes(&[
            node(1, got(&[("n3", "10.9.9.9")])),
            node(2, got(&[("n1", "10.0.0.1"), ("n3", "10.0.0.3")])),
            node(3, refused),
        ]);
        assert_eq!(
            failures(&forwarding),
            [
                "n1: ipip fd00::2: nothing arrived, not an arrival at n2",
                "n2: ipip 10.0.0.3: nothing arrived, not an arrival at n3",
                "n2: ipip fd00::3: nothing arrived, not an arrival at n3",
                "n3: ipip 10.0.0.1: arrived from 10.9.9.9, which is no address of the Node object, not an arrival at n1",
                "n3: ipip fd00::1: no route, not an arrival at n1",
            ]
        );
        assert_eq!((forwarding.sent.len(), forwarding.left_out.len()), (6, 0));
    }

    #[test]
    fn answers_are_judged_by_their_source() {
        let at = "198.51.100.9:4000".parse().unwrap();
        let sources = ["10.0.0.1", "10.0.0.2", "203.0.113.7", "fd00::2"].map(ip);
        let arrival = |sent, seen| Arrival {
            node: "n1".to_owned(),
            sent: ip(sent),
            seen: ip(seen),
        };
        let judged = |arrived: &[Arrival], forwarded| {
            let mut forwarding = Forwarding::default();
            let arrived = arrived.iter().cloned().collect();
            forwarding.answers(&node(1, forwarded), &sources, at, &arrived);
            (failures(&forwarding), forwarding.left_out.len())
        };
        let own = arrival("10.0.0.1", "10.0.0.1");
        let translated = arrival("203.0.113.7", "10.0.0.1");
        assert_eq!(
            judged(&[own, translated], got(&[])),
            (
                vec![
                    "n1: udp 198.51.100.9:4000: no datagram with the source 10.0.0.2, not an arrival here".to_owned(),
                    "n1: udp 198.51.100.9:4000: 203.0.113.7 arrived as 10.0.0.1, not an arrival here".to_owned(),
                ],
                0
            )
        );
        assert_eq!(judged(&[], got(&[])), (vec![], 1));
        let (failures, left_out) = judged(&[], Err(anyhow!("no pod")));
        assert_eq!((failures.len(), left_out), (2, 0));
        assert!(failures[0].contains("n1: no pod"));
    }
}
