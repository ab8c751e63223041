//! A node with an API server and a kpx.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use aya::Pod;
use aya::maps::{HashMap, Map, MapData};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use proxy_common::addr::Addr4;
use proxy_common::frontend::{Backend, Frontend, FrontendKey, Service, SlotKey};
use proxy_common::names::IPV4;
use serde_json::Value;
use tempfile::TempDir;

use super::cluster::{Cluster, NODE, NODE_IP, SERVICE_CIDR};
use super::process::Process;
use super::{Idle, Start};
use testbed::agent::{binary, wait_until};
use testbed::apiserver::{ApiServer, Options};
use testbed::netns::NetNs;

/// How long the agent may take for its start, and for its end.
const DEADLINE: Duration = Duration::from_secs(120);
/// After which what is left of a start is over: freed memory returned, watches begun.
const SETTLED: Duration = Duration::from_secs(5);

pub(super) struct Bed {
    /// Before the namespace, which it runs in.
    kpx: Option<Child>,
    pub(super) server: ApiServer,
    dir: TempDir,
    netns: NetNs,
}

impl Bed {
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
        Ok(Self { kpx: None, server, dir, netns })
    }

    /// Starts kpx and waits until it has done what the cluster asks for.
    pub(super) fn start(&mut self, cluster: &Cluster, args: &[String]) -> Result<Start> {
        let path = |name: &str| self.dir.path().join(name);
        let log = File::create(path("log")).context("make kpx's log")?;
        let mut command = Command::new(binary()?);
        command.arg("run").args(["--node-name", NODE, "--service-cidr", SERVICE_CIDR]).args(args);
        command.args(["--metrics-bind-address=", "--healthz-bind-address="]);
        command.arg("--kubeconfig").arg(path("kubeconfig")).arg("--run-dir").arg(path("run"));
        command.arg("--bpf-dir").arg(self.netns.bpf_dir());
        let bytes_before = self.server.meter().bytes_sent();
        let started = Instant::now();
        self.kpx = Some(self.netns.spawn(command.stdout(log.try_clone()?).stderr(log))?);
        let programmed = self.programmed(cluster).with_context(|| format!("kpx's log:\n{}", self.log()))?;
        let listed = self.server.meter().last_list().context("nothing was listed")?;
        let process = self.process()?;
        let (cpu, bytes_sent) = (process.cpu()?, self.server.meter().bytes_sent() - bytes_before);
        thread::sleep(SETTLED);
        self.is_well()?;
        Ok(Start {
            lists_ms: millis(listed - started),
            programmed_ms: millis(programmed - listed),
            cpu_ms: millis(cpu),
            bytes_sent,
            memory: process.memory()?,
        })
    }

    /// When the maps had all rows.
    fn programmed(&mut self, cluster: &Cluster) -> Result<Instant> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.kpx.as_mut().context("kpx was not started")?.try_wait()? {
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

    fn is_well(&self) -> Result<()> {
        let mut command = Command::new(binary()?);
        command.args(["status", "--output", "json", "--run-dir"]).arg(self.dir.path().join("run"));
        let output = self.netns.run(|| command.output()).context("ask kpx how it is")?;
        let status: Value = serde_json::from_slice(&output.stdout).context("read kpx's status")?;
        let is_empty = |field: &str| status[field].as_array().is_some_and(Vec::is_empty);
        ensure!(
            status["healthy"] == true && is_empty("problems") && is_empty("skipped"),
            "kpx is not well: {status:#}"
        );
        Ok(())
    }

    /// What kpx takes where nothing happens.
    pub(super) fn idle(&self, duration: Duration) -> Result<Idle> {
        let (process, meter) = (self.process()?, self.server.meter());
        let (cpu_before, bytes_before, began) = (process.cpu_of_threads()?, meter.bytes_sent(), Instant::now());
        thread::sleep(duration);
        let (cpu, seconds) = (process.cpu_of_threads()?.saturating_sub(cpu_before), began.elapsed().as_secs_f64());
        let cpu_percent = 100.0 * cpu.as_secs_f64() / seconds;
        Ok(Idle { seconds, cpu_percent, bytes_sent: meter.bytes_sent() - bytes_before })
    }

    pub(super) fn process(&self) -> Result<Process> {
        let kpx = self.kpx.as_ref().context("kpx was not started")?;
        Ok(Process(Pid::from_raw(kpx.id().cast_signed())))
    }

    /// Ends kpx as Kubernetes would.
    pub(super) fn end(mut self) -> Result<()> {
        self.is_well()?;
        kill(self.process()?.0, Signal::SIGTERM).context("send SIGTERM to kpx")?;
        let kpx = self.kpx.as_mut().context("kpx was not started")?;
        wait_until(DEADLINE, "kpx ends", || Ok(kpx.try_wait()?.is_some()))
    }

    fn log(&self) -> String {
        let path: PathBuf = self.dir.path().join("log");
        fs::read_to_string(&path).unwrap_or_else(|error| format!("{}: {error}", path.display()))
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        if let Some(kpx) = &mut self.kpx {
            let _ = kpx.kill(); // It may have been stopped already.
            let _ = kpx.wait();
        }
    }
}

/// Whether a map has so many rows.
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
