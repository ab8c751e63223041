//! A node in a namespace of its own, its API server, and kpx on it.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use proxy_agent::status::Status;
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::agent::{binary, wait_until};
use testbed::apiserver::{ApiServer, Options};
use testbed::netns::NetNs;

pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

pub(crate) struct Bed {
    pub(crate) api: ApiServer,
    pub(crate) node: NetNs,
    dir: TempDir,
}

impl Bed {
    /// A node of the name n1 at 192.0.2.1 and fd00::1, without an object as yet. `wire` is the other end of its eth0.
    pub(crate) fn new() -> Result<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        let name = format!("kpx-{}-events{}", std::process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let node = NetNs::create(name)?;
        node.ip("link add eth0 type veth peer name wire
             link set wire up
             link set eth0 up
             addr add 192.0.2.1/24 dev eth0
             addr add fd00::1/64 dev eth0 nodad
             route add default via 192.0.2.254
             route add default via fd00::fe")?;
        let listener = node.run(|| TcpListener::bind(("127.0.0.1", 6443))).context("listen on the node")?;
        let dir = TempDir::with_prefix("kpx-")?;
        let api = ApiServer::start(Options::on(listener))?;
        api.kubeconfig(&dir.path().join("kubeconfig"))?;
        Ok(Self { api, node, dir })
    }

    /// With the node's object.
    pub(crate) fn with_node() -> Result<Self> {
        let bed = Self::new()?;
        bed.put(&node(&["192.0.2.1", "fd00::1"]))?;
        Ok(bed)
    }

    pub(crate) fn put(&self, object: &Value) -> Result<Value> {
        self.api.apply(object)
    }

    /// Starts kpx, and waits until it answers.
    pub(crate) fn start(&self, arguments: &str) -> Result<Kpx<'_>> {
        let kpx = self.spawn(arguments)?;
        wait_until(DEADLINE, "kpx answers", || Ok(kpx.status().is_ok())).with_context(|| self.log())?;
        Ok(kpx)
    }

    /// Starts kpx, which may end at once.
    pub(crate) fn spawn(&self, arguments: &str) -> Result<Kpx<'_>> {
        let log = fs::File::options().create(true).append(true).open(self.dir.path().join("log"))?;
        let mut command = Command::new(binary()?);
        command.args(["run", "--node-name", "n1", "--kubeconfig"]).arg(self.dir.path().join("kubeconfig"));
        command
            .arg("--run-dir")
            .arg(self.dir.path().join("run"))
            .arg("--bpf-dir")
            .arg(self.node.bpf_dir())
            .args(arguments.split_whitespace());
        // Its size is the machine's, which a test leaves alone.
        command.args(["--conntrack-max-per-core", "0"]);
        let child = self.node.spawn(command.stdout(Stdio::null()).stderr(log))?;
        Ok(Kpx { bed: self, child })
    }

    /// Starts kpx, and waits until all is well.
    pub(crate) fn start_healthy(&self, arguments: &str) -> Result<Kpx<'_>> {
        let kpx = self.start(arguments)?;
        kpx.wait("kpx is healthy", |status| status.healthy)?;
        Ok(kpx)
    }

    /// What was told, in the order in which it was told first.
    pub(crate) fn events(&self) -> Vec<Value> {
        let mut events = self.api.list("events.events.k8s.io");
        events.sort_by_key(|event| event["eventTime"].to_string());
        events
    }

    /// Waits until something is told for this reason, and that `holds`.
    pub(crate) fn told(&self, reason: &str, holds: impl Fn(&Value) -> bool) -> Result<Value> {
        let find = || self.events().into_iter().find(|event| event["reason"] == reason && holds(event));
        wait_until(DEADLINE, &format!("{reason} is told"), || Ok(find().is_some()))
            .with_context(|| format!("told: {:#?}\n{}", self.events(), self.log()))?;
        find().context("an event that stays")
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }
}

pub(crate) struct Kpx<'a> {
    bed: &'a Bed,
    child: Child,
}

impl Kpx<'_> {
    pub(crate) fn status(&self) -> Result<Status> {
        let mut command = Command::new(binary()?);
        command.args(["status", "--output", "json", "--run-dir"]).arg(self.bed.dir.path().join("run"));
        // It fails when kpx is not healthy, and says why all the same.
        let output = self.bed.node.run(|| command.output())?;
        serde_json::from_slice(&output.stdout).with_context(|| format!("{output:?}"))
    }

    pub(crate) fn wait(&self, what: &str, holds: impl Fn(&Status) -> bool) -> Result<()> {
        wait_until(DEADLINE, what, || Ok(holds(&self.status()?)))
            .with_context(|| format!("{:?}\n{}", self.status(), self.bed.log()))
    }

    /// What it answers at `/metrics`.
    pub(crate) fn metrics(&self) -> Result<String> {
        let ask = || {
            let mut stream = TcpStream::connect(("127.0.0.1", 10249))?;
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: kpx\r\nConnection: close\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        };
        self.bed.node.run(ask)
    }

    pub(crate) fn wait_problem(&self, what: &str, why: &str) -> Result<()> {
        self.wait(why, |status| status.problems.iter().any(|problem| problem.what == what && problem.why.contains(why)))
    }

    pub(crate) fn stop(mut self) -> Result<()> {
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM)?;
        let status = self.child.wait()?;
        ensure!(status.success(), "{status}: {}", self.bed.log());
        Ok(())
    }

    /// Waits until it ends by itself, with 1 and for this reason.
    pub(crate) fn fails(mut self, why: &str) -> Result<()> {
        let mut ended = None;
        wait_until(DEADLINE, "kpx ends", || {
            ended = self.child.try_wait()?;
            Ok(ended.is_some())
        })?;
        let status = ended.context("kpx has ended")?;
        let log = self.bed.log();
        ensure!(status.code() == Some(1) && log.contains(why), "{status}, and not {why:?}: {log}");
        Ok(())
    }
}

impl Drop for Kpx<'_> {
    fn drop(&mut self) {
        // It may have ended already.
        let _ended = self.child.kill().and_then(|()| self.child.wait().map(drop));
    }
}

pub(crate) fn node(addresses: &[&str]) -> Value {
    let addresses: Vec<_> = addresses.iter().map(|ip| json!({ "type": "InternalIP", "address": ip })).collect();
    json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "n1" }, "status": { "addresses": addresses } })
}

/// A Service of one UDP port in both families: `nth` of the service network, port 53.
pub(crate) fn service(name: &str, nth: u8) -> Value {
    let ips = [format!("10.96.0.{nth}"), format!("fd00:96::{nth:x}")];
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "type": "ClusterIP", "clusterIP": ips[0], "clusterIPs": ips, "ipFamilies": ["IPv4", "IPv6"],
            "ipFamilyPolicy": "RequireDualStack", "ports": [{ "port": 53, "protocol": "UDP" }],
        },
    })
}

/// An endpoint of `service` at port 5353.
pub(crate) fn slice(service: &str, address: &str) -> Value {
    let family = if address.contains(':') { "IPv6" } else { "IPv4" };
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": format!("{service}-{}", family.to_lowercase()), "namespace": "default",
            "labels": { "kubernetes.io/service-name": service },
        },
        "addressType": family,
        "endpoints": [{ "addresses": [address], "conditions": { "ready": true } }],
        "ports": [{ "port": 5353, "protocol": "UDP", "name": "" }],
    })
}
