//! A flood of SYNs with spoofed sources against a backend that answers each of them, and of ACKs
//! that claim to have seen the answer. RSTs, FINs and SYNs spoof clients whose connections are
//! silent. Open connections survive, and new connections succeed.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use etherparse::{PacketBuilderStep, TcpHeader};
use testbed::agent::{Service, idle};
use testbed::echo::{Connection, Dial, Protocol, pattern};
use testbed::flow_table::{FlowTable, counters, flow_tables};
use testbed::lab::{Family, Host, Layout};
use testbed::served_lab::ServedLab;
use testbed::stranger::{self, Stranger};

/// The port of all servers, and the port that outside clients dial.
const PORT: u16 = 8080;
const NODE_PORT: u16 = 30_080;
/// The size of each family's flow table. The flood makes more flows.
const FLOW_ENTRIES: usize = 8_192;
/// The minimum duration of the flood, which ends after this number of SYNs.
const FLOOD: Duration = Duration::from_secs(3);
const SYNS: u64 = 2 * FLOW_ENTRIES as u64;
/// The time limit on any machine.
const DEADLINE: Duration = Duration::from_secs(60);
/// SYNs between a SYN and its ACK. The half-open queue holds more.
const LEAD: usize = FLOW_ENTRIES / 16;
/// Longer than the time for which kpx assumes data in flight on a silent connection.
const SILENCE: Duration = Duration::from_secs(4);
/// The number of connections used during the flood, and of silent connections, in each family.
const CONNECTIONS: usize = 10;

#[test]
fn a_flood_of_blind_handshakes_costs_no_connection_and_no_handshake() -> Result<()> {
    let lab = served()?;
    let entries = FLOW_ENTRIES.to_string();
    let agent = lab.kpx(&["--flow-table-size", &entries])?;
    let to = node_ports(&lab);
    let client = lab.lab.host("xl");
    let flooder = lab.lab.host("x");

    let mut standing = connect(client, to)?;
    let mut silent = connect(client, to)?;
    let victims = silent
        .iter()
        .map(|connection| Ok(connection.ends().map_err(|fault| anyhow!("{fault}"))?[0]));
    let victims = victims.collect::<Result<Vec<_>>>()?;
    let strangers = to.map(|to| {
        let victims = victims
            .iter()
            .filter(|victim| victim.is_ipv4() == to.is_ipv4())
            .copied()
            .collect();
        Names {
            to,
            dialled: VecDeque::new(),
            victims,
        }
    });
    // Until then, kpx assumes that data of silent connections is in flight.
    let connected = Instant::now();
    while connected.elapsed() < SILENCE {
        exchange(&mut standing)?;
    }
    let before = counters(&agent)?;
    let stop = AtomicBool::new(false);
    let sent = AtomicU64::new(0);
    let dialled = thread::scope(|scope| -> Result<_> {
        let flood = scope.spawn(|| flood(flooder, strangers, &stop, &sent));
        let dialled = under_flood(client, to, &mut standing, &sent);
        stop.store(true, Ordering::Relaxed);
        flood.join().map_err(|_| anyhow!("the flood panicked"))??;
        dialled
    })?;
    let sent = sent.into_inner();
    let now = counters(&agent)?;
    let grown = |name: &str| now[name] - before[name];
    println!(
        "{sent} SYNs, {dialled} handshakes meanwhile; {} forgotten",
        grown("flow_forgotten")
    );
    ensure!(
        dialled > 0 && sent > SYNS,
        "{sent} SYNs, {dialled} handshakes"
    );
    ensure!(
        grown("flow_forgotten") > 0 && grown("flows_full") == 0 && grown("end_ignored") > 1_000,
        "{now:?}"
    );

    for FlowTable {
        half_open,
        entries,
        others,
        established,
    } in flow_tables(&agent)?
    {
        // Half of the table, in flows of two entries.
        ensure!(
            half_open <= FLOW_ENTRIES / 4 + 100,
            "{half_open} half-open flows"
        );
        ensure!(
            others >= 2 * CONNECTIONS && others <= 2 * CONNECTIONS + dialled,
            "{others} other flows of {dialled}"
        );
        ensure!(
            established >= 2 * CONNECTIONS,
            "{established} established flows"
        );
        ensure!(
            entries <= 2 * (half_open + others) + 100,
            "{entries} entries of {half_open} and {others} flows"
        );
    }
    exchange(&mut standing)?;
    exchange(&mut silent).context("after the flood")?;
    agent.stop()
}

