//! What one API server sends for a change, by the number of nodes that watch.

use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::agent::{self, Agent, Source};
use testbed::apiserver::{self, ApiServer};
use testbed::netns::NetNs;

use super::figure::{By, Figure, What};
use super::{Keep, Options};
use crate::control::cluster::{Cluster, SERVICE_CIDR, newcomer};

/// The cluster's size: how many Services there are matters to no change.
const CLUSTER: Cluster = Cluster { services: 200, endpoints: 50 };
/// The numbers of agents.
const AGENTS: [(usize, What); 3] = [(1, What::Fan1), (2, What::Fan2), (4, What::Fan4)];
/// The changes that are counted, and the time between two of them: each comes to all agents before the next one.
const CHANGES: u32 = 100;
const INTERVAL: Duration = Duration::from_millis(10);
/// A time without a byte, after which all has been sent; and the longest wait for it.
const SENT: Duration = Duration::from_millis(500);
const BUSY: Duration = Duration::from_secs(30);
/// The address of the server, as the nodes know it.
const SERVER: &str = "192.0.2.10";

/// A node whose agent watches.
struct Node {
    ns: NetNs,
    dir: TempDir,
    name: String,
}

pub(super) fn measure(options: &Options, keep: &mut impl Keep) -> Result<()> {
    let hub = NetNs::create(format!("kpx-fan-{}", std::process::id()))?;
    hub.ip(&format!("addr add {SERVER}/32 dev lo"))?;
    let listener = hub.run(|| TcpListener::bind((SERVER, 6443))).context("listen on port 6443")?;
    let service_cidrs = vec![SERVICE_CIDR.parse().context("the range of ClusterIPs")?];
    let bookmark_every = Duration::from_secs(60);
    let server =
        ApiServer::start(apiserver::Options { service_cidrs, bookmark_every, ..apiserver::Options::on(listener) })?;
    for nth in 0..CLUSTER.services {
        server.apply_as_is(&CLUSTER.service(nth))?;
        server.apply_as_is(&CLUSTER.slice(nth, None))?;
    }
    let nodes = (0..options.agents).map(|nth| Node::new(&hub, &server, nth)).collect::<Result<Vec<_>>>()?;
    let mut agents = Vec::new();
    let mut tell =
        |what, bytes: f64| keep.figure(Figure::new(By::Kpx, (CLUSTER.services, CLUSTER.endpoints), what, bytes.into()));
    for (count, what) in AGENTS.into_iter().filter(|(count, _)| *count <= options.agents) {
        while agents.len() < count {
            agents.push(nodes[agents.len()].start()?);
        }
        tell(what, bytes_of_change(&server, |slice| slice)?)?;
    }
    tell(What::FanHeadless, bytes_of_change(&server, headless)?)?;
    agents.into_iter().try_for_each(Agent::stop)
}

impl Node {
    fn new(hub: &NetNs, server: &ApiServer, nth: usize) -> Result<Self> {
        let (ns, name) = (NetNs::create(format!("{}-{nth}", hub.name()))?, format!("node-fan-{nth}"));
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
        let [kubeconfig, run, log] = ["kubeconfig", "run", "log"].map(|name| self.dir.path().join(name));
        let mut command = agent::run(&self.name, Source::Kubeconfig(&kubeconfig), &run, &self.ns)?;
        command.args(["--service-cidr", SERVICE_CIDR, "--metrics-bind-address=", "--healthz-bind-address="]);
        Agent::spawn(&self.ns, command, &run, &log)?.healthy()
    }
}

/// Returns the mean of the bytes that the server sends to all agents for one change.
fn bytes_of_change(server: &ApiServer, form: fn(Value) -> Value) -> Result<f64> {
    // The first changes tell nothing: a slice that becomes another one may have to go.
    let change = |nth: u32| server.apply_as_is(&form(CLUSTER.slice(nth % CLUSTER.services, Some(newcomer(nth)))));
    (0..CHANGES).try_for_each(change)?;
    all_sent(server);
    let (before, began) = (server.meter().bytes_sent(), Instant::now());
    for nth in 0..CHANGES {
        thread::sleep((began + INTERVAL * nth).saturating_duration_since(Instant::now()));
        change(CLUSTER.services + nth)?;
    }
    all_sent(server);
    Ok((server.meter().bytes_sent() - before) as f64 / f64::from(CHANGES))
}

/// Waits until the server sends nothing more.
fn all_sent(server: &ApiServer) {
    let (began, mut before) = (Instant::now(), None);
    loop {
        let sent = Some(server.meter().bytes_sent());
        if sent == before || began.elapsed() > BUSY {
            return;
        }
        before = sent;
        thread::sleep(SENT);
    }
}

/// Marks a slice as one of a headless Service, which no proxy serves.
fn headless(mut slice: Value) -> Value {
    slice["metadata"]["labels"]["service.kubernetes.io/headless"] = json!("");
    slice
}
