//! A flood of SYNs with forged sources, against a backend that answers each of them, and of ACKs that claim to have seen
//! the answer. Beside them, RSTs, FINs and SYNs in the names of clients whose connections are silent. Open connections stay open,
//! and new connections get through.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use aya::maps::{HashMap, MapData};
use etherparse::{PacketBuilder, PacketBuilderStep, TcpHeader};
use proxy_common::addr::{Addr, Addr4, Addr6};
use proxy_common::flow::{Flow, FlowKey, Kind, State};
use proxy_common::names::{IPV4, IPV6};
use proxy_datapath::open;
use socket2::{Domain, SockAddr, Socket, Type};
use testbed::agent::{Agent, Cluster, Service, node};
use testbed::echo::{Connection, Dial, Protocol, Servers, pattern};
use testbed::lab::{Family, Host, Lab, Layout};

/// The port of every server of the lab, and the one that clients outside dial.
const PORT: u16 = 8080;
const NODE_PORT: u16 = 30_080;
/// Room in each family's flow table: the flood brings more flows than that.
const FLOW_ENTRIES: usize = 8_192;
/// It lasts as long at least, and until it has brought them.
const FLOOD: Duration = Duration::from_secs(3);
const SYNS: u64 = 2 * FLOW_ENTRIES as u64;
/// The time limit, on any machine.
const DEADLINE: Duration = Duration::from_secs(60);
/// SYNs between a SYN and its ACK. The half-open queue holds more.
const LEAD: usize = FLOW_ENTRIES / 16;
/// Longer than kpx takes a silent connection for one that may have data on its way.
const SILENCE: Duration = Duration::from_secs(4);
/// Connections that are used during the flood, and as many that are silent, in each family.
const CONNECTIONS: usize = 10;

#[test]
fn a_flood_of_blind_handshakes_costs_no_connection_and_no_handshake() -> Result<()> {
    let lab = Lab::start(Layout::Routed)?;
    // Strangers' names come in from where no route leads to them.
    lab.set_rp_filter(0)?;
    let servers = Servers::start()?;
    servers.serve(lab.host("p1b"), PORT)?;
    let cluster = Cluster::with_manifests(&lab)?;
    let web = Service::new("web", 10, &["p1b"], PORT).node_port(NODE_PORT);
    let objects = web.objects(&lab).into_iter().chain(lab.nodes().map(node));
    objects.into_iter().try_for_each(|object| cluster.put(&object))?;
    let [n1, _] = lab.nodes();
    let arguments = ["--flow-table-size".to_owned(), FLOW_ENTRIES.to_string()];
    let agent = Agent::start_with(&lab, n1, cluster.source(), &arguments)?;
    let to = Family::ALL.map(|family| SocketAddr::new(n1.host.addrs.ip(family), NODE_PORT));
    let (client, flooder) = (lab.host("xl"), lab.host("x"));

    let (mut standing, mut silent) = (connect(client, to)?, connect(client, to)?);
    let victims = silent.iter().map(|connection| Ok(connection.ends().map_err(|fault| anyhow!("{fault}"))?[0]));
    let victims = victims.collect::<Result<Vec<_>>>()?;
    let strangers = to.map(|to| {
        let victims = victims.iter().filter(|victim| victim.is_ipv4() == to.is_ipv4()).copied().collect();
        Stranger { to, dialled: VecDeque::new(), victims }
    });
    // Until then, some of what the silent ones have sent may be on its way.
    let connected = Instant::now();
    while connected.elapsed() < SILENCE {
        exchange(&mut standing)?;
    }
    let before = counts(&agent)?;
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    let dialled = thread::scope(|scope| -> Result<_> {
        let flood = scope.spawn(|| flood(flooder, strangers, &stop, &sent));
        let dialled = under_flood(client, to, &mut standing, &sent);
        stop.store(true, Ordering::Relaxed);
        flood.join().map_err(|_| anyhow!("the flood panicked"))??;
        dialled
    })?;
    let sent = sent.into_inner();
    let now = counts(&agent)?;
    let grown = |name: &str| now[name] - before[name];
    println!("{sent} SYNs, {dialled} handshakes meanwhile; {} forgotten", grown("flow_forgotten"));
    ensure!(dialled > 0 && sent > SYNS, "{sent} SYNs, {dialled} handshakes");
    ensure!(grown("flow_forgotten") > 0 && grown("flows_full") == 0 && grown("end_ignored") > 1_000, "{now:?}");

    for family in [table::<Addr4>(&agent, IPV4.flows)?, table::<Addr6>(&agent, IPV6.flows)?] {
        let Table { half_open, entries, others, established } = family;
        // Half of the table, in flows of two entries.
        ensure!(half_open <= FLOW_ENTRIES / 4 + 100, "{half_open} half-open flows");
        ensure!(others >= 2 * CONNECTIONS && others <= 2 * CONNECTIONS + dialled, "{others} other flows of {dialled}");
        ensure!(established >= 2 * CONNECTIONS, "{established} established flows");
        ensure!(entries <= 2 * (half_open + others) + 100, "{entries} entries of {half_open} and {others} flows");
    }
    exchange(&mut standing)?;
    exchange(&mut silent).context("after the flood")?;
    agent.stop()
}

/// Opens connections to both addresses.
fn connect(client: &Host, to: [SocketAddr; 2]) -> Result<Vec<Connection>> {
    let dial = |to| Dial::new(Protocol::Tcp, to).connect(&client.ns).map_err(|fault| anyhow!("{fault}"));
    to.into_iter().flat_map(|to| [to; CONNECTIONS]).map(dial).collect()
}

