//! Random routes to the pods of other nodes: the host's packets to a Service leave by the next hop
//! and with the source that the kernel chooses for the same datagram to the backend.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use etherparse::IpSlice;
use nix::sys::socket::{
    AddressFamily, LinkAddr, SockFlag, SockProtocol, SockType, recvfrom, setsockopt, socket,
    sockopt,
};
use nix::sys::time::TimeVal;
use rand::rngs::SmallRng;
use rand::seq::{IndexedRandom, IteratorRandom};
use rand::{RngExt, SeedableRng};
use testbed::agent::Agent;
use testbed::cases;
use testbed::netns::NetNs;

use super::uplinks::{OBJECTS, PORT, backends, slice};

const ROUNDS: usize = 60;
/// Datagrams to the Service for each route; several reach several next hops.
const DIALS: usize = 4;
const LINKS: [u8; 2] = [1, 2];
const GATEWAYS: [u8; 3] = [2, 3, 4];
const IS_V4: [bool; 2] = [true, false];
const ETH_LEN: usize = 14;
/// The first source port, below those that the kernel and kpx allocate.
const FIRST_PORT: u16 = 10_000;
/// The time within which a datagram leaves.
const PATIENCE: Duration = Duration::from_secs(5);

/// A router at the other end of a link. It is only an entry in the node's neighbour table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Gateway {
    link: u8,
    host: u8,
}

/// The gateway address that a route names.
#[derive(Clone, Copy, Debug)]
enum Via {
    Own,
    /// An address outside of the node's networks.
    Onlink,
    /// An IPv4 route with an IPv6 gateway.
    Inet6,
}

#[derive(Debug)]
struct Route {
    is_v4: bool,
    hops: Vec<(Gateway, Via)>,
    source: Option<IpAddr>,
}

/// The source and next hop of a datagram that left the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Left {
    gateway: Gateway,
    source: IpAddr,
    backend: IpAddr,
}

#[test]
fn host_takes_next_hop_and_source_of_random_routes() -> Result<()> {
    let mut dice = SmallRng::seed_from_u64(cases::seed()?);
    let ns = |role: &str| NetNs::create(format!("kpx-{}-routes-{role}", std::process::id()));
    let node = ns("n")?;
    let far = ns("r")?;
    wire(&node, &far)?;
    let objects = OBJECTS
        .replace("NODE4", &own(true, 0).to_string())
        .replace("NODE6", &own(false, 0).to_string());
    let slices: String = backends()
        .iter()
        .zip(["IPv4", "IPv6"])
        .map(|(addrs, family)| slice(addrs, family))
        .collect();
    let kpx = Agent::start_alone(
        &node,
        &[("objects", &(objects + &slices))],
        "--socket-lb off",
    )?
    .healthy()?;
    let frames = far.run(listen)?;
    let mut token = 0;
    let mut send = |to: SocketAddr| {
        token += 1;
        node.run(|| send(to, token))?;
        left(&frames, token).with_context(|| format!("a datagram to {to}"))
    };
    for _ in 0..ROUNDS {
        let route = Route::random(&mut dice);
        node.ip(&format!("route add {}", route.text()))?;
        for _ in 0..DIALS {
            let of_service = send(cluster_ip(route.is_v4)).with_context(|| route.text())?;
            let plain = send(SocketAddr::new(of_service.backend, PORT))?;
            ensure!(
                route.permits(plain),
                "{}: the kernel: {plain:?}",
                route.text()
            );
            let is_same = of_service == plain;
            ensure!(
                is_same || route.hops.len() > 1 && route.permits(of_service),
                "{}: {of_service:?}, and the kernel: {plain:?}",
                route.text()
            );
        }
        node.ip(&format!("route del {}", route.destination()))?;
    }
    kpx.stop()
}

impl Route {
    fn random(dice: &mut SmallRng) -> Self {
        let is_v4 = dice.random();
        let count = dice.random_range(1..=3);
        let gateways = LINKS
            .into_iter()
            .flat_map(|link| GATEWAYS.map(|host| Gateway { link, host }))
            .sample(dice, count);
        let mut via = || match dice.random_range(0..4) {
            0 => Via::Onlink,
            1 if is_v4 => Via::Inet6,
            _ => Via::Own,
        };
        let hops = gateways
            .into_iter()
            .map(|gateway| (gateway, via()))
            .collect();
        let sources = [None, Some(0), Some(1), Some(2), Some(3)];
        let source = *sources.choose(dice).expect("there are some");
        Self {
            is_v4,
            hops,
            source: source.map(|nth| own(is_v4, nth)),
        }
    }

    fn destination(&self) -> &'static str {
        if self.is_v4 {
            "10.244.2.0/24"
        } else {
            "fd00:244:2::/64"
        }
    }

    /// Returns the route in the syntax of iproute2.
    fn text(&self) -> String {
        let mut text = self.destination().to_owned();
        if let Some(source) = self.source {
            text += &format!(" src {source}");
        }
        for (gateway, via) in &self.hops {
            let nexthop = if self.hops.len() > 1 { " nexthop" } else { "" };
            let by = match via {
                Via::Own => format!("via {}", gateway.addr(self.is_v4, false)),
                Via::Onlink => format!("via {}", gateway.addr(self.is_v4, true)),
                Via::Inet6 => format!("via inet6 {}", gateway.addr(false, false)),
            };
            let onlink = if matches!(via, Via::Onlink) {
                " onlink"
            } else {
                ""
            };
            text += &format!("{nexthop} {by} dev eth{}{onlink}", gateway.link);
        }
        text
    }

    /// Returns true if the route allows this datagram.
    fn permits(&self, left: Left) -> bool {
        let has_source = match self.source {
            Some(source) => left.source == source,
            None => [1, 2, 3]
                .map(|nth| own(self.is_v4, nth))
                .contains(&left.source),
        };
        has_source
            && self
                .hops
                .iter()
                .any(|(gateway, _)| *gateway == left.gateway)
    }
}

