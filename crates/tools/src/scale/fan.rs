//! The events and bytes that an API server sends for a change, by the number of watching nodes and
//! by their filters.

use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::agent::{self, Agent, Source};
use testbed::apiserver::{self, ApiServer, PlainWatch};
use testbed::netns::NetNs;

use super::figure::{By, Figure, What};
use super::{Keep, Options};
use crate::control::cluster::{Cluster, SERVICE_CIDR, newcomer};

/// The cluster's size, which has no effect on a change.
const CLUSTER: Cluster = Cluster {
    services: 200,
    endpoints: 50,
};
/// The numbers of agents.
const AGENTS: [(usize, Names); 3] = [
    (1, [What::Fan1, What::Fan1Events]),
    (2, [What::Fan2, What::Fan2Events]),
    (4, [What::Fan4, What::Fan4Events]),
];
/// The number of counted changes. The time between two changes follows: each reaches all agents
/// before the next.
const CHANGES: u32 = 100;
const INTERVAL: Duration = Duration::from_millis(10);
/// The time without a byte after which everything has been sent: busy agents do not read. `BUSY`
/// limits the wait.
const SENT: Duration = Duration::from_secs(2);
const BUSY: Duration = Duration::from_secs(30);
/// The server's address for the nodes.
const SERVER: &str = "192.0.2.10";

/// The figures of bytes and events per change.
type Names = [What; 2];

/// A node with a watching agent.
struct Node {
    ns: NetNs,
    dir: TempDir,
    name: String,
}

pub(super) fn measure(options: &Options, keep: &mut impl Keep) -> Result<()> {
    let hub = NetNs::create(format!("kpx-fan-{}", std::process::id()))?;
    hub.ip(&format!("addr add {SERVER}/32 dev lo"))?;
    let listener = hub
        .run(|| TcpListener::bind((SERVER, 6443)))
        .context("listen on port 6443")?;
    let service_cidrs = vec![SERVICE_CIDR.parse().context("the range of ClusterIPs")?];
    let bookmark_every = Duration::from_secs(60);
    let server = ApiServer::start(apiserver::Options {
        service_cidrs,
        bookmark_every,
        ..apiserver::Options::on(listener)
    })?;
    for nth in 0..CLUSTER.services {
        server.apply_as_is(&CLUSTER.service(nth))?;
        server.apply_as_is(&CLUSTER.slice(nth, None))?;
    }
    let nodes = (0..options.agents)
        .map(|nth| Node::new(&hub, &server, nth))
        .collect::<Result<Vec<_>>>()?;
    let mut agents = Vec::new();
    let mut report = |names: Names, sent: [f64; 2]| {
        let size = (CLUSTER.services, CLUSTER.endpoints);
        let mut figures = names.into_iter().zip(sent);
        figures.try_for_each(|(what, value)| {
            keep.figure(Figure::new(By::Kpx, size, what, value.into()))
        })
    };
    for (count, names) in AGENTS
        .into_iter()
        .filter(|(count, _)| *count <= options.agents)
    {
        while agents.len() < count {
            agents.push(nodes[agents.len()].start()?);
        }
        report(names, sent_for_change(&server, |slice| slice)?)?;
    }
    report(
        [What::FanHeadless, What::FanHeadlessEvents],
        sent_for_change(&server, headless)?,
    )?;
    agents.into_iter().try_for_each(Agent::stop)?;

    let plain = nodes.first().context("no node")?.watch_all(&server)?;
    report(
        [What::FanUnfiltered, What::FanUnfilteredEvents],
        sent_for_change(&server, |slice| slice)?,
    )?;
    let of_headless = sent_for_change(&server, headless)?;
    report(
        [
            What::FanUnfilteredHeadless,
            What::FanUnfilteredHeadlessEvents,
        ],
        of_headless,
    )?;
    plain.stop()
}

impl Node {
    fn new(hub: &NetNs, server: &ApiServer, nth: usize) -> Result<Self> {
        let ns = NetNs::create(format!("{}-{nth}", hub.name()))?;
        let name = format!("node-fan-{nth}");
        hub.ip(&format!(
            "link add fan{nth} type veth peer name eth0 netns {}
             link set fan{nth} up
             addr add 198.51.100.{}/30 dev fan{nth}",
            ns.name(),
            4 * nth + 1
        ))?;
        ns.ip(&format!(
            "link set eth0 up
             addr add 198.51.100.{}/30 dev eth0
             route add default via 198.51.100.{}",
            4 * nth + 2,
            4 * nth + 1
        ))?;
        let mut node = CLUSTER.node();
        node["metadata"]["name"] = json!(name);
        node["status"]["addresses"][0]["address"] = json!(format!("198.51.100.{}", 4 * nth + 2));
        server.apply(&node)?;
        let dir = tempfile::tempdir().context("make a folder")?;
        server.kubeconfig(&dir.path().join("kubeconfig"))?;
        Ok(Self { ns, dir, name })
    }

    fn start(&self) -> Result<Agent<'_>> {
        let [kubeconfig, run, log] =
            ["kubeconfig", "run", "log"].map(|name| self.dir.path().join(name));
        let mut command = agent::run(&self.name, Source::Kubeconfig(&kubeconfig), &run, &self.ns)?;
        command.args([
            "--service-cidr",
            SERVICE_CIDR,
            "--metrics-bind-address=",
            "--healthz-bind-address=",
        ]);
        Agent::spawn(&self.ns, command, &run, &log)?.healthy()
    }

    /// Watches all EndpointSlices without a filter. No other client may watch.
    fn watch_all(&self, server: &ApiServer) -> Result<PlainWatch> {
        let are_watched =
            |number| server.wait(BUSY, |traffic| traffic.watches("endpointslices") == number);
        ensure!(are_watched(0), "a watch of before has not ended");
        let watch = PlainWatch::start(
            &self.ns,
            &self.dir.path().join("kubeconfig"),
            server.version(),
        )?;
        ensure!(are_watched(1), "the watch has not begun");
        Ok(watch)
    }
}

/// Returns the mean numbers of bytes and events that the server sends to all clients per change.
fn sent_for_change(server: &ApiServer, form: fn(Value) -> Value) -> Result<[f64; 2]> {
    // The first changes do not count: a slice that changes its form may need a deletion.
    let change = |nth: u32| {
        server.apply_as_is(&form(
            CLUSTER.slice(nth % CLUSTER.services, Some(newcomer(nth))),
        ))
    };
    (0..CHANGES).try_for_each(change)?;
    all_sent(server);
    let before = server.meter().bytes_sent();
    let began = Instant::now();
    let events = server.meter().events();
    for nth in 0..CHANGES {
        thread::sleep((began + INTERVAL * nth).saturating_duration_since(Instant::now()));
        change(CLUSTER.services + nth)?;
    }
    all_sent(server);
    server.meter().forget_events();
    let bytes = server.meter().bytes_sent() - before;
    Ok([bytes as f64, events.try_iter().count() as f64].map(|all| all / f64::from(CHANGES)))
}

/// Waits until the server has sent everything.
fn all_sent(server: &ApiServer) {
    let began = Instant::now();
    let mut before = None;
    loop {
        let sent = Some(server.meter().bytes_sent());
        if sent == before || began.elapsed() > BUSY {
            return;
        }
        before = sent;
        thread::sleep(SENT);
    }
}

/// Labels a slice as belonging to a headless Service, which no proxy serves.
fn headless(mut slice: Value) -> Value {
    slice["metadata"]["labels"]["service.kubernetes.io/headless"] = json!("");
    slice
}
