//! The packets of external forwarding, without Services: packets in IPIP to other nodes, and
//! datagrams to the outside client with addresses that this node lacks.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use etherparse::PacketBuilder;
use futures::future::join_all;
use nix::libc;
use proxy_view::output::print;
use serde::{Deserialize, Serialize};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::UdpSocket;
use tokio::time::{Instant, interval, timeout_at};

/// Time between two packets to the same destination.
const AGAIN: Duration = Duration::from_millis(200);
/// The port of the packets in IPIP: discard.
const DISCARD: u16 = 9;
const HOPS: u8 = 64;
/// Maximum size of a received packet that is examined, in bytes.
const LONGEST: usize = 2_048;

/// Send packets as external forwarding does, and print which arrived here as JSON.
#[derive(Args, Debug)]
pub(super) struct ForwardArgs {
    /// The word that marks the packets of this run.
    #[arg(long, value_name = "WORD")]
    word: String,
    /// The name of this node, in its packets.
    #[arg(long, value_name = "NAME")]
    name: String,
    /// Send a packet in IPIP to this node; may be repeated.
    #[arg(long, value_name = "IP")]
    node: Vec<IpAddr>,
    /// Send datagrams from this address and port to the client; may be repeated.
    #[arg(long, value_name = "IP:PORT")]
    source: Vec<SocketAddr>,
    /// The outside client, once per family.
    #[arg(long, value_name = "IP:PORT")]
    client: Vec<SocketAddr>,
    /// The milliseconds during which packets are sent and received.
    #[arg(long, value_name = "N", default_value_t = 6_000, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    millis: u64,
}

/// A node's half of the test.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Forwarded {
    /// The nodes whose packets in IPIP arrived, and the outer source of each.
    pub(crate) arrived: Vec<(String, IpAddr)>,
    /// The nodes to which the kernel sent nothing, with its error.
    pub(crate) refused_nodes: Vec<(IpAddr, String)>,
    /// The sources with which the kernel sent nothing to the client, with its error.
    pub(crate) refused_sources: Vec<(IpAddr, String)>,
}

pub(super) async fn forward(args: ForwardArgs) -> Result<ExitCode> {
    let forwarded = run(&args).await;
    print(&(serde_json::to_string(&forwarded)? + "\n"))?;
    Ok(ExitCode::SUCCESS)
}

async fn run(args: &ForwardArgs) -> Forwarded {
    let until = Instant::now() + Duration::from_millis(args.millis);
    let tunnels = Family::ALL.map(Family::tunnel);
    let arrived = join_all(
        tunnels
            .iter()
            .flatten()
            .map(|tunnel| receive(tunnel, args, until)),
    );
    let nodes = join_all(args.node.iter().map(|node| {
        let [v4, v6] = &tunnels;
        hand_over(if node.is_ipv4() { v4 } else { v6 }, *node, args, until)
    }));
    let sources = join_all(
        args.source
            .iter()
            .map(|source| answer(args, *source, until)),
    );
    let (arrived, nodes, sources) = tokio::join!(arrived, nodes, sources);
    let mut arrived: Vec<_> = arrived.into_iter().flatten().collect();
    arrived.sort_unstable();
    arrived.dedup();
    Forwarded {
        arrived,
        refused_nodes: refused(args.node.iter().copied(), nodes),
        refused_sources: refused(args.source.iter().map(SocketAddr::ip), sources),
    }
}

/// Returns the addresses whose packets failed, with the error.
fn refused(ips: impl Iterator<Item = IpAddr>, sent: Vec<io::Result<()>>) -> Vec<(IpAddr, String)> {
    ips.zip(sent)
        .filter_map(|(ip, sent)| Some((ip, sent.err()?.to_string())))
        .collect()
}

#[derive(Clone, Copy)]
enum Family {
    V4,
    V6,
}

impl Family {
    const ALL: [Self; 2] = [Self::V4, Self::V6];

