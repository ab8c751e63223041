//! A node with an API server and a kpx.

use std::fs;
use std::net::TcpListener;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use aya::Pod;
use aya::maps::{HashMap, Map, MapData};
use proxy_common::addr::Addr4;
use proxy_common::frontend::{Backend, Frontend, FrontendKey, Service, SlotKey};
use proxy_common::names::IPV4;
use tempfile::TempDir;

use super::cluster::{CLUSTER_CIDR, Cluster, NODE, NODE_IP, SERVICE_CIDR};
use super::process::Process;
use super::{Idle, Start};
use testbed::agent::{self, Agent, Source};
use testbed::apiserver::{ApiServer, Options};
use testbed::http::METRICS;
use testbed::netns::NetNs;

/// Time limit for the agent's start. An emulated machine takes minutes for 100,000 Services.
const DEADLINE: Duration = Duration::from_secs(600);

pub(crate) struct Fixture {
    pub(crate) server: ApiServer,
    dir: TempDir,
    pub(crate) netns: NetNs,
}

impl Fixture {
    pub(crate) fn new(cluster: &Cluster) -> Result<Self> {
        let netns = node()?;
        let listener = netns
            .run(|| TcpListener::bind(("127.0.0.1", 6443)))
            .context("listen on port 6443")?;
        let service_cidrs = vec![SERVICE_CIDR.parse().context("the range of ClusterIPs")?];
        let bookmark_every = Duration::from_secs(60);
        let server = ApiServer::start(Options {
            service_cidrs,
            bookmark_every,
            ..Options::on(listener)
        })?;
        server.apply(&cluster.node())?;
        for nth in 0..cluster.services {
            server.apply_as_is(&cluster.service(nth))?;
            server.apply_as_is(&cluster.slice(nth, None))?;
        }
        let fixture = Self {
            server,
            dir: tempfile::tempdir().context("make a folder")?,
            netns,
        };
        fixture.server.kubeconfig(&fixture.kubeconfig())?;
        Ok(fixture)
    }

    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.dir.path().join("kubeconfig")
    }

    fn spawn(&self, args: &[String]) -> Result<Agent<'_>> {
        let [run, log] = ["run", "log"].map(|name| self.dir.path().join(name));
        let mut command = agent::run(
            NODE,
            Source::Kubeconfig(&self.kubeconfig()),
            &run,
            &self.netns,
        )?;
        command
            .args([
                "--service-cidr",
                SERVICE_CIDR,
                "--cluster-cidr",
                CLUSTER_CIDR,
            ])
            .args(args);
        command.args(["--metrics-bind-address", METRICS, "--healthz-bind-address="]);
        Agent::spawn(&self.netns, command, &run, &log)
    }

    /// Starts a successor of an agent, and waits until it is healthy.
    pub(crate) fn start_again(&self) -> Result<Agent<'_>> {
        self.spawn(&[])?.healthy()
    }

    /// Starts kpx and waits until the cluster is programmed. After the time `settled`, a start has
    /// no more effects.
    pub(crate) fn start(
        &self,
        cluster: &Cluster,
        args: &[String],
        settled: Duration,
    ) -> Result<(Agent<'_>, Start)> {
        let bytes_before = self.server.meter().bytes_sent();
        let started = Instant::now();
        let mut kpx = self.spawn(args)?;
        let programmed = self
            .programmed(&mut kpx, cluster)
            .with_context(|| format!("kpx's log:\n{}", kpx.log()))?;
        let listed = self
            .server
            .meter()
            .last_list()
            .context("nothing was listed")?;
        let process = Process(kpx.pid());
        let cpu = process.cpu()?;
        let bytes_sent = self.server.meter().bytes_sent() - bytes_before;
        thread::sleep(settled);
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

    /// Waits until the maps have all rows, and returns the time.
    fn programmed(&self, kpx: &mut Agent, cluster: &Cluster) -> Result<Instant> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = kpx.exited()? {
                bail!("kpx has ended: {status}");
            }
            let now = Instant::now();
            // Frontends come last. Reading all rows would take a CPU from the agent, so one
            // frontend is polled.
            if let Ok(frontends) = self.map::<FrontendKey<Addr4>, Frontend<Addr4>>(IPV4.frontends)
                && frontends.get(&cluster.last_frontend(), 0).is_ok()
            {
                let [frontend_rows, service_rows, slot_rows] = cluster.rows();
                if rows(&frontends, frontend_rows)
                    && rows(
                        &self.map::<FrontendKey<Addr4>, Service>(IPV4.services)?,
                        service_rows,
                    )
                    && rows(&self.slots()?, slot_rows)
                {
                    return Ok(now);
                }
            }
            ensure!(
                now < deadline,
                "not all rows are in the maps after {DEADLINE:?}"
            );
            thread::sleep(Duration::from_millis(1));
        }
    }

    pub(crate) fn slots(&self) -> Result<HashMap<MapData, SlotKey<Addr4>, Backend<Addr4>>> {
        self.map(IPV4.slots)
    }

    fn map<K: Pod, V: Pod>(&self, name: &str) -> Result<HashMap<MapData, K, V>> {
        let pin = self.netns.bpf_dir().join("v2/maps").join(name);
        let map = MapData::from_pin(&pin).with_context(|| format!("open {}", pin.display()))?;
        Ok(HashMap::try_from(Map::from_map_data(map)?)?)
    }

    /// Returns the kernel's memory of all pinned maps in bytes.
    pub(crate) fn map_memory(&self) -> Result<u64> {
        let folder = self.netns.bpf_dir().join("v2/maps");
        let mut bytes = 0;
        for entry in fs::read_dir(&folder).with_context(|| format!("read {}", folder.display()))? {
            let path = entry?.path();
            let map =
                MapData::from_pin(&path).with_context(|| format!("open {}", path.display()))?;
            let info = format!("/proc/self/fdinfo/{}", map.fd().as_fd().as_raw_fd());
            let text = fs::read_to_string(&info).with_context(|| format!("read {info}"))?;
            let memory = text
                .lines()
                .find_map(|line| line.strip_prefix("memlock:")?.trim().parse::<u64>().ok());
            bytes +=
                memory.with_context(|| format!("no memory of {} in {text}", path.display()))?;
        }
        Ok(bytes)
    }

    pub(crate) fn idle(&self, kpx: &Agent, duration: Duration) -> Result<Idle> {
        let process = Process(kpx.pid());
        let meter = self.server.meter();
        let bytes_before = meter.bytes_sent();
        let began = Instant::now();
        let cpu_percent = process.share(duration)?;
        Ok(Idle {
            seconds: began.elapsed().as_secs_f64(),
            cpu_percent,
            bytes_sent: meter.bytes_sent() - bytes_before,
        })
    }
}