/// Uses connections that stood before the flood.
fn exchange(standing: &mut [Connection]) -> Result<()> {
    for connection in standing {
        connection.exchange(&pattern(100)).map_err(|fault| anyhow!("a connection that stood: {fault}"))?;
    }
    Ok(())
}

/// Goes on for as long as the flood does: connections are used, others made. How many were.
fn under_flood(client: &Host, to: [SocketAddr; 2], standing: &mut [Connection], sent: &AtomicU64) -> Result<usize> {
    let (started, mut dialled) = (Instant::now(), 0);
    let is_over = || started.elapsed() > FLOOD && sent.load(Ordering::Relaxed) > SYNS;
    while !is_over() && started.elapsed() < DEADLINE {
        exchange(standing)?;
        for to in to {
            let answer = Dial::new(Protocol::Tcp, to).deadline(DEADLINE / 6).exchange(&client.ns, &pattern(100));
            answer.map_err(|fault| anyhow!("handshake {dialled}, {to}: {fault}"))?;
            dialled += 1;
        }
    }
    Ok(dialled)
}

/// Sends as fast as one thread can, and counts the SYNs of strangers.
fn flood(from: &Host, mut strangers: [Stranger; 2], stop: &AtomicBool, sent: &AtomicU64) -> Result<()> {
    /// Sends the packets as they are, with their IP headers.
    const RAW: i32 = 255;
    let socket = |domain| from.ns.run(move || Socket::new(domain, Type::RAW, Some(RAW.into())));
    let sockets = [socket(Domain::IPV4)?, socket(Domain::IPV6)?];
    while !stop.load(Ordering::Relaxed) {
        for (socket, stranger) in sockets.iter().zip(&mut strangers) {
            let (packets, syns) = stranger.packets();
            for packet in packets {
                let mut bytes = Vec::new();
                packet.write(&mut bytes, &[])?;
                // To a port of 0: of IPv6 it would be the protocol's.
                let to = SockAddr::from(SocketAddr::new(stranger.to.ip(), 0));
                socket.send_to(&bytes, &to).context("send a packet in another's name")?;
            }
            sent.fetch_add(syns, Ordering::Relaxed);
        }
    }
    Ok(())
}

/// The sender in others' names of one family. It sees none of the answers.
struct Stranger {
    to: SocketAddr,
    /// The SYNs that wait for their ACKs.
    dialled: VecDeque<SocketAddr>,
    /// The clients whose connections are to end.
    victims: Vec<SocketAddr>,
}

impl Stranger {
    /// Returns a SYN or the ACK of an older one, and one packet in the name of a victim; and the number of SYNs.
    fn packets(&mut self) -> ([PacketBuilderStep<TcpHeader>; 2], u64) {
        let answered = if self.dialled.len() > LEAD { self.dialled.pop_front() } else { None };
        let syns = u64::from(answered.is_none());
        let handshake = match answered {
            Some(name) => self.tcp(name).ack(rand::random()),
            None => {
                let name = self.name();
                self.dialled.push_back(name);
                self.tcp(name).syn()
            }
        };
        let victim = self.tcp(self.victims[rand::random_range(0..self.victims.len())]);
        let end = match rand::random_range(0..4) {
            0 => victim.rst(),
            1 => victim.rst().ack(rand::random()),
            2 => victim.fin().ack(rand::random()),
            _ => victim.syn(),
        };
        ([handshake, end], syns)
    }

    /// Returns a source in a range that no host has here.
    fn name(&self) -> SocketAddr {
        let name: u32 = rand::random();
        let ip = match self.to.ip() {
            IpAddr::V4(_) => IpAddr::from((0x0b00_0000 | name >> 8).to_be_bytes()),
            IpAddr::V6(_) => IpAddr::from((0x2001_0db8_00ff_u128 << 80 | u128::from(name)).to_be_bytes()),
        };
        SocketAddr::new(ip, rand::random_range(1_024..=u16::MAX))
    }

    fn tcp(&self, from: SocketAddr) -> PacketBuilderStep<TcpHeader> {
        let ip = match (from.ip(), self.to.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => PacketBuilder::ipv4(from.octets(), to.octets(), 64),
            (IpAddr::V6(from), IpAddr::V6(to)) => PacketBuilder::ipv6(from.octets(), to.octets(), 64),
            _ => unreachable!("both are of one family"),
        };
        ip.tcp(from.port(), self.to.port(), rand::random(), 64_000)
    }
}

/// Returns the counters of the programs.
fn counts(agent: &Agent<'_>) -> Result<BTreeMap<String, u64>> {
    let status = agent.status()?;
    let mut counts: BTreeMap<String, u64> = serde_json::from_value(status["events"].clone())?;
    counts.extend(serde_json::from_value::<BTreeMap<String, u64>>(status["reasons"].clone())?);
    Ok(counts)
}

/// A family's flow table.
struct Table {
    entries: usize,
    half_open: usize,
    /// Flows that are more than that.
    others: usize,
    /// Those of them that neither side has ended.
    established: usize,
}

fn table<A: Addr>(agent: &Agent<'_>, name: &str) -> Result<Table> {
    let maps = serde_json::from_value(agent.status()?["maps"].clone())?;
    let map: HashMap<MapData, FlowKey<A>, Flow<A>> = open(&maps, name)?;
    let mut table = Table { entries: 0, half_open: 0, others: 0, established: 0 };
    for entry in &map {
        let (key, flow) = entry?;
        table.entries += 1;
        match flow.kind {
            Kind::DNAT if flow.is_half_open(key.proto()) => table.half_open += 1,
            Kind::DNAT => {
                table.others += 1;
                table.established += usize::from(flow.state() == State::Established);
            }
            _ => {}
        }
    }
    Ok(table)
}
