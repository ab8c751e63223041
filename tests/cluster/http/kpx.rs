//! A kpx with an API server, in a network namespace of their own, asked by HTTP.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use proxy_agent::status::Status;
use serde_json::{Value, json};
use tempfile::TempDir;
use testbed::agent::{binary, wait_until};
use testbed::apiserver::{ApiServer, Options};
use testbed::exposition::{self, Exposition};
use testbed::netns::NetNs;

pub(crate) const DEADLINE: Duration = Duration::from_secs(20);
pub(crate) const HEALTH: &str = "127.0.0.1:10256";
pub(crate) const METRICS: &str = "127.0.0.1:10249";

/// A network namespace with an API server that has the node `n1`.
pub(crate) struct Cluster {
    pub(crate) ns: NetNs,
    pub(crate) api: ApiServer,
    dir: TempDir,
}

pub(crate) struct Kpx<'a> {
    cluster: &'a Cluster,
    child: Child,
}

/// An answer by HTTP.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) code: u16,
    /// As they were sent, without `Date`.
    pub(crate) headers: Vec<String>,
    pub(crate) body: String,
}

impl Cluster {
    pub(crate) fn start(name: &str) -> Result<Self> {
        let ns = NetNs::create(format!("kpx-{}-{name}", std::process::id()))?;
        let dir = TempDir::with_prefix("kpx-")?;
        let listener = ns.run(|| TcpListener::bind("127.0.0.1:6443")).context("listen for the API server")?;
        let api = ApiServer::start(Options::on(listener))?;
        api.kubeconfig(&dir.path().join("kubeconfig"))?;
        api.apply(&node(&json!([])))?;
        Ok(Self { ns, api, dir })
    }

    /// Starts kpx, and waits until it answers `kpx status`.
    pub(crate) fn kpx(&self, arguments: &str) -> Result<Kpx<'_>> {
        let kpx = self.spawn(arguments)?;
        wait_until(DEADLINE, "kpx answers", || Ok(kpx.status().is_ok())).with_context(|| self.log())?;
        Ok(kpx)
    }

    /// And until all is well.
    pub(crate) fn healthy_kpx(&self, arguments: &str) -> Result<Kpx<'_>> {
        let kpx = self.kpx(arguments)?;
        wait_until(DEADLINE, "kpx is healthy", || Ok(kpx.status()?.healthy)).with_context(|| self.log())?;
        Ok(kpx)
    }

    pub(crate) fn spawn(&self, arguments: &str) -> Result<Kpx<'_>> {
        let log = File::create(self.dir.path().join("log"))?;
        let mut command = Command::new(binary()?);
        command.args(["run", "--node-name", "n1", "--kubeconfig"]).arg(self.dir.path().join("kubeconfig"));
        command
            .arg("--run-dir")
            .arg(self.dir.path().join("run"))
            .arg("--bpf-dir")
            .arg(self.ns.bpf_dir())
            .args(arguments.split_whitespace());
        let child = self.ns.spawn(command.stdout(Stdio::null()).stderr(log))?;
        Ok(Kpx { cluster: self, child })
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    pub(crate) fn get(&self, at: &str, path: &str) -> Result<Answer> {
        self.ask(at, "GET", path)
    }

    pub(crate) fn ask(&self, at: &str, method: &str, path: &str) -> Result<Answer> {
        let to: SocketAddr = at.parse()?;
        let stream = self.ns.run(|| TcpStream::connect_timeout(&to, DEADLINE)).with_context(|| at.to_owned())?;
        stream.set_read_timeout(Some(DEADLINE))?;
        converse(stream, method, path).with_context(|| format!("{method} {at}{path}"))
    }

    pub(crate) fn scrape(&self) -> Result<Exposition> {
        let answer = self.get(METRICS, "/metrics")?;
        ensure!(answer.code == 200, "{answer:?}");
        exposition::parse(&answer.body)
    }
}

impl Kpx<'_> {
    pub(crate) fn status(&self) -> Result<Status> {
        let mut command = Command::new(binary()?);
        command.args(["status", "--output", "json", "--run-dir"]).arg(self.cluster.dir.path().join("run"));
        // It fails when kpx is not healthy, and says why all the same.
        let output = self.cluster.ns.run(|| command.output())?;
        serde_json::from_slice(&output.stdout).with_context(|| format!("{output:?}"))
    }

    pub(crate) fn problem(&self, what: &str) -> Result<Option<String>> {
        Ok(self.status()?.problems.into_iter().find(|problem| problem.what == what).map(|problem| problem.why))
    }

    /// At the socket in the run directory.
    pub(crate) fn get(&self, path: &str) -> Result<Answer> {
        converse(UnixStream::connect(self.cluster.dir.path().join("run/kpx.sock"))?, "GET", path)
    }

    /// Waits until it ends by itself.
    pub(crate) fn ended(&mut self) -> Result<ExitStatus> {
        let mut ended = None;
        wait_until(DEADLINE, "kpx ends", || {
            ended = self.child.try_wait()?;
            Ok(ended.is_some())
        })?;
        ended.context("kpx has ended")
    }

    pub(crate) fn stop(mut self) -> Result<()> {
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM)?;
        let status = self.child.wait()?;
        ensure!(status.success(), "{status}: {}", self.cluster.log());
        Ok(())
    }
}

impl Drop for Kpx<'_> {
    fn drop(&mut self) {
        // It may have ended already.
        let _ended = self.child.kill().and_then(|()| self.child.wait().map(drop));
        if std::thread::panicking() {
            eprintln!("--- log of kpx:\n{}", self.cluster.log());
        }
    }
}

fn converse(mut stream: impl Read + Write, method: &str, path: &str) -> Result<Answer> {
    write!(stream, "{method} {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").with_context(|| format!("no end of the header: {answer}"))?;
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).context("no status line")?;
    let headers = lines.filter(|line| !line.starts_with("Date: ")).map(str::to_owned).collect();
    Ok(Answer { code: status.parse()?, headers, body: body.to_owned() })
}

pub(crate) fn node(taints: &Value) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": { "name": "n1" },
        "spec": { "taints": taints },
        "status": { "addresses": [{ "type": "InternalIP", "address": "192.0.2.1" }] },
    })
}

/// A Service of both families, whose internal traffic stays on its node if `local`.
pub(crate) fn service(name: &str, nth: u8, local: bool) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": { "name": name, "namespace": "default" },
        "spec": {
            "clusterIP": format!("10.96.0.{nth}"),
            "clusterIPs": [format!("10.96.0.{nth}"), format!("fd00:96::{nth}")],
            "ipFamilies": ["IPv4", "IPv6"],
            "ipFamilyPolicy": "RequireDualStack",
            "internalTrafficPolicy": if local { "Local" } else { "Cluster" },
            "ports": [{ "port": 80, "protocol": "TCP" }],
        },
    })
}

/// An IPv4 slice with an endpoint on another node, `changed` at a time in RFC 3339.
pub(crate) fn slice(service: &str, nth: u8, changed: &str) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": format!("{service}-ipv4"),
            "namespace": "default",
            "labels": { "kubernetes.io/service-name": service },
            "annotations": { "endpoints.kubernetes.io/last-change-trigger-time": changed },
        },
        "addressType": "IPv4",
        "endpoints": [{ "addresses": [format!("10.244.1.{nth}")], "nodeName": "n2", "conditions": { "ready": true } }],
        "ports": [{ "name": "", "port": 8080, "protocol": "TCP" }],
    })
}