/// Makes a node's namespace. `eth1` is the peer of its `eth0`.
pub(crate) fn node() -> Result<NetNs> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let nth = NEXT.fetch_add(1, Ordering::Relaxed);
    let netns = NetNs::create(format!("kpx-control-{}-{nth}", std::process::id()))?;
    netns.ip(&format!(
        "link add eth0 type veth peer name eth1
         link set eth0 up
         addr add {NODE_IP}/24 dev eth0"
    ))?;
    Ok(netns)
}

fn is_well(kpx: &Agent) -> Result<()> {
    let status = kpx.status()?;
    let is_empty = |field: &str| status[field].as_array().is_some_and(Vec::is_empty);
    ensure!(
        status["healthy"] == true && is_empty("problems") && is_empty("skipped"),
        "kpx is not well: {status:#}"
    );
    Ok(())
}

/// Ends kpx as Kubernetes does.
pub(crate) fn end(kpx: Agent) -> Result<()> {
    is_well(&kpx)?;
    kpx.stop()
}

/// Returns true if a map has this number of rows.
fn rows<K: Pod, V: Pod>(map: &HashMap<MapData, K, V>, expected: usize) -> bool {
    let mut seen = 0;
    map.keys().all(|key| {
        key.is_ok_and(|_| {
            seen += 1;
            seen <= expected
        })
    }) && seen == expected
}

pub(crate) fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