impl Gateway {
    fn addr(self, is_v4: bool, is_onlink: bool) -> IpAddr {
        let Self { link, host } = self;
        match (is_v4, is_onlink) {
            (true, false) => Ipv4Addr::new(10, link, 0, host).into(),
            (true, true) => Ipv4Addr::new(172, 30, link, host).into(),
            (false, _) => {
                let net = if is_onlink { 0xd0 } else { 0xc0 } + u16::from(link);
                Ipv6Addr::new(0xfd00, net, 0, 0, 0, 0, 0, host.into()).into()
            }
        }
    }

    fn mac(self) -> String {
        format!("02:00:00:00:{:02x}:{:02x}", self.link, self.host)
    }

    /// Returns the gateway that a frame is addressed to.
    fn of_frame(frame: &[u8]) -> Option<Self> {
        match *frame {
            [2, 0, 0, 0, link, host, ..] => Some(Self { link, host }),
            _ => None,
        }
    }
}

/// Returns an address of the node: 0 is the address of its Node object on lo, others are on the
/// link of this number.
fn own(is_v4: bool, nth: u8) -> IpAddr {
    match (is_v4, nth) {
        (true, 0) => Ipv4Addr::new(192, 0, 2, 1).into(),
        (false, 0) => Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1).into(),
        (true, _) => Ipv4Addr::new(10, nth, 0, 1).into(),
        (false, _) => Ipv6Addr::new(0xfd00, 0xc0 + u16::from(nth), 0, 0, 0, 0, 0, 1).into(),
    }
}

fn cluster_ip(is_v4: bool) -> SocketAddr {
    let ip = if is_v4 { "10.96.0.50" } else { "fd00:96::50" };
    SocketAddr::new(ip.parse().expect("an address"), 80)
}

/// Makes the links and their neighbour entries.
fn wire(node: &NetNs, far: &NetNs) -> Result<()> {
    for (key, value) in [
        ("ipv4/ip_forward", "1"),
        ("ipv6/conf/all/forwarding", "1"),
        ("ipv4/conf/default/rp_filter", "0"),
    ] {
        node.sysctl(key, value)?;
    }
    let links = LINKS.map(|link| {
        let far = far.name();
        format!(
            "link add eth{link} type veth peer name eth{link} netns {far}\nlink set eth{link} up"
        )
    });
    node.ip(&links.join("\n"))?;
    far.ip(&LINKS
        .map(|link| format!("link set eth{link} up"))
        .join("\n"))?;
    let mut lines = String::new();
    let on = [(0, "lo"), (1, "eth1"), (2, "eth2"), (3, "eth1")];
    for is_v4 in IS_V4 {
        for (nth, device) in on {
            let addr = own(is_v4, nth);
            let (bits, nodad) = match (is_v4, nth) {
                (true, 0) => (32, ""),
                (true, _) => (24, ""),
                (false, 0) => (128, " nodad"),
                (false, _) => (64, " nodad"),
            };
            lines += &format!("addr add {addr}/{bits} dev {device}{nodad}\n");
        }
    }
    node.ip(&lines)?;
    node.settle()?;
    lines.clear();
    for gateway in LINKS
        .into_iter()
        .flat_map(|link| GATEWAYS.map(|host| Gateway { link, host }))
    {
        for addr in IS_V4
            .into_iter()
            .flat_map(|is_v4| [false, true].map(|is_onlink| gateway.addr(is_v4, is_onlink)))
        {
            lines += &format!(
                "neigh add {addr} dev eth{} lladdr {} nud permanent\n",
                gateway.link,
                gateway.mac()
            );
        }
    }
    node.ip(&lines)
}

/// Sends a datagram from its own port, because a flow keeps the source of its first route.
fn send(to: SocketAddr, token: u16) -> Result<()> {
    let any: IpAddr = if to.is_ipv4() {
        Ipv4Addr::UNSPECIFIED.into()
    } else {
        Ipv6Addr::UNSPECIFIED.into()
    };
    let socket = UdpSocket::bind((any, FIRST_PORT + token))?;
    socket.send_to(&content(token), to)?;
    Ok(())
}

fn content(token: u16) -> Vec<u8> {
    format!("datagram {token}").into_bytes()
}

/// Opens a socket that receives all frames of a namespace, with any destination.
fn listen() -> Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC;
    let socket = socket(
        AddressFamily::Packet,
        SockType::Raw,
        flags,
        SockProtocol::EthAll,
    )?;
    setsockopt(
        &socket,
        sockopt::ReceiveTimeout,
        &TimeVal::new(PATIENCE.as_secs() as _, 0),
    )?;
    Ok(socket)
}

/// Waits for the datagram with this token.
fn left(frames: &OwnedFd, token: u16) -> Result<Left> {
    let mut buffer = [0; 2_048];
    let since = Instant::now();
    while since.elapsed() < PATIENCE {
        let (len, _) = recvfrom::<LinkAddr>(frames.as_raw_fd(), &mut buffer).context("no frame")?;
        let frame = &buffer[..len];
        if !frame.ends_with(&content(token)) {
            continue;
        }
        let ip = IpSlice::from_slice(&frame[ETH_LEN..])?;
        let gateway =
            Gateway::of_frame(frame).with_context(|| format!("to {:02x?}", &frame[..6]))?;
        return Ok(Left {
            gateway,
            source: ip.source_addr(),
            backend: ip.destination_addr(),
        });
    }
    bail!("it does not leave by a gateway of its link")
}