    fn of(ip: IpAddr) -> Self {
        if ip.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    fn domain(self) -> Domain {
        match self {
            Self::V4 => Domain::IPV4,
            Self::V6 => Domain::IPV6,
        }
    }

    /// Returns a socket for IP packets in IP packets.
    fn tunnel(self) -> io::Result<UdpSocket> {
        let protocol = match self {
            Self::V4 => libc::IPPROTO_IPIP,
            Self::V6 => libc::IPPROTO_IPV6,
        };
        self.raw(protocol)
    }

    /// Returns a socket for packets with their IP header, which it only sends.
    fn whole(self) -> io::Result<UdpSocket> {
        self.raw(libc::IPPROTO_RAW)
    }

    fn raw(self, protocol: i32) -> io::Result<UdpSocket> {
        let socket = Socket::new(self.domain(), Type::RAW, Some(Protocol::from(protocol)))?;
        socket.set_nonblocking(true)?;
        // tokio has no raw sockets, and the calls are the same.
        UdpSocket::from_std(socket.into())
    }
}

/// Returns the nodes whose packets arrive, with the outer source of each.
async fn receive(tunnel: &UdpSocket, args: &ForwardArgs, until: Instant) -> Vec<(String, IpAddr)> {
    let mut arrived = Vec::new();
    let mut packet = [0; LONGEST];
    while let Ok(received) = timeout_at(until, tunnel.recv_from(&mut packet)).await {
        let Ok((bytes, from)) = received else {
            continue;
        };
        // The packet ends with the words of `inner`.
        let name = String::from_utf8_lossy(&packet[..bytes])
            .rsplit_once(&args.word)
            .map(|(_, name)| (name.trim().to_owned(), from.ip()));
        // Each arrives many times.
        arrived.extend(name.filter(|name| !arrived.contains(name)));
    }
    arrived
}

/// Sends packets in IPIP to a node until the time is over.
async fn hand_over(
    tunnel: &io::Result<UdpSocket>,
    node: IpAddr,
    args: &ForwardArgs,
    until: Instant,
) -> io::Result<()> {
    let socket = tunnel
        .as_ref()
        .map_err(|error| io::Error::new(error.kind(), error.to_string()))?;
    // From the node to itself: the packet needs no other route if a tunnel device takes it out.
    let at = SocketAddr::new(node, DISCARD);
    let packet = datagram(at, at, &format!("{} {}", args.word, args.name))?;
    repeat(until, || socket.send_to(&packet, SocketAddr::new(node, 0))).await
}

/// Sends datagrams with this source to the client of its family until the time is over. Like an
/// answer of the mode, the packet takes the route to the client for any source.
async fn answer(args: &ForwardArgs, source: SocketAddr, until: Instant) -> io::Result<()> {
    let mut clients = args.client.iter();
    let Some(client) = clients.find(|client| client.is_ipv4() == source.is_ipv4()) else {
        return Ok(());
    };
    let words = format!("{} {} {}", args.word, args.name, source.ip());
    let packet = datagram(source, *client, &words)?;
    let socket = Family::of(source.ip()).whole()?;
    repeat(until, || {
        socket.send_to(&packet, SocketAddr::new(client.ip(), 0))
    })
    .await
}

/// Returns a UDP datagram with its IP header.
fn datagram(from: SocketAddr, to: SocketAddr, words: &str) -> io::Result<Vec<u8>> {
    let ip = match (from.ip(), to.ip()) {
        (IpAddr::V4(from), IpAddr::V4(to)) => PacketBuilder::ipv4(from.octets(), to.octets(), HOPS),
        (IpAddr::V6(from), IpAddr::V6(to)) => PacketBuilder::ipv6(from.octets(), to.octets(), HOPS),
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    };
    let mut packet = Vec::new();
    ip.udp(from.port(), to.port())
        .write(&mut packet, words.as_bytes())
        .map_err(io::Error::other)?;
    Ok(packet)
}

/// Sends again and again until the time is over. Fails only if no send succeeded.
async fn repeat<F: Future<Output = io::Result<usize>>>(
    until: Instant,
    send: impl Fn() -> F,
) -> io::Result<()> {
    let mut ticks = interval(AGAIN);
    let mut outcome = Ok(());
    let mut has_sent = false;
    while timeout_at(until, ticks.tick()).await.is_ok() {
        match timeout_at(until, send()).await {
            Ok(Ok(_)) => has_sent = true,
            Ok(Err(error)) => outcome = Err(error),
            Err(_) => break,
        }
    }
    if has_sent { Ok(()) } else { outcome }
}
