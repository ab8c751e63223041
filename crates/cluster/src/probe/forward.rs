//! The packets of external forwarding, without Services: a packet to each other node in IPIP, and
//! datagrams to the outside client with addresses that this node lacks.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
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
/// The port of the inner packet: discard.
const DISCARD: u16 = 9;
/// Maximum size of a received packet that is examined, in bytes.
const LONGEST: usize = 2_048;

/// Send packets as external forwarding does, and print which arrived here as JSON.
#[derive(Args, Debug)]
pub(super) struct ForwardArgs {
    /// The word that marks the packets of this run.
    #[arg(long, value_name = "WORD")]
    word: String,
    /// The name in the datagrams to the outside client.
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
    #[arg(long, value_name = "N", default_value_t = 4_000, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    millis: u64,
}

/// A node's half of the test.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Forwarded {
    /// The senders of the packets in IPIP that arrived.
    pub(crate) arrived_from: BTreeSet<IpAddr>,
    /// The destinations and sources that the kernel refused, with its error.
    pub(crate) refused: Vec<(IpAddr, String)>,
}

pub(super) async fn forward(args: ForwardArgs) -> Result<ExitCode> {
    let forwarded = run(&args).await;
    print(&(serde_json::to_string(&forwarded)? + "\n"))?;
    Ok(ExitCode::SUCCESS)
}

async fn run(args: &ForwardArgs) -> Forwarded {
    let until = Instant::now() + Duration::from_millis(args.millis);
    let tunnels = [
        Tunnel::open(Ipv4Addr::UNSPECIFIED.into()),
        Tunnel::open(Ipv6Addr::UNSPECIFIED.into()),
    ];
    let arrivals = join_all(
        tunnels
            .iter()
            .flatten()
            .map(|tunnel| tunnel.receive(args, until)),
    );
    let handed = join_all(args.node.iter().map(|node| {
        let [v4, v6] = &tunnels;
        hand_over(
            if node.is_ipv4() { v4 } else { v6 },
            *node,
            &args.word,
            until,
        )
    }));
    let answered = join_all(
        args.source
            .iter()
            .map(|source| answer(args, *source, until)),
    );
    let (arrivals, handed, answered) = tokio::join!(arrivals, handed, answered);
    let of_nodes = args.node.iter().copied().zip(handed);
    let of_sources = args.source.iter().map(SocketAddr::ip).zip(answered);
    let refused = of_nodes
        .chain(of_sources)
        .filter_map(|(ip, sent)| Some((ip, sent.err()?.to_string())));
    Forwarded {
        arrived_from: arrivals.into_iter().flatten().collect(),
        refused: refused.collect(),
    }
}

/// A socket for IP packets in IP packets of one family.
struct Tunnel(UdpSocket);

impl Tunnel {
    fn open(any: IpAddr) -> io::Result<Self> {
        let (domain, protocol) = match any {
            IpAddr::V4(_) => (Domain::IPV4, libc::IPPROTO_IPIP),
            IpAddr::V6(_) => (Domain::IPV6, libc::IPPROTO_IPV6),
        };
        let socket = Socket::new(domain, Type::RAW, Some(Protocol::from(protocol)))?;
        socket.set_nonblocking(true)?;
        Ok(Self(UdpSocket::from_std(socket.into())?))
    }

    /// Returns the senders of packets with the run's word.
    async fn receive(&self, args: &ForwardArgs, until: Instant) -> BTreeSet<IpAddr> {
        let mut senders = BTreeSet::new();
        let mut packet = [0; LONGEST];
        while let Ok(received) = timeout_at(until, self.0.recv_from(&mut packet)).await {
            // An ICMP error about an earlier packet is no arrival.
            let Ok((bytes, from)) = received else {
                continue;
            };
            if packet[..bytes].ends_with(args.word.as_bytes()) {
                senders.insert(from.ip());
            }
        }
        senders
    }
}

/// Sends packets in IPIP to a node until the time is over.
async fn hand_over(
    tunnel: &io::Result<Tunnel>,
    node: IpAddr,
    word: &str,
    until: Instant,
) -> io::Result<()> {
    let Tunnel(socket) = tunnel
        .as_ref()
        .map_err(|error| io::Error::new(error.kind(), error.to_string()))?;
    let packet = inner(node, word);
    repeat(until, || socket.send_to(&packet, SocketAddr::new(node, 0))).await
}

/// Returns a datagram with the word, from a node's address to itself: it needs no other route if the
/// kernel takes it out of the outer packet.
fn inner(node: IpAddr, word: &str) -> Vec<u8> {
    const HOPS: u8 = 64;
    let ip = match node {
        IpAddr::V4(node) => PacketBuilder::ipv4(node.octets(), node.octets(), HOPS),
        IpAddr::V6(node) => PacketBuilder::ipv6(node.octets(), node.octets(), HOPS),
    };
    let udp = ip.udp(DISCARD, DISCARD);
    let mut packet = Vec::with_capacity(udp.size(word.len()));
    udp.write(&mut packet, word.as_bytes())
        .expect("a Vec takes all bytes of a short packet");
    packet
}

/// Sends datagrams from this address to the client of its family until the time is over.
async fn answer(args: &ForwardArgs, source: SocketAddr, until: Instant) -> io::Result<()> {
    let mut clients = args.client.iter();
    let Some(client) = clients.find(|client| client.is_ipv4() == source.is_ipv4()) else {
        return Ok(());
    };
    let socket = Socket::new(Domain::for_address(source), Type::DGRAM, None)?;
    // The address belongs to another node or to no node.
    match source {
        SocketAddr::V4(_) => socket.set_ip_transparent_v4(true)?,
        SocketAddr::V6(_) => socket.set_freebind_v6(true)?,
    }
    socket.bind(&source.into())?;
    socket.set_nonblocking(true)?;
    let socket = UdpSocket::from_std(socket.into())?;
    let words = format!("{} {}", args.word, args.name);
    repeat(until, || socket.send_to(words.as_bytes(), *client)).await
}

/// Sends again and again until the time is over. Returns the last send's error.
async fn repeat<F: Future<Output = io::Result<usize>>>(
    until: Instant,
    send: impl Fn() -> F,
) -> io::Result<()> {
    let mut ticks = interval(AGAIN);
    let mut last = Ok(());
    while timeout_at(until, ticks.tick()).await.is_ok() {
        last = send().await.map(drop);
    }
    last
}
