//! A node with an API server and a kpx.

use std::net::TcpListener;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use aya::Pod;
use aya::maps::{HashMap, Map, MapData};
use proxy_common::addr::Addr4;
use proxy_common::frontend::{Backend, Frontend, FrontendKey, Service, SlotKey};
use proxy_common::names::IPV4;
use tempfile::TempDir;

use super::cluster::{Cluster, NODE, NODE_IP, SERVICE_CIDR};
use super::process::Process;
use super::{Idle, Start};
use testbed::agent::{self, Agent, Source};
use testbed::apiserver::{ApiServer, Options};
use testbed::netns::NetNs;

/// The time that the agent may take for its start.
const DEADLINE: Duration = Duration::from_secs(120);
/// The time after which a start has no more effects: freed memory is returned, watches have begun.
const SETTLED: Duration = Duration::from_secs(5);

pub(super) struct Fixture {
    pub(super) server: ApiServer,
    dir: TempDir,
    netns: NetNs,
}

impl Fixture {
    pub(super) fn new(cluster: &Cluster) -> Result<Self> {
        let netns = NetNs::create(format!("kpx-control-{}", std::process::id()))?;
        netns.ip(&format!(
            "link add eth0 type veth peer name eth1
             link set eth0 up
             addr add {NODE_IP}/24 dev eth0"
        ))?;
        let listener = netns.run(|| TcpListener::bind(("127.0.0.1", 6443))).context("listen on port 6443")?;
        let service_cidrs = vec![SERVICE_CIDR.parse().context("the range of ClusterIPs")?];
        let bookmark_every = Duration::from_secs(60);
        let server = ApiServer::start(Options { service_cidrs, bookmark_every, ..Options::on(listener) })?;
        server.apply(&cluster.node())?;
        for nth in 0..cluster.services {
            server.apply_as_is(&cluster.service(nth))?;
            server.apply_as_is(&cluster.slice(nth, None))?;
        }
        let dir = tempfile::tempdir().context("make a folder")?;
        server.kubeconfig(&dir.path().join("kubeconfig"))?;
        Ok(Self { server, dir, netns })
    }

    /// Starts kpx and waits until it has done what the cluster asks for.
    pub(super) fn start(&self, cluster: &Cluster, args: &[String]) -> Result<(Agent<'_>, Start)> {
        let path = |name: &str| self.dir.path().join(name);
        let mut command = agent::run(NODE, Source::Kubeconfig(&path("kubeconfig")), &path("run"), &self.netns)?;
        command.args(["--service-cidr", SERVICE_CIDR]).args(args);
        command.args(["--metrics-bind-address=", "--healthz-bind-address="]);
        let bytes_before = self.server.meter().bytes_sent();
        let started = Instant::now();
        let mut kpx = Agent::spawn(&self.netns, command, &path("run"), &path("log"))?;
        let programmed = self.programmed(&mut kpx, cluster).with_context(|| format!("kpx's log:\n{}", kpx.log()))?;
        let listed = self.server.meter().last_list().context("nothing was listed")?;
        let process = Process(kpx.pid());
        let (cpu, bytes_sent) = (process.cpu()?, self.server.meter().bytes_sent() - bytes_before);
        thread::sleep(SETTLED);
        is_well(&kpx)?;
        let start = Start {
            lists_ms: millis(listed - started),
            programmed_ms: millis(programmed - listed),
            cpu_ms: millis(cpu),
            bytes_sent,
            memory: process.memory()?,
        };
        Ok((kpx, start))
    }

    /// Waits until the maps have all rows, and returns the time at which they had.
    fn programmed(&self, kpx: &mut Agent, cluster: &Cluster) -> Result<Instant> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = kpx.exited()? {
                bail!("kpx has ended: {status}");
            }
            let now = Instant::now();
            // The slots come first and are the most: as long as one is missing, no other map is looked at.
            if let Ok(slots) = self.map::<SlotKey<Addr4>, Backend<Addr4>>(IPV4.slots) {
                let [frontend_rows, service_rows, slot_rows] = cluster.rows();
                if rows(&slots, slot_rows)
                    && rows(&self.map::<FrontendKey<Addr4>, Service>(IPV4.services)?, service_rows)
                    && rows(&self.map::<FrontendKey<Addr4>, Frontend<Addr4>>(IPV4.frontends)?, frontend_rows)
                {
                    return Ok(now);
                }
            }
            ensure!(now < deadline, "not all rows are in the maps after {DEADLINE:?}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    pub(super) fn slots(&self) -> Result<HashMap<MapData, SlotKey<Addr4>, Backend<Addr4>>> {
        self.map(IPV4.slots)
    }

    fn map<K: Pod, V: Pod>(&self, name: &str) -> Result<HashMap<MapData, K, V>> {
        let pin = self.netns.bpf_dir().join("v2/maps").join(name);
        let map = MapData::from_pin(&pin).with_context(|| format!("open {}", pin.display()))?;
        Ok(HashMap::try_from(Map::from_map_data(map)?)?)
    }

    /// Measures a kpx for which nothing happens.
    pub(super) fn idle(&self, kpx: &Agent, duration: Duration) -> Result<Idle> {
        let (process, meter) = (Process(kpx.pid()), self.server.meter());
        let (cpu_before, bytes_before, began) = (process.cpu_of_threads()?, meter.bytes_sent(), Instant::now());
        thread::sleep(duration);
        let (cpu, seconds) = (process.cpu_of_threads()?.saturating_sub(cpu_before), began.elapsed().as_secs_f64());
        let cpu_percent = 100.0 * cpu.as_secs_f64() / seconds;
        Ok(Idle { seconds, cpu_percent, bytes_sent: meter.bytes_sent() - bytes_before })
    }
}

fn is_well(kpx: &Agent) -> Result<()> {
    let status = kpx.status()?;
    let is_empty = |field: &str| status[field].as_array().is_some_and(Vec::is_empty);
    ensure!(status["healthy"] == true && is_empty("problems") && is_empty("skipped"), "kpx is not well: {status:#}");
    Ok(())
}

/// Ends kpx as Kubernetes does.
pub(super) fn end(kpx: Agent) -> Result<()> {
    is_well(&kpx)?;
    kpx.stop()
}

/// Tells if a map has so many rows.
fn rows<K: Pod, V: Pod>(map: &HashMap<MapData, K, V>, expected: usize) -> bool {
    let mut seen = 0;
    map.keys().all(|key| {
        key.is_ok_and(|_| {
            seen += 1;
            seen <= expected
        })
    }) && seen == expected
}

pub(super) fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
