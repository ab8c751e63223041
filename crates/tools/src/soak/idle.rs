//! Silent connections, and packets in their names from another pod and from a stranger on the
//! uplink.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::fixture::{NODE_PORT, WEB_PORT};
use super::report::Report;
use testbed::agent::Service;
use testbed::echo::{Connection, Dial, Protocol, pattern};
use testbed::flow_table::{counters, flow_tables};
use testbed::lab::{Family, Host, Layout};
use testbed::served_lab::ServedLab;
use testbed::stranger::{Stranger, end};

const BACKEND: &str = "p1b";
/// The clients, and the hosts that send in their names: a pod of the same node, and a host on the
/// uplink.
const CLIENTS: [(&str, &str); 2] = [("p1a", "p1c"), ("xl", "x")];
/// Longer than kpx takes a silent connection for one that may have data on its way.
const SILENCE: Duration = Duration::from_secs(4);
/// Packets between two looks at whether to stop.
const BATCH: usize = 256;

/// Opens so many connections, a quarter of them for each family and kind of client, and has
/// strangers try to end them for that long.
pub fn idle(connections: usize, at_least: Duration) -> Result<Report> {
    allow_open_files()?;
    let served = ServedLab::with_manifests(Layout::Routed)?.serve(&[BACKEND], WEB_PORT)?;
    // Strangers' names come in from where no route leads to them.
    served.lab.set_rp_filter(0)?;
    // The node's connection tracking takes a RST anywhere in its window for the end. The CNI's
    // rules would then masquerade what the backend sends next.
    for node in served.lab.nodes() {
        node.host.ns.nft("delete table inet cni")?;
    }
    let web = Service::new("web", 20, &[BACKEND], WEB_PORT).node_port(NODE_PORT);
    served.put(&web)?;
    let kpx = served.kpx(&[])?;
    let node = &served.lab.n1.host;
    let mut idle = Vec::new();
    for (client, stranger) in CLIENTS {
        for family in Family::ALL {
            let from_pod = served.lab.node_of(served.lab.host(client)).is_some();
            let outside = SocketAddr::new(node.addrs.ip(family), NODE_PORT);
            let to = if from_pod {
                web.frontend(family)
            } else {
                outside
            };
            idle.push(Idle::open(
                served.lab.host(client),
                served.lab.host(stranger),
                to,
                connections / 4,
            )?);
        }
    }
    let of_before = counters(&kpx)?;
    // No flow may have data on its way any more.
    thread::sleep(SILENCE);
    let stop = AtomicBool::new(false);
    let started = Instant::now();
    let sent = thread::scope(|scope| {
        let strangers: Vec<_> = idle
            .iter()
            .map(|idle| scope.spawn(|| idle.molest(&stop)))
            .collect();
        thread::sleep(at_least);
        stop.store(true, Ordering::Relaxed);
        let sent = strangers
            .into_iter()
            .map(|sent| sent.join().map_err(|_| anyhow!("a stranger panicked"))?);
        sent.sum::<Result<u64>>()
    })?;
    let lasted = started.elapsed();

    let tables = flow_tables(&kpx)?;
    let now = counters(&kpx)?;
    let status = kpx.typed_status()?;
    let what = format!(
        "{connections} silent TCP connections, of pods and of clients outside, by IPv4 and IPv6; {sent} RSTs, FINs and SYNs in their names in {lasted:.1?}"
    );
    let mut report = Report::of("idle", what, &[]);
    for (family, table) in Family::ALL.into_iter().zip(tables) {
        let wanted = connections / 2;
        report.note(format!(
            "{family}: {} flows are established",
            table.established
        ));
        report.promise(
            table.established >= wanted,
            format!("{family}: {} of {wanted} flows", table.established),
        );
    }
    let grown = |name: &str| now.get(name).unwrap_or(&0) - of_before.get(name).unwrap_or(&0);
    let refused =
        ["end_ignored", "spoofed", "flow_moved"].map(|name| format!("{} {name}", grown(name)));
    report.note(format!("counted: {}", refused.join(", ")));
    let mut faults = Vec::new();
    for idle in &mut idle {
        faults.extend(
            idle.connections
                .iter_mut()
                .filter_map(|connection| connection.exchange(&pattern(100)).err()),
        );
    }
    report.note(format!(
        "{} of {connections} connections were used again",
        connections - faults.len()
    ));
    report.promise(
        faults.is_empty(),
        format!(
            "{} connections are dead, the first: {:?}",
            faults.len(),
            faults.first()
        ),
    );
    report.promise(
        sent > 0 && grown("end_ignored") > 0,
        "no stranger tried to end a connection".to_owned(),
    );
    report.promise(status.problems.is_empty(), format!("{:?}", status.problems));
    kpx.stop()?;
    Ok(report)
}

/// The connections of one client and family.
struct Idle<'a> {
    connections: Vec<Connection>,
    clients: Vec<SocketAddr>,
    to: SocketAddr,
    stranger: &'a Host,
}

impl<'a> Idle<'a> {
    fn open(client: &Host, stranger: &'a Host, to: SocketAddr, number: usize) -> Result<Self> {
        let mut connections = Vec::new();
        let mut clients = Vec::new();
        for _ in 0..number {
            let mut connection = Dial::new(Protocol::Tcp, to).connect(&client.ns)?;
            connection
                .exchange(&pattern(100))
                .with_context(|| format!("from {} to {to}", client.name))?;
            clients.push(connection.ends()?[0]);
            connections.push(connection);
        }
        Ok(Self {
            connections,
            clients,
            to,
            stranger,
        })
    }

    /// Sends in the clients' names until it is told to stop. Returns the number of packets.
    fn molest(&self, stop: &AtomicBool) -> Result<u64> {
        let stranger = Stranger::on(self.stranger)?;
        let mut sent = 0;
        let mut clients = self.clients.iter().cycle();
        while !stop.load(Ordering::Relaxed) {
            for client in clients.by_ref().take(BATCH) {
                stranger.send(end(*client, self.to), self.to.ip())?;
                sent += 1;
            }
        }
        Ok(sent)
    }
}

/// Allows this process as many open files as it may have: both ends of all connections are its own.
fn allow_open_files() -> Result<()> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE).context("read the limit of open files")?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most).context("raise the limit of open files")
}