/// Conntrack forgets a connection that is silent for ten seconds after a RST in its window, and
/// masquerades the pod's next packet.
#[test]
fn silent_connection_outlives_resets_of_all_windows() -> Result<()> {
    /// Less than the first window of a connection.
    const STEP: usize = 1 << 15;
    const FORGOTTEN: Duration = Duration::from_secs(11);

    let lab = served()?;
    let agent = lab.kpx(&[])?;
    let to = node_ports(&lab);
    let mut silent = connect(lab.lab.host("xl"), to)?;
    exchange(&mut silent)?;
    let ends = silent
        .iter()
        .map(|connection| connection.ends().map_err(|fault| anyhow!("{fault}")));
    let ends = ends.collect::<Result<Vec<_>>>()?;
    idle(SILENCE)?;
    let stranger = Stranger::on(lab.lab.host("x"))?;
    // One connection of each family is enough for this many packets.
    let victims = [ends[0], ends[CONNECTIONS]];
    for [client, node_port] in victims {
        for seq in (0..=u32::MAX).step_by(STEP) {
            stranger.send(
                stranger::tcp_with(client, node_port, seq).rst(),
                node_port.ip(),
            )?;
        }
    }
    idle(FORGOTTEN)?;
    // The pod's next packet starts a new connection, if conntrack has forgotten the old one.
    for [client, node_port] in victims {
        stranger.send(
            stranger::tcp(client, node_port).fin().ack(rand::random()),
            node_port.ip(),
        )?;
    }
    idle(SILENCE)?;
    exchange(&mut silent)?;
    ensure!(
        counters(&agent)?["spoofed"] > 100_000,
        "{:?}",
        counters(&agent)?
    );
    agent.stop()
}

/// A lab with a Service of one pod, where the kernel accepts spoofed sources on every device.
fn served() -> Result<ServedLab> {
    let lab = ServedLab::with_manifests(Layout::Routed)?.serve(&["p1b"], PORT)?;
    lab.lab.set_rp_filter(0)?;
    lab.put(&Service::new("web", 10, &["p1b"], PORT).node_port(NODE_PORT))?;
    Ok(lab)
}

/// Returns the addresses by which outside clients dial the Service.
fn node_ports(lab: &ServedLab) -> [SocketAddr; 2] {
    Family::ALL.map(|family| SocketAddr::new(lab.lab.n1.host.addrs.ip(family), NODE_PORT))
}

/// Opens connections to both addresses.
fn connect(client: &Host, to: [SocketAddr; 2]) -> Result<Vec<Connection>> {
    let dial = |to| {
        Dial::new(Protocol::Tcp, to)
            .connect(&client.ns)
            .map_err(|fault| anyhow!("{fault}"))
    };
    to.into_iter()
        .flat_map(|to| [to; CONNECTIONS])
        .map(dial)
        .collect()
}

/// Uses connections that were open before the flood.
fn exchange(standing: &mut [Connection]) -> Result<()> {
    for connection in standing {
        connection
            .exchange(&pattern(100))
            .map_err(|fault| anyhow!("a connection that stood: {fault}"))?;
    }
    Ok(())
}

/// Uses open connections and opens new connections during the flood. Returns the number of new
/// connections.
fn under_flood(
    client: &Host,
    to: [SocketAddr; 2],
    standing: &mut [Connection],
    sent: &AtomicU64,
) -> Result<usize> {
    let started = Instant::now();
    let mut dialled = 0;
    let is_over = || started.elapsed() > FLOOD && sent.load(Ordering::Relaxed) > SYNS;
    while !is_over() && started.elapsed() < DEADLINE {
        exchange(standing)?;
        for to in to {
            let answer = Dial::new(Protocol::Tcp, to)
                .deadline(DEADLINE / 6)
                .exchange(&client.ns, &pattern(100));
            answer.map_err(|fault| anyhow!("handshake {dialled}, {to}: {fault}"))?;
            dialled += 1;
        }
    }
    Ok(dialled)
}

/// Sends as fast as one thread can, and counts the spoofed SYNs.
fn flood(
    from: &Host,
    mut strangers: [Names; 2],
    stop: &AtomicBool,
    sent: &AtomicU64,
) -> Result<()> {
    let stranger = Stranger::on(from)?;
    while !stop.load(Ordering::Relaxed) {
        for names in &mut strangers {
            let (packets, syns) = names.packets();
            for packet in packets {
                stranger.send(packet, names.to.ip())?;
            }
            sent.fetch_add(syns, Ordering::Relaxed);
        }
    }
    Ok(())
}

/// The spoofed addresses of one family.
struct Names {
    to: SocketAddr,
    /// The SYNs that wait for their ACKs.
    dialled: VecDeque<SocketAddr>,
    /// The clients whose connections the flood tries to end.
    victims: Vec<SocketAddr>,
}

impl Names {
    /// Returns two packets and their number of SYNs: a SYN or the ACK of an older SYN, and a packet
    /// that spoofs a victim.
    fn packets(&mut self) -> ([PacketBuilderStep<TcpHeader>; 2], u64) {
        let answered = if self.dialled.len() > LEAD {
            self.dialled.pop_front()
        } else {
            None
        };
        let syns = u64::from(answered.is_none());
        let handshake = match answered {
            Some(name) => stranger::tcp(name, self.to).ack(rand::random()),
            None => {
                let name = self.name();
                self.dialled.push_back(name);
                stranger::tcp(name, self.to).syn()
            }
        };
        let end = stranger::end(
            self.victims[rand::random_range(0..self.victims.len())],
            self.to,
        );
        ([handshake, end], syns)
    }

    /// Returns a random spoofed source address from a range without hosts.
    fn name(&self) -> SocketAddr {
        let name: u32 = rand::random();
        let ip = match self.to.ip() {
            IpAddr::V4(_) => IpAddr::from((0x0b00_0000 | name >> 8).to_be_bytes()),
            IpAddr::V6(_) => {
                IpAddr::from((0x2001_0db8_00ff_u128 << 80 | u128::from(name)).to_be_bytes())
            }
        };
        SocketAddr::new(ip, rand::random_range(1_024..=u16::MAX))
    }
}
